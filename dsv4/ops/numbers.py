"""The numbers of a call, as its schema takes them."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import torch

from dsv4.ops.errors import OpError

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""What a compiler passes for numbers it does not know."""

INT64 = 1 << 63


def number(op: str, name: str, kind: str, value: Any) -> Any:
    """The value as an "int", a "float" or a "bool"; numpy's numbers and tensors of one element are taken for one, too.

    Raises
    ------
    OpError
        It is none.
    """
    if isinstance(value, SYMBOLS):
        return value
    takes, made = _KINDS[kind]
    try:
        found = made(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is a tensor's of several elements
        raise OpError(f"{name} of {op} is {reprlib.repr(value)}", f"pass {takes}", name=name) from None
    return found


def _integer(value: Any) -> int:
    found = value if type(value) is int else operator.index(value)
    if not -INT64 <= found < INT64:
        raise OverflowError
    return found


def _real(value: Any) -> float:
    if type(value) is not float and not hasattr(value, "__float__"):  # a text is no number, whatever it says
        raise TypeError
    return float(value)


def _truth(value: Any) -> bool:
    if value is None or isinstance(value, float | complex) or not hasattr(value, "__bool__"):
        raise TypeError
    return bool(value)


_KINDS = {
    "int": ("an integer of 64 bits", _integer),
    "float": ("a number", _real),
    "bool": ("True or False", _truth),
}
