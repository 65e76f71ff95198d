"""How captures are noticed: torch's ``CUDAGraph.capture_begin`` and ``capture_end`` are wrapped, once.

A flag is then all the steady path needs. Captures begun by raw CUDA calls are not seen here; a status query
sees them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Watcher(Protocol):
    """What is told of captures. `beginning` returns a token `began` is given, or None to skip it."""

    def beginning(self) -> object: ...

    def began(self, graph: Any, token: Any) -> None: ...

    def ended(self, graph: Any, failed: bool) -> None: ...


_MARK = "_workspace_watches"
_lock = threading.Lock()


def install(graph_class: type) -> weakref.WeakSet[Any]:
    """Wrap the two methods of a graph class unless they are wrapped, and return the set of its watchers.

    Signatures and docstrings are kept. The set holds watchers weakly, so that a driver nobody uses can go.
    """
    with _lock:
        watchers: weakref.WeakSet[Any] | None = graph_class.__dict__.get(_MARK)
        if watchers is None:
            watchers = weakref.WeakSet()
            setattr(graph_class, _MARK, watchers)
            begin, end = graph_class.capture_begin, graph_class.capture_end  # type: ignore[attr-defined]
            graph_class.capture_begin = _watched_begin(begin, end, watchers)  # type: ignore[attr-defined]
            graph_class.capture_end = _watched_end(end, watchers)  # type: ignore[attr-defined]
        return watchers


def _watched_begin(
    begin: Callable[..., None], end: Callable[..., None], watchers: weakref.WeakSet[Any]
) -> Callable[..., None]:
    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        told = [(watcher, token) for watcher in list(watchers) if (token := watcher.beginning()) is not None]
        begin(self, *args, **kwargs)
        try:
            for watcher, token in told:
                watcher.began(self, token)
        except BaseException:
            end(self)  # a capture its watchers refuse must not stay open on the caller's stream
            for watcher, _ in told:
                watcher.ended(self, True)
            raise

    return capture_begin


def _watched_end(end: Callable[..., None], watchers: weakref.WeakSet[Any]) -> Callable[..., None]:
    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> None:
        failed = True
        try:
            end(self, *args, **kwargs)
            failed = False
        finally:
            for watcher in list(watchers):
                watcher.ended(self, failed)

    return capture_end
