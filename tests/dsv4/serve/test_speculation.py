"""Speculative decoding on a real model: the tokens and logits of plain decoding, whatever was guessed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs
import pytest
import torch

from dsv4.model.decoder import Outcome
from dsv4.scheduler import Rows
from dsv4.serve.model import Contexts, RunnerModel
from dsv4.serve.sampling import Sampling
from dsv4.serve.server import Server
from tests.dsv4.serve.made import generated, prompt, tiny

PROMPT, COUNT = prompt(104), 30
"""Positions 104 to 133: past the window of 32, over the ends of seven groups of 4 and one of 128."""

WRITTEN = (
    # What a row writes, its layer, cache and group, positions for each entry, and entries of a block.
    ("C4 state", 1, "state", "c4_state", 1, 4),
    ("C4 key", 1, "compressed", "compressed", 4, 64),
    ("indexer key", 1, "index", "compressed", 4, 64),
    ("C128 state", 2, "state", "c128_state", 1, 8),
    ("C128 key", 2, "compressed", "compressed", 128, 2),
)


class Oracle(RunnerModel):
    """Guesses that are right as often as asked, by drafting with the real MTP block and replacing what it says.

    It remembers the logits of every row by the tokens the row has seen, and what rows left in the caches.

    Parameters
    ----------
    wanted
        Prompt and generated tokens of plain decoding.
    right
        Share of the guesses that are right.
    """

    def __init__(self, inner: RunnerModel, wanted: Sequence[int], right: float) -> None:
        super().__init__(inner.runner, inner.drafts)
        self.wanted, self.right, self.draw = wanted, right, random.Random(1)
        self.seen: dict[tuple[int, ...], torch.Tensor] = {}
        self.left: dict[tuple[str, int], list[torch.Tensor]] = {}

    def forward(self, rows: Sequence[Rows], contexts: Contexts) -> Outcome:
        outcome = super().forward(rows, contexts)
        logits = self.runner.logits(outcome.hidden)
        places = [(one.request, position) for one in rows for position in range(one.start, one.end)]
        for row, (request, position) in enumerate(places):
            context = contexts[request]
            self.seen[tuple(context.tokens[: position + 1])] = logits[row].clone()
            self._remember(context.blocks_of(self.runner.decoders[0].caches).tables, position)
        return outcome

    def _remember(self, tables: Mapping[str, list[int]], position: int) -> None:
        for name, layer, cache, group, ratio, block in WRITTEN:
            number, rest = divmod(position + 1, ratio)
            if not rest:
                entry = getattr(self.runner.decoders[0].caches.layers[layer], cache)
                place = tables[group][(number - 1) // block], (number - 1) % block
                self.left.setdefault((name, number), []).append(entry[place].clone())

    def draft(self, rows: Sequence[Rows], contexts: Contexts, residual: torch.Tensor) -> Outcome:
        outcome = super().draft(rows, contexts, residual)
        hidden, embedding = outcome.hidden.clone(), self.runner.decoders[0].weights.lm_head
        for row, one in zip(outcome.sampled, [one for one in rows if one.samples], strict=True):
            right = self.wanted[one.end + 1] if one.end + 1 < len(self.wanted) else 0
            guess = right if self.draw.random() < self.right else (right + 1) % len(embedding)
            hidden[row] = embedding[guess]
        return attrs.evolve(outcome, hidden=hidden)


@pytest.fixture(scope="module")
def plain() -> tuple[list[int], torch.Tensor]:
    """Prompt and tokens of plain greedy decoding, and the logits of one full prefill of them all."""
    with tiny() as one:
        tokens = [*PROMPT, *generated(one, PROMPT, COUNT)]
        context = Server(one.model).submit(tokens).context
        outcome = one.model.forward([Rows(0, 0, len(tokens), True, True)], {0: context})
        logits = one.model.runner.logits(outcome.hidden).clone()
        context.free()
    return tokens, logits


@pytest.mark.parametrize(("drafts", "right"), [(1, 0.5), (3, 0.0), (8, 0.6), (3, 1.0)])
def test_tokens_and_logits_are_those_of_plain_decoding(
    drafts: int, right: float, plain: tuple[list[int], torch.Tensor]
) -> None:
    """Wrong guesses write compressor states and compressed keys over every boundary; nothing of them is ever read."""
    wanted, logits = plain
    with tiny(drafts=drafts) as one:
        model = Oracle(one.model, wanted, right)
        server = Server(model)
        found = list(server.stream(server.submit(PROMPT, Sampling(max_new_tokens=COUNT))))
    assert [*PROMPT, *found] == wanted
    for length in range(len(PROMPT), len(wanted)):
        assert (model.seen[tuple(wanted[:length])] - logits[length - 1]).abs().max() <= 1e-4
    assert server.acceptance.rate == right or 0 < right < 1


def test_wrong_guesses_do_write_what_must_not_be_read() -> None:
    """Control: states and keys that rows of wrong guesses left differ from what stands there in the end."""
    with tiny(drafts=3) as one:
        wanted = [*PROMPT, *generated(one, PROMPT, 1)]
    with tiny(drafts=3) as one:
        model = Oracle(one.model, [*wanted, *[0] * COUNT], 0.0)
        server = Server(model)
        list(server.stream(server.submit(PROMPT, Sampling(max_new_tokens=COUNT))))
    for name, *_ in WRITTEN:
        again = [left for (what, _), left in model.left.items() if what == name and len(left) > 1]
        assert again and all(not torch.equal(left[0], left[-1]) for left in again), name


def test_the_mtp_block_itself_guesses_without_harm() -> None:
    """Its own guesses, in a batch of requests, at a temperature, too."""
    asked = [(prompt(length, seed), Sampling(max_new_tokens=12, temperature=seed % 2 * 0.7, seed=seed))
             for seed, length in enumerate((40, 125, 3, 60))]  # fmt: skip
    found = []
    for drafts in (0, 2):
        with tiny(drafts=drafts) as one:
            server = Server(one.model)
            generations = [server.submit(*each) for each in asked]
            while server.unfinished:
                server.step()
            found.append([generation.tokens for generation in generations])
            assert bool(server.acceptance.guessed) is bool(drafts)
    assert found[0] == found[1]
