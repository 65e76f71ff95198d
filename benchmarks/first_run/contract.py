"""Contract scenarios a1, a7 and d7 straight on the driver: is the seam enough, and does each control fail?

Run once for each of torch's allocator backends, each in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workspace.cuda import CudaDriver, cuda_driver
from workspace.errors import CaptureError, WorkspaceError

NBYTES = 16 << 20
DELAY = 100_000_000
"""Cycles of a delay kernel (50 ms at 2 GHz): longer than the host needs to enqueue a scenario."""


class Counted:
    """A driver that counts the verbs called on it."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.calls: dict[str, int] = {}

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._driver, verb)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[verb] = self.calls.get(verb, 0) + 1
            return function(*args, **kwargs)

        return counted


class Scene:
    """Main stream S0, two side streams, and a block of 16 MiB that holds 17s."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.main, *self.sides = (driver.new_stream(name) for name in ("s0", "s1", "s2"))
        self.buffer = driver.alloc(NBYTES, self.main)
        self.block = driver.tensor(self.buffer, 0, (NBYTES,), torch.uint8)
        self.outs = [torch.zeros(NBYTES, dtype=torch.uint8, device=driver.device) for _ in range(2)]
        driver.synchronize()
        self.fill(17)

    def fill(self, value: int) -> None:
        self.driver.memset(self.buffer.address, NBYTES, value, self.main)

    def order(self, earlier: int, later: int) -> None:
        """A fence: what is on `earlier` now comes before what `later` does next."""
        event = self.driver.new_event()
        self.driver.record(event, earlier)
        self.driver.wait(event, later)

    def slow_copy(self, source: torch.Tensor, out: int, stream: int) -> None:
        self.driver.set_stream(stream)
        torch.cuda._sleep(DELAY)
        self.outs[out].copy_(source)
        self.driver.set_stream(0)

    def intact(self, out: int) -> bool:
        self.driver.synchronize()
        return bool((self.outs[out] == 17).all())


def a1_slab(driver: CudaDriver, fenced: bool) -> bool:
    """A block of our own is refilled on S0 while S1 still reads it."""
    scene = Scene(driver)
    scene.order(scene.main, scene.sides[0])
    scene.slow_copy(scene.block, 0, scene.sides[0])
    if fenced:
        scene.order(scene.sides[0], scene.main)
    scene.fill(93)
    return scene.intact(0)


def a1_caching(driver: CudaDriver, fenced: bool) -> bool:
    """The same through torch's allocator: the tensor is freed, and the next of its size is filled."""
    scene = Scene(driver)
    driver.set_stream(scene.main)
    tensor = torch.full((NBYTES,), 17, dtype=torch.uint8, device=driver.device)
    scene.order(scene.main, scene.sides[0])
    scene.slow_copy(tensor, 0, scene.sides[0])
    if fenced:
        driver.record_use(tensor, scene.sides[0])
    del tensor
    driver.set_stream(scene.main)
    again = torch.full((NBYTES,), 93, dtype=torch.uint8, device=driver.device)
    driver.set_stream(0)
    intact = scene.intact(0)
    del again
    return intact


def a7_joined(driver: CudaDriver, fenced: bool) -> bool:
    """Fork to S1 and S2, join, release, acquire: the joins order the refill, no other call is made."""
    scene = Scene(driver)
    for index, side in enumerate(scene.sides):
        scene.order(scene.main, side)
        scene.slow_copy(scene.block, index, side)
    if fenced:
        for side in scene.sides:
            scene.order(side, scene.main)
    counted = Counted(driver)
    scene.driver = counted  # type: ignore[assignment]
    scene.fill(93)
    assert counted.calls == {"memset": 1}
    return scene.intact(0) and scene.intact(1)


def a7_late_use(driver: CudaDriver, fenced: bool) -> bool:
    """One more use on S1 after the join: exactly one fence makes the refill safe."""
    scene = Scene(driver)
    side = scene.sides[0]
    scene.order(scene.main, side)
    scene.order(side, scene.main)
    scene.slow_copy(scene.block, 0, side)
    counted = Counted(driver)
    scene.driver = counted  # type: ignore[assignment]
    if fenced:
        scene.order(side, scene.main)
        assert counted.calls == {"new_event": 1, "record": 1, "wait": 1}
    scene.fill(93)
    return scene.intact(0)


class Lending:
    """Which of two blocks an eager lease gets: one that a capture saw is pinned until its graph is gone."""

    def __init__(self, driver: CudaDriver, stream: int, pin: bool) -> None:
        self.blocks = [driver.alloc(NBYTES, stream) for _ in range(2)]
        self.pinned: set[int] = set()
        self.captures: dict[int, str] = {}
        self._driver = driver
        self._pin = pin
        driver.watch_captures(lambda _: None, self._began, self._ended)

    def _began(self, stream: int, capture: int) -> None:
        self.captures[capture] = "open"

    def _ended(self, stream: int, capture: int, graph: Any) -> None:
        self.captures[capture] = "closed"
        if graph is not None:
            self._driver.on_graph_release(graph, self.pinned.clear)

    def lend(self, stream: int) -> Any:
        """Bytes for a lease on a stream; inside a capture they stay pinned after it."""
        index = next(index for index in range(2) if index not in self.pinned)
        if self._driver.capture_of(stream) in self.captures and self._pin:
            self.pinned.add(index)
        return self.blocks[index]


def d7(driver: CudaDriver, fenced: bool) -> bool:
    """torch.cuda.graph, raw replay: the captured lease's bytes are lent to nobody until the graph is gone."""
    scene = Scene(driver)
    lending = Lending(driver, scene.main, pin=fenced)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        key = driver.current_stream()
        captured = lending.lend(key)
        driver.memset(captured.address, NBYTES, 17, key)
        scene.outs[0].copy_(driver.tensor(captured, 0, (NBYTES,), torch.uint8))
    eager = lending.lend(scene.main)
    driver.memset(eager.address, NBYTES, 93, scene.main)
    driver.synchronize()
    graph.replay()
    driver.synchronize()
    kept = bool((driver.tensor(eager, 0, (NBYTES,), torch.uint8) == 93).all())
    right = scene.intact(0)
    graph.reset()
    for _ in range(1_000_000):
        driver.poll()
        if not lending.pinned:
            break
    return kept and right and not lending.pinned


SCENARIOS = {
    "a1, own slab": a1_slab,
    "a1, torch's allocator": a1_caching,
    "a7, joined": a7_joined,
    "a7, one use after the join": a7_late_use,
    "d7": d7,
}


def trim_while_torch_captures(driver: CudaDriver) -> str:
    """Whether cached memory can be returned while one of torch's captures is open, and the capture goes on."""
    stream = driver.new_stream("main")
    block = driver.alloc(NBYTES, stream)
    driver.alloc(NBYTES * 32, 0)
    driver.begin_capture(stream)
    driver.memset(block.address, NBYTES, 1, stream)
    outcome = "passes"
    try:
        driver.trim()
    except WorkspaceError as error:
        outcome = str(error).splitlines()[0][:200]
    try:
        driver.end_capture(stream).launch(stream)
    except WorkspaceError:
        return f"{outcome}, capture broken"
    driver.synchronize()
    return f"{outcome}, capture intact"


def broken_capture(driver: CudaDriver) -> dict[str, str]:
    """Does freed memory with a recorded use come back after a capture that broke, cleaned up after or not?"""
    return {
        "never broken": _comes_back(driver),
        "driver": _break_one(driver, clean=True),
        "control": _break_one(driver, clean=False),
    }


def _comes_back(driver: CudaDriver) -> str:
    """Whether bytes whose recorded use is over are handed out again, and empty_cache works."""
    side = driver.new_stream("user")
    torch.cuda.empty_cache()
    buffer = driver.alloc(NBYTES * 4, 0)
    address = buffer.address
    driver.record_use(buffer, side)
    del buffer
    driver.synchronize()
    again = driver.alloc(NBYTES * 4, 0)
    try:
        torch.cuda.empty_cache()
    except (RuntimeError, CaptureError) as error:
        return str(error).splitlines()[0][:200]
    return "comes back" if again.address == address else "never comes back"


def _break_one(driver: CudaDriver, clean: bool) -> str:
    stream = driver.new_stream("broken")
    if clean:
        driver.begin_capture(stream)
        driver._lib.cuStreamSynchronize(stream)
        driver.abort_capture(stream)
    else:
        graph = torch.cuda.CUDAGraph()
        driver.set_stream(stream)
        graph.capture_begin()
        driver._lib.cuStreamSynchronize(stream)
        try:
            graph.capture_end()
        except RuntimeError as error:
            broke = str(error)
        driver.set_stream(0)
        assert broke
    return _comes_back(driver)


def measure() -> dict[str, Any]:
    """Each scenario with its fence and, as the control, without it; each twice."""
    driver = cuda_driver("cuda")
    results: dict[str, Any] = {"backend": torch.cuda.get_allocator_backend()}
    for name, scenario in SCENARIOS.items():
        results[name] = {
            "fenced": ["intact" if scenario(driver, True) else "corrupt" for _ in range(2)],
            "control": ["intact" if scenario(driver, False) else "corrupt" for _ in range(2)],
        }
    results["trim while torch captures"] = trim_while_torch_captures(driver)
    results["torch's allocator after a broken capture"] = broken_capture(driver)
    return results
