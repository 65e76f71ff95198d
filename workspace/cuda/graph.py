"""One captured graph: launch, reset, and whether it is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workspace.cuda.memory import torch_failure
from workspace.cuda.releases import Release
from workspace.errors import GraphError

if TYPE_CHECKING:
    from workspace.cuda.graphs import Graphs


class CapturedGraph:
    """One instantiated graph of torch's.

    Attributes
    ----------
    capture
        Identity of the capture that made it.
    raw
        The ``torch.cuda.CUDAGraph``; None once a graph this library did not begin has been collected.
    """

    def __init__(self, owner: Graphs, capture: int, release: Release, raw: Callable[[], Any], kept: bool) -> None:
        self._owner = owner
        self._raw = raw
        self.release = release
        self.capture = capture
        # The short way of a launch: of a graph that is kept anyway, which its bound method does, on the only device.
        self._replay = raw().replay if kept and owner.alone else None
        self._current = owner.current

    @property
    def raw(self) -> torch.cuda.CUDAGraph | None:
        graph: torch.cuda.CUDAGraph | None = self._raw()
        return graph

    def launch(self, stream: int) -> None:
        """Enqueue the graph on a stream, through torch so that random generators advance."""
        if self._replay is None or self._current() != stream:
            self._launch(stream)
            return
        try:
            self._replay()
        except RuntimeError as error:
            self._alive()
            raise self._failure(error, stream) from error

    def _launch(self, stream: int) -> None:
        """The same for any graph, on any stream."""
        graph = self._alive()
        try:
            if self._owner.is_current(stream):
                graph.replay()
            else:
                with self._owner.on(stream):
                    graph.replay()
        except RuntimeError as error:
            raise self._failure(error, stream) from error

    def _failure(self, error: RuntimeError, stream: int) -> Exception:
        return torch_failure(error, "CUDAGraph.replay", capture=self.capture, stream=stream)

    def reset(self) -> None:
        """Destroy the graph, while a capture is open after it. Launches in flight finish; its release is seen later."""
        self._owner.destroy(self._reset)

    def _reset(self) -> None:
        graph = self._raw()
        if graph is not None:
            graph.reset()
        self.release.ending = True

    def _alive(self) -> torch.cuda.CUDAGraph:
        graph = self.raw
        if graph is None or self.release.over:
            raise GraphError(f"the graph of capture {self.capture} is gone", "keep it, and capture it again")
        return graph
