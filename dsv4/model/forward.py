"""One micro-batch of one step through the layers: `dsv4.topology`'s nodes, walked with real kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from dsv4.cache.caches import Caches, LayerCaches
from dsv4.config import ModelConfig
from dsv4.model.metadata import Metadata
from dsv4.model.precision import Precision
from dsv4.model.scratch import stage_layouts
from dsv4.model.weights import CompressorWeights, HyperWeights, IndexerWeights, LayerWeights
from dsv4.shard import Shard
from dsv4.topology import EXIT, Acquire, Branch, Conditions, Fork, Node, Op, Release, eager_region, layer

Kernel = Callable[["Forward", Op], None]
"""Enqueues what one op of the topology stands for, on the caller's current stream."""

AllReduce = Callable[[torch.Tensor], Any]
"""Starts the sum of a tensor over the ranks, in place; its handle's ``wait()`` orders the caller's current stream."""


@attrs.frozen(eq=False)
class Body:
    """What a micro-batch runs through: layers with their caches, and what stands at either end.

    Attributes
    ----------
    enter
        Fills the first layer's streams, [T, S, H].
    head
        Collapses the last layer's.
    tables
        RoPE table by kind of layer.
    chosen
        int32 [Tmax, K], the compressed keys a C4 layer chooses; kept for the life of the workspace.
    """

    layers: tuple[LayerWeights, ...]
    caches: Caches
    enter: Callable[[Forward, Any], None]
    head: HyperWeights
    tables: dict[Any, torch.Tensor]
    chosen: torch.Tensor | None


def _lease(name: str) -> Any:
    return property(lambda self: self.leases[name], doc=f"The lease {name!r} of the topology, while it is held.")


@attrs.define(eq=False, slots=False)
class Forward:
    """The state of a walk: which layer it is in, and the leases it holds.

    Attributes
    ----------
    kernels
        By label of the topology's ops.
    streams
        The aux streams by name; the main one is the caller's current stream.
    dims
        Values for the layouts' dims, by kind of layer.
    all_reduce
        Of the ranks that share the model; None where there is one.
    sums
        Handles of the sums under way, by lease.
    given
        Streams [T, S, H] that the MTP block takes from its target; None in a target.
    broken
        Called at a break in a capture, with what the layer's eager region runs on; None: there is no capture.
    hidden, residual
        After the last layer: [T, H] with the final norm, and the streams [T, S, H] before the head. Never scratch:
        tensors given before the walk, or the framework's memory.
    """

    ws: Any
    shard: Shard
    precision: Precision
    body: Body
    meta: Metadata
    dims: dict[Any, dict[str, int]]
    conditions: Conditions
    streams: dict[str, Any]
    kernels: dict[str, Kernel]
    all_reduce: AllReduce | None = None
    leases: dict[str, Any] = attrs.field(factory=dict)
    sums: dict[str, Any] = attrs.field(factory=dict)
    _stages: dict[Any, dict[str, tuple[Any, dict[str, int]]]] = attrs.field(factory=dict, init=False)
    _stage: dict[str, tuple[Any, dict[str, int]]] = attrs.field(factory=dict, init=False)
    place: int = 0
    given: Any = None
    broken: Callable[[Forward], None] | None = None
    hidden: Any = None
    residual: Any = None

    mhc_attn = _lease("mhc_attn")
    inputs = _lease("inputs")
    norms = _lease("norms")
    output = _lease("output")
    preparation = _lease("preparation")
    attention = _lease("attention")
    projection = _lease("projection")
    mhc_ffn = _lease("mhc_ffn")
    ffn = _lease("ffn")

    @property
    def config(self) -> ModelConfig:
        return self.shard.config

    @property
    def weights(self) -> LayerWeights:
        """Of the present layer."""
        return self.body.layers[self.place]

    @property
    def compressor(self) -> CompressorWeights:
        """Of the present layer, which is C4 or C128."""
        assert self.weights.attention.compressor is not None
        return self.weights.attention.compressor

    @property
    def indexer(self) -> IndexerWeights:
        """Of the present layer, which is C4."""
        assert self.weights.attention.indexer is not None
        return self.weights.attention.indexer

    @property
    def caches(self) -> LayerCaches:
        """Of the present layer."""
        return self.body.caches.layers[self.place]

    @property
    def table(self) -> torch.Tensor:
        """The present layer's RoPE table."""
        return self.body.tables[self.weights.kind]

    @property
    def tokens(self) -> int:
        """Rows of the step, padding included."""
        return self.meta.positions.shape[0]

    @property
    def decode(self) -> int:
        """Decode rows, which come first."""
        return self.meta.window.lens.shape[0]

    def walk(self) -> Iterator[None]:
        """Enqueue everything, yielding after each layer; leases are released whatever happens."""
        try:
            for place, weights in enumerate(self.body.layers):
                self._enter(place)
                self.run(layer(weights.kind, self.conditions, place == 0))
                yield
            self.run(EXIT)
        finally:
            for lease in reversed(self.leases.values()):
                lease.release()
            self.leases.clear()

    def run(self, nodes: tuple[Node, ...]) -> None:
        """Enqueue some nodes in host order."""
        kernels, leases = self.kernels, self.leases
        for node in nodes:
            kind = type(node)
            if kind is Op:
                kernels[node.label](self, node)  # type: ignore[union-attr, arg-type]
            elif kind is Acquire:
                self._acquire(node.lease)  # type: ignore[union-attr]
            elif kind is Release:
                leases.pop(node.lease).release()  # type: ignore[union-attr]
            elif kind is Fork:
                self._fork(node)  # type: ignore[arg-type]
            elif self.broken is not None:
                self.broken(self)
            else:  # outside a graph there is nothing to break out of
                self.run(node.nodes)  # type: ignore[union-attr]

    def run_region(self, place: int, held: dict[str, Any]) -> None:
        """Enqueue the eager region of one layer on what its graph holds there."""
        self._enter(place)
        self.leases = dict(held)
        try:
            self.run(eager_region(self.weights.kind, self.conditions))
        finally:
            for name in self.leases.keys() - held.keys():
                self.leases.pop(name).release()

    def sum_over_ranks(self, lease: str, tensor: Any) -> None:
        """Start the sum of a tensor of a lease; the lease is released after it, even when nobody reads the sum."""
        if self.all_reduce is not None:
            self.sums[lease] = self.all_reduce(tensor)
            self.leases[lease].until(self.sums[lease])

    def summed(self, lease: str) -> Any:
        """The lease, whose sum the current stream's next work comes after."""
        if lease in self.sums:
            self.sums.pop(lease).wait()
        return self.leases[lease]

    def _enter(self, place: int) -> None:
        """The next nodes are those of this layer."""
        self.place = place
        self._stage = self._stages.setdefault(self.weights.kind, {})

    def _acquire(self, name: str) -> None:
        found = self._stage.get(name)
        if found is None:
            kind = self.weights.kind
            layout = stage_layouts(self.shard, self.precision, kind)[name]
            own = {dim: value for dim, value in self.dims[kind].items() if dim in layout.dim_names}
            found = self._stage[name] = layout, own
        layout, own = found
        # Not `acquire`, which has more to look at.
        self.leases[name] = self.ws.lease(layout, **own).__enter__()

    def _fork(self, node: Fork) -> None:
        with self.ws.fork(*(self.streams[branch.stream] for branch in node.branches)) as branch:
            if not node.branches_first:
                self.run(node.body)
            for one in node.branches:
                self._branch(branch, one)
            if node.branches_first:
                self.run(node.body)

    def _branch(self, branch: Any, one: Branch) -> None:
        with branch(self.streams[one.stream]):
            self.run(one.nodes)
