"""Arguments that callers write by hand: what they cannot be is refused by name, before anything has changed."""

from __future__ import annotations

from typing import Any

import torch

from workspace.errors import ArgumentError, LayoutError
from workspace.layout import Layout


def name(what: str, value: object) -> None:
    """Names of streams, lanes, phases, owners and persistent buffers."""
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{what}={value!r} is not a name", "pass a non-empty str")


def integer(what: str, value: object, least: int | None = None) -> None:
    """Counts and indices; a bool is none."""
    if type(value) is not int or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ArgumentError(f"{what}={value!r} is not an integer{bound}", "pass a Python int")


def layout(value: object) -> None:
    """What is leased or declared."""
    if not isinstance(value, Layout):
        raise LayoutError(f"{value!r} is not a layout", "pass a workspace.Layout")


def shape(value: object) -> None:
    """The shape of one tensor. Before any look-up by it: 5.0 and True find what 5 and 1 have made."""
    if not isinstance(value, tuple | list):
        raise LayoutError(f"shape {value!r} is not a tuple", "pass the dims in a tuple: (5,)")
    if not {int}.issuperset(map(type, value)):
        raise LayoutError(f"shape {value!r} has a dim that is no integer", "pass Python ints: (5,)")


def dtype(value: object) -> None:
    """The element type of one tensor."""
    if not isinstance(value, torch.dtype):
        raise LayoutError(f"dtype {value!r} is not a torch dtype", "pass e.g. torch.bfloat16")


def memory(what: str, value: Any) -> None:
    """What uses are declared of, and what is uploaded to."""
    # In this order: a slot that is asked for its address makes its tensor.
    if not hasattr(value, "__workspace_range__") and not hasattr(value, "data_ptr"):
        raise ArgumentError(f"{what} {value!r}, which is no tensor", "pass a tensor, or the slot of a lease")


def function(value: object) -> None:
    """What runs eagerly between two segments, or again after a trim."""
    if not callable(value):
        raise ArgumentError(f"{value!r} cannot be called", "pass a function without arguments")


def work(value: Any) -> None:
    """What a lease's release waits for."""
    if not callable(getattr(value, "wait", None)):
        raise ArgumentError(f"{value!r} has no wait()", "pass the work of an asynchronous collective")
