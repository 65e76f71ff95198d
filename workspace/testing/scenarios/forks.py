"""a7 and a8: forks, joins, and what raises in between."""

from __future__ import annotations

from workspace.errors import ForkError, LateUse, WorkspaceError
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario

CALLS = ("record", "wait", "record_stream", "query", "synchronize", "alloc", "malloc", "memset")


@scenario("a7", "P", "join", evidence="failure")
def joined_uses_cost_nothing(bench: Bench) -> None:
    """Fork to S1 and S2, join, release, acquire on S0: the device is not called."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 7)
    with ws.fork(s1, s2) as branch:
        for side in (s1, s2):
            with branch(side):
                bench.slow()
                bench.expect(bench.copy(lease.data), 7)
    before = bench.calls()
    lease.release()
    again = ws.acquire(BLOCK, N=nbytes)
    made = bench.calls() - before
    require(not any(made[verb] for verb in CALLS), f"release and acquire called the device: {dict(made)}")
    bench.fill(again.data, 8)
    again.release()


@scenario("a7-one-fence", "P", "fence", "declare")
def one_unjoined_use_costs_one_fence(bench: Bench) -> None:
    """One more declared use on S1 after the join: exactly one fence."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 7)
    with ws.fork(s1, s2) as branch:
        for side in (s1, s2):
            with branch(side):
                bench.copy(lease.data)
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 7)
    ws.use(lease, s1)
    before, fences = bench.calls(), ws.snapshot().fences
    lease.release()
    again = ws.acquire(BLOCK, N=nbytes)
    bench.fill(again.data, 8)
    bench.check()
    made = bench.calls() - before
    require(made["record"] == made["wait"] == 1, f"not one fence: {dict(made)}")
    require(ws.snapshot().fences == fences + 1, "the snapshot does not count one fence")
    again.release()


@scenario("a7-late", "R")
def late_use(bench: Bench) -> None:
    """A use declared after the release is refused, and releasing twice is."""
    ws = bench.ws
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=bench.mib(1))
    data = lease.data
    bench.fill(data, 1)
    lease.release()
    before = ws.snapshot()
    for call in (lambda: ws.use(lease, s1), lambda: lease.use(s1)):
        with refused(LateUse) as refusal:
            call()
        refusal.names("release")
    for call in (lease.release, lambda: lease.data, lambda: lease.until(None)):
        with refused(WorkspaceError):
            call()
    require(ws.snapshot() == before, "a refusal changed the state")


@scenario("a8", "P", "join")
def exception_in_a_branch(bench: Bench) -> None:
    """A branch raises: every branch is joined, S0 is current again, and the exception arrives."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    failed = ValueError("in a branch")
    try:
        with ws.lease(BLOCK, N=nbytes) as lease:
            bench.fill(lease.data, 1)
            with ws.fork(s1, s2) as branch:
                with branch(s1):
                    bench.slow()
                    bench.expect(bench.copy(lease.data), 1)
                with branch(s2):
                    raise failed
    except ValueError as error:
        require(error is failed, "another exception arrived")
    require(ws.driver.current_stream() == bench.main.key, "the caller's stream is not current again")
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 2)


@scenario("a8-nested", "P", "join")
def exception_in_a_nested_fork(bench: Bench) -> None:
    """The innermost of three forks raises behind a handler of its own and once more in the outer one."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2, s3 = bench.streams(3)
    try:
        with ws.lease(BLOCK, N=nbytes) as lease:
            bench.fill(lease.data, 1)
            with ws.fork(s1, s2) as outer, outer(s1):
                try:
                    with ws.fork(s3) as inner, inner(s3):
                        bench.slow()
                        bench.expect(bench.copy(lease.data), 1)
                        raise KeyError("innermost")
                except KeyError:
                    pass
                require(ws.driver.current_stream() == s1.key, "the branch is not current again")
                bench.slow()
                bench.expect(bench.copy(lease.data), 1)
                raise ValueError("outer")
    except ValueError:
        pass
    require(ws.driver.current_stream() == bench.main.key, "the caller's stream is not current again")
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 2)


@scenario("a8-lease-in-branch", "P", "fence", "declare")
def lease_acquired_in_a_branch(bench: Bench) -> None:
    """A lease of a branch, used by S0 after the join, while a lease of before the fork was released inside it."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    before = ws.acquire(OTHER, N=nbytes)
    with ws.fork(s1) as branch:
        with branch(s1):
            lease = ws.acquire(BLOCK, N=nbytes)
            bench.fill(lease.data, 1)
        before.release()
    bench.slow()
    bench.expect(bench.copy(lease.data), 1)
    lease.release()
    with ws.on(s1), ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 2)


@scenario("a8-lease-in-nested-branch", "P", "fence", "declare")
def lease_acquired_in_a_nested_branch(bench: Bench) -> None:
    """A lease taken two forks deep, read on S0 after both joins."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    with ws.fork(s1) as outer, outer(s1), ws.fork(s2) as inner, inner(s2):
        lease = ws.acquire(BLOCK, N=nbytes)
        bench.fill(lease.data, 1)
    bench.slow()
    bench.expect(bench.copy(lease.data), 1)
    lease.release()
    with ws.on(s2), ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 2)


@scenario("a8-same-stream-twice", "P", "fence", "branches")
def fork_to_one_stream_twice(bench: Bench) -> None:
    """A fork inside a fork to the same stream ends first; the outer branch goes on, and the lease is released in it."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 1)
    with ws.fork(s1) as outer:
        with ws.fork(s1):
            pass
        with outer(s1):
            bench.slow()
            bench.expect(bench.copy(lease.data), 1)
        lease.release()
        with ws.lease(BLOCK, N=nbytes) as again:
            bench.fill(again.data, 2)


@scenario("a8-refused", "R")
def forks_out_of_order(bench: Bench) -> None:
    """A fork to the current stream, a branch outside its fork, a stream the fork does not name."""
    ws = bench.ws
    s1, s2 = bench.streams(2)
    with refused(ForkError), ws.fork(bench.main):
        pass
    fork = ws.fork(s1)
    with refused(ForkError):
        fork(s1)
    with ws.fork(s1) as branch, refused(ForkError):
        branch(s2)
    require(ws.driver.current_stream() == bench.main.key, "the caller's stream is not current again")
