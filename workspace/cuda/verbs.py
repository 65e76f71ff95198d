"""The verbs that every fork, fence and lease makes, in C++ where that form is built."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p, cast
from typing import TYPE_CHECKING, Any

import torch

from workspace import native
from workspace.cuda.libcuda import LibCuda
from workspace.cuda.streams import Streams

if TYPE_CHECKING:
    from workspace.cuda.driver import CudaDriver


def hot_verbs(driver: CudaDriver, lib: LibCuda, streams: Streams, index: int, several: bool) -> dict[str, Any]:
    """By name, in place of verbs that the driver has; none without the C++ form.

    ctypes and a Python frame cost as much as the driver's call. Each leaves to the verb it stands in for what fails,
    raw streams, which may have been destroyed, and where several devices make a difference.
    """
    made = native.extension()
    if made is None:
        return {}
    handles, keys = streams.handles, streams.keys
    current, change = torch._C._cuda_getCurrentRawStream, torch._C._cuda_setStream
    return {
        "record": made.record(_address(lib.cuEventRecord), handles, several, driver.record),
        "wait": made.wait(_address(lib.cuStreamWaitEvent), handles, several, driver.wait),
        "capture_of": made.capture_of(_address(lib.capture_info_function), handles, several, driver.capture_of),
        "current_stream": made.current_stream(current, index, keys, driver.current_stream),
        "set_stream": made.set_stream(change, index, handles, several, driver.set_stream),
    }


def _address(function: Callable[..., int]) -> int:
    return cast(function, c_void_p).value or 0  # type: ignore[arg-type]
