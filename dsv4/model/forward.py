"""One micro-batch of one step through the layers: `dsv4.topology`'s nodes, walked with real kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch

from dsv4.config import ModelConfig
from dsv4.model.layer import Body, Layer
from dsv4.model.metadata import Metadata
from dsv4.model.precision import Precision
from dsv4.model.route import Forked, Routes, Steps
from dsv4.model.rows import DecodeRows, decode_rows
from dsv4.model.scratch import stage_layouts
from dsv4.shard import Shard
from dsv4.topology import Op

Kernel = Callable[["Forward", Op], None]
"""Enqueues what one op of the topology stands for, on the caller's current stream."""

AllReduce = Callable[[torch.Tensor], Any]
"""Starts the sum of a tensor over the ranks, in place; its handle's ``wait()`` orders the caller's current stream."""

LEASES = frozenset(
    (
        *("mhc_attn", "inputs", "norms", "output", "preparation", "attention", "projection", "mhc_ffn", "ffn"),
        *("experts", "last"),
    )
)
"""Of `dsv4.model.scratch.stage_layouts`: attributes of a `Forward` while they are held."""


@attrs.define(eq=False, slots=False)
class Forward:
    """The state of a walk: which layer it is in, and the leases it holds, each under its name in the topology.

    Attributes
    ----------
    routes
        The topology under the step's conditions.
    streams
        The aux streams by name; the main one is the caller's current stream.
    dims
        Values for the layouts' dims, by kind of layer.
    all_reduce
        Of the ranks that share the model; None where there is one.
    keeps_streams
        Whether the streams outlive the walk.
    sums
        Handles of the sums under way, by lease.
    layer
        The present one.
    rows
        The step's decode rows.
    tokens
        Rows of the step, padding included.
    given
        Streams [T, S, H] that the MTP block takes from its target; None in a target.
    broken
        Called at a break in a capture, with what the layer's eager region runs on; None: there is no capture.
    hidden, residual
        After the last layer: [T, H] with the final norm, and the streams [T, S, H] before the head, where they are
        kept. Never scratch: tensors given before the walk, or the framework's memory.
    """

    ws: Any
    shard: Shard
    precision: Precision
    body: Body
    meta: Metadata
    dims: dict[Any, dict[str, int]]
    routes: Routes
    streams: dict[str, Any]
    all_reduce: AllReduce | None = None
    keeps_streams: bool = True
    sums: dict[str, Any] = attrs.field(factory=dict)
    _stages: dict[Any, dict[str, Any]] = attrs.field(factory=dict, init=False)
    _stage: dict[str, Any] = attrs.field(factory=dict, init=False)
    place: int = 0
    layer: Layer = attrs.field(init=False)
    rows: DecodeRows = attrs.field(init=False)
    tokens: int = attrs.field(init=False)
    config: ModelConfig = attrs.field(init=False)
    given: Any = None
    broken: Callable[[Forward], None] | None = None
    hidden: Any = None
    residual: Any = None

    if TYPE_CHECKING:

        def __getattr__(self, lease: str) -> Any: ...

    def __attrs_post_init__(self) -> None:
        self.config = self.shard.config
        self.tokens = self.meta.positions.shape[0]
        self.rows = decode_rows(self.meta, self.body.chosen)

    @property
    def leases(self) -> dict[str, Any]:
        """Those that are held, in the order they were acquired."""
        return {name: one for name, one in self.__dict__.items() if name in LEASES}

    def walk(self) -> Iterator[None]:
        """Enqueue everything, yielding after each layer; leases are released whatever happens."""
        try:
            for place in range(len(self.body.layers)):
                self._enter(place)
                self.run(self.routes.layer(self.layer.kind, place == 0))
                yield
            self.run(self.routes.exit)
        finally:
            for name in reversed(self.leases):
                self.release(name)

    def run(self, steps: Steps) -> None:
        """Enqueue some nodes in host order."""
        for enqueue, what in steps:
            enqueue(self, what)

    def run_region(self, place: int, held: dict[str, Any]) -> None:
        """Enqueue the eager region of one layer on what its graph holds there."""
        self._enter(place)
        self.__dict__.update(held)
        try:
            self.run(self.routes.region(self.layer.kind))
        finally:
            for name in self.leases.keys() - held.keys():
                self.release(name)
            for name in held:
                delattr(self, name)

    def sum_over_ranks(self, lease: str, tensor: Any) -> None:
        """Start the sum of a tensor of a lease; the lease is released after it, even when nobody reads the sum."""
        if self.all_reduce is not None:
            self.sums[lease] = self.all_reduce(tensor)
            getattr(self, lease).until(self.sums[lease])

    def summed(self, lease: str) -> Any:
        """The lease, whose sum the current stream's next work comes after."""
        if lease in self.sums:
            self.sums.pop(lease).wait()
        return getattr(self, lease)

    # -- nodes -----------------------------------------------------------------------------------------------
    def _enter(self, place: int) -> None:
        """The next nodes are those of this layer."""
        self.place = place
        self.layer = self.body.layers[place]
        self._stage = self._stages.setdefault(self.layer.kind, {})

    def _leased(self, name: str) -> Any:
        kind = self.layer.kind
        layout = stage_layouts(self.shard, self.precision, kind)[name]
        lease = self.ws.lease(layout, **{dim: self.dims[kind][dim] for dim in layout.dim_names})
        if self.broken is None:  # a graph keeps each lease it was captured with
            self._stage[name] = lease
        return lease

    def acquire(self, name: str) -> None:
        """Begin the lease of that name; one object serves the layers of a kind in turn."""
        self.__dict__[name] = (self._stage.get(name) or self._leased(name)).__enter__()

    def release(self, name: str) -> None:
        """End it."""
        self.__dict__.pop(name).__exit__(None, None, None)  # as `release`, which has a frame of its own

    def pause(self, steps: Steps) -> None:
        """Leave an eager region to whoever captures; outside of a capture, enqueue it like the rest."""
        if self.broken is not None:
            self.broken(self)
        else:
            self.run(steps)

    def fork(self, node: Forked) -> None:
        """Enqueue branches beside the caller's stream, and join them."""
        with self.ws.fork(*node.streams) as branch:
            if not node.branches_first:
                self.run(node.body)
            for one, stream in zip(node.branches, node.streams, strict=True):
                self._branch(branch(stream), one.nodes)
            if node.branches_first:
                self.run(node.body)

    def _branch(self, branch: Any, steps: Steps) -> None:
        with branch:
            self.run(steps)
