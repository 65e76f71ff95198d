"""Requests get their own tokens whatever runs beside them, and leave no block behind."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from dsv4.errors import NoRoom, RequestError
from dsv4.serve.errors import StepError
from dsv4.serve.generation import Finish, Generation
from dsv4.serve.sampling import Sampling
from dsv4.serve.server import Server
from tests.dsv4.serve.standin import LIMITS, VOCABULARY, StandIn, expected


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def drain(server: Server) -> None:
    while server.unfinished:
        server.step()


REQUESTS = some.lists(some.tuples(some.integers(1, 265), some.integers(1, 30)), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(
    requests=REQUESTS,
    room=some.integers(256, 1000),
    drafts=some.integers(0, 4),
    arrive=some.integers(0, 3),
    cancelled=some.sets(some.integers(0, 5), max_size=2),
    fail_at=some.integers(-1, 20),
)
def test_every_request_gets_its_tokens_however_little_room_there_is(
    requests: list[tuple[int, int]], room: int, drafts: int, arrive: int, cancelled: set[int], fail_at: int
) -> None:
    """Evictions, wrong guesses, arrivals, cancellations and a failing step change no token of the others.

    Every block comes back.
    """
    model = StandIn(room, drafts=drafts, fail_at=fail_at)
    everything = model.free
    server = Server(model)
    found: list[Generation] = []
    ended: dict[int, Finish] = {}
    for seed, (length, new) in enumerate(requests):
        try:
            found.append(server.submit(prompt(length, seed), Sampling(max_new_tokens=new)))
        except RequestError:  # it would not fit alone
            continue
        for _ in range(arrive):
            server.step()
        for place in cancelled & {len(found) - 2}:
            if server.cancel(found[place]):
                ended[found[place].id] = Finish.CANCELLED
    drain(server)
    ended |= {one.request: Finish.ERROR for one in model.failed}
    for generation in found:
        wanted = expected(generation.context.tokens[: generation.prompt_tokens], generation.sampling.max_new_tokens)
        assert generation.tokens == wanted[: len(generation.tokens)]
        assert generation.finish is ended.get(generation.id, Finish.LENGTH)
        assert generation.tokens == wanted or generation.finish is not Finish.LENGTH
    assert model.free == everything


def test_a_server_with_little_room_evicts_and_one_with_much_does_not() -> None:
    """Control of the test above: there is something to be survived."""
    for room, evicts in ((768, True), (4000, False)):
        server = Server(StandIn(room))
        for seed in range(4):
            server.submit(prompt(240, seed), Sampling(max_new_tokens=40))
        drain(server)
        assert bool(server.evictions) is evicts


def test_a_block_of_another_request_is_noticed() -> None:
    """Control of the stand-in: with two requests' tables exchanged it fails the step."""
    model = StandIn()
    server = Server(model)
    first, second = (server.submit(prompt(20, seed)) for seed in range(2))
    server.step()
    mine, theirs = (one.context.blocks_of(model.caches[0]) for one in (first, second))
    mine.tables, theirs.tables = theirs.tables, mine.tables
    server.step()
    assert first.finish is Finish.ERROR and "another's" in str(first.error)


def test_a_stream_gives_tokens_as_they_come() -> None:
    """The first one after the first step; other requests are run along."""
    model = StandIn()
    server = Server(model)
    first, second = (server.submit(prompt(20, seed), Sampling(max_new_tokens=6)) for seed in range(2))
    stream = server.stream(first)
    assert next(stream) == expected(prompt(20), 1)[0]
    assert len(model.steps) == 1 and len(second.tokens) == 1
    assert list(stream) == expected(prompt(20), 6)[1:]
    assert second.finish is Finish.LENGTH and list(server.stream(second)) == second.tokens


def test_a_reader_that_stops_cancels_its_request() -> None:
    """By close, by an error in its loop, by dropping the iterator; while the iterator is kept, the request stays."""
    model = StandIn()
    everything, server = model.free, Server(model)
    other = server.submit(prompt(20, 9), Sampling(max_new_tokens=30))

    def closed(generation: Generation) -> None:
        stream = server.stream(generation)
        assert next(stream) == expected(prompt(20), 1)[0]
        assert server.unfinished == 2
        stream.close()

    def failing(generation: Generation) -> None:
        with pytest.raises(ArithmeticError):
            for _ in server.stream(generation):
                raise ArithmeticError

    def dropped(generation: Generation) -> None:
        for _ in server.stream(generation):
            break

    for stop in (closed, failing, dropped):
        generation = server.submit(prompt(20), Sampling(max_new_tokens=30))
        stop(generation)
        assert generation.finish is Finish.CANCELLED and server.unfinished == 1
    assert list(server.stream(other)) == expected(prompt(20, 9), 30)
    assert model.free == everything


@pytest.mark.parametrize("drafts", (0, 4))
def test_a_stop_token_ends_the_generation_with_it(drafts: int) -> None:
    """Also where it was guessed with others behind it; the blocks come back at once."""
    model = StandIn(drafts=drafts, right=1.0)
    server, everything = Server(model), model.free
    wanted = expected(prompt(30), 12)
    stop = wanted[7]
    generation = server.submit(prompt(30), Sampling(max_new_tokens=40, stop_tokens=frozenset((stop,))))
    assert list(server.stream(generation)) == wanted[: wanted.index(stop) + 1]
    assert generation.finish is Finish.STOP
    assert model.free == everything


def test_cancelling_gives_the_blocks_back_and_leaves_the_others_alone() -> None:
    """While it waits, in the middle of its prompt, while it generates; once it has ended, nothing happens."""
    model = StandIn()
    everything, server = model.free, Server(model)
    generating, long, waiting, other = (
        server.submit(prompt(length, seed), Sampling(max_new_tokens=8)) for seed, length in enumerate((10, 150, 30, 20))
    )
    server.step()
    assert generating.tokens and not long.tokens
    for one in (generating, long, waiting):
        assert server.cancel(one)
        assert one.finish is Finish.CANCELLED
        assert not server.cancel(one)
    assert list(server.stream(generating)) == expected(prompt(10), 1)
    assert list(server.stream(other)) == expected(prompt(20, 3), 8)
    assert model.free == everything and server.unfinished == 0


def test_a_request_of_another_server_is_left_to_it() -> None:
    """Two servers of one model, whose requests have the same numbers: neither cancels nor reads the other's."""
    model = StandIn()
    everything, servers = model.free, [Server(model), Server(model)]
    own, others = (server.submit(prompt(20, seed), Sampling(max_new_tokens=4)) for seed, server in enumerate(servers))
    assert own.id == others.id
    for server, generation in ((servers[0], others), (servers[1], own)):
        with pytest.raises(RequestError, match="another server"):
            server.cancel(generation)
        with pytest.raises(RequestError, match="another server"):
            next(server.stream(generation))
    assert list(servers[0].stream(own)) == expected(prompt(20), 4)
    assert list(servers[1].stream(others)) == expected(prompt(20, 1), 4)
    assert model.free == everything and not servers[0].cancel(others)


@pytest.mark.parametrize(
    "wrong",
    [torch.tensor([1, 2]), iter([1, 2]), {1, 2}, None, 5, "ab", [[1]], [1.0]],
    ids=["tensor", "iterator", "set", "None", "int", "str", "nested", "floats"],  # workers must agree on them
)
def test_a_prompt_is_a_sequence_of_ids(wrong: Any) -> None:
    """Anything else is refused by its type, or by the first token that is none."""
    server = Server(StandIn())
    with pytest.raises(RequestError):
        server.submit(wrong)
    with pytest.raises(RequestError, match="sampling="):
        server.submit([1], wrong if wrong is not None else 0)
    assert server.unfinished == 0


def test_closing_cancels_everything() -> None:
    model = StandIn()
    everything, server = model.free, Server(model)
    generations = [server.submit(prompt(20, seed)) for seed in range(6)]
    server.step()
    server.close()
    assert {one.finish for one in generations} == {Finish.CANCELLED}
    assert model.free == everything


@pytest.mark.parametrize("drafts", (0, 2))
def test_a_failing_step_ends_its_requests_and_no_other(drafts: int) -> None:
    """Its error is theirs; what waited runs as if nothing had been, and every block comes back."""
    model = StandIn(drafts=drafts, fail_at=2, engine=attrs.evolve(LIMITS, max_num_seqs=2))
    everything, server = model.free, Server(model)
    failed = [server.submit(prompt(20, seed)) for seed in range(2)]
    waiting = server.submit(prompt(20, 2), Sampling(max_new_tokens=9))
    with pytest.raises(StepError, match="on purpose") as caught:
        list(server.stream(failed[0]))
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert [one.finish for one in failed] == [Finish.ERROR] * 2
    assert list(server.stream(waiting)) == expected(prompt(20, 2), 9)
    assert model.free == everything


def test_a_failed_step_names_the_type_of_its_cause() -> None:
    """The text of a KeyError is a key; that of some errors is empty."""
    for cause, says in ((KeyError(3), "failed: KeyError: 3"), (MemoryError(), "failed: MemoryError")):
        model = StandIn()
        model.forward = mock.Mock(side_effect=cause)  # type: ignore[method-assign]
        server = Server(model)
        generation = server.submit(prompt(20))
        server.step()
        assert generation.error is not None and generation.error.problem.endswith(says)


def test_logits_that_are_no_numbers_end_the_request() -> None:
    """With the sampler's own error, and without a token."""
    model = StandIn()
    everything, server = model.free, Server(model)
    model.logits = lambda hidden, rows: torch.full((len(rows), VOCABULARY), torch.nan)  # type: ignore[method-assign]
    generation = server.submit(prompt(20))
    with pytest.raises(StepError, match="^the largest logit of token 0 is nan"):
        list(server.stream(generation))
    assert not generation.tokens and model.free == everything


def test_a_request_without_room_ends_and_those_behind_it_go_on() -> None:
    """Another server's request holds the blocks: the long request cannot run, the short one can."""
    model = StandIn(512)
    everything, first, second = model.free, Server(model), Server(model)
    holding = first.submit(prompt(200), Sampling(max_new_tokens=90))
    for _ in range(8):
        first.step()
    long = second.submit(prompt(250, 1), Sampling(max_new_tokens=40))
    short = second.submit(prompt(20, 2), Sampling(max_new_tokens=5))
    drain(second)
    assert long.finish is Finish.ERROR and isinstance(long.error, NoRoom)
    assert "another server" in long.error.remedy and "alone" not in str(long.error)
    with pytest.raises(NoRoom, match=f"request {long.id} finds no room"):
        list(second.stream(long))
    assert short.tokens == expected(prompt(20, 2), 5)
    assert list(first.stream(holding)) == expected(prompt(200), 90)
    assert model.free == everything


def test_an_interrupt_leaves_no_block() -> None:
    """It is raised where the step was run."""
    model = StandIn()
    everything, server = model.free, Server(model)
    generation = server.submit(prompt(20))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    model.forward = interrupted  # type: ignore[assignment, method-assign]
    with pytest.raises(KeyboardInterrupt):
        server.step()
    assert generation.finish is Finish.ERROR and model.free == everything


@pytest.mark.parametrize(
    ("tokens", "settings", "room", "says"),
    [
        ([], {}, 2000, "prompt is empty"),
        ([VOCABULARY], {}, 2000, "outside the vocabulary"),
        ([-1], {}, 2000, "outside the vocabulary"),
        ([1] * 301, {}, 2000, "above the 300"),
        ([1] * 290, {"max_new_tokens": 11}, 2000, "max_model_len=300"),
        ([1] * 250, {"max_new_tokens": 40}, 256, "289 tokens needs 2 blocks of cache group 'compressed', which has 1"),
        ([1], {"stop_tokens": frozenset((VOCABULARY,))}, 2000, "stop token 50"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_request_is_refused_and_the_others_run(
    tokens: list[int], settings: dict[str, Any], room: int, says: str
) -> None:
    """Nothing of it is left behind."""
    model = StandIn(room)
    everything, server = model.free, Server(model)
    good = server.submit(prompt(20), Sampling(max_new_tokens=5))
    server.step()
    with pytest.raises(RequestError, match=says):
        server.submit(tokens, Sampling(**settings))
    assert server.unfinished == 1
    assert list(server.stream(good)) == expected(prompt(20), 5)
    assert model.free == everything


def test_a_draw_does_not_depend_on_the_batch() -> None:
    """At a temperature, with guesses, alone or beside others: the seed decides."""
    logits = StandIn.logits

    def flatter(self: StandIn, hidden: object, rows: object) -> object:
        return 3 * logits(self, hidden, rows)  # type: ignore[arg-type]

    found = []
    for drafts, others in ((0, 0), (3, 0), (0, 3), (3, 3)):
        model = StandIn(600, drafts=drafts)
        model.logits = flatter.__get__(model)  # type: ignore[method-assign]
        server = Server(model)
        for seed in range(others):
            server.submit(prompt(90, seed + 1), Sampling(max_new_tokens=30))
        asked = server.submit(prompt(40), Sampling(max_new_tokens=30, temperature=1.0, seed=5))
        found.append(list(islice(server.stream(asked), 30)))
    assert found[0] == found[1] == found[2] == found[3] != expected(prompt(40), 30)


def test_right_guesses_save_steps_and_are_counted() -> None:
    """All right: three tokens a step. None right: one, and the rate says so."""
    for right, most in ((1.0, 12), (0.0, 31)):
        model = StandIn(drafts=2, right=right)
        server = Server(model)
        list(server.stream(server.submit(prompt(10), Sampling(max_new_tokens=30))))
        assert len(model.steps) <= most
        assert server.acceptance.rate == right and server.acceptance.guessed > 0
