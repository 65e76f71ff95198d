"""The clocks agree with reachability over random programs, which also catch each small change of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tests.workspace.clocks_machine import SEARCH, Between, ClocksMachine, Framework
from workspace import clocks, native
from workspace.clocks import Clocks, Seen, merge


@pytest.fixture(params=["Python", "C++"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps the clocks: either form runs on either."""
    made = native.extension()
    if request.param == "C++" and made is None:
        pytest.skip("the C++ form is not built")
    python = request.param == "Python"
    monkeypatch.setattr(clocks, "new_seen", dict if python else made.Seen)
    monkeypatch.setattr(clocks, "new_clock", clocks.Clock if python else made.Clock)


@pytest.mark.usefixtures("kind")
def test_clocks_agree_with_reachability() -> None:
    """No order is claimed that is not there, and none is missed that nothing blurred."""
    run_state_machine_as_test(ClocksMachine, settings=SEARCH)


@pytest.mark.skipif(native.extension() is None, reason="the C++ form is not built")
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 1 << 40))),
    st.dictionaries(st.integers(1, 30), st.integers(1, 9)),
)
def test_what_is_seen_is_kept_as_a_dict_keeps_it(steps: list[tuple[int, int]], other: Seen) -> None:
    """In C++ too, for more streams than lie in the object itself; a copy is another."""
    seen, wanted = native.extension().Seen(), dict[int, int]()
    for stream, epoch in steps:
        before, kept = seen.copy(), dict(wanted)
        seen[stream] = wanted[stream] = epoch
        assert before == kept and (seen == before) is (wanted == kept)
    merge(seen, other)
    merge(wanted, other)
    assert seen == wanted and wanted == seen and dict(seen) == wanted and len(seen) == len(wanted)
    assert list(seen) == sorted(wanted) and seen.items() == sorted(wanted.items())
    assert [seen.get(stream, 0) for stream in range(32)] == [wanted.get(stream, 0) for stream in range(32)]
    assert repr(seen) == repr(dict(sorted(wanted.items()))) and seen.get(99) is None


@pytest.mark.skipif(native.extension() is None, reason="the C++ form is not built")
def test_what_is_seen_takes_numbers_only() -> None:
    """Errors are those of a dict, and those of an integer."""
    seen = native.extension().Seen()
    with pytest.raises(KeyError, match="7"):
        seen[7]
    for wrong in ("a", None, 1.5):
        with pytest.raises(TypeError):
            seen[wrong] = 1
        with pytest.raises(TypeError):
            seen[1] = wrong
    with pytest.raises(OverflowError):
        seen[1] = 1 << 64
    with pytest.raises(TypeError):
        del seen[1]
    with pytest.raises(TypeError):
        hash(seen)
    with pytest.raises(TypeError):
        native.extension().Seen({1: 2})
    assert len(seen) == 0


# -- small changes that must not survive -----------------------------------------------------------------------


class SkipsMerge(Clocks):
    def wait(self, stream: int, covered: Seen) -> None:
        pass


class SkipsTick(Clocks):
    def record(self, stream: int) -> Seen:
        covered = self.of[stream].seen.copy()
        covered[stream] = self.of[stream].epoch
        return covered


class NotTransitive(Clocks):
    def record(self, stream: int) -> Seen:
        covered = super().record(stream)
        alone = clocks.new_seen()
        alone[stream] = covered[stream]
        return alone


class CoversWhatFollows(Clocks):
    """The event's cover is the stream's own knowledge, which grows on."""

    def record(self, stream: int) -> Seen:
        clock = self.of[stream]
        clock.seen[stream] = clock.epoch
        clock.epoch += 1
        return clock.seen

    def wait(self, stream: int, covered: Seen) -> None:
        clock = self.of[stream]
        merge(clock.seen, covered)
        clock.waited = clock.epoch


class ChangesWhatItShares(Clocks):
    """A wait for an older event adds to what an event covers that the stream shares."""

    def wait(self, stream: int, covered: Seen) -> None:
        clock = self.of[stream]
        if covered.get(stream, 0) >= clock.waited:
            clock.seen = covered
        else:
            merge(clock.seen, covered)
        clock.waited = clock.epoch


class TakesWhateverComes(Clocks):
    """An older event replaces what the stream knows."""

    def wait(self, stream: int, covered: Seen) -> None:
        clock = self.of[stream]
        clock.seen = covered
        clock.waited = clock.epoch


class ForgetsHost(Clocks):
    def ordered(self, stream: int, used: int, epoch: int) -> bool:
        return used == stream or self.of[stream].seen.get(used, 0) >= epoch


class OneTooGenerous(Clocks):
    def ordered(self, stream: int, used: int, epoch: int) -> bool:
        return super().ordered(stream, used, epoch - 1)


class OneTooStrict(Clocks):
    def ordered(self, stream: int, used: int, epoch: int) -> bool:
        return used == stream or super().ordered(stream, used, epoch + 1)


class TrustsNobody(Clocks):
    def ordered(self, stream: int, used: int, epoch: int) -> bool:
        return used != stream and super().ordered(stream, used, epoch)


class LastWaitWins(Clocks):
    """Knowledge is replaced, not merged."""

    def wait(self, stream: int, covered: Seen) -> None:
        for used, epoch in covered.items():
            self.of[stream].seen[used] = epoch


class BarrierForgetsOthers(Clocks):
    def barrier(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self.record(stream)


class SettlesWhatIsNotOver(Clocks):
    def settle(self) -> None:
        for clock in self.of.values():
            clock.seen = clocks.new_seen()


def with_clocks(tested: type[Clocks]) -> type[Framework]:
    return type(tested.__name__, (Framework,), {"clocks_type": tested})


class TicksAfterRecord(Framework):
    def record(self, stream: int, device: Between, between: Between, before: Seen) -> Seen:
        device()
        between()
        return self.clocks.record(stream)


class MergesBeforeWait(Framework):
    def wait(self, stream: int, covered: Seen, device: Between, between: Between) -> None:
        self.clocks.wait(stream, covered)
        between()
        device()


class KeepsOldRecord(Framework):
    """An event recorded again still counts for its former record."""

    def record(self, stream: int, device: Between, between: Between, before: Seen) -> Seen:
        covered = super().record(stream, device, between, before)
        merge(covered, before)
        return covered


class BelievesEveryQuery(Framework):
    def query(self, covered: Seen, done: bool) -> None:
        self.clocks.complete(covered)


class IgnoresQueries(Framework):
    def query(self, covered: Seen, done: bool) -> None:
        pass


class CoversWhatCameDuringTheWait(Framework):
    """The covered epochs are taken when the host wakes up."""

    def synchronize(self, streams: Iterable[int], device: Between, between: Between) -> None:
        device()
        between()
        for stream in streams:
            self.clocks.complete(self.clocks.record(stream))


class CaptureIsTheStream(Framework):
    """A captured stream knows, inside, what it knows outside."""

    def captured(self, eager: int) -> int:
        made = super().captured(eager)
        known = self.clocks.of[made].seen = self.clocks.of[eager].seen.copy()
        known[eager] = self.clocks.of[eager].epoch
        return made


MUTANTS = [
    *map(
        with_clocks,
        (
            SkipsMerge, SkipsTick, NotTransitive, CoversWhatFollows, ChangesWhatItShares, TakesWhateverComes,
            ForgetsHost, OneTooGenerous, OneTooStrict, TrustsNobody, LastWaitWins, BarrierForgetsOthers,
            SettlesWhatIsNotOver,
        ),
    ),
    TicksAfterRecord, MergesBeforeWait, KeepsOldRecord, BelievesEveryQuery, IgnoresQueries,
    CoversWhatCameDuringTheWait, CaptureIsTheStream,
]  # fmt: skip


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_changed_clock_is_caught(mutant: type[Framework]) -> None:
    """Each small change of the clocks, or of the order they are called in, breaks a law on some program."""
    machine = type("Mutated", (ClocksMachine,), {"framework": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=settings(SEARCH, max_examples=4000, phases=[Phase.generate]))


def test_ids_are_never_reused() -> None:
    """A forgotten stream's id never names another one, so that old covers order nothing new."""
    tested = Clocks()
    first = tested.add()
    tested.forget([first])
    assert tested.add() != first


def test_merge_keeps_the_larger_epoch_of_each_stream() -> None:
    """Merging never loses knowledge."""
    into = {1: 5, 2: 1}
    merge(into, {1: 3, 2: 4, 3: 1})
    assert into == {1: 5, 2: 4, 3: 1}


def test_an_event_of_before_a_wait_takes_no_knowledge_away() -> None:
    """A stream that waited since the event's stream heard of it last keeps the later epochs it knows."""
    tested = Clocks()
    one, two, three = (tested.add() for _ in range(3))
    early = tested.record(three)
    tested.wait(two, tested.record(one))
    tested.wait(two, early)
    stale = tested.record(two)  # comes after the first epoch of each, but not after what `one` waits for next
    late = tested.record(three)
    tested.wait(one, late)
    tested.wait(one, stale)
    assert tested.ordered(one, three, late[three])
