"""The topology's nodes made ready to be walked: each beside the function that enqueues it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from dsv4.config import LayerKind
from dsv4.topology import EXIT, Acquire, Break, Conditions, Fork, Node, Op, Release, eager_region, layer

Steps = tuple[tuple[Callable[[Any, Any], None], Any], ...]
"""What is called with the walk and with the thing beside it, one after the other."""


@attrs.frozen(eq=False)
class Branch:
    """A branch of a fork, by the name of its stream."""

    stream: str
    nodes: Steps


@attrs.frozen(eq=False)
class Forked:
    """A fork; its streams are those of the branches in turn."""

    branches: tuple[Branch, ...]
    streams: tuple[Any, ...]
    body: Steps
    branches_first: bool


class Routes:
    """The layers' nodes under some conditions, each sort of layer made ready when it is first walked.

    Parameters
    ----------
    walk
        The class of the walks; its methods `acquire`, `release`, `fork` and `pause` take what is beside them.
    kernels
        By label of the topology's ops.
    streams
        Aux streams by name.
    """

    def __init__(
        self, conditions: Conditions, walk: Any, kernels: Mapping[str, Any], streams: Mapping[str, Any]
    ) -> None:
        self._conditions, self._walk, self._kernels, self._streams = conditions, walk, kernels, streams
        self._layers: dict[tuple[LayerKind, bool], Steps] = {}
        self._regions: dict[LayerKind, Steps] = {}
        self.exit = self._ready(EXIT)

    def layer(self, kind: LayerKind, first: bool) -> Steps:
        """A layer, or the first one."""
        found = self._layers.get((kind, first))
        if found is None:
            found = self._layers[kind, first] = self._ready(layer(kind, self._conditions, first))
        return found

    def region(self, kind: LayerKind) -> Steps:
        """The eager region of a layer."""
        found = self._regions.get(kind)
        if found is None:
            found = self._regions[kind] = self._ready(eager_region(kind, self._conditions))
        return found

    def _ready(self, nodes: tuple[Node, ...]) -> Steps:
        return tuple(self._step(node) for node in nodes)

    def _step(self, node: Node) -> tuple[Callable[[Any, Any], None], Any]:
        walk = self._walk
        if isinstance(node, Op):
            return self._kernels[node.label], node
        if isinstance(node, Acquire):
            return walk.acquire, node.lease
        if isinstance(node, Release):
            return walk.release, node.lease
        if isinstance(node, Break):
            return walk.pause, self._ready(node.nodes)
        return walk.fork, self._forked(node)

    def _forked(self, node: Fork) -> Forked:
        return Forked(
            tuple(Branch(one.stream, self._ready(one.nodes)) for one in node.branches),
            tuple(self._streams[one.stream] for one in node.branches),
            self._ready(node.body),
            node.branches_first,
        )
