"""After a true race, the look back accuses no pair that the allocator's waits or the memory's return kept apart."""

from __future__ import annotations

import gc
from collections import deque

import pytest
import torch

import workspace
from workspace.simulated import Device
from workspace.simulated.node import Node
from workspace.simulated.settled import Settled

NBYTES = 1 << 16


def accused(monkeypatch: pytest.MonkeyPatch, *, remember: bool, racing: bool = True) -> set[tuple[str, str]]:
    """Pairs reported of a tensor that a second stream used, dropped, and whose bytes are then used racily."""
    if not remember:
        monkeypatch.setattr(Settled, "add", lambda *given: None)
    device = Device(memory="virtual")
    ws = workspace.create("caching", device=device)
    a, b = ws.stream("a"), ws.stream("b")
    with torch.inference_mode(), ws.on(a):
        first = ws.empty((NBYTES,), torch.uint8)
        address = first.data_ptr()
        device.launch("first", writes=[first])
        event = device.new_event()
        device.record(event, a.key)
        device.wait(event, b.key)
        ws.use(first, b)
        device.launch("late reader", reads=[first], stream=b.key)
        del first
        gc.collect()
        second = ws.empty((NBYTES,), torch.uint8)  # handed out once b's event was seen complete
        assert second.data_ptr() == address
        device.launch("second", writes=[second])
        if racing:
            device.launch("racing reader", reads=[second], stream=b.key)
        device.launch("third", writes=[second])
    return {(race.first.label, race.second.label) for race in device.races()}


def test_only_pairs_of_the_racing_reader_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accused(monkeypatch, remember=True) == {("second", "racing reader"), ("racing reader", "third")}
    assert not accused(monkeypatch, remember=True, racing=False)


def test_without_the_ends_an_ordered_pair_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    assert ("late reader", "third") in accused(monkeypatch, remember=False)


@pytest.mark.parametrize("returned", (False, True))
def test_bytes_that_went_back_accuse_nobody(returned: bool) -> None:
    """The control leaves them: then the earlier reader races, too."""
    device = Device(memory="virtual")
    start = device.malloc(NBYTES)
    a, b = device.new_stream(), device.new_stream()
    device.launch("earlier", reads=[(start, 64)], stream=b)
    if returned:
        assert device.judge is not None
        device.judge.log.forget(start, start + 64)
    device.launch("reader", reads=[(start, 64)], stream=b)
    device.launch("writer", writes=[(start, 64)], stream=a)
    first = {race.first.label for race in device.races()}
    assert first == ({"reader"} if returned else {"earlier", "reader"})


def test_what_is_over_for_some_bytes_is_not_for_the_others() -> None:
    """Nor for a node that the clock does not cover, nor for one that came after."""
    settled = Settled()
    early, late = Node(1, 1, {}, "launch", "early"), Node(1, 2, {}, "launch", "late")
    early.tick, late.tick = 1, 2
    settled.add(16, 32, {1: 1}, deque([early]))
    assert settled.left(early, 0, 64) == [(0, 16), (32, 64)]
    assert settled.left(early, 16, 32) == []
    assert settled.left(late, 0, 64) == [(0, 64)]
    settled.add(0, 64, {2: 9}, deque([early, late]))
    assert settled.left(late, 0, 64) == [(0, 64)]
