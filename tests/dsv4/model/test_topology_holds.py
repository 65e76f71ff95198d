"""Every kernel touches the leases' tensors that its op in the topology declares, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from dsv4.config import LayerKind
from dsv4.model.decoder import KERNELS
from dsv4.model.forward import Forward
from dsv4.model.presets import MIXED
from dsv4.topology import EXIT, Conditions, Op, layer
from tests.dsv4.model.made import context, decoder, prompt, step
from tests.dsv4.walk import ops

DECLARED_AS = {
    "projection.o_grouped": "projection.o_fp8",
    "attention.partial": "attention.lse",
}
"""What is named otherwise where kernels compute in FP8, or is part of one row of vLLM's table."""

INSIDE = {
    "topk_prefill": ("cp_gather_indexer_k", "mqa_logits"),
    "flash_mla_sparse_fwd": ("dequantize_and_gather_k_cache", "combine_topk_swa"),
    "fused_wqa_wkv": ("act_quant_x",),
    "wq_b": ("act_quant_qr",),
    "indexer_wq_b": ("act_quant_qr_indexer",),
    "wo_b": ("act_quant_z",),
}
"""Ops that run within a later one of the same stream, or whose input it takes unquantised."""


class Watched:
    """A lease whose reads by name are noted."""

    def __init__(self, lease: Any, name: str, seen: set[str]) -> None:
        self.__dict__.update(lease=lease, name=name, seen=seen)

    def __getattr__(self, tensor: str) -> Any:
        if tensor in self.lease.tensors:
            self.seen.add(f"{self.name}.{tensor}")
        return getattr(self.lease, tensor)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """What each label's kernel touched, and what its ops declare, filled as a model runs."""
    found: dict[str, set[str]] = {}
    for label, kernel in KERNELS.items():

        def watched(f: Forward, op: Op, kernel: Any = kernel) -> None:
            seen = found.setdefault(op.label, set())
            found.setdefault(f"{op.label} declares", set()).update(op.reads + op.writes)
            plain = f.leases
            f.__dict__.update({name: Watched(lease, name, seen) for name, lease in plain.items()})
            try:
                kernel(f, op)
            finally:
                f.__dict__.update(plain)

        monkeypatch.setitem(KERNELS, label, watched)
    yield found


def run_a_model() -> None:
    """Prefill, chunks beside decode, past the point where fewer keys are chosen than there are."""
    model = decoder(MIXED, capacity=1024)
    contexts = {i: context(model, prompt(MIXED, 300, i)) for i in range(2)}
    step(model, contexts, (0, 0, 150, True))
    step(model, contexts, (0, 150, 1, False), (1, 0, 200, True))


def undeclared(touched: dict[str, set[str]]) -> set[tuple[str, str]]:
    found = set()
    for label in touched.keys() & KERNELS.keys():
        allowed = set(touched[f"{label} declares"])
        for other in INSIDE.get(label, ()):
            allowed |= touched[f"{other} declares"]
        names = {DECLARED_AS.get(name, name) for name in touched[label]}
        found |= {(label, name) for name in names - allowed}
    return found


def test_kernels_touch_what_the_topology_declares(touched: dict[str, set[str]]) -> None:
    """So what was proved about the topology's accesses holds for the model that runs."""
    run_a_model()
    assert sum(map(len, touched.values())) > 60
    assert undeclared(touched) == set()


def test_an_undeclared_access_is_found(touched: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a kernel that reads one tensor more."""
    plain = KERNELS["wq_b"]

    def greedy(f: Forward, op: Op) -> None:
        plain(f, op)
        touched["wq_b"].add("inputs.qr_kv")

    monkeypatch.setitem(KERNELS, "wq_b", greedy)
    run_a_model()
    assert undeclared(touched) == {("wq_b", "inputs.qr_kv")}


def test_every_op_of_the_topology_has_a_kernel() -> None:
    """Whatever the kind of layer, the region and the step."""
    labels = {op.label for op in ops(EXIT)}
    for kind, region, first, short, boundary in product(
        LayerKind, ("none", "wide", "narrow"), (True, False), (True, False), (True, False)
    ):
        labels |= {
            op.label for op in ops(layer(kind, Conditions(region, short_context=short, boundary=boundary), first))
        }
    assert labels == KERNELS.keys()
