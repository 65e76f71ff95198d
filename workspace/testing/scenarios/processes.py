"""l: fork, pickle and spawn."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable

import torch

from workspace.config import WorkspaceConfig
from workspace.create import create
from workspace.errors import ProcessError, WorkspaceError
from workspace.handle import Handle
from workspace.testing.bench import BLOCK, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario


@scenario("l1", "R", "process", evidence="failure", real=False)
def forked_child(bench: Bench) -> None:
    """After a fork of the process the child is refused by the parent's pid, and the parent keeps working."""
    ws = bench.ws
    held = ws.acquire(BLOCK, N=4096)
    with ws.lease(BLOCK, N=4096):
        pass
    said = _in_child(lambda: _refused_in_child(bench))
    require(not said, f"in the child: {said}")
    held.release()
    with ws.lease(BLOCK, N=4096) as lease:
        bench.fill(lease.data, 1)


def _in_child(body: Callable[[], object]) -> str:
    """What a forked child says: the error of `body`, or nothing."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        # The child reports through the pipe and leaves at once: its threads, locks and exit handlers are the parent's.
        said = ""
        try:
            body()
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(send, said.encode()[:4096])
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def _refused_in_child(bench: Bench) -> None:
    ws = bench.ws
    for call in (
        lambda: ws.acquire(BLOCK, N=4096), lambda: ws.acquire(BLOCK, N=8192), lambda: ws.empty((16,), torch.uint8),
        lambda: ws.fork(*bench.streams(1)).__enter__(), lambda: ws.capture().__enter__(), ws.reserve,
    ):  # fmt: skip
        with refused(ProcessError) as refusal:
            call()
        refusal.names(os.getppid())


@scenario("l1-anew", "P", "process", evidence="failure", real=False)
def workspace_created_in_a_child(bench: Bench) -> None:
    """What the refusal advises works: the child creates a workspace of its own, by hand or through a handle."""
    config = WorkspaceConfig(strategy=bench.strategy)
    handle = Handle(config)
    parents = handle()
    with parents.lease(BLOCK, N=64) as lease:
        lease.data.fill_(1)

    def body() -> None:
        for own in (handle(), create(config=config, device="cpu")):
            require(own is not parents, "the handle still names the parent's workspace")
            with own.lease(BLOCK, N=64) as lease:
                lease.data.fill_(2)
                require(int(lease.data.sum()) == 128, "the bytes are wrong")

    said = _in_child(body)
    require(not said, f"in the child: {said}")
    with parents.lease(BLOCK, N=64) as lease:
        lease.data.fill_(3)


class _Module(torch.nn.Module):
    """A module that keeps a handle."""

    scratch: Handle

    def __init__(self, config: WorkspaceConfig) -> None:
        super().__init__()
        self.scratch = Handle(config)


@scenario("l2", "P", no_control="copying is refused by the types themselves: there is no guard to remove", real=False)
def pickled_and_copied(bench: Bench) -> None:
    """Configs, layouts and handles copy and pickle; a live workspace and a lease say why they do not."""
    config = WorkspaceConfig(strategy=bench.strategy, owners={"mla": "caching"})
    for one in (config, BLOCK.specs["data"]):
        require(pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one), f"{one!r} does not come back equal")
    layout = pickle.loads(pickle.dumps(BLOCK))
    require(layout.size(N=100) == BLOCK.size(N=100), "a layout does not come back equal")
    ws = bench.ws
    with ws.lease(BLOCK, N=16) as lease:
        for live in (ws, lease):
            for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
                with refused(ProcessError, WorkspaceError) as refusal:
                    attempt(live)
                refusal.names("cop")
    module = _Module(config)
    twin, sent = copy.deepcopy(module), pickle.loads(pickle.dumps(module.scratch))
    require(twin.scratch() is module.scratch() is sent(), "copies of a handle resolve to different workspaces")
    with twin.scratch().lease(BLOCK, N=16) as again:
        again.data.fill_(1)


def _spawned(config: WorkspaceConfig, pipe: object) -> None:
    import torch

    with torch.no_grad():
        ws = Handle(config)()
        with ws.lease(BLOCK, N=64) as lease:
            lease.data.fill_(7)
            pipe.send((os.getpid(), int(lease.data.sum())))  # type: ignore[attr-defined]


@scenario("l3", "P", no_control="nothing is shared by name, so there is no guard to remove", real=False)
def spawned_workers(bench: Bench) -> None:
    """Spawned workers make workspaces of their own from the config alone."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    config = WorkspaceConfig(strategy=bench.strategy)
    workers = [context.Process(target=_spawned, args=(config, end)) for _, end in ends]
    for worker in workers:
        worker.start()
    answers = [here.recv() if here.poll(60) else (0, 0) for here, _ in ends]
    for worker in workers:
        worker.join()
        require(worker.exitcode == 0, f"a spawned worker ended with {worker.exitcode}")
    require(len({pid for pid, _ in answers}) == 2 and all(total == 448 for _, total in answers), f"{answers}")
