"""b3: pinned memory of the host that is filled again while the device still copies out of it."""

from __future__ import annotations

from workspace.errors import CapacityError, CaptureError, SizeError
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import refused
from workspace.testing.scenario import scenario


@scenario("b3", "P", "staged", evidence="bytes", virtual=False)
def slot_filled_behind_a_slow_stream(bench: Bench) -> None:
    """64 KiB uploaded behind a slow stream, filled anew and uploaded again: each copy has what was filled for it."""
    ws, nbytes = bench.ws, bench.mib(1 / 16)
    for slots in (1, 2):
        staging = ws.staging(f"b3 {slots}", nbytes, slots=slots)
        with ws.lease(BLOCK, N=nbytes) as lease:
            bench.slow()
            for value in range(1, 6):
                with staging.fill() as slot:
                    slot.memory[:] = bytes([value]) * nbytes
                    slot.upload(lease.data)
                bench.expect(bench.copy(lease.data), value)
            bench.check()


@scenario("b3-two-streams", "P", "staged", evidence="bytes", virtual=False)
def slot_copied_on_two_streams(bench: Bench) -> None:
    """One slot is uploaded on two streams, the second of them slow: the next fill waits for both."""
    ws, nbytes = bench.ws, bench.mib(1 / 16)
    (s1,) = bench.streams(1)
    staging = ws.staging("b3", nbytes, slots=1)
    with ws.lease(BLOCK, N=nbytes) as one, ws.lease(OTHER, N=nbytes) as two:
        bench.fill(two.data, 9)
        bench.order(bench.main, s1)
        ws.use(two, s1)
        bench.slow(s1)
        for value in (1, 2, 3):
            with staging.fill() as slot:
                slot.memory[:] = bytes([value]) * nbytes
                slot.upload(two.data, stream=s1)
                slot.upload(one.data)
            bench.expect(bench.copy(one.data), value)
            bench.expect(bench.copy(two.data, s1), value)
        bench.check()


@scenario("b3-refused", "R")
def upload_that_cannot_be(bench: Bench) -> None:
    """Uploads inside a capture, beyond the slot, and more slots filled at once than there are: refused by name."""
    ws, nbytes = bench.ws, bench.mib(1 / 16)
    staging = ws.staging("b3", nbytes, slots=1)
    bench.reserve(ws, 2 * nbytes)
    with ws.lease(BLOCK, N=2 * nbytes) as lease, staging.fill() as slot:
        with refused(SizeError) as refusal:
            slot.upload(lease.data)
        refusal.names(nbytes, 2 * nbytes)
        with refused(CapacityError) as refusal, staging.fill():
            pass
        refusal.names("slots")
    out = bench.allocate(nbytes)
    with ws.capture() as capture, staging.fill() as slot:
        with refused(CaptureError) as refusal:
            slot.upload(out)
        refusal.names("replay")
    capture.graph.release()
