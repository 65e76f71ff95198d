"""The one order in which adaptors wrap a strategy: trace > guard > poison > statistics > limit > strategy."""

from __future__ import annotations

from workspace.adaptors.adaptor import Adaptor
from workspace.adaptors.guard import Guard
from workspace.adaptors.limit import Limit
from workspace.adaptors.poison import Poison
from workspace.adaptors.statistics import Statistics
from workspace.adaptors.trace import Trace, TraceFile
from workspace.config import WorkspaceConfig
from workspace.errors import ConfigError
from workspace.provider import WorkspaceProvider
from workspace.timeline import Timeline

ORDER: tuple[type[Adaptor], ...] = (Trace, Guard, Poison, Statistics, Limit)
"""Outermost first."""


def compose(strategy: WorkspaceProvider, timeline: Timeline, config: WorkspaceConfig) -> WorkspaceProvider:
    """Wrap a strategy in the adaptors the config asks for."""
    provider = strategy
    if config.limit is not None:
        provider = Limit(provider, config.limit)
    if config.statistics:
        provider = Statistics(provider)
    if config.poison:
        provider = Poison(provider, timeline)
    if config.guard:
        if not timeline.driver.readable:
            raise ConfigError(
                f"guard={config.guard} on virtual memory: the bands have no bytes that could be compared",
                "set guard=0, or use a device with memory='host'",
            )
        provider = Guard(provider, timeline)
    if config.trace is not None:
        provider = Trace(provider, TraceFile(config.trace))
    check_order(provider)
    return provider


def check_order(provider: object) -> None:
    """Raise `ConfigError` unless adaptors are nested in `ORDER`: a guard inside poison would see its bands poisoned."""
    last = -1
    while isinstance(provider, Adaptor):
        position = ORDER.index(type(provider)) if type(provider) in ORDER else last
        if position < last or (position == last and type(provider) in ORDER):
            names = " > ".join(one.__name__.lower() for one in ORDER)
            raise ConfigError(f"adaptor {type(provider).__name__} stands outside the order", f"nest as {names}")
        last, provider = position, provider.inner


def find(provider: object, kind: type[Adaptor]) -> Adaptor | None:
    """The adaptor of a kind around a provider, or None."""
    while isinstance(provider, Adaptor):
        if isinstance(provider, kind):
            return provider
        provider = provider.inner
    return None
