"""The steady path in C++: it does what the Python form does, says which of them runs, and leaks nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.bookkeeping import check_books, pooled
from tests.workspace.forms import BOTH, running
from tests.workspace.scene import BYTES, SLAB, scene, write
from tests.workspace.steady_program import PAIR, WIDE, CapturedProgram, Program
from workspace import Layout, config, native, spec
from workspace import lease as lease_module
from workspace.errors import ConfigError, DriverError, ForkError, LeaseReleased
from workspace.fork import Fork
from workspace.lazy import LazyLease
from workspace.simulated import Device
from workspace.timeline import Timeline

STRATEGIES = ["caching", "upstream", "event_fenced", "per_stream", "unfenced"]
SETTINGS: dict[str, dict[str, Any]] = {
    "event_fenced in small slabs": {"granularity": 512},
    "event_fenced in a locked pool": {"locked": True},
    "per_stream in a locked pool": {"locked": True},
}
ROOT = Path(__file__).parents[2]
cpp = pytest.mark.skipif(not native.built(), reason="the C++ form is not built")


def interpreter(code: str, form: str) -> str:
    """What a fresh interpreter prints under ``WORKSPACE_NATIVE``."""
    environment = {**os.environ, "WORKSPACE_NATIVE": form}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    return done.stdout + done.stderr


# -- which form runs -------------------------------------------------------------------------------------------


def test_the_python_form_runs_where_it_is_asked_for() -> None:
    """Nothing of the C++ form is loaded then."""
    code = "import sys, workspace; print(workspace.native.form(), 'workspace._native' in sys.modules)"
    assert interpreter(code, "0") == "Python False\n"


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Puts something else in the extension's place."""

    def put(module: Any) -> None:
        monkeypatch.delattr(workspace, "_native", raising=False)
        monkeypatch.setitem(sys.modules, "workspace._native", module)

    monkeypatch.delenv("WORKSPACE_NATIVE", raising=False)
    return put


def test_without_the_extension_the_python_form_runs(
    monkeypatch: pytest.MonkeyPatch, extension: Callable[[Any], None]
) -> None:
    """Unless the other is demanded, which is refused with the way to build it."""
    extension(None)
    assert native._bound() == {}
    monkeypatch.setenv("WORKSPACE_NATIVE", "1")
    with pytest.raises(ConfigError, match=r"(?s)cannot be loaded.*build_ext"):
        native._bound()


def test_an_extension_of_other_sources_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, extension: Callable[[Any], None]
) -> None:
    """It would look for slots that are gone."""

    def bind(given: Any, inlined: Any) -> Any:
        raise TypeError("<class 'Lease'> has no slot _t3")

    extension(SimpleNamespace(bind=bind))
    with pytest.warns(RuntimeWarning, match="other sources.*_t3"):
        assert native._bound() == {}
    monkeypatch.setenv("WORKSPACE_NATIVE", "1")
    with pytest.raises(ConfigError, match="other sources"):
        native._bound()


def test_a_wrong_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and value."""
    monkeypatch.setenv("WORKSPACE_NATIVE", "yes")
    with pytest.raises(ConfigError, match="WORKSPACE_NATIVE=yes"):
        native._bound()


def test_a_wrong_wish_is_refused_by_the_first_workspace() -> None:
    """And not by the import, which a command line could not catch."""
    code = "import workspace; print('imported'); workspace.create()"
    printed = interpreter(code, "yes").splitlines()
    assert printed[0] == "imported" and printed[-2].startswith("workspace.errors.ConfigError: WORKSPACE_NATIVE=yes")


def test_the_variable_is_no_setting() -> None:
    """A workspace's settings come from ``WORKSPACE_*``; this one is the process's."""
    assert config.load_config(env={"WORKSPACE_NATIVE": "0"}).config == config.WorkspaceConfig()


@cpp
def test_the_form_can_be_changed() -> None:
    """Also while leases are held: both forms keep their state in the same place."""
    _, ws = scene(steady=True)
    with running("c++"):
        assert native.form() == "C++" and not hasattr(Fork.__enter__, "__code__")
        lease = ws.acquire(BYTES, N=SLAB)
        lease.release()
        with ws.lease(BYTES, N=SLAB) as lease:
            native.use(False)
            assert native.form() == "Python" and hasattr(Fork.__enter__, "__code__") and lease.address
        assert lease.released


# -- the same in both forms --------------------------------------------------------------------------------------


@cpp
@pytest.mark.parametrize("strategy", [*STRATEGIES, *SETTINGS])
@pytest.mark.parametrize("seed", range(6))
def test_both_forms_make_the_same_calls(strategy: str, seed: int) -> None:
    """Every verb of the driver in order, every place, clock, count and verdict after a random program.

    In small slabs streams wait for each other's blocks, some of which are handed over; in a locked pool blocks are
    lent at other dims.
    """
    name, settings = strategy.partition(" in ")[0], SETTINGS.get(strategy, {})
    found = []
    for form in ("python", "c++"):
        with running(form):
            found.append(Program(name, seed, **settings).run())
    assert found[0] == found[1]


@cpp
@pytest.mark.parametrize("seed", range(4))
def test_both_forms_make_the_same_calls_in_a_capture(seed: int) -> None:
    """Forks of a stream that captures, to streams with and without a past, beside leases of before and inside."""
    found = []
    for form in ("python", "c++"):
        with running(form):
            found.append(CapturedProgram("event_fenced", seed).run(12))
    assert found[0] == found[1]


@cpp
def test_a_change_of_dims_stays_in_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks where C++ does not, and both leave the same. A size's first lease takes the long way in either."""
    looks: list[str] = []
    refit = lease_module.refit
    monkeypatch.setattr(lease_module, "refit", lambda *given: looks.append(native.form()) or refit(*given))
    states = []
    for form in ("python", "c++"):
        with running(form):
            _, ws = scene(steady=True)
            ws.declare(BYTES, N=SLAB)
            ws.reserve()
            ws.lock()
            for nbytes in (SLAB, 256, 512, 256, 512, 256):
                with ws.lease(BYTES, N=nbytes):
                    pass
            pool = pooled(ws).pool
            (block,) = pool._longer
            request, shelf, (used,) = block.request, block.shelf, pool._longer[block].values()
            assert request is not None and shelf is not None
            assert block.views == {request: block.lent} and block.first == (block.lent[0], None, None)
            (shelves,) = request.sizes.shelves.values()
            assert [one for one in shelves if one.blocks] == list(pool.shelves) == [shelf] and [*shelf] == [block]
            states.append((block.nbytes, block.epoch, used, request.dims, shelf.blocks))
            check_books(ws)
    assert looks == ["Python"] * 3 and states[0] == states[1]


@cpp
def test_a_difference_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same program with one wait less in one form."""
    with running("python"):
        whole = Program("event_fenced", 0).run()
        monkeypatch.setattr(Fork, "_join", lambda self, *arguments: None)
        assert Program("event_fenced", 0).run() != whole


@cpp
def test_a_method_that_is_replaced_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the C++ form calls inline it leaves to Python while it is not what it was, and takes up again after."""
    _, ws = scene(steady=True)
    streams = [ws.stream("one"), ws.stream("two")]
    joined: list[Any] = []
    join = Fork._join

    def fork() -> int:
        with ws.fork(*streams) as branch, branch(streams[0]):
            pass
        return len(joined)

    with running("c++"):
        assert fork() == 0
        monkeypatch.setattr(Fork, "_join", lambda self, *rest: (joined.append(rest), join(self, *rest)))
        assert fork() == 2
        monkeypatch.undo()
        assert fork() == 2


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize(("verb", "verdict"), [(None, "SAFE"), ("wait", "UNSAFE"), ("record", "UNSAFE")])
def test_a_fork_without_its_edges_is_caught(form: str, verb: str | None, verdict: str) -> None:
    """A driver that does nothing for a verb: in each form it is the device that orders, not the clocks."""
    device, ws = scene(steady=True)
    one = ws.stream("one")
    write(device, ws, "warm", SLAB, ws.stream("warm"))
    if verb is not None:
        setattr(ws.driver, verb, lambda *arguments: None)
    with running(form), ws.lease(BYTES, N=SLAB) as lease:
        device.launch("parent", writes=[lease.x])
        with ws.fork(one) as branch, branch(one):
            device.launch("branch", writes=[lease.x])
        device.launch("after", reads=[lease.x])
    assert device.verdict() == verdict


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("strategy", ["caching", "upstream"])
def test_a_lazy_lease_released_in_the_middle_of_an_acquire(form: str, strategy: str) -> None:
    """By a finaliser that interrupts its own thread: the tensors go back with the next acquire."""
    device, ws = scene(strategy, steady=True, allow_unsafe=True)
    with running(form):
        lease = ws.acquire(PAIR, T=4)
        lease.allocate()
        held = ws.strategy_object.allocated
        with ws.timeline.lock:
            lease.release()
            assert ws.strategy_object.allocated == held
        assert lease.released
        ws.acquire(PAIR, T=4).release()
        assert ws.strategy_object.allocated == 0


@pytest.mark.parametrize("form", BOTH)
def test_an_allocation_that_fails_keeps_what_was_made(form: str) -> None:
    """And counts it; the lease stays usable, and the error arrives."""
    _, ws = scene("caching", steady=True)
    empty, left = ws.driver.empty, [2]

    def failing(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise DriverError("out of order", "repair")
        return empty(*arguments)

    with running(form), ws.lease(WIDE, T=2) as lease:
        ws.driver.empty = failing
        with pytest.raises(DriverError, match="out of order"):
            lease.allocate()
        assert ws.strategy_object.allocated == 2 * 64
        ws.driver.empty = empty
        assert len(lease.allocate()) == 5 and ws.strategy_object.allocated == 5 * 64
    assert ws.strategy_object.allocated == 0


# -- references ----------------------------------------------------------------------------------------------------


LARGE = Layout("large", a=spec("T", dtype=torch.uint8))
FULL = 2 << 20
"""Bytes of a slab, so that two streams have one block of `LARGE` between them."""


class Paths:
    """One workspace with everything the steady path does, and the ways it fails."""

    def __init__(self, strategy: str) -> None:
        self.device = Device(memory="virtual", log=False)
        self.ws = workspace.create(strategy, device=self.device, allow_unsafe=True)
        self.one, self.two = self.ws.stream("one"), self.ws.stream("two")

    def lease(self) -> None:
        with self.ws.lease(PAIR, T=4) as lease:
            lease.allocate()
            lease.allocate("a")
            lease.address  # noqa: B018  (read as a property)

    def fork(self) -> None:
        with self.ws.lease(PAIR, T=4) as lease, self.ws.fork(self.one, self.two) as branch:
            with branch(self.one):
                lease.allocate("b")
            with branch(self.two), self.ws.fork(self.one) as inner, inner(self.one):
                lease.allocate("a")

    def fence(self) -> None:
        for stream in (self.one, self.two):
            with self.ws.on(stream), self.ws.lease(LARGE, T=FULL):
                pass

    def capture(self) -> None:
        with self.ws.on(self.one), self.ws.capture() as capture, self.ws.fork(self.two) as branch:
            with branch(self.two):
                pass
        capture.graph.release()

    def wrong_name(self) -> None:
        with self.ws.lease(PAIR, T=4) as lease, pytest.raises(AttributeError):
            lease.allocate("c")

    def after_release(self) -> None:
        with self.ws.lease(PAIR, T=4) as lease:
            pass
        for call in (lease.allocate, lease.release):
            try:
                call()
            except LeaseReleased:
                pass

    def wrong_fork(self) -> None:
        try:
            with self.ws.on(self.one), self.ws.fork(self.one):
                pass
        except ForkError:
            pass
        try:
            with self.ws.fork(self.one) as branch, branch(self.two):
                pass
        except ForkError:
            pass

    def failing(self) -> None:
        for verb in ("record", "wait", "empty"):
            before = getattr(self.ws.driver, verb)
            setattr(self.ws.driver, verb, self._fail)
            try:
                with self.ws.lease(PAIR, T=4) as lease, self.ws.fork(self.one, self.two):
                    lease.allocate()
            except DriverError:
                pass
            finally:
                setattr(self.ws.driver, verb, before)

    def raising(self) -> None:
        try:
            with self.ws.lease(PAIR, T=4), self.ws.fork(self.one) as branch, branch(self.one):
                raise KeyError
        except KeyError:
            pass

    def _fail(self, *arguments: Any) -> None:
        raise DriverError("fails", "repair")


PATHS = ["lease", "fork", "fence", "wrong_name", "after_release", "wrong_fork", "failing", "raising"]


def references(paths: Paths) -> tuple[int, ...]:
    """Objects that the collector knows, and references to what every call touches."""
    for _ in range(10):
        if not gc.collect():  # what a finaliser lets go of, another test's too, is found by the next one
            break
    timeline = paths.ws.timeline
    kept = (
        None, 0, 3, PAIR, paths.ws, timeline, timeline.clocks, timeline.driver, timeline.lock, timeline.state.held,
        paths.one, paths.two, paths.ws.strategy_object, Fork, LazyLease, Timeline, *PAIR.resolve(T=4).extents,
    )  # fmt: skip
    return len(gc.get_objects()), *map(sys.getrefcount, kept)


@cpp
@pytest.mark.parametrize("strategy", ["caching", "event_fenced"])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_leaks(strategy: str, path: str) -> None:
    """Ten thousand rounds leave as many objects and references as a thousand."""
    cycles = 10_000 if path in ("lease", "fork") else 2_000
    objects, *kept = grown(strategy, getattr(Paths, path), cycles)
    # Fewer objects are what earlier tests have left to the collector; fewer references are one too many given back.
    assert objects < cycles // 10 and all(-cycles // 10 < one < cycles // 10 for one in kept), (objects, kept)


@cpp
def test_forks_in_captures_leak_nothing() -> None:
    """The simulated device remembers each capture: neither form leaves more than the other."""
    rounds = 300
    python, native = (grown("event_fenced", Paths.capture, rounds, form) for form in ("python", "c++"))
    assert all(abs(one - other) < rounds // 10 for one, other in zip(python, native, strict=True)), (python, native)


@cpp
def test_a_leak_would_be_seen() -> None:
    """The control: a round that keeps one object."""
    kept: list[Any] = []
    assert grown("caching", lambda paths: (paths.lease(), kept.append([])), 2_000)[0] > 1_000


def grown(strategy: str, path: Callable[[Paths], Any], cycles: int, form: str = "c++") -> list[int]:
    """By how much each count of `references` grows over many rounds."""
    with running(form), torch.no_grad():
        paths = Paths(strategy)
        for _ in range(100):
            path(paths)
        before = references(paths)
        for _ in range(cycles):
            path(paths)
        return [late - early for early, late in zip(before, references(paths), strict=True)]


@cpp
@pytest.mark.slow
def test_everything_passes_on_the_python_form_as_well() -> None:
    """The core's tests and the contract, with their controls, in an interpreter that does not load the C++ form."""
    code = (
        "import pytest, sys; sys.exit(pytest.main(['-q', '-n0', '-p', 'no:cacheprovider', 'tests/workspace', "
        "'tests/contract']))"
    )
    assert " passed" in (printed := interpreter(code, "0")) and " failed" not in printed and " error" not in printed


@cpp
@pytest.mark.parametrize("what", ["lease", "fork"])
def test_what_is_no_stream_is_refused(what: str) -> None:
    """Where a stream was put out of its place, neither form reads it as one. What is held ends when it is back."""
    ws = workspace.create("caching", device="cpu")
    other = ws.stream("other")
    held = ws.timeline.state.held.holdings()
    with torch.no_grad():
        if what == "lease":
            lease = ws.acquire(PAIR, T=4)
            stream, lease.stream = lease.stream, 5
            with pytest.raises((TypeError, AttributeError)):
                lease.release()
            lease.stream = stream
            lease.release()
        else:
            fork = ws.fork(other)
            fork.__enter__()
            branches, fork._branches = fork._branches, (5,)
            with pytest.raises((TypeError, AttributeError)):
                fork.__exit__(None, None, None)
            fork._branches = branches
            fork.__exit__(None, None, None)
    assert ws.timeline.state.held.holdings() == held
