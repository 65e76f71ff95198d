"""a1 to a6: a block reused while another stream may still be using it."""

from __future__ import annotations

import torch

from workspace.errors import StreamError
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario


@scenario("a1", "P", "fence", "order", "declare")
def reuse_after_declared_use(bench: Bench) -> None:
    """A consumer on S1 falls behind, its lease is released and the bytes asked for again on S0."""
    ws, nbytes = bench.ws, bench.mib(16)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 17)
    bench.order(bench.main, s1)
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 17)
    ws.use(lease, s1)
    lease.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 93)
        bench.expect(bench.copy(again.data), 93)


@scenario("a1-undeclared", "D", "judge", evidence="failure")
def undeclared_use_is_reported(bench: Bench) -> None:
    """The same use, not declared, is reported with both streams and both call sites."""
    ws, nbytes = bench.ws, bench.mib(16)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 17)
    bench.order(bench.main, s1)
    bench.copy(lease.data, s1)
    lease.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 93)
    bench.detect("copy 1", "fill 93")


@scenario("a1-poison", "D", "poison", evidence="failure", virtual=False)
def undeclared_use_reads_poison(bench: Bench) -> None:
    """In debug mode a use that comes too late finds the pattern, with nobody asking for the bytes again."""
    ws, nbytes = bench.workspace(poison=True), bench.mib(16)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 17)
    bench.order(bench.main, s1)
    late = bench.tensor(lease.data)
    lease.release()
    bench.order(bench.main, s1)
    copy = bench.copy(late, s1)
    bench.settle()
    require(not copy.wrong(0xCB), "what a released lease leaves behind is not the pattern")


@scenario("a1-default-stream", "P", "fence", "use")
def reuse_on_the_default_stream(bench: Bench) -> None:
    """As a1 with two consumers, the default stream as producer, and a view of the tensor in the declaration."""
    ws, nbytes = bench.ws, bench.mib(16)
    s1, s2 = bench.streams(2)
    with ws.on(0):
        lease = ws.acquire(BLOCK, N=nbytes)
        bench.fill(lease.data, 17)
        for side in (s1, s2):
            bench.order(0, side)
            bench.slow(side)
            bench.expect(bench.copy(lease.data, side), 17)
            ws.use(lease.data[bench.mib(1) :], side)
        lease.release()
        with ws.lease(BLOCK, N=nbytes) as again:
            bench.fill(again.data, 93)


@scenario("a1-event", "P", "fence", "declare")
def reuse_with_library_events(bench: Bench) -> None:
    """Order made by `ws.event` is known; a re-recorded event does not vouch for what came after its first record."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    done = ws.event()
    done.wait()
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 1)
    done.record()
    done.wait(s1)
    bench.slow(s1)
    bench.copy(lease.data, s1)
    done.record(s1)
    done.wait()
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 1)
    ws.use(lease, s1)
    lease.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 2)


@scenario("a1-declared-early", "P", "fence", "declare")
def use_declared_before_a_fork(bench: Bench) -> None:
    """A use declared before a fork to the same stream, and made after its join, still counts at the release."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 3)
    ws.use(lease, s1)
    with ws.fork(s1):
        pass
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 3)
    lease.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 4)


@scenario("a2", "P", "fence")
def order_survives_an_idle_lease(bench: Bench) -> None:
    """A's write, a lease on B that enqueues nothing, then C: what B knew of A reaches C with the block."""
    ws, nbytes = bench.ws, bench.mib(1)
    a, b, c = bench.streams(3)
    with ws.on(a), ws.lease(BLOCK, N=nbytes) as lease:
        bench.slow()
        bench.fill(lease.data, 1)
    with ws.on(b), ws.lease(BLOCK, N=nbytes):
        pass
    with ws.on(c), ws.lease(BLOCK, N=nbytes) as last:
        bench.fill(last.data, 3)
        bench.slow()
        bench.expect(bench.copy(last.data), 3)


@scenario("a2-chain", "P", "fence")
def order_survives_many_hands(bench: Bench) -> None:
    """One block goes round four streams with sizes that split and coalesce it; each finds its own bytes."""
    ws = bench.ws
    streams = bench.streams(4)
    for turn in range(bench.times(40)):
        for number, stream in enumerate(streams):
            with ws.on(stream):
                value = 4 * (turn % 50) + number + 1
                with ws.lease(BLOCK, N=bench.mib(1 + number % 2)) as one, ws.lease(OTHER, N=bench.mib(0.5)) as two:
                    bench.fill(one.data, value)
                    bench.fill(two.data, 255 - value)
                    bench.slow()
                    bench.expect(bench.copy(one.data), value)
                    bench.expect(bench.copy(two.data), 255 - value)


@scenario("a3", "P", "fence")
def handle_of_a_destroyed_stream(bench: Bench) -> None:
    """A raw stream reads, is destroyed, and its handle comes up again: the new stream is another one."""
    ws, nbytes = bench.ws, bench.mib(4)
    for value in range(5, 9):
        first = bench.raw_stream()
        with ws.on(first), ws.lease(BLOCK, N=nbytes) as lease:
            bench.fill(lease.data, value)
            bench.slow()
            bench.expect(bench.copy(lease.data), value)
        bench.destroy(first)
        second = bench.raw_stream()
        if second == first:  # a driver may have taken that memory for something else
            break
    require(second == first, "the device does not reuse handles: the scenario needs one that does")
    with ws.on(second), ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 9)
        bench.expect(bench.copy(again.data), 9)


@scenario("a3-declared", "P", "exact", "declare", evidence="failure")
def declared_use_on_a_destroyed_stream(bench: Bench) -> None:
    """A use declared on a raw stream is recorded while the stream exists, so that its bytes can be waited for."""
    ws, nbytes = bench.ws, bench.mib(4)
    raw = bench.raw_stream()
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 5)
    bench.order(bench.main, raw)
    bench.slow(raw)
    bench.expect(bench.copy(lease.data, raw), 5)
    ws.use(lease, raw)
    lease.release()
    bench.destroy(raw)
    bench.raw_stream()
    ws.lock()  # nothing else is there
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 9)


@scenario("a3-none", "R")
def stream_none(bench: Bench) -> None:
    """An explicit None is a bug of the caller's, and changes nothing."""
    ws = bench.ws
    before = ws.snapshot()
    lease = ws.acquire(BLOCK, N=16)
    for call in (
        lambda: ws.acquire(BLOCK, N=16, stream=None), lambda: ws.use(lease, None), lambda: ws.on(None),
        lambda: ws.synchronize(None), lambda: ws.event().record(None),
    ):  # fmt: skip
        with refused(StreamError) as refusal:
            call()
        refusal.names("current stream")
    lease.release()
    require(ws.snapshot().allocated == before.allocated, "a refusal changed what is on lease")


@scenario("a5", "D", "judge", evidence="failure")
def record_stream_on_a_lease(bench: Bench) -> None:
    """``tensor.record_stream`` does nothing for a lease: the use is reported as undeclared."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 17)
    bench.order(bench.main, s1)
    bench.copy(lease.data, s1)
    bench.record_stream(lease.data, s1)
    lease.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 93)
    bench.detect("copy 1", "fill 93")


@scenario("a5-use", "P", "fence", "declare")
def use_of_a_tensor(bench: Bench) -> None:
    """``ws.use(tensor, stream)`` finds the lease behind a tensor, also one of several."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    other = ws.acquire(OTHER, N=nbytes)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(other.data, 1)
    bench.fill(lease.data, 17)
    bench.order(bench.main, s1)
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 17)
    ws.use(lease.data, s1)
    lease.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 93)
    bench.expect(bench.copy(other.data), 1)
    other.release()


@scenario("a5-single", "P", "fence", "use")
def use_of_a_single_tensor(bench: Bench) -> None:
    """A single tensor with a declared use dies, views and all; its bytes wait for the use."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    tensor = ws.empty((nbytes,), torch.uint8)
    bench.fill(tensor, 17)
    bench.order(bench.main, s1)
    bench.slow(s1)
    view = tensor[nbytes // 2 :]
    ws.use(tensor, s1)
    del tensor
    bench.expect(bench.copy(view, s1), 17)
    del view
    again = ws.empty((nbytes,), torch.uint8)
    bench.fill(again, 93)
    bench.expect(bench.copy(again), 93)


@scenario("a6", "P", "until")
def collective_waited_for_at_release(bench: Bench) -> None:
    """A lease given to an asynchronous collective is released through the work."""
    ws, nbytes = bench.ws, bench.mib(4)
    with ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 6)
        ws.until(bench.collective(lease.data, 66))
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 7)
        bench.slow()
        bench.expect(bench.copy(again.data), 7)


@scenario("a6-early", "D", "judge", evidence="failure")
def collective_not_waited_for(bench: Bench) -> None:
    """Released before the wait, the collective's accesses are reported against the next user's."""
    ws, nbytes = bench.ws, bench.mib(4)
    with ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 6)
        bench.collective(lease.data, 66)
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 7)
    bench.detect("all-reduce", "fill 7")
