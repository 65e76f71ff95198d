"""What the reference kernels compute, against loops written from the formulas in float64."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from dsv4 import ops
from dsv4.cache.pages import Format, pages_of
from dsv4.config import LayerKind
from dsv4.model.presets import MIXED
from dsv4.ops import OpError
from dsv4.ops.math import normed, rotated
from dsv4.ops.rope import frequencies, table
from dsv4.presets import FLASH
from tests.dsv4.cache import encoder
from tests.dsv4.ops.samples import (
    ENDING,
    ENDS,
    EPS,
    HEADS,
    PADDED,
    REQUESTS,
    STATE_TABLE,
    STREAMS,
    WIDTH,
    T,
    cos_sin,
    ints,
    noise,
    packed,
    positions,
    sample,
    states,
)

F64 = torch.float64


def turned(row: list[float], position: int, inverse: bool = False) -> list[float]:
    """RoPE of a row's last 64 dims as complex numbers."""
    pairs = frequencies(64, MIXED.compress_rope_theta, MIXED.rope_scaling, F64).tolist()
    found = list(row)
    start = len(row) - 64
    for i, pair in enumerate(pairs):
        angle = position * pair * (-1 if inverse else 1)
        value = complex(row[start + 2 * i], row[start + 2 * i + 1]) * cmath.exp(1j * angle)
        found[start + 2 * i], found[start + 2 * i + 1] = value.real, value.imag
    return found


def test_yarn_turns_the_published_pairs() -> None:
    """Of 32 frequencies those below 15 stay, those from 25 on are divided by 16 (base 160000, original 65536)."""
    plain = frequencies(64, 160000.0, None, F64)
    ratio = plain / frequencies(64, 160000.0, FLASH.rope_scaling, F64)
    assert torch.allclose(ratio[:16], torch.ones(16, dtype=F64))
    assert torch.allclose(ratio[25:], torch.full((7,), 16.0, dtype=F64))
    assert (ratio[16:25].diff() > 0).all()


def test_swa_layers_turn_without_yarn() -> None:
    """Base 10000, the first column once per radian; cosines in the first half of a row."""
    found = table(FLASH, LayerKind.SWA, 8, F64)
    assert found.shape == (8, 64)
    assert torch.allclose(found[:, 0], torch.arange(8, dtype=F64).cos())
    assert torch.allclose(found[:, 33], (torch.arange(8, dtype=F64) * 10000 ** (-1 / 32)).sin())


def test_queries_are_normed_turned_and_padded() -> None:
    """Without a weight; heads behind the local ones are exactly 0."""
    inputs = list(sample("q_norm_rope_kv_insert", F64))
    inputs[5] = cos_sin(F64)
    found = ops.q_norm_rope_kv_insert(*inputs, out=torch.full((T, PADDED, WIDTH), math.nan, dtype=F64))
    for token, position in enumerate(positions().tolist()):
        for head in range(HEADS):
            row = inputs[0][token, head]
            normed = (row / (row.square().mean() + EPS).sqrt()).tolist()
            assert found[token, head].tolist() == pytest.approx(turned(normed, position), abs=1e-9)
    assert (found[:, HEADS:] == 0).all()


def test_inserted_keys_are_the_encoders_bytes() -> None:
    """Rotated in float32, then quantised; a short slot mapping leaves the rest of the tokens out."""
    kv, cache = noise(T, 512, seed=1), torch.zeros(2, pages_of(Format.FP8_DS_MLA, 512, 64, 4).page_bytes)
    cache = cache.to(torch.uint8)
    slots = torch.tensor([5, -1, 0, 2])
    q = noise(T, HEADS, 512)
    ops.q_norm_rope_kv_insert(q, kv, cache, slots, positions(), cos_sin(), EPS, 4, 1, out=torch.empty(T, PADDED, 512))
    wanted = torch.zeros_like(cache)
    rows = rotated(kv, cos_sin()[positions()])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            state, scales = encoder.mla_state(rows[token].tolist())
            page, at = wanted[slot // 4], slot % 4
            page[at * 576 : at * 576 + 576] = torch.tensor(list(state), dtype=torch.uint8)
            page[4 * 576 + at * 8 : 4 * 576 + at * 8 + 8] = torch.tensor(list(scales), dtype=torch.uint8)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("name", ("indexer_q_rope_fp8", "indexer_q_rope_fp4"))
def test_indexer_queries_are_the_encoders_bytes(name: str) -> None:
    """Bit by bit, with every scale in the weights (FP8) or beside the values (FP4)."""
    inputs = sample(name)
    q, weights = inputs[0] * torch.logspace(-6, 3, T)[:, None, None], inputs[1]
    found = getattr(ops, name)(q, *inputs[1:])
    rows = rotated(q, cos_sin()[positions()])
    for token in range(T):
        for head in range(16):
            row, factor = rows[token, head].tolist(), weights[token, head].item() * inputs[4]
            if name.endswith("fp8"):
                data, scale = encoder.indexer_fp8_key(row)
                assert found[0][token, head].view(torch.uint8).tolist() == list(data)
                factor *= torch.frombuffer(bytearray(scale), dtype=torch.float32).item()
            else:
                data, scales = encoder.fp4_row(row)
                assert found[0][token, head].tolist() == list(data)
                assert found[1][token, head].tolist() == list(scales)
            assert found[-1][token, head].item() == pytest.approx(factor, rel=1e-6)


def test_pooling_takes_the_halves_of_both_groups() -> None:
    """c_d = sum over 8 rows; the group before gives its first columns, the group itself its second ones."""
    state = states(4 * WIDTH, dtype=F64)
    pooled = torch.full((T, WIDTH), math.nan, dtype=F64)
    ops.pool_states(state, STATE_TABLE, ENDS, REQUESTS, ENDING, 4, True, out=pooled)
    for token, end in enumerate(ENDS.tolist()):
        if ENDING[token] < 0:
            assert pooled[token].isnan().all()
            continue
        rows = []
        for at in range(end - 7, end + 1):
            if at >= 0:
                row = state[STATE_TABLE[REQUESTS[token], at // 4], at % 4]
                half = WIDTH if at > end - 4 else 0
                rows.append((row[half : half + WIDTH], row[2 * WIDTH + half : 3 * WIDTH + half]))
        weights = torch.stack([score for _, score in rows]).exp()
        wanted = (weights * torch.stack([kv for kv, _ in rows])).sum(0) / weights.sum(0)
        assert torch.allclose(pooled[token], wanted, atol=1e-12)


def test_states_hold_the_score_with_its_positional_encoding() -> None:
    """Only where a slot is given; everything else stays."""
    kv_score, ape, at, slots, state = sample("save_partial_states")
    wanted = state.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // 4, slot % 4, :128] = kv_score[token, :128]
            wanted[slot // 4, slot % 4, 128:] = kv_score[token, 128:] + ape[at[token] % 4]
    ops.save_partial_states(kv_score, ape, at, slots, state)
    assert torch.equal(state, wanted)


def test_stored_states_are_normed_turned_to_their_first_position_and_encoded() -> None:
    """The scale floor of compressed caches is that of the scale, not of the absolute maximum."""
    pooled = noise(T, 512) * torch.logspace(-8, 2, T)[:, None]
    cache = pages_of(Format.FP8_DS_MLA, 512, 64, 2).allocate(16)
    weight = noise(512, seed=8) * 1e-3
    ops.store_compressed(pooled, weight, cos_sin(), ENDS, ENDING, cache, 4, EPS, 2, 1)
    rows = rotated(normed(pooled, EPS) * weight, cos_sin()[ENDS // 4 * 4])
    for token, slot in enumerate(ENDING.tolist()):
        if slot >= 0:
            state, scales = encoder.mla_state(rows[token].tolist(), scale_floor=True)
            page, at = cache[slot // 2], slot % 2
            assert page[at * 576 : at * 576 + 576].tolist() == list(state)
            assert page[2 * 576 + at * 8 :][:8].tolist() == list(scales)


def test_compressing_at_once_is_pooling_and_storing() -> None:
    """Bit for bit, so that one kernel may stand for two."""
    inputs = sample("compress")
    state, table_, at, request, slots, weight, turns, cache, *rest = inputs
    ops.compress(*inputs)
    apart = torch.zeros_like(cache)
    pooled = ops.pool_states(state, table_, at, request, slots, 4, True, out=torch.zeros(T, WIDTH))
    ops.store_compressed(pooled, weight, turns, at, slots, apart, 4, *rest[2:])
    assert torch.equal(cache, apart)


def test_logits_end_where_the_causal_limit_is() -> None:
    """sum_h w relu(q . k) over the keys in the pages, -inf behind a row's candidates."""
    q, _, weights, cache, blocks, request, counts, block, _ = sample("indexer_logits")
    found = ops.indexer_logits(*sample("indexer_logits"), out=torch.empty(T, 8))
    pages = pages_of(Format.INDEXER_FP8, 128, 64, block)
    for token in range(T):
        for s in range(8):
            if s >= counts[token]:
                assert found[token, s] == -math.inf
                continue
            slot = blocks[request[token], s // block] * block + s % block
            key = pages.read(cache, slot[None], F64)[0]
            wanted = sum(weights[token, h].double() * max(0.0, q[token, h].double() @ key) for h in range(16))
            assert found[token, s].item() == pytest.approx(float(wanted), abs=1e-4)


def test_ties_go_to_the_lower_index_and_choices_ascend() -> None:
    """Whatever the order of equal scores, the same keys are chosen; -1 fills the rest."""
    logits = torch.tensor(
        [[1.0, 3, 3, 2, 3, 3], [0, 0, 0, 0, 0, 0], [5, 1, 9, 9, 9, 9], [-math.inf, 0, -math.inf, 1, 7, 7]]
    )
    found = ops.indexer_top_k(logits, ints(6, 6, 2, 4), out=torch.empty(4, 3, dtype=torch.int32))
    assert found.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, -1], [0, 1, 3]]
    short = ops.indexer_top_k(logits[:, :2].contiguous(), ints(2, 1, 0, 2), out=torch.empty(4, 3, dtype=torch.int32))
    assert short.tolist() == [[0, 1, -1], [0, -1, -1], [-1, -1, -1], [0, 1, -1]]
    none = ops.indexer_top_k(logits[:, :0].contiguous(), ints(0, 0, 0, 0), out=torch.empty(4, 3, dtype=torch.int32))
    assert (none == -1).all()


def test_chosen_positions_become_slots() -> None:
    """Integer-exact; -1 stays, a padding row has no length."""
    indices, request, blocks, valid, size = sample("global_top_k")
    slots, lens = ops.global_top_k(indices, request, blocks, valid, size)
    for token in range(T):
        for place, index in enumerate(indices[token].tolist()):
            wanted = -1 if index < 0 else int(blocks[request[token], index // size]) * size + index % size
            assert slots[token, place] == wanted
    assert lens.tolist() == [4, 4, 4, 4, 4, 4, 0]


def dense(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """One row, [P, D]: the softmax with one more column that has no value."""
    scores = torch.cat((q.double() @ keys.double().T * scale, sink.double()[:, None]), 1)
    return scores.softmax(1)[:, :-1] @ keys.double()


def test_decode_attends_to_both_lists_and_the_sink() -> None:
    """Each row over its own slots; a row without a key is 0, also where a padding head's sink is -inf."""
    inputs = list(sample("sparse_attention_decode"))
    inputs[3], inputs[6] = ints(0, 2, 3, 4, 5, 6, 6), ints(0, 5, 2, 1, 0, 3, 4)
    q, cache, window, lens, more, extra, counts, sink = inputs[:8]
    found = ops.sparse_attention_decode(*inputs, scratch=torch.empty(T, 0, PADDED, WIDTH + 2))
    pages = pages_of(Format.FP8_DS_MLA, WIDTH, 64, 4)
    assert (found[0] == 0).all()
    for token in range(1, T):
        keys = torch.cat((
            pages.read(more, extra[token, : counts[token]], F64), pages.read(cache, window[token, : lens[token]], F64)
        ))  # fmt: skip
        assert torch.allclose(found[token].double(), dense(q[token], keys, sink, inputs[8]), atol=1e-5)


def test_prefill_attends_to_gathered_rows() -> None:
    """The first `lens` indices of each row, whatever stands behind them."""
    q, keys, indices, lens, sink, scale = sample("sparse_attention_prefill")
    indices[:, -1] = -7
    found = ops.sparse_attention_prefill(q, keys, indices, lens.clamp(max=8), sink, scale)
    for token, count in enumerate(lens.clamp(max=8).tolist()):
        rows = keys[indices[token, :count].long()]
        assert torch.allclose(found[token].double(), dense(q[token], rows, sink, scale), atol=1e-5)


def test_a_nan_in_an_unlisted_key_reaches_no_row() -> None:
    """Neither slot 0, which hidden places fall back to, nor any other."""
    inputs = list(sample("sparse_attention_prefill"))
    inputs[2] = inputs[2].clamp(min=1)
    wanted = ops.sparse_attention_prefill(*inputs)
    inputs[1] = inputs[1].clone()
    inputs[1][0] = math.nan
    assert torch.equal(ops.sparse_attention_prefill(*inputs), wanted)
    inputs[1][1] = math.nan  # control: a listed one does
    assert ops.sparse_attention_prefill(*inputs).isnan().any()


def test_gathered_keys_follow_their_tables() -> None:
    """Requests 2 and 0 from their first states on, into their own rows; the rest is left alone."""
    inputs = sample("gather_keys")
    cache, blocks = inputs[:2]
    keys = torch.full((12, WIDTH), 5.0)
    ops.gather_keys(*inputs, out=keys)
    pages = pages_of(Format.FP8_DS_MLA, WIDTH, 64, 4)
    for first, count, start, request in ((1, 4, 2, 2), (3, 3, 6, 0)):
        for i in range(count):
            slot = blocks[request, (first + i) // 4] * 4 + (first + i) % 4
            assert torch.equal(keys[start + i], pages.read(cache, slot[None], torch.float32)[0])
    assert (keys[:2] == 5).all() and (keys[9:] == 5).all()


@pytest.mark.parametrize("ratio", (0, 4, 128))
def test_combined_rows_are_the_compressed_ones_and_the_window(ratio: int) -> None:
    """All complete groups of C128, the chosen ones of C4, none in SWA; then up to 8 of the window, oldest first."""
    at, group = torch.tensor([2, 5, 300, 301]), ints(0, 0, 1, 1)
    compressed, window, first = ints(0, 40), ints(100, 200), ints(0, 290)
    chosen = ints(-1, -1, -1, 0, -1, -1, 3, 5, 9, 0, 2, -1).view(4, 3) if ratio == 4 else None
    given = at, group, compressed, window, first, chosen, ratio, 8
    indices, lens = ops.combine_indices(
        *given, out=(torch.empty(4, 12, dtype=torch.int32), torch.empty(4, dtype=torch.int32))
    )
    for row in range(4):
        base, here = int(compressed[group[row]]), int(at[row])
        picked = [] if not ratio else list(range((here + 1) // ratio))
        if chosen is not None:
            picked = [int(one) for one in chosen[row] if one >= 0]
        seen = range(max(0, here - 7), here + 1)
        offset = int(window[group[row]]) - int(first[group[row]])
        wanted = [base + one for one in picked] + [offset + one for one in seen]
        assert indices[row].tolist() == wanted + [-1] * (12 - len(wanted))
        assert lens[row] == len(wanted)


def test_turning_back_undoes_rope_and_groups_heads() -> None:
    """Heads in their order, group by group, padding heads left out."""
    o = noise(T, PADDED, WIDTH, dtype=F64)
    found = ops.inverse_rope(o, positions(), cos_sin(F64), HEADS, out=torch.empty(2, T, 2 * WIDTH, dtype=F64))
    for token, position in enumerate(positions().tolist()):
        for head in range(HEADS):
            part = found[head // 2, token, head % 2 * WIDTH :][:WIDTH]
            wanted = turned(o[token, head].tolist(), position, inverse=True)
            assert part.tolist() == pytest.approx(wanted, abs=1e-9)


def test_the_quantised_output_has_power_of_two_scales_laid_out_by_token() -> None:
    """FP8 times its scale is within a sixteenth of the value; padding columns of the scales are 0."""
    o = noise(T, PADDED, WIDTH) * torch.logspace(-12, 4, T)[:, None, None]
    made = torch.empty(2, T, 2 * WIDTH).to(torch.float8_e4m3fn), torch.full((2, 2, 8), math.nan)
    codes, scales = ops.inverse_rope_fp8(o, positions(), cos_sin(), HEADS, out=made)
    plain = ops.inverse_rope(o, positions(), cos_sin(), HEADS, out=torch.empty(2, T, 2 * WIDTH))
    assert (scales[..., T:] == 0).all() and (scales[..., :T].frexp().mantissa == 0.5).all()
    values = codes.float().unflatten(2, (2, 128)) * scales[..., :T].transpose(1, 2)[..., None]
    plain = plain.unflatten(2, (2, 128))
    assert ((values - plain).abs() <= plain.abs() / 16 + scales[..., :T].transpose(1, 2)[..., None] * 2**-10).all()
    largest = codes.float().abs().unflatten(2, (2, 128)).amax(3)
    assert (largest[:, 1:] >= 224).all() and (largest[:, 0] < 224).all()  # the first token lies below the floor


def test_hyper_connections_mix_by_columns_that_sum_to_one() -> None:
    """comb is doubly stochastic but not symmetric; layer_in is normed; post lies between 0 and 2."""
    inputs = sample("mhc_pre", F64)
    residual, fn, base, scale, weight = inputs[:5]
    layer_in, post, comb = ops.mhc_pre(*inputs)
    assert torch.allclose(comb.sum(1), torch.ones(T, STREAMS, dtype=F64), atol=1e-4)
    assert torch.allclose(comb.sum(2), torch.ones(T, STREAMS, dtype=F64), atol=1e-2)
    assert (comb - comb.transpose(1, 2)).abs().max() > 0.01
    x = residual.flatten(1)
    for token in range(T):
        m = (fn.double() @ x[token]) / (x[token].square().mean() + EPS).sqrt()
        pre = torch.sigmoid(m[:4] * scale[0] + base[:4]) + EPS
        total = sum(pre[i] * residual[token, i] for i in range(STREAMS))
        wanted = total / (total.square().mean() + EPS).sqrt() * weight
        assert torch.allclose(layer_in[token], wanted, atol=1e-6)
        assert torch.allclose(post[token], 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8]), atol=1e-6)


def test_out_of_a_block_the_first_index_of_comb_is_contracted() -> None:
    """R'_j = sum_i comb_ij R_i + post_j y."""
    residual, post, comb, y = sample("mhc_post", F64)
    found = ops.mhc_post(residual, post, comb, y)
    for token in range(T):
        for j in range(STREAMS):
            wanted = sum(comb[token, i, j] * residual[token, i] for i in range(STREAMS)) + post[token, j] * y[token]
            assert torch.allclose(found[token, j], wanted)


def test_the_fused_op_is_its_two_parts() -> None:
    """Bit for bit."""
    inputs = sample("mhc_post_pre")
    mixed, *rest = ops.mhc_post_pre(*inputs)
    alone = ops.mhc_post(*inputs[:4])
    assert torch.equal(mixed, alone)
    assert all(torch.equal(one, other) for one, other in zip(rest, ops.mhc_pre(alone, *inputs[4:]), strict=True))


def test_routing_chooses_by_bias_and_weighs_without_it() -> None:
    """Ties go to the lower expert; a hash layer takes its table; weights sum to the factor."""
    logits = torch.tensor([[1.0, 1, 1, 1, 0, 0], [0, 5, 0, 0, 0, 30]])
    bias = torch.tensor([0.0, 0, 0, 0, 9, 0])
    chosen = torch.empty(2, 3, dtype=torch.int32), torch.empty(2, 3)
    experts, weights = ops.route(logits, bias, None, torch.tensor([0, 1]), 1.5, out=chosen)
    assert experts.tolist() == [[4, 0, 1], [4, 5, 1]]
    scores = [math.sqrt(math.log1p(math.exp(x))) for x in (0, 30, 5)]
    assert weights[1].tolist() == pytest.approx([1.5 * one / sum(scores) for one in scores])
    table_ = torch.tensor([[5, 0, 2], [1, 2, 3]])
    experts, weights = ops.route(logits, None, table_, torch.tensor([1, 0]), 1.5)
    assert experts.tolist() == [[1, 2, 3], [5, 0, 2]]
    assert weights.sum(1).tolist() == pytest.approx([1.5, 1.5])


def test_experts_are_clamped_and_summed_by_weight() -> None:
    """The gate from above only, the other factor from both sides."""
    x, experts, weights, w13, w2, limit = sample("routed_experts", F64)
    found = ops.routed_experts(x, experts, weights, w13, w2, limit)
    for token in range(T):
        wanted = torch.zeros_like(x[0])
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            both = w13[expert].double() @ x[token]
            gate, up = both[:12].clamp(max=limit), both[12:].clamp(-limit, limit)
            wanted += weight * (w2[expert].double() @ (gate / (1 + (-gate).exp()) * up))
        assert torch.allclose(found[token], wanted, atol=1e-9)
    low = ops.swiglu(torch.tensor([[-9.0, 0.5]]), 2.0)
    assert low.item() == pytest.approx(-9 / (1 + math.exp(9)) * 0.5)


def test_pages_in_samples_are_not_empty() -> None:
    """Control of the samples: a cache of zeros would make attention and logits vacuous."""
    assert (packed() != 0).any(1).all()


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    """However large its number is: it takes no memory to count."""
    chosen = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)
    given = torch.ones(1, 4), chosen, torch.ones(1, 2), torch.ones(2, 6, 4), torch.ones(2, 4, 3), 1.0
    with pytest.raises(OpError, match="1 of 2 experts are none of the 2"):
        ops.routed_experts(*given)
