"""What a steady acquire is made of, and what a cached one costs against the three allocations it replaces."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from benchmarks.first_run.timing import interleaved
from workspace.cuda import CudaDriver, cuda_driver

INDEXER_Q = (((2, 64, 64), torch.uint8), ((2, 64, 4), torch.uint8), ((2, 64), torch.float32))
"""Values, scales and weights of the FP4 indexer-q stage at T = 2."""


class _Block:
    """Bytes with their last use and the tensors made over them."""

    __slots__ = ("epoch", "stream", "tensors")

    def __init__(self, tensors: tuple[torch.Tensor, ...], stream: int) -> None:
        self.tensors = tensors
        self.stream = stream
        self.epoch = 0


class Prototype:
    """A cached acquire and release: current stream, look-up, clock check, hand-out, stamp; under a lock.

    A measuring stick for what Python alone can reach, not the library.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._current = driver.current_stream
        self._lock = threading.Lock()
        self._epochs: dict[int, int] = {}
        self._seen: dict[int, dict[int, int]] = {}
        self._free: dict[tuple[str, int, int], list[_Block]] = {}

    def acquire(self, layout: str, tokens: int) -> _Block:
        stream = self._current()
        with self._lock:
            free = self._free.get((layout, tokens, stream))
            block = free.pop() if free else self._make(stream)
            if block.stream != stream and self._seen[stream].get(block.stream, 0) < block.epoch:
                event = self._driver.new_event()
                self._driver.record(event, block.stream)
                self._driver.wait(event, stream)
            return block

    def release(self, layout: str, tokens: int, block: _Block) -> None:
        stream = self._current()
        with self._lock:
            epoch = self._epochs[stream] = self._epochs.get(stream, 0) + 1
            block.stream, block.epoch = stream, epoch
            self._free.setdefault((layout, tokens, stream), []).append(block)

    def _make(self, stream: int) -> _Block:
        buffer = self._driver.alloc(64 << 10, stream)
        tensors = [
            self._driver.tensor(buffer, 16384 * index, shape, dtype) for index, (shape, dtype) in enumerate(INDEXER_Q)
        ]
        return _Block(tuple(tensors), stream)

    def lease(self, layout: str, tokens: int) -> _Lease:
        return _Lease(self, layout, tokens)


class _Lease:
    __slots__ = ("_block", "_layout", "_pool", "_tokens")

    def __init__(self, pool: Prototype, layout: str, tokens: int) -> None:
        self._pool = pool
        self._layout = layout
        self._tokens = tokens

    def __enter__(self) -> tuple[torch.Tensor, ...]:
        self._block = self._pool.acquire(self._layout, self._tokens)
        return self._block.tensors

    def __exit__(self, *_: object) -> None:
        self._pool.release(self._layout, self._tokens, self._block)


_EMPTY = [
    "empty((2, 64, 64), dtype=uint8, device=cuda)",
    "empty((2, 64, 4), dtype=uint8, device=cuda)",
    "empty((2, 64), dtype=float32, device=cuda)",
]

STATEMENTS = {
    "empty statement": "pass",
    "record, driver": "driver.record(event, side)",
    "record, driver, default stream": "driver.record(event, 0)",
    "record, libcuda holding the interpreter lock": "held_record(event, side)",
    "record, torch": "torch_event.record(torch_side)",
    "wait, driver": "driver.wait(event, other)",
    "wait, torch": "torch_side.wait_event(torch_event)",
    "query, driver (relaxed)": "driver.done(event)",
    "query, torch": "torch_event.query()",
    "event made and freed, driver": "driver.free_event(driver.new_event())",
    "memset of 64 bytes, driver": "driver.memset(address, 64, 0, side)",
    "current stream, driver": "driver.current_stream()",
    "current stream, torch's tuple": "current_tuple(0)",
    "current stream, raw handle": "current_raw(0)",
    "current stream, torch.cuda.current_stream()": "current_stream()",
    "stream made current, driver": "driver.set_stream(0)",
    "stream made current and back, torch's context": "with torch_context(torch_side): pass",
    "key of a torch stream": "driver.stream_key(torch_side)",
    "key of a raw stream": "driver.stream_key(raw)",
    "tensor over slab bytes, driver": "driver.tensor(buffer, 0, (2, 64, 64), uint8)",
    "storage over slab bytes alone": "make_storage(address, cuda, 8192)",
    "tensor over slab bytes, one C call": "make_tensor(metadata, make_storage(address, cuda, 8192))",
    "tensor over slab bytes, as_strided of the slab": "slab.as_strided((2, 64, 64), (4096, 64, 1), 0)",
    "alloc and free of 2 MiB, driver": "driver.alloc(2097152, 0)",
    "one torch.empty": _EMPTY[0],
    "three torch.empty of the indexer-q layout": "; ".join(_EMPTY),
    "prototype: acquire and release": "pool.release('q', 2, pool.acquire('q', 2))",
    "prototype: with lease": "with pool.lease('q', 2) as tensors: pass",
    "graph launch, driver": "graph.launch(0)",
    "graph launch, driver, on another stream than the current": "graph.launch(side)",
    "graph launch, CUDAGraph.replay()": "raw_graph.replay()",
}


def scope_of(driver: CudaDriver) -> dict[str, Any]:
    """Every name the statements use."""
    side, other = driver.new_stream("side"), driver.new_stream("other")
    raw = ctypes.c_void_p()
    driver._lib.check(driver._lib.cuStreamCreate(ctypes.byref(raw), 1), "cuStreamCreate")
    held = ctypes.PyDLL("libcuda.so.1").cuEventRecord
    held.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    torch_event, torch_side = torch.cuda.Event(), torch.cuda.Stream()
    torch_event.record(torch_side)
    buffer = driver.alloc(1 << 20, 0)
    driver.begin_capture(side)
    driver.memset(buffer.address, 64, 0, side)
    graph = driver.end_capture(side)
    return {
        "driver": driver,
        "event": driver.new_event(),
        "side": side,
        "other": other,
        "raw": raw.value,
        "held_record": held,
        "torch_event": torch_event,
        "torch_side": torch_side,
        "torch_context": torch.cuda.stream,
        "current_tuple": torch._C._cuda_getCurrentStream,
        "current_raw": torch._C._cuda_getCurrentRawStream,
        "current_stream": torch.cuda.current_stream,
        "address": buffer.address,
        "buffer": buffer,
        "slab": driver.tensor(buffer, 0, (1 << 20,), torch.uint8),
        "make_storage": torch._C._construct_storage_from_data_pointer,
        "make_tensor": torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata,
        "metadata": {
            "size": (2, 64, 64),
            "stride": (4096, 64, 1),
            "storage_offset": 0,
            "dtype": torch.uint8,
            "device": driver.device,
        },
        "empty": torch.empty,
        "uint8": torch.uint8,
        "float32": torch.float32,
        "cuda": driver.device,
        "pool": Prototype(driver),
        "graph": graph,
        "raw_graph": graph.raw,
    }


def measure() -> dict[str, Any]:
    """Every part, and the prototype's ratio to the three allocations, from one interleaved run."""
    driver = cuda_driver("cuda")
    taken = interleaved(STATEMENTS, scope_of(driver), settle=torch.cuda.synchronize)
    three = taken["three torch.empty of the indexer-q layout"]["median_us"]
    ratios = {
        name: round(taken[name]["median_us"] / three, 3)
        for name in ("prototype: acquire and release", "prototype: with lease")
    }
    return {"us": taken, "prototype over three torch.empty": ratios}
