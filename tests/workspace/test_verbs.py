"""The driver's verbs in C++: which function they call with what, and when they leave a call to the long way."""

from __future__ import annotations

import gc
import weakref
from ctypes import CFUNCTYPE, POINTER, c_int, c_uint, c_uint64, c_void_p, cast
from typing import Any

import pytest

from workspace import native

pytestmark = pytest.mark.skipif(not native.built(), reason="the C++ form is not built")

HANDLES = {0: 0, 3: 0x10000, 0x20000: 0x20000}
"""Of the default stream, one of torch's and one of the library's."""


class LibCuda:
    """Functions at addresses, as libcuda has them, that note their arguments and return a code."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0
        self.capturing = 0, 0
        self._functions = {
            "record": CFUNCTYPE(c_int, c_void_p, c_void_p)(lambda *given: self._note("record", given)),
            "wait": CFUNCTYPE(c_int, c_void_p, c_void_p, c_uint)(lambda *given: self._note("wait", given)),
            "capture_of": CFUNCTYPE(c_int, c_void_p, POINTER(c_int), POINTER(c_uint64), *(c_void_p,) * 4)(self._info),
        }

    def address(self, name: str) -> int:
        return cast(self._functions[name], c_void_p).value or 0

    def _note(self, name: str, given: tuple[Any, ...]) -> int:
        self.calls.append((name, *given))
        return self.code

    def _info(self, stream: Any, status: Any, identity: Any, *rest: Any) -> int:
        status[0], identity[0] = self.capturing
        assert rest == (None,) * 4
        return self._note("capture_of", (stream,))


class Otherwise:
    """The long way."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> str:
        self.calls.append(given)
        return "the long way"


def made(name: str, several: bool = False) -> tuple[Any, LibCuda, Otherwise]:
    lib, otherwise = LibCuda(), Otherwise()
    maker = getattr(native.extension(), name)
    return maker(lib.address(name), HANDLES, several, otherwise), lib, otherwise


def test_record_and_wait_are_one_call_each() -> None:
    """With the handle behind the key, in libcuda's order of arguments."""
    record, lib, otherwise = made("record")
    assert record(0x99, 3) is None and record(0x98, 0x20000) is None
    assert lib.calls == [("record", 0x99, 0x10000), ("record", 0x98, 0x20000)]
    wait, lib, _ = made("wait")
    assert wait(0x99, 3) is None and wait(0x99, 0) is None
    assert lib.calls == [("wait", 0x10000, 0x99, 0), ("wait", None, 0x99, 0)]
    assert otherwise.calls == []


@pytest.mark.parametrize("name", ["record", "wait"])
def test_a_call_that_fails_goes_the_long_way(name: str) -> None:
    """Which makes it again in the device's context, or says what is wrong."""
    verb, lib, otherwise = made(name)
    lib.code = 201
    assert verb(0x99, 3) == "the long way"
    assert otherwise.calls == [(0x99, 3)] and len(lib.calls) == 1


@pytest.mark.parametrize("name", ["record", "wait"])
def test_what_may_be_gone_or_another_goes_the_long_way(name: str) -> None:
    """A raw stream may have been destroyed; the default one of several devices is the current device's."""
    verb, lib, otherwise = made(name, several=True)
    assert verb(0x99, 1 << 62) == verb(0x99, 0) == "the long way" and verb(0x99, 3) is None
    assert len(lib.calls) == 1 and otherwise.calls == [(0x99, 1 << 62), (0x99, 0)]


@pytest.mark.parametrize("name", ["record", "wait", "capture_of", "set_stream"])
@pytest.mark.parametrize("arguments", [(), (None,), (None, None), ("a", 3), (0x99, []), (1.5, 3, 0), ([],)])
def test_what_makes_no_sense_goes_the_long_way(name: str, arguments: tuple[Any, ...]) -> None:
    """The verb's own errors are those of the Python one."""
    if name == "set_stream":
        otherwise = Otherwise()
        verb = native.extension().set_stream(print, 0, HANDLES, False, otherwise)
    else:
        verb, _, otherwise = made(name)
    assert verb(*arguments) == "the long way" and otherwise.calls == [arguments]


def test_the_capture_of_a_stream_is_asked_for_in_one_call() -> None:
    """What is not known so is left to the long way: a broken capture, an error; the default stream never captures."""
    capture_of, lib, otherwise = made("capture_of")
    assert capture_of(3) == 0
    lib.capturing = 1, 77
    assert capture_of(3) == 77 and otherwise.calls == []
    assert capture_of(0) == "the long way"
    lib.capturing = 2, 0
    assert capture_of(3) == "the long way"
    lib.capturing, lib.code = (0, 0), 900
    assert capture_of(3) == "the long way" and otherwise.calls == [(0,), (3,), (3,)]


def test_the_current_stream_is_known_by_its_handle() -> None:
    """One that is not kept is identified anew each time."""
    handle, otherwise = [0x10000], Otherwise()
    keys = {0: 0, 0x10000: 3}
    current = native.extension().current_stream(lambda device: handle[device], 0, keys, otherwise)
    assert current() == 3
    handle[0] = 0x50000
    assert current() == "the long way" and otherwise.calls == [()]


def test_a_stream_is_made_current_with_what_torch_takes() -> None:
    """Id, device, and the number of CUDA among the devices; an error of torch's arrives."""
    given: list[Any] = []
    otherwise = Otherwise()
    make = native.extension().set_stream
    change = make(lambda *all_of: given.append(all_of), 2, HANDLES, False, otherwise)
    assert change(3) is None and change(3) is None and change(0) is None
    assert given == [(3, 2, 1), (3, 2, 1), (0, 2, 1)] and otherwise.calls == []
    assert change(1 << 62) == "the long way"
    assert make(print, 2, HANDLES, True, otherwise)(3) == "the long way"
    with pytest.raises(ZeroDivisionError):
        make(lambda *_: 1 // 0, 2, HANDLES, False, otherwise)(3)


def test_a_verb_goes_with_its_driver() -> None:
    """Each refers to the other; the collector sees it."""

    class Driver:
        def record(self, event: int, stream: int) -> None: ...

    driver = Driver()
    driver.record = native.extension().record(1, HANDLES, False, driver.record)  # type: ignore
    gone = weakref.ref(driver)
    del driver
    gc.collect()
    assert gone() is None
