"""The caching allocator follows torch's rules, and no sequence of calls loses or shares bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workspace.errors import OutOfMemory
from workspace.simulated import Buffer, Device

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def device() -> Device:
    return Device(memory="virtual")


@pytest.mark.parametrize("asked, rounded", [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded_to_512_bytes(device: Device, asked: int, rounded: int) -> None:
    buffer = device.alloc(asked)
    assert (device.statistics.allocated, device.statistics.requested) == (rounded, asked)
    assert buffer.nbytes == asked and buffer.address % 512 == 0


@pytest.mark.parametrize("asked, segment", [
    (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
    (10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB),
])  # fmt: skip
def test_segments_are_2_mib_20_mib_or_rounded_to_2_mib(device: Device, asked: int, segment: int) -> None:
    buffer = device.alloc(asked)
    assert device.statistics.reserved == segment
    del buffer
    assert (device.statistics.allocated, device.statistics.reserved) == (0, segment)


def test_a_freed_block_serves_its_stream_again_at_once(device: Device) -> None:
    side = device.new_stream()
    buffer = device.alloc(4 * MIB)
    address = buffer.address
    del buffer
    elsewhere = device.alloc(4 * MIB, side)
    assert elsewhere.address != address
    assert device.alloc(4 * MIB).address == address


def test_the_smallest_block_that_fits_is_taken(device: Device) -> None:
    buffers = [device.alloc(size * KIB) for size in (64, 1, 32, 1, 48, 1)]
    middle = buffers[2].address
    buffers[0] = buffers[2] = buffers[4] = None
    assert device.alloc(20 * KIB).address == middle


def test_a_rest_of_512_bytes_is_split_off_in_a_small_segment(device: Device) -> None:
    first, rest = device.alloc(MIB), device.alloc(MIB - 512)
    assert device.alloc(512).address == rest.address + MIB - 512
    assert rest.address == first.address + MIB
    assert device.statistics.reserved == 2 * MIB


@pytest.mark.parametrize("rest, split", [(MIB, False), (MIB + 512, True)])
def test_a_rest_of_a_mib_or_less_stays_with_its_block_in_a_large_segment(
    device: Device, rest: int, split: bool
) -> None:
    whole = device.alloc(32 * MIB)
    del whole
    buffer = device.alloc(32 * MIB - rest)
    assert device.statistics.reserved == 32 * MIB
    assert device.statistics.allocated == buffer.block.size == (32 * MIB - rest if split else 32 * MIB)


def test_neighbours_join_on_both_sides(device: Device) -> None:
    buffers = [device.alloc(512 * KIB) for _ in range(4)]
    base = buffers[0].address
    for index in (0, 2, 1):
        buffers[index] = None
    whole = device.alloc(MIB)
    assert whole.address == base
    assert device.statistics.reserved == 2 * MIB


def test_neighbours_of_another_use_do_not_join(device: Device) -> None:
    """A block whose events are pending keeps its bytes to itself."""
    late = Device(memory="virtual", ahead=1 << 60)
    side = late.new_stream()
    first, second = late.alloc(512 * KIB), late.alloc(512 * KIB)
    address = second.address
    late.launch("use", reads=[first], stream=side)
    late.record_stream(first, side)
    del first, second
    assert late.alloc(MIB).address == address


def test_record_stream_delays_reuse_until_the_events_of_its_free_are_done() -> None:
    device = Device(memory="virtual", ahead=3)
    side = device.new_stream()
    buffer = device.alloc(4 * MIB)
    address = buffer.address
    device.launch("use", reads=[buffer], stream=side)
    device.record_stream(buffer, side)
    del buffer
    assert device.statistics.allocated == 0
    kept = device.alloc(4 * MIB)
    assert kept.address != address
    for _ in range(3):
        device.launch("time passes", stream=side)
    assert device.alloc(4 * MIB).address == address


def test_record_stream_on_the_own_stream_changes_nothing(device: Device) -> None:
    late = Device(memory="virtual", ahead=1 << 60)
    buffer = late.alloc(4 * MIB)
    address = buffer.address
    late.record_stream(buffer, 0)
    del buffer
    assert late.alloc(4 * MIB).address == address


@pytest.mark.parametrize("kind", ["host", "virtual"])
def test_record_stream_reaches_tensors_of_the_allocator_and_their_views_but_not_leases(kind: str) -> None:
    device = Device(memory=kind)
    side = device.new_stream()
    own, slab = device.empty((4, 256), torch.float32), device.alloc(4 * KIB)
    lease = device.tensor(slab, 0, (4, 256), torch.float32)
    assert device.record_stream(own, side)
    assert device.record_stream(own[1:], side)
    assert device.record_stream(slab, side)
    assert not device.record_stream(lease, side)
    assert not device.record_stream(torch.empty(4), side)


def test_empty_cache_returns_whole_segments_only(device: Device) -> None:
    kept, freed = device.alloc(512), device.alloc(4 * MIB)
    assert device.statistics.reserved == 22 * MIB
    del freed
    device.empty_cache()
    assert device.statistics.reserved == device.memory.used == 2 * MIB
    del kept
    device.empty_cache()
    assert device.statistics.reserved == device.memory.used == 0


def test_empty_cache_waits_for_pending_events() -> None:
    device = Device(memory="virtual", ahead=1 << 60)
    side = device.new_stream()
    buffer = device.alloc(4 * MIB)
    device.record_stream(buffer, side)
    del buffer
    device.empty_cache()
    assert device.memory.used == 0


def test_host_memory_goes_back_to_the_system_with_its_segment() -> None:
    device = Device(memory="host")
    buffer = device.alloc(64 * MIB)
    base = device.memory.segment_of(buffer.address)
    assert base is not None
    device.memory.segment(base).fill_(1)
    before = resident()
    del buffer
    device.empty_cache()
    assert before - resident() > 60 * MIB


def resident() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096


def test_peaks_are_the_most_since_the_last_reset(device: Device) -> None:
    first, second = device.alloc(MIB), device.alloc(MIB)
    del first, second
    assert (device.statistics.allocated, device.statistics.peak_allocated) == (0, 2 * MIB)
    device.statistics.reset_peaks()
    assert device.statistics.peak_allocated == 0 and device.statistics.peak_reserved == 2 * MIB


def test_out_of_memory_frees_the_cache_first_and_then_says_how_much_there_is() -> None:
    device = Device(memory="virtual", capacity=40 * MIB)
    cached = device.alloc(20 * MIB)
    del cached
    held = device.alloc(30 * MIB)  # does not fit beside the cached 20 MiB
    assert device.counters["free"] == 1
    with pytest.raises(OutOfMemory, match=f"{20 * MIB} bytes were asked for") as caught:
        device.alloc(4 * MIB)
    assert caught.value.fields["request"] == 4 * MIB
    assert caught.value.fields["allocated"] == held.nbytes
    assert device.alloc(10 * MIB).address  # state unchanged: a request that fits is served


def test_an_empty_request_takes_nothing(device: Device) -> None:
    buffer = device.alloc(0)
    assert (buffer.address, buffer.nbytes, device.statistics.reserved) == (0, 0, 0)
    assert device.empty((0, 7), torch.float32).shape == (0, 7)


def test_captures_have_a_pool_of_their_own_until_their_graph_is_gone(device: Device) -> None:
    stream = device.new_stream()
    warm = device.alloc(4 * MIB, stream)
    address = warm.address
    del warm
    device.begin_capture(stream)
    inside = device.alloc(4 * MIB, stream)
    inner = inside.address
    assert inner != address
    del inside
    assert device.alloc(4 * MIB, stream).address == inner
    graph = device.end_capture(stream)
    assert device.alloc(4 * MIB, stream).address == address
    device.empty_cache()
    assert device.memory.segment_of(inner) is not None
    graph.reset()
    device.empty_cache()
    assert device.memory.segment_of(inner) is None


def test_two_captures_share_no_block(device: Device) -> None:
    stream, addresses, graphs = device.new_stream(), set(), []
    for _ in range(2):
        device.begin_capture(stream)
        addresses.add(device.alloc(4 * MIB, stream).address)
        graphs.append(device.end_capture(stream))
    assert len(addresses) == 2


def test_a_broken_capture_gives_its_pool_back(device: Device) -> None:
    stream = device.new_stream()
    device.begin_capture(stream)
    inside = device.alloc(4 * MIB, stream)
    device.abort_capture(stream)
    del inside
    device.empty_cache()
    assert device.memory.used == 0


def test_a_block_used_on_two_streams_and_freed_in_a_capture_waits_for_its_end() -> None:
    """pytorch/pytorch#159594: events cannot be recorded while capturing, so the free is put off."""
    device = Device(memory="virtual")
    main, side, event = device.new_stream(), device.new_stream(), device.new_event()
    device.begin_capture(main)
    device.record(event, main)
    device.wait(event, side)
    buffer = device.alloc(4 * MIB, main)
    address = buffer.address
    device.record_stream(buffer, side)
    del buffer
    assert device.alloc(4 * MIB, main).address != address
    device.record(event, side)
    device.wait(event, main)
    device.end_capture(main)


@pytest.mark.parametrize("capturing", [True, False])
def test_events_of_a_free_during_any_capture_are_recorded_after_it(capturing: bool) -> None:
    """Time that passes while somebody captures does not count."""
    device = Device(memory="virtual", ahead=3)
    side, elsewhere = device.new_stream(), device.new_stream()
    buffer = device.alloc(4 * MIB)
    address = buffer.address
    device.record_stream(buffer, side)
    if capturing:
        device.begin_capture(elsewhere)
    del buffer
    for _ in range(5):
        device.launch("time passes", stream=side)
    if capturing:
        device.end_capture(elsewhere)
    assert (device.alloc(4 * MIB).address == address) is not capturing


def test_the_judge_takes_the_allocators_edge_for_the_bytes_alone(device: Device) -> None:
    """A block that came back through its events is safe to reuse; other bytes of that stream are not."""
    main, side = device.new_stream(), device.new_stream()
    buffer, other = device.alloc(4 * MIB, main), device.alloc(4 * MIB, main)
    address = buffer.address
    device.launch("side", reads=[buffer], writes=[other], stream=side)
    device.record_stream(buffer, side)
    del buffer
    again = device.alloc(4 * MIB, main)
    assert again.address == address
    device.launch("reuse", writes=[again], stream=main)
    assert device.verdict() == "SAFE"
    device.launch("read other", reads=[other], stream=main)
    assert device.verdict() == "UNSAFE"


class Blocks(RuleBasedStateMachine):
    """Random requests, frees, recorded uses and captures on a few streams."""

    @initialize()
    def begin(self) -> None:
        self.device = Device(memory="virtual", ahead=4)
        self.streams = [0, self.device.new_stream(), self.device.new_stream()]
        self.held: list[Buffer] = []
        self.graphs: list[object] = []

    @rule(size=st.sampled_from([1, 512, 700, 5000, 300_000, MIB, MIB + 1, 3 * MIB, 11 * MIB]), index=st.integers(0, 2))
    def alloc(self, size: int, index: int) -> None:
        self.held.append(self.device.alloc(size, self.streams[index]))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 1000))
    def free(self, index: int) -> None:
        self.held.pop(index % len(self.held))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 1000), stream=st.integers(0, 2))
    def use(self, index: int, stream: int) -> None:
        self.device.record_stream(self.held[index % len(self.held)], self.streams[stream])

    @rule(stream=st.integers(0, 2))
    def launch(self, stream: int) -> None:
        self.device.launch("op", stream=self.streams[stream])

    @rule()
    def capture(self) -> None:
        if self.device.capture_of(self.streams[1]):
            self.graphs.append(self.device.end_capture(self.streams[1]))
        else:
            self.device.begin_capture(self.streams[1])

    @rule()
    def release_graphs(self) -> None:
        self.graphs.clear()

    @rule()
    def trim(self) -> None:
        self.device.empty_cache()

    @invariant()
    def live_blocks_never_overlap(self) -> None:
        if hasattr(self, "held"):
            ends = sorted((buffer.address, buffer.address + buffer.nbytes) for buffer in self.held)
            assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))

    @invariant()
    def statistics_are_the_sum_of_what_is_held(self) -> None:
        if hasattr(self, "held"):
            statistics = self.device.statistics
            assert statistics.allocated == sum(buffer.block.size for buffer in self.held)
            assert statistics.requested == sum(buffer.nbytes for buffer in self.held)
            assert statistics.reserved == self.device.memory.used >= statistics.allocated

    def teardown(self) -> None:
        if not hasattr(self, "held"):
            return
        for stream in self.streams:
            if self.device.capture_of(stream):
                self.device.end_capture(stream)
        self.held.clear()
        self.graphs.clear()
        self.device.empty_cache()
        assert self.device.statistics.allocated == 0
        assert self.device.memory.used == 0, "bytes were lost"


Blocks.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_blocks = Blocks.TestCase
