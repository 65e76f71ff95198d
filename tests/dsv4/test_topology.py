"""The streams, forks and joins of dsv4.md section 2, and that they order every use of every temporary."""

from __future__ import annotations

from itertools import product

import pytest

from dsv4.config import LayerKind
from dsv4.layouts import stage_layouts
from dsv4.presets import FLASH
from dsv4.shard import Shard
from dsv4.topology import EXIT, Acquire, Break, Conditions, Fork, Node, Release, eager_region, layer
from tests.dsv4.walk import conflicts, leases, ops, ordered

SWA, C4, C128 = LayerKind.SWA, LayerKind.C4, LayerKind.C128
EVERY = [
    Conditions(region, aux, small, prefill, decode, short, boundary, fp4)
    for region, aux, small, prefill, decode, short, boundary, fp4 in product(
        ("none", "wide", "narrow"), *[(True, False)] * 7
    )
    if prefill or decode
]


def streams(kind: LayerKind, conditions: Conditions) -> dict[str, str]:
    return {op.label: op.stream for op in ops(layer(kind, conditions, True))}


def forks(nodes: tuple[Node, ...]) -> list[Fork]:
    found = []
    for node in nodes:
        if isinstance(node, Break):
            found += forks(node.nodes)
        elif isinstance(node, Fork):
            found += [node, *(inner for branch in node.branches for inner in forks(branch.nodes))]
    return found


def test_a_c4_layer_runs_where_the_table_says() -> None:
    where = streams(C4, Conditions())
    assert where["fused_wqa_wkv"] == where["wq_b"] == where["fused_qnorm_rope_kv_insert"] == "main"
    assert where["compressor_wkv_wgate"] == "aux0"
    assert where["indexer_weights_proj"] == "aux1"
    assert where["indexer_wkv_wgate"] == "aux2"
    assert where["indexer_wq_b"] == where["fused_indexer_q_rope_quant"] == "aux0"
    assert where["c4_save_states_and_compress"] == "aux1"
    assert where["indexer_save_states_and_compress"] == "aux2"
    assert where["mqa_logits"] == where["flash_mla_decode"] == where["wo_b"] == "main"


def test_a_c128_layer_compresses_on_aux0() -> None:
    where = streams(C128, Conditions())
    assert where["compressor_wkv_wgate"] == where["c128_compress"] == where["c128_norm_rope_store"] == "aux0"
    assert {"aux1", "aux2"}.isdisjoint(where.values())


def test_an_swa_layer_never_forks() -> None:
    assert set(streams(SWA, Conditions()).values()) == {"main"}


C4_LAYER = layer(C4, Conditions(), True)


def test_the_forks_of_a_c4_layer() -> None:
    """Stage A forks to three, stage C to two, aux0 to aux2 inside; only the inner one is parent first."""
    found = [(one.parent, [b.stream for b in one.branches], one.branches_first) for one in forks(C4_LAYER)]
    assert found == [
        ("main", ["aux0", "aux1", "aux2"], True),
        ("main", ["aux0", "aux1"], True),
        ("aux0", ["aux2"], False),
    ]


def test_above_the_token_threshold_only_stage_a_is_serial() -> None:
    where = streams(C4, Conditions(parallel_inputs=False))
    assert where["compressor_wkv_wgate"] == where["indexer_weights_proj"] == where["indexer_wkv_wgate"] == "main"
    assert where["indexer_wq_b"] == "aux0"


def test_a_captured_narrow_region_is_serial_where_vllm_is() -> None:
    """0.28: the C128 compressor on main and the indexer's compressor on aux0; the three-way fork stays."""
    assert streams(C128, Conditions(region="narrow"))["c128_compress"] == "main"
    where = streams(C4, Conditions(region="narrow"))
    assert where["indexer_save_states_and_compress"] == "aux0"
    assert where["c4_save_states_and_compress"] == "aux1"
    assert len(forks(layer(C4, Conditions(region="narrow"), True))) == 2
    assert len(forks(layer(C4, Conditions(region="wide"), True))) == 3


@pytest.mark.parametrize("kind", LayerKind)
def test_without_aux_streams_everything_is_on_main(kind: LayerKind) -> None:
    for conditions in EVERY:
        if not conditions.aux_streams:
            assert set(streams(kind, conditions).values()) == {"main"}


def test_a_short_context_skips_the_queries_but_not_in_a_captured_stage() -> None:
    assert "indexer_wq_b" not in streams(C4, Conditions(short_context=True))
    assert "fill_topk_indices" in streams(C4, Conditions(short_context=True, region="wide"))
    assert "mqa_logits" in streams(C4, Conditions(short_context=True, region="narrow"))


def test_without_a_boundary_the_c128_compressor_saves_states_only() -> None:
    assert "c128_compress" not in streams(C128, Conditions(boundary=False))
    assert "c128_compress" in streams(C128, Conditions(boundary=False, region="narrow"))


@pytest.mark.parametrize("kind", LayerKind)
def test_what_is_captured(kind: LayerKind) -> None:
    """Wide: stages C and D are eager; narrow: stage D only; none: nothing is."""
    eager = {op.label for op in ops(eager_region(kind, Conditions(region="wide")))}
    assert {"wq_b", "flash_mla_decode"} <= eager and "wo_b" not in eager
    eager = {op.label for op in ops(eager_region(kind, Conditions(region="narrow")))}
    assert "flash_mla_decode" in eager and "wq_b" not in eager
    for region, breaks in (("none", 0), ("wide", 1), ("narrow", 1)):
        found = layer(kind, Conditions(region=region), True)
        assert sum(isinstance(node, Break) for node in found) == breaks


def model(conditions: Conditions, *kinds: LayerKind) -> tuple[Node, ...]:
    """Layers one after the other, with the head."""
    return tuple(n for i, kind in enumerate(kinds) for n in layer(kind, conditions, i == 0)) + EXIT


def test_the_stock_topology_orders_every_use() -> None:
    """Temporaries keep their name from layer to layer: reuse of bytes by the next layer is ordered too."""
    for conditions in EVERY[::5]:
        assert conflicts(ordered(model(conditions, SWA, C4, C128, C4, C128))) == set(), conditions


@pytest.mark.parametrize(
    ("stream", "kinds", "hit"),
    [
        ("aux0", (C128, C128), ("c128_save_states", "compressor_wkv_wgate", "inputs.kv_score")),
        ("aux0", (C4, SWA), ("fused_indexer_q_rope_quant", "mqa_logits", "preparation.iq")),
        ("aux1", (C4, C4), ("c4_save_states_and_compress", "compressor_wkv_wgate", "inputs.kv_score")),
        ("aux2", (C4, C4), ("indexer_wkv_wgate", "mhc_fused_post_pre", "mhc_attn.layer_in")),
    ],
)
def test_a_dropped_join_leaves_uses_unordered(stream: str, kinds: tuple[LayerKind, ...], hit: tuple[str, ...]) -> None:
    """The control of the test above."""
    found = conflicts(ordered(model(Conditions(parallel_inputs=stream == "aux2"), *kinds), without_join=stream))
    assert hit in found, found


def test_every_op_touches_held_leases_only() -> None:
    """A lease is acquired once, covers all ops that name it, and none is left at the end."""
    held: set[str] = set()

    def walk(nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            if isinstance(node, Acquire):
                assert node.lease not in held
                held.add(node.lease)
            elif isinstance(node, Release):
                held.remove(node.lease)
            elif isinstance(node, Break):
                walk(node.nodes)
            else:
                for op in ops((node,)):
                    for name in (*op.reads, *op.writes):
                        assert name.split(".")[0] in held | {"persistent"}, (op, held)

    for conditions in EVERY:
        walk(model(conditions, SWA, C4, C128, SWA))
        assert held == set()


@pytest.mark.parametrize(("kind", "fp4"), [(kind, fp4) for kind in LayerKind for fp4 in (False, True)])
def test_every_tensor_of_every_layout_is_written_and_read(kind: LayerKind, fp4: bool) -> None:
    """No layout holds bytes that no op uses, and no op names a tensor that no layout has."""
    shard = Shard(FLASH, indexer="fp4", architecture="sm100") if fp4 else Shard(FLASH)
    declared = {f"{stage}.{name}" for stage, one in stage_layouts(shard, kind).items() for name in one.specs}
    found = ops(model(Conditions(fp4=fp4), kind, kind))
    written = {name for op in found for name in op.writes if not name.startswith("persistent")}
    read = {name for op in found for name in op.reads if not name.startswith("persistent")}
    assert written == declared
    assert written - read == {"attention.lse"} | ({"attention.topk_workspace"} if kind is C4 else set())


def test_one_lease_per_stage_and_the_output_its_own() -> None:
    found = [node.lease for node in leases(layer(C4, Conditions(), True)) if isinstance(node, Acquire)]
    assert found == [
        "mhc_attn", "inputs", "norms", "preparation", "output", "attention", "projection", "mhc_ffn", "ffn",
    ]  # fmt: skip
