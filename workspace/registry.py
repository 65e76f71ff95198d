"""Registries: strategies and workloads, the built-in ones and those of installed packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache, update_wrapper
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import attrs

from workspace.errors import ConfigError, UnknownStrategy, WorkspaceError
from workspace.provider import StrategyFactory, WorkspaceProvider

if TYPE_CHECKING:
    from workspace.config import WorkspaceConfig
    from workspace.timeline import Timeline


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
    unusable
        Why it cannot be chosen (an installed package is broken), else empty. It claims nothing then.
    written
        The entry point that registers it, as its package wrote it; empty for a built-in strategy.
    """

    name: str
    summary: str
    safe: bool
    load: Callable[[], StrategyFactory]
    unusable: str = ""
    written: str = ""


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

    A package adds one through the entry-point group ``workspace.strategies``: the object has ``name`` (the entry
    point's), ``safe`` (bool), a docstring whose first line is the summary, and is called with the timeline and the
    config. One that is not so is listed with what is wrong, and `strategy` refuses it. A name that is taken stays what
    it is, and `strategy` warns: see `overlooked`.
    """
    found = {entry.name: entry for entry in _BUILT_IN}
    for point in entry_points(group="workspace.strategies"):
        if point.name not in found:
            found[point.name] = _installed(point)
    return found


def overlooked(name: str = "") -> list[str]:
    """A line for each entry point (of that name, if one is given) that adds nothing because its name is taken."""
    taken = {entry.name: "a built-in strategy" for entry in _BUILT_IN}
    lines = []
    for point in entry_points(group="workspace.strategies"):
        if name and point.name != name:
            continue
        if point.name in taken:
            lines.append(f"{_written(point)} is not used: {point.name!r} is {taken[point.name]}")
        else:
            taken[point.name] = _written(point)
    return lines


@cache  # once in a process for each name: a look at what is installed takes longer than to make a workspace
def _warn_of_overlooked(name: str) -> None:
    for line in overlooked(name):
        warnings.warn(f"{line}; uninstall its package, or let it choose another name", RuntimeWarning, stacklevel=3)


def _written(point: EntryPoint) -> str:
    """An entry point as its package wrote it, and whose it is."""
    whose = f" of {point.dist.name}" if point.dist is not None else ""
    return f"entry point '{point.name} = {point.value}'{whose}"


def _installed(point: EntryPoint) -> StrategyEntry:
    try:
        factory = point.load()
    except Exception as error:  # whatever a package raises at import must not hide the other strategies
        unusable = f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        return StrategyEntry(point.name, unusable, False, point.load, unusable, _written(point))
    safe, unusable = getattr(factory, "safe", None), _unusable(factory, point.name)
    lines = (getattr(factory, "__doc__", None) or "").strip().splitlines() or [point.value]

    written = _written(point)

    def load() -> StrategyFactory:
        def checked(timeline: Timeline, config: WorkspaceConfig) -> WorkspaceProvider:
            return _made(point.name, written, factory, timeline, config)

        return update_wrapper(checked, factory, updated=())  # of the package's module, which reports name

    return StrategyEntry(point.name, unusable or lines[0], safe is True and not unusable, load, unusable, written)


def _unusable(factory: Any, name: str) -> str:
    """What keeps an installed object from being a strategy; empty if nothing does."""
    if not callable(factory):
        return "is not callable: a strategy is called with the timeline and the config"
    if not isinstance(getattr(factory, "safe", None), bool):
        return "has no `safe`: a strategy says by True or False whether it keeps scratch intact"
    if getattr(factory, "name", None) != name:
        return f"has `name` {getattr(factory, 'name', None)!r}: a strategy's `name` is its entry point's"
    return ""


def _made(name: str, written: str, factory: Any, timeline: Timeline, config: WorkspaceConfig) -> WorkspaceProvider:
    """A package's strategy made, which follows the protocol; what is wrong is said before anything is lent."""
    try:
        made = factory(timeline, config)
    except WorkspaceError:
        raise
    except Exception as error:
        raise _broken(name, written, f"raises {type(error).__name__} when it is made: {error}") from error
    if not isinstance(made, WorkspaceProvider):
        wanted = {*WorkspaceProvider.__annotations__, *vars(WorkspaceProvider)}
        missing = sorted(one for one in wanted if not one.startswith("_") and not hasattr(made, one))
        raise _broken(name, written, f"does not follow workspace.WorkspaceProvider: it has no {', '.join(missing)}")
    return made


def _broken(name: str, written: str, problem: str) -> ConfigError:
    remedy = "mend or uninstall the package that registers it, or choose another strategy"
    return ConfigError(f"strategy {name!r} {problem} ({written})", remedy, key="strategy", name=name)


def strategy(name: str) -> StrategyEntry:
    """One strategy. Warns, once in a process, of a package that registers another one under its name.

    Raises
    ------
    UnknownStrategy
        There is none of that name; the nearest is named.
    ConfigError
        The package that registers it is broken.
    """
    _warn_of_overlooked(name)
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
    entry = known[name]
    if entry.unusable:
        raise _broken(name, entry.written, entry.unusable)
    return entry


def workloads() -> dict[str, Callable[[], Any]]:
    """Makers of the command line's workloads by name: entry-point group ``workspace.workloads``, loaded when called."""

    def maker(point: EntryPoint) -> Callable[[], Any]:
        return lambda: point.load()()

    return {point.name: maker(point) for point in entry_points(group="workspace.workloads")}
