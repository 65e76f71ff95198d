"""Plans of one micro-batch: programs are compiled once, leases bound once for a batch that comes up again."""

from __future__ import annotations

from typing import Any

from dsv4.batch import Batch
from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.microbatch import MicroBatch
from dsv4.options import Options
from dsv4.plan import Calls, Plan, conditions_of, stages_of
from dsv4.runs import runs
from dsv4.shard import Shard
from dsv4.stages import METADATA
from dsv4.topology import EXIT, Conditions, Node, eager_region, layer, unread_branches

PLANS_KEPT = 64


class Planner:
    """Makes the plans of a micro-batch and remembers them.

    Attributes
    ----------
    prepare
        Calls at the start of a step: the metadata that all layers read.
    """

    def __init__(self, micro_batch: MicroBatch, shard: Shard, engine: Engine, options: Options) -> None:
        self.micro_batch = micro_batch
        self.shard = shard
        self.engine = engine
        self.options = options
        self._compiled: dict[Any, Calls] = {}
        self._plans: dict[Any, Plan] = {}
        self.prepare = self._compile("metadata", METADATA)
        self._leave = self._compile("exit", EXIT)

    def step(self, batch: Batch, region: str, tokens: int) -> Plan:
        """The whole step; with a region, as it is captured."""
        return self._plan(("step", region, tokens), batch, self.shard.config.layer_kinds)

    def regions(self, batch: Batch, region: str, tokens: int) -> Plan:
        """The eager regions of a replay."""
        return self._plan(("regions", region, tokens), batch, self.shard.config.layer_kinds)

    def draft(self, batch: Batch) -> Plan:
        """The MTP layer, SWA-only, on a batch of decode rows."""
        return self._plan(("step", "none", batch.tokens), batch, (LayerKind.SWA,))

    def _plan(self, what: tuple[str, str, int], batch: Batch, kinds: tuple[LayerKind, ...]) -> Plan:
        key = (what, batch, len(kinds))
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= PLANS_KEPT:
                self._plans.clear()
            found = self._plans[key] = self._make(what, batch, kinds)
        return found

    def _make(self, what: tuple[str, str, int], batch: Batch, kinds: tuple[LayerKind, ...]) -> Plan:
        part, region, tokens = what
        ws = self.micro_batch.ws
        stages = stages_of(ws, self.shard, self.engine, batch, tokens, kinds)
        conditions = conditions_of(batch, self.shard, region, self.options.aux_streams, tokens)
        regions: dict[LayerKind, Calls] = {}
        if region != "none":
            regions = {kind: self._region(kind, conditions) for kind in stages}
        if part == "regions":
            return Plan(stages, regions=regions)
        layers = [(stages[kind], self._layer(kind, conditions, not i)) for i, kind in enumerate(kinds)]
        return Plan(stages, tuple(layers), self._leave, regions)

    def _layer(self, kind: LayerKind, conditions: Conditions, first: bool) -> Calls:
        key = (kind, conditions, first)
        return self._compiled.get(key) or self._compile(key, layer(kind, conditions, first))

    def _region(self, kind: LayerKind, conditions: Conditions) -> Calls:
        key = (kind, conditions)
        return self._compiled.get(key) or self._compile(key, eager_region(kind, conditions))

    def _compile(self, key: Any, nodes: tuple[Node, ...]) -> Calls:
        nodes = runs(nodes) if self.options.merge else nodes
        dropped = self.options.drop_join
        unjoined = unread_branches(nodes, dropped) if dropped else frozenset()
        calls = self.micro_batch.compile(nodes, unjoined)
        self._compiled[key] = calls
        return calls
