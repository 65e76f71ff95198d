"""libcuda as far as a graph's retained user objects need it: their destructors run when a test wants."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


class Retaining:
    """Stands in for libcuda: keeps the destructors of what a graph would retain."""

    def __init__(self) -> None:
        self.destructors: list[Callable[[], None]] = []

    def cuUserObjectCreate(self, made: Any, argument: int, destructor: int, *_: int) -> int:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor)
        self.destructors.append(lambda: function(argument))
        made._obj.value = 1
        return 0

    def cuGraphRetainUserObject(self, *_: int) -> int:
        return 0

    def check(self, code: int, verb: str, **_: object) -> None:
        assert code == 0, verb
