"""However a prompt is cut, batched or fed, the logits are those of one full prefill."""

from __future__ import annotations

import attrs
import pytest
import torch

from dsv4.cache.pages import Format
from dsv4.model.decoder import Decoder
from dsv4.model.metadata import Padding
from dsv4.model.precision import Precision
from dsv4.model.presets import MIXED, of_ratio
from dsv4.scheduler import Rows
from tests.dsv4.model.made import ENGINE, EXACT, context, decoder, full_prefill, prompt, step

SERVED = attrs.evolve(MIXED, head_dim=512)
"""With states of the served width, 448 + 64."""

SMOOTH = attrs.evolve(SERVED, index_topk=128, num_hash_layers=4)
"""Without discrete choices: every compressed key is attended to, and tokens choose their experts. Where there are
choices, the smallest difference may turn one, and the logits jump."""

PACKED = {
    "fp8 keys": Precision(keys=Format.FP8_DS_MLA, indexer=Format.INDEXER_FP8),
    "fp4 indexer": Precision(keys=Format.FP8_DS_MLA, indexer=Format.INDEXER_FP4),
}

TOLERANCE = 1e-4
PACKED_TOLERANCE = 0.01
"""Of quantised caches, logits having a standard deviation of 1: GEMMs of other shapes round otherwise, and a key at
the edge of two codes then gets the other one."""


def chunked(model: Decoder, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of every position, the prompt fed in chunks of these sizes (the last one takes the rest)."""
    one, found, start = context(model, tokens), [], 0
    for size in [*sizes, len(tokens)]:
        count = min(size, len(tokens) - start)
        if count:
            found.append(step(model, {0: one}, (0, start, count, True))[1])
            start += count
    one.free()
    return torch.cat(found)


def decoded(model: Decoder, tokens: list[int], after: int) -> torch.Tensor:
    """Logits of the positions from `after` on, each token fed alone behind a prefill."""
    one = context(model, tokens)
    step(model, {0: one}, (0, 0, after, True))
    found = [step(model, {0: one}, (0, at, 1, False))[1] for at in range(after, len(tokens))]
    one.free()
    return torch.cat(found)


SPLITS = {
    "boundaries": [4, 124, 128, 256],
    "odd": [1, 2, 126, 3, 131, 5, 64],
    "one by one, then the rest": [1] * 9,
    "halves": [353],
}


@pytest.fixture(scope="module")
def whole() -> tuple[Decoder, list[int], torch.Tensor]:
    """The mixed model, 706 tokens, and the logits of their full prefill."""
    model, tokens = decoder(MIXED), prompt(MIXED, 706)
    return model, tokens, full_prefill(model, tokens)


@pytest.mark.parametrize("split", SPLITS)
def test_chunks_give_the_logits_of_one_prefill(split: str, whole: tuple[Decoder, list[int], torch.Tensor]) -> None:
    """Any cut, also within a group of 4, of 128, within the window, and of one token."""
    model, tokens, wanted = whole
    assert (chunked(model, tokens, SPLITS[split]) - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_random_chunks_give_the_logits_of_one_prefill(seed: int) -> None:
    """Cuts drawn by seed, with weights of another seed each."""
    torch.manual_seed(seed)
    model, tokens = decoder(MIXED, seed=seed + 10), prompt(MIXED, 500, seed)
    sizes = torch.randint(1, 150, (12,)).tolist()
    assert (chunked(model, tokens, sizes) - full_prefill(model, tokens)).abs().max() <= TOLERANCE


SPANS = {0: [(120, 150)], 4: [(120, 150)], 128: [(120, 135), (250, 262)]}
"""First and last position that is fed alone, by ratio: across the window's end and where groups of 128 end."""


@pytest.mark.parametrize("ratio", SPANS)
def test_token_by_token_decode_gives_the_logits_of_one_prefill(ratio: int) -> None:
    """Behind a prefill, across every kind of boundary."""
    model = decoder(of_ratio(ratio))
    tokens = prompt(model.shard.config, 262)
    wanted = full_prefill(model, tokens)
    for first, last in SPANS[ratio]:
        assert (decoded(model, tokens[:last], first) - wanted[first:last]).abs().max() <= TOLERANCE


@pytest.mark.slow
def test_a_whole_prompt_token_by_token_gives_the_logits_of_one_prefill() -> None:
    """Nothing but decode rows from the second token on."""
    model, tokens = decoder(MIXED), prompt(MIXED, 400)
    assert (decoded(model, tokens, 1) - full_prefill(model, tokens)[1:]).abs().max() <= TOLERANCE


@pytest.mark.slow
def test_steps_above_the_fork_threshold_give_the_logits_of_chunks_below_it() -> None:
    """1100 tokens at once: stage A then stays on the main stream."""
    engine = attrs.evolve(ENGINE, max_num_batched_tokens=2048, max_model_len=2048)
    model, tokens = decoder(MIXED, engine=engine), prompt(MIXED, 1100)
    assert (chunked(model, tokens, [400, 300]) - full_prefill(model, tokens)).abs().max() <= TOLERANCE


def test_decode_of_a_mixed_model_past_several_windows(whole: tuple[Decoder, list[int], torch.Tensor]) -> None:
    """16 tokens behind a prefill of 690: fewer keys are chosen than there are."""
    model, tokens, wanted = whole
    assert (decoded(model, tokens, 690) - wanted[690:]).abs().max() <= TOLERANCE


def test_requests_in_one_step_do_not_see_each_other() -> None:
    """Three decode rows and two prompts of other lengths in each step; each gets the logits it gets alone."""
    model = decoder(MIXED, capacity=4096)
    lengths = (300, 141, 520, 260, 90)
    prompts = [prompt(MIXED, length, seed) for seed, length in enumerate(lengths)]
    alone = [full_prefill(model, tokens) for tokens in prompts]
    contexts = {i: context(model, tokens) for i, tokens in enumerate(prompts)}
    step(model, contexts, *((i, 0, lengths[i] - 3, True) for i in range(3)))
    for turn in range(3):
        decode = [(i, lengths[i] - 3 + turn, 1, False) for i in range(3)]
        chunks = [(i, turn * (lengths[i] // 3), lengths[i] // 3, True) for i in (3, 4)]
        logits = step(model, contexts, *decode, *chunks)[1]
        for i in range(3):
            assert (logits[i] - alone[i][lengths[i] - 3 + turn]).abs().max() <= TOLERANCE
        start = 3
        for i, first, count, _ in chunks:
            part = logits[start : start + count]
            assert (part - alone[i][first : first + count]).abs().max() <= TOLERANCE
            start += count


def test_another_requests_tokens_in_the_tables_show() -> None:
    """Control: with the block tables of two requests exchanged the same comparison fails."""
    model = decoder(MIXED)
    first, second = (context(model, prompt(MIXED, 200, seed)) for seed in range(2))
    alone = full_prefill(model, first.tokens)
    step(model, {0: first, 1: second}, (0, 0, 199, True), (1, 0, 199, True))
    mine, theirs = first.blocks_of(model.caches), second.blocks_of(model.caches)
    mine.tables, theirs.tables = theirs.tables, mine.tables
    logits = step(model, {0: first}, (0, 199, 1, False))[1]
    assert (logits[0] - alone[199]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("precision", PACKED)
def test_packed_pages_keep_the_invariants_within_their_tolerance(precision: str) -> None:
    """Chunks and decode behind them, keys in fp8_ds_mla pages and a quantised indexer."""
    model, tokens = decoder(SMOOTH, precision=PACKED[precision]), prompt(SMOOTH, 290)
    wanted = full_prefill(model, tokens)
    assert (chunked(model, tokens, [7, 130, 64]) - wanted).abs().max() <= PACKED_TOLERANCE
    assert (decoded(model, tokens, 280) - wanted[280:]).abs().max() <= PACKED_TOLERANCE


def test_choices_among_packed_keys_turn_in_few_positions() -> None:
    """With a sparse choice and biased routing nine positions of ten stay within the tolerance."""
    model, tokens = decoder(SERVED, precision=PACKED["fp8 keys"]), prompt(SERVED, 290)
    difference = (chunked(model, tokens, [7, 130, 64]) - full_prefill(model, tokens)).abs().amax(1)
    assert difference.quantile(0.9) <= PACKED_TOLERANCE


def test_packed_pages_change_the_logits_by_their_rounding_only() -> None:
    """FP8 keys are near the exact ones and not equal to them."""
    tokens = prompt(SMOOTH, 120)
    exact = full_prefill(decoder(SMOOTH, precision=EXACT), tokens)
    packed = full_prefill(decoder(SMOOTH, precision=PACKED["fp8 keys"]), tokens)
    assert 1e-3 < (packed - exact).abs().max() < 0.5


def test_a_padded_step_gives_the_logits_of_its_rows() -> None:
    """Padding rows insert nothing, and the others do not see them."""
    model, tokens = decoder(MIXED), prompt(MIXED, 150)
    wanted = full_prefill(model, tokens)
    one = context(model, tokens)
    with model.ws.on(model.main):
        hidden = model.forward([Rows(0, 0, 140, True, False)], {0: one}, Padding(160, 1, 0)).hidden
        first = model.logits(hidden[:140])
        hidden = model.forward([Rows(0, 140, 10, True, True)], {0: one}, Padding(16, 1, 0)).hidden
        second = model.logits(hidden[:10])
    assert (torch.cat((first, second)) - wanted).abs().max() <= TOLERANCE


def test_float64_agrees_with_float32() -> None:
    """The same kernels in float64: the difference is float32's rounding."""
    tokens = prompt(MIXED, 300)
    wide = full_prefill(decoder(MIXED, precision=Precision(activations=torch.float64)), tokens)
    assert wide.dtype is torch.float64
    assert (full_prefill(decoder(MIXED), tokens) - wide).abs().max() <= TOLERANCE


def test_bfloat16_stays_near_float32() -> None:
    """As served: bf16 activations, FP8 pages; a coarse bound, every part in its own dtype."""
    tokens = prompt(SMOOTH, 100)
    served = Precision(torch.bfloat16, Format.FP8_DS_MLA, Format.INDEXER_FP8)
    found = full_prefill(decoder(SMOOTH, precision=served), tokens)
    assert found.dtype is torch.bfloat16
    assert (found.float() - full_prefill(decoder(SMOOTH), tokens)).abs().max() < 0.5
