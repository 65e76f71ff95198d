"""The clocks agree with reachability over random programs, which also catch each small change of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.workspace.clocks_machine import SEARCH, Between, ClocksMachine, Framework
from workspace.clocks import Clocks, Seen, merge


def test_clocks_agree_with_reachability() -> None:
    """No order is claimed that is not there, and none is missed that nothing blurred."""
    run_state_machine_as_test(ClocksMachine, settings=SEARCH)


# -- small changes that must not survive -----------------------------------------------------------------------


class SkipsMerge(Clocks):
    def wait(self, stream: int, covered: Seen) -> None:
        pass


class SkipsTick(Clocks):
    def record(self, stream: int) -> Seen:
        return {**self.seen[stream], stream: self.epoch[stream]}


class NotTransitive(Clocks):
    def record(self, stream: int) -> Seen:
        covered = super().record(stream)
        return {stream: covered[stream]}


class CoversWhatFollows(Clocks):
    """The event's cover is the stream's own knowledge, which grows on."""

    def record(self, stream: int) -> Seen:
        covered = self.seen[stream]
        covered[stream] = self.epoch[stream]
        self.epoch[stream] += 1
        return covered

    def wait(self, stream: int, covered: Seen) -> None:
        merge(self.seen[stream], covered)
        self._waited[stream] = self.epoch[stream]


class ChangesWhatItShares(Clocks):
    """A wait for an older event adds to what an event covers that the stream shares."""

    def wait(self, stream: int, covered: Seen) -> None:
        if covered.get(stream, 0) >= self._waited[stream]:
            self.seen[stream] = covered
        else:
            merge(self.seen[stream], covered)
        self._waited[stream] = self.epoch[stream]


class TakesWhateverComes(Clocks):
    """An older event replaces what the stream knows."""

    def wait(self, stream: int, covered: Seen) -> None:
        self.seen[stream] = covered
        self._waited[stream] = self.epoch[stream]


class ForgetsHost(Clocks):
    def ordered(self, stream: int, used: int, epoch: int) -> bool:
        return used == stream or self.seen[stream].get(used, 0) >= epoch


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
        self.seen[stream].update(covered)


class BarrierForgetsOthers(Clocks):
    def barrier(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self.record(stream)


class SettlesWhatIsNotOver(Clocks):
    def settle(self) -> None:
        for seen in self.seen.values():
            seen.clear()


def with_clocks(clocks: type[Clocks]) -> type[Framework]:
    return type(clocks.__name__, (Framework,), {"clocks_type": clocks})


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
        self.clocks.seen[made] = {**self.clocks.seen[eager], eager: self.clocks.epoch[eager]}
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_changed_clock_is_caught(mutant: type[Framework]) -> None:
    """Each small change of the clocks, or of the order they are called in, breaks a law on some program."""
    machine = type("Mutated", (ClocksMachine,), {"framework": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=settings(SEARCH, max_examples=400, phases=[Phase.generate]))


def test_ids_are_never_reused() -> None:
    """A forgotten stream's id never names another one, so that old covers order nothing new."""
    clocks = Clocks()
    first = clocks.add()
    clocks.forget([first])
    assert clocks.add() != first


def test_merge_keeps_the_larger_epoch_of_each_stream() -> None:
    """Merging never loses knowledge."""
    into = {1: 5, 2: 1}
    merge(into, {1: 3, 2: 4, 3: 1})
    assert into == {1: 5, 2: 4, 3: 1}


def test_an_event_of_before_a_wait_takes_no_knowledge_away() -> None:
    """A stream that waited since the event's stream heard of it last keeps the later epochs it knows."""
    clocks = Clocks()
    one, two, three = (clocks.add() for _ in range(3))
    early = clocks.record(three)
    clocks.wait(two, clocks.record(one))
    clocks.wait(two, early)
    stale = clocks.record(two)  # comes after the first epoch of each, but not after what `one` waits for next
    late = clocks.record(three)
    clocks.wait(one, late)
    clocks.wait(one, stale)
    assert clocks.ordered(one, three, late[three])
