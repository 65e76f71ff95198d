"""Registries: strategies and workloads, the built-in ones and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs

from workspace.errors import UnknownStrategy
from workspace.provider import StrategyFactory


@attrs.frozen
class StrategyEntry:
    """A strategy by name.

    Attributes
    ----------
    summary
        One line for lists.
    safe
        Whether it keeps the one rule; an unsafe one needs ``allow_unsafe=True``.
    load
        Returns the factory, called as ``factory(timeline, config)``.
    """

    name: str
    summary: str
    safe: bool
    load: Callable[[], StrategyFactory]


def _built_in(name: str, summary: str, safe: bool, module: str, attribute: str) -> StrategyEntry:
    def load() -> StrategyFactory:
        from importlib import import_module

        factory: StrategyFactory = getattr(import_module(f"workspace.strategies.{module}"), attribute)
        return factory

    return StrategyEntry(name, summary, safe, load)


_BUILT_IN = (
    _built_in("caching", "fresh tensors from the caching allocator; the reference", True, "caching", "Caching"),
    _built_in(
        "event_fenced",
        "one pool for all streams, fenced where the clocks show no order",
        True,
        "event_fenced",
        "EventFenced",
    ),
    _built_in("per_stream", "a sub-pool for each stream; blocks migrate when ordered", True, "per_stream", "PerStream"),
    _built_in(
        "upstream", "unsafe: returning forms, no lifetime tracking; the speed baseline", False, "upstream", "Upstream"
    ),
    _built_in("unfenced", "unsafe: the reverted model-wide slab, no lifetimes", False, "unfenced", "Unfenced"),
)


def strategies() -> dict[str, StrategyEntry]:
    """All strategies by name.

    A package adds one through the entry-point group ``workspace.strategies``: the object has ``safe`` (bool), a
    docstring whose first line is the summary, and is called with the timeline and the config. One that cannot be
    imported is listed as such, and raises when it is chosen.
    """
    found = {entry.name: entry for entry in _BUILT_IN}
    for point in entry_points(group="workspace.strategies"):
        if point.name not in found:
            found[point.name] = _installed(point)
    return found


def _installed(point: EntryPoint) -> StrategyEntry:
    try:
        factory = point.load()
    except Exception as error:  # whatever a package raises at import must not hide the other strategies
        return StrategyEntry(point.name, f"cannot be imported: {error}", True, point.load)
    summary = (factory.__doc__ or point.value).strip().splitlines()[0]
    return StrategyEntry(point.name, summary, bool(factory.safe), point.load)


def strategy(name: str) -> StrategyEntry:
    """One strategy. Raises `UnknownStrategy`, naming the nearest."""
    for entry in _BUILT_IN:
        if entry.name == name:
            return entry
    known = strategies()
    if name not in known:
        near = get_close_matches(name, known, 1)
        raise UnknownStrategy(
            f"strategy {name!r} is not known",
            (f"did you mean {near[0]!r}? " if near else "") + f"there are: {', '.join(known)}",
            name=name,
            known=tuple(known),
        )
    return known[name]


def workloads() -> dict[str, Callable[[], Any]]:
    """Makers of the command line's workloads by name: entry-point group ``workspace.workloads``, loaded when called."""

    def maker(point: EntryPoint) -> Callable[[], Any]:
        return lambda: point.load()()

    return {point.name: maker(point) for point in entry_points(group="workspace.workloads")}
