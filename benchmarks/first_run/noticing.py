"""How captures are noticed, what that costs, and which calls a capture on another thread survives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_uint64, c_void_p
from typing import Any

import torch

from benchmarks.first_run.timing import interleaved
from workspace.cuda import CudaDriver, cuda_driver
from workspace.cuda.libcuda import CAPTURE_RELAXED

GLOBAL, THREAD_LOCAL = 0, 1


class _Subclass(torch.cuda.CUDAGraph):
    """A graph class of someone else's."""


def _by_context(graph: torch.cuda.CUDAGraph, work: Callable[[], Any]) -> None:
    with torch.cuda.graph(graph):
        work()


def _by_methods(graph: torch.cuda.CUDAGraph, work: Callable[[], Any]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        work()
        graph.capture_end()


def _by_base_class(graph: torch.cuda.CUDAGraph, work: Callable[[], Any]) -> None:
    base: Any = torch._C._CUDAGraph
    with torch.cuda.stream(torch.cuda.Stream()):
        base.capture_begin(graph, pool=None, capture_error_mode="global")
        work()
        base.capture_end(graph)


def _by_callables(_: torch.cuda.CUDAGraph, work: Callable[[], Any]) -> None:
    sample = torch.ones(4, device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables(lambda x: x + work(), (sample,))


def who_is_noticed(driver: CudaDriver) -> dict[str, dict[str, Any]]:
    """For each way to capture: did the wrapper tell of it, and did asking the stream's status see it?"""
    told: list[int] = []
    driver.watch_captures(lambda _: None, lambda _, capture: told.append(capture), lambda *_: None)
    x = torch.ones(4, device="cuda")
    asked: list[int] = []

    def work() -> torch.Tensor:
        asked.append(driver.capture_of(driver.current_stream()))
        return x + 1

    ways: dict[str, tuple[Callable[..., None], type[torch.cuda.CUDAGraph]]] = {
        "torch.cuda.graph": (_by_context, torch.cuda.CUDAGraph),
        "CUDAGraph.capture_begin": (_by_methods, torch.cuda.CUDAGraph),
        "a subclass in torch.cuda.graph": (_by_context, _Subclass),
        "make_graphed_callables": (_by_callables, torch.cuda.CUDAGraph),
        "the C++ base class, past the Python class": (_by_base_class, torch.cuda.CUDAGraph),
    }
    results: dict[str, dict[str, Any]] = {}
    for name, (way, graph_class) in ways.items():
        told.clear()
        asked.clear()
        try:
            way(graph_class(), work)
        except RuntimeError as error:
            results[name] = {"failed": str(error).splitlines()[0]}
            continue
        results[name] = {"wrapper": bool(told), "status query": any(asked)}
    told.clear()
    results["cuStreamBeginCapture"] = {"status query": _raw_capture(driver), "wrapper": bool(told)}
    return results


def _raw_capture(driver: CudaDriver) -> bool:
    stream, graph = driver.new_stream("raw"), c_void_p()
    driver._lib.check(driver._lib.cuStreamBeginCapture_v2(stream, THREAD_LOCAL), "cuStreamBeginCapture")
    seen = driver.capture_of(stream)
    driver._lib.check(driver._lib.cuStreamEndCapture(stream, byref(graph)), "cuStreamEndCapture")
    driver._lib.cuGraphDestroy(graph)
    return bool(seen)


def costs(driver: CudaDriver) -> dict[str, Any]:
    """Host time of noticing: on the steady path, and once for each capture."""
    side = driver.new_stream("side")
    pool = torch.cuda.Stream()
    watched = torch.cuda.CUDAGraph
    scope: dict[str, Any] = {
        "driver": driver,
        "side": side,
        "captures": {},
        "capturing": torch.cuda.is_current_stream_capturing,
        "CUDAGraph": watched,
        "begin": watched.capture_begin.__wrapped__,  # type: ignore[attr-defined]
        "end": watched.capture_end.__wrapped__,  # type: ignore[attr-defined]
        "pool": pool.stream_id,
    }
    steady = {
        "empty statement": "pass",
        "a flag: is any capture open": "if captures: pass",
        "driver.capture_of(stream)": "driver.capture_of(side)",
        "driver.capture_of(default stream)": "driver.capture_of(0)",
        "torch.cuda.is_current_stream_capturing()": "capturing()",
        "driver.current_stream()": "driver.current_stream()",
    }
    results: dict[str, Any] = {"steady": interleaved(steady, scope, settle=torch.cuda.synchronize)}
    kernel = "driver.memset(address, 64, 0, pool)"
    buffer = driver.alloc(4096, side)
    scope["address"] = buffer.address
    whole = {
        "capture of one memset, noticed": f"g = CUDAGraph(); g.capture_begin(); {kernel}; g.capture_end()",
        "capture of one memset, wrapper left out": f"g = CUDAGraph(); begin(g); {kernel}; end(g)",
    }
    driver.set_stream(pool.stream_id)
    results["capture"] = interleaved(whole, scope, settle=torch.cuda.synchronize, calls=20)
    driver.set_stream(0)
    return results


def _calls(driver: CudaDriver, event: int, idle: int, handle: int) -> dict[str, Callable[[], int]]:
    lib = driver._lib
    buffer = driver.alloc(4096, idle)
    sizes = iter(range(700 << 20, 1 << 40, 64 << 20))

    def malloc() -> int:
        torch.empty(next(sizes), dtype=torch.uint8, device=driver.device)
        return 0

    def empty_cache() -> int:
        torch.empty(next(sizes), dtype=torch.uint8, device=driver.device)
        torch.cuda.empty_cache()
        return 0

    def destroy() -> int:
        made = c_void_p()
        return lib.cuEventCreate(byref(made), 2) or lib.cuEventDestroy_v2(made)

    return {
        "event create, destroy": destroy,
        "event record on an idle stream": lambda: lib.cuEventRecord(event, idle),
        "wait on an idle stream": lambda: lib.cuStreamWaitEvent(idle, event, 0),
        "event query": lambda: lib.cuEventQuery(event),
        "event synchronise": lambda: lib.cuEventSynchronize(event),
        "stream synchronise": lambda: lib.cuStreamSynchronize(idle),
        "device synchronise": lambda: lib.cuCtxSynchronize(),
        "stream id": lambda: lib.cuStreamGetId(handle, byref(c_uint64())),
        "stream context": lambda: lib.cuStreamGetCtx(handle, byref(c_void_p())),
        "stream create": lambda: lib.cuStreamCreate(byref(c_void_p()), 1),
        "capture status": lambda: lib.cuStreamIsCapturing(handle, byref(c_int())),
        "memset on an idle stream": lambda: lib.cuMemsetD8Async(buffer.address, 1, 64, idle),
        "torch.empty of new memory": malloc,
        "default stream synchronise": lambda: lib.cuStreamSynchronize(0),
        "torch.cuda.empty_cache": empty_cache,
    }


def who_breaks_a_capture(driver: CudaDriver) -> dict[str, dict[str, str]]:
    """Each call from another thread, and from the same one, while a stream captures.

    Does the call pass, does the capture survive? In both strict modes, as it is and relaxed.
    """
    lib = driver._lib
    main, idle, event = driver.new_stream("main"), driver.new_stream("idle"), driver.new_event()
    handle = driver.new_stream("raw")
    driver.record(event, idle)
    calls = _calls(driver, event, idle, handle)
    results: dict[str, dict[str, str]] = {}
    for name, call in calls.items():
        row = results[name] = {}
        for mode_name, mode in (("global", GLOBAL), ("thread_local", THREAD_LOCAL)):
            for elsewhere in (True, False):
                for relaxed in (False, True):
                    where = "other thread" if elsewhere else "same thread"
                    key = f"{mode_name}, {where}, {'relaxed' if relaxed else 'plain'}"
                    lib.check(lib.cuStreamBeginCapture_v2(main, mode), "cuStreamBeginCapture")
                    outcome = _outcome(driver, call, elsewhere, relaxed)
                    graph = c_void_p()
                    broken = lib.cuStreamEndCapture(main, byref(graph))
                    if graph.value:
                        lib.cuGraphDestroy(graph)
                    row[key] = f"{outcome}, capture {'broken' if broken else 'intact'}"
    return results


def _outcome(driver: CudaDriver, call: Callable[[], int], elsewhere: bool, relaxed: bool) -> str:
    outcome = ""

    def run() -> None:
        nonlocal outcome
        mode = c_int(CAPTURE_RELAXED)
        lib = driver._lib
        with lib.current(driver._events._context):
            if relaxed:
                lib.cuThreadExchangeStreamCaptureMode(byref(mode))
            try:
                code = call()
                outcome = f"error {code}" if code else "passes"
            except RuntimeError as error:
                outcome = f"error {getattr(error, 'error_code', None) or type(error).__name__}"
            finally:
                if relaxed:
                    lib.cuThreadExchangeStreamCaptureMode(byref(mode))

    if elsewhere:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    return outcome


def status_of_a_broken_capture(driver: CudaDriver) -> dict[str, Any]:
    """What a stream answers between the call that broke its capture and the capture's end."""
    stream = driver.new_stream("broken")
    identity = driver.begin_capture(stream)
    driver._lib.cuStreamSynchronize(stream)
    code, status = driver._lib.capture_status(stream)
    info, still, _ = driver._lib.capture_info(stream)
    driver.abort_capture(stream)
    return {"code": code, "status": status, "info code": info, "identity kept": still == identity}


def release_of_a_graph(driver: CudaDriver) -> dict[str, Any]:
    """When the user object signals: after a reset at rest, and after a reset with a launch in flight."""
    results: dict[str, Any] = {}
    for name, in_flight in (("at rest", False), ("launch in flight", True)):
        stream = driver.new_stream("release")
        driver.begin_capture(stream)
        driver.set_stream(stream)
        torch.cuda._sleep(100_000_000)
        driver.set_stream(0)
        graph = driver.end_capture(stream)
        signalled: list[int] = []
        driver.on_graph_release(graph, lambda signalled=signalled: signalled.append(1))  # type: ignore[misc]
        event = driver.new_event()
        graph.launch(stream)
        driver.record(event, stream)
        if not in_flight:
            driver.synchronize(stream)
        graph.reset()
        polls = 0
        while not signalled and polls < 5_000_000:
            driver.poll()
            polls += 1
        results[name] = {
            "signalled": bool(signalled),
            "work complete by then": driver.done(event),
            "polls": polls,
        }
        driver.synchronize(stream)
    return results


def measure() -> dict[str, Any]:
    """Everything above."""
    driver = cuda_driver("cuda")
    return {
        "noticed": who_is_noticed(driver),
        "costs": costs(driver),
        "release of a graph": release_of_a_graph(driver),
        "status of a broken capture": status_of_a_broken_capture(driver),
        "calls during a capture": who_breaks_a_capture(driver),
    }
