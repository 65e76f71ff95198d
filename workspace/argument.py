"""Arguments that callers write by hand: what they cannot be is refused by name, before anything has changed."""

from __future__ import annotations

from typing import Any

from workspace.errors import ArgumentError, LayoutError
from workspace.layout import Layout


def name(what: str, value: object) -> None:
    """Names of streams, lanes, phases, owners and persistent buffers."""
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{what}={value!r} is not a name", "pass a non-empty str")


def integer(what: str, value: object, least: int) -> None:
    """Counts and indices; a bool is none."""
    if type(value) is not int or value < least:
        raise ArgumentError(f"{what}={value!r} is not an integer of at least {least}", "pass a Python int")


def layout(value: object) -> None:
    """What is leased or declared."""
    if not isinstance(value, Layout):
        raise LayoutError(f"{value!r} is not a layout", "pass a workspace.Layout")


def shape(value: object) -> None:
    """The shape of one tensor; its dims are the spec's to check."""
    if not isinstance(value, tuple | list):
        raise LayoutError(f"shape {value!r} is not a tuple", "pass the dims in a tuple: (5,)")


def memory(value: Any) -> None:
    """What uses are declared of."""
    if not hasattr(value, "data_ptr") and not hasattr(value, "__workspace_range__"):
        raise ArgumentError(f"a use of {value!r} is declared", "pass a lease, or a tensor over its bytes")


def function(value: object) -> None:
    """What runs eagerly between two segments, or again after a trim."""
    if not callable(value):
        raise ArgumentError(f"{value!r} cannot be called", "pass a function without arguments")


def work(value: Any) -> None:
    """What a lease's release waits for."""
    if not callable(getattr(value, "wait", None)):
        raise ArgumentError(f"{value!r} has no wait()", "pass the work of an asynchronous collective")
