"""Random programs on three streams: what the judge calls safe computes the same under every schedule that is tried."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workspace import simulated
from workspace.simulated.witness import compare, observe

STREAMS, TENSORS = 3, 3
STEP = st.one_of(
    st.tuples(st.just("write"), st.integers(0, STREAMS - 1), st.integers(0, TENSORS - 1), st.integers(0, TENSORS - 1)),
    st.tuples(st.just("half"), st.integers(0, STREAMS - 1), st.integers(0, TENSORS - 1), st.integers(0, 1)),
    st.tuples(st.just("renew"), st.integers(0, STREAMS - 1), st.integers(0, TENSORS - 1), st.just(0)),
    st.tuples(st.just("edge"), st.integers(0, STREAMS - 1), st.integers(0, STREAMS - 1), st.just(0)),
    st.tuples(st.just("host"), st.integers(0, STREAMS - 1), st.just(0), st.just(0)),
)
Steps = list[tuple[str, int, int, int]]


def program(steps: Steps, fenced: bool) -> Callable[[simulated.Device], None]:
    """`fenced` orders every operator after the one before it."""

    def run(device: simulated.Device) -> None:
        streams = [0, device.new_stream("one"), device.new_stream("two")]
        tensors = [torch.full((4,), float(index)) for index in range(TENSORS)]
        device.synchronize()
        last = 0
        for kind, stream, first, second in steps:
            if fenced and streams[stream] != last:
                edge(device, last, streams[stream])
            last = streams[stream]
            with device.on(streams[stream]):
                if kind == "write":
                    tensors[first].mul_(0.5).add_(tensors[second])
                elif kind == "half":
                    tensors[first][2 * second : 2 * second + 2].add_(1)
                elif kind == "renew":
                    tensors[first] = tensors[first] + 1
                elif kind == "edge":
                    edge(device, streams[first], streams[stream])
                else:
                    device.synchronize(streams[stream])
        device.synchronize()

    return run


def edge(device: simulated.Device, source: int, target: int) -> None:
    event = device.new_event()
    device.record(event, source)
    device.wait(event, target)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(STEP, min_size=3, max_size=12))
def test_what_is_safe_never_corrupts(steps: Steps) -> None:
    run = program(steps, fenced=False)
    device, _ = observe(run, simulated.InOrder())
    if device.verdict() == "SAFE":
        assert compare(run, seeds=range(3)) is None


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(STEP, min_size=3, max_size=12))
def test_a_fenced_program_is_safe_and_never_corrupts(steps: Steps) -> None:
    """Except where memory is freed on one stream while another still uses it: `renew` frees without record_stream."""
    run = program([step for step in steps if step[0] != "renew"], fenced=True)
    device, _ = observe(run, simulated.InOrder())
    assert device.verdict() == "SAFE"
    assert compare(run, seeds=range(3)) is None


def test_both_verdicts_occur() -> None:
    """Negative control of the first law: an unfenced program is not called safe, and corrupts."""
    steps: Steps = [("write", 1, 0, 1), ("write", 2, 1, 0)]
    run = program(steps, fenced=False)
    assert observe(run, simulated.InOrder())[0].verdict() == "UNSAFE"
    assert compare(run) is not None
