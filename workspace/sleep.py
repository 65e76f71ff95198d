"""Sleep: a workspace gives its memory back to the device, and takes as much again when it wakes.

What is asleep lends nothing. With ``restorable`` slabs graphs live through it, because addresses stay reserved while
there is no memory behind them; otherwise those whose bytes go are destroyed, and say so when they are replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workspace.errors import CaptureError, GraphError, SleepError, WorkspaceError
from workspace.explain import call_site
from workspace.holding import Footprint
from workspace.lazy import LazyLease
from workspace.lease import Lease
from workspace.single import Single
from workspace.snapshot import take_snapshot

if TYPE_CHECKING:
    from workspace.holding import Pinnable
    from workspace.pins import Pins
    from workspace.timeline import Timeline
    from workspace.workspace import Workspace


@runtime_checkable
class Sleeper(Protocol):
    """What a strategy with slabs offers beside `WorkspaceProvider`; one without has no memory to give back.

    Every method is called with the timeline's lock held, outside captures.
    """

    def quiesce(self) -> int:
        """Take back what waits on shelves, so that no lease can begin without the lock; returns bytes on loan."""

    def sleep(self) -> int:
        """Give back the memory of all slabs that no graph and no tensor keeps; returns the bytes.

        The device is idle. Where it fails, the next call gives back what is left.
        """

    def wake(self) -> int:
        """Take as much again; returns the bytes. Raises `CapacityError`; `sleep` then gives back what it has taken."""


def put_to_sleep(workspaces: list[Workspace]) -> int:
    """See `Workspace.sleep`. All that are awake or, where one is refused, none."""
    timeline = workspaces[0].timeline
    with timeline.lock:
        timeline.ready()
        timeline.settle_releases()
        # Those that are asleep and hold memory still: a sleep has failed half-way, or somebody viewed a slab then.
        awake = [ws for ws in workspaces if not ws.closed and not (ws.asleep and not _holds_memory(ws))]
        return _put_to_sleep(awake, timeline) if awake else 0


def _holds_memory(ws: Workspace) -> bool:
    return isinstance(ws.strategy_object, Sleeper) and bool(ws.strategy_object.held().slabs)


def _put_to_sleep(workspaces: list[Workspace], timeline: Timeline) -> int:
    if timeline.captures:
        names = ", ".join(sorted(capture.name for capture in timeline.captures.values()))
        raise SleepError(f"sleep() while {names} is open", "sleep before captures begin or after they have ended")
    if any(isinstance(one, Footprint) for one in timeline.state.held.holdings()):
        # A strategy without lanes shows no other sign of it.
        raise SleepError("sleep() in an eager break of a capture or a replay", "sleep after it has ended")
    doomed = {pins: ws for ws in workspaces for pins in _doomed(ws)}
    timeline.synchronize()
    site = call_site()
    for pins, ws in doomed.items():
        _invalidate(pins, ws, site)
    if doomed:
        timeline.call(timeline.driver.settle)
        timeline.settle_releases()
    for ws in workspaces:
        # Before the memory goes: of what a failure leaves half-way nothing is lent, and another sleep() gives the rest.
        ws.asleep_since = ws.asleep_since or site
        for pins in _pins(ws):
            pins.sleeping[id(ws.provider)] = f"{ws!r} (since {site})"
        for one in _sharing(ws):
            one.forget_requests()
    given = _give_back(workspaces)
    timeline.call(timeline.driver.trim)
    return given


def _give_back(workspaces: list[Workspace]) -> int:
    return sum(ws.strategy_object.sleep() for ws in workspaces if isinstance(ws.strategy_object, Sleeper))


def wake_up(workspaces: list[Workspace]) -> int:
    """See `Workspace.wake`. All that are asleep or none."""
    timeline = workspaces[0].timeline
    with timeline.lock:
        timeline.ready()
        asleep = [ws for ws in workspaces if not ws.closed and ws.asleep]
        if asleep and timeline.current().capture is not None:
            raise CaptureError("wake() inside a capture", "wake before the capture begins")
        return _wake_up(asleep) if asleep else 0


def _wake_up(workspaces: list[Workspace]) -> int:
    try:
        taken = sum(ws.strategy_object.wake() for ws in workspaces if isinstance(ws.strategy_object, Sleeper))
    except BaseException as error:  # an interrupt, too: it sleeps on, and holds nothing of what was taken
        try:
            _lie_down(workspaces)
        except WorkspaceError as again:
            error.add_note(f"giving back what was taken failed, too: {again}")
        raise
    for ws in workspaces:
        ws.asleep_since = ""
        for pins in _pins(ws):
            pins.sleeping.pop(id(ws.provider), None)
    return taken


def _lie_down(workspaces: list[Workspace]) -> None:
    """After a wake that has failed. What is left of it the next sleep() gives back."""
    timeline = workspaces[0].timeline
    timeline.synchronize()
    _give_back(workspaces)
    if not timeline.captures:
        timeline.call(timeline.driver.trim)


def _sharing(ws: Workspace) -> Iterable[Workspace]:
    """The workspace, and the owners that share its strategy."""
    yield ws
    for child in ws.children.values():
        if child.provider is ws.provider:
            yield from _sharing(child)


def _pins(ws: Workspace) -> list[Pins]:
    return [pins for pins in ws.timeline.pins if id(ws.provider) in pins.providers]


def _doomed(ws: Workspace) -> list[Pins]:
    """What is pinned by graphs that the sleep must destroy. Raises `SleepError` where the workspace is in use."""
    pinned = _pins(ws)
    lanes: set[str] = {*getattr(ws.strategy_object, "under_way", list)()}
    lanes |= {graph.name for pins in pinned if (graph := pins.replayable()) is not None and graph.running}
    if lanes:
        raise SleepError(
            f"sleep() while a capture or a replay of lane {', '.join(sorted(lanes))} has begun and not ended",
            "sleep before it begins or after it has ended",
        )
    lent = _on_loan(ws, pinned)
    if lent:
        owners = _borrowers(ws)
        raise SleepError(
            f"sleep() of {ws!r} while {lent} bytes are on loan" + (f" to {', '.join(owners)}" if owners else ""),
            "release leases and drop single tensors first",
            allocated=lent, owners=owners,
        )  # fmt: skip
    if not isinstance(ws.strategy_object, Sleeper):
        return []
    doomed = [pins for pins in pinned if _reads_leases(pins, ws) or _loses_addresses(pins, ws)]
    for pins in doomed:
        if pins.replayable() is None:
            raise SleepError(
                "sleep() while there is a graph that may be replayed without the library's knowledge, which "
                + ("reads leases of before its capture" if _reads_leases(pins, ws) else "uses bytes that would go"),
                "release the graph first, or adopt it in its capture (ws.adopt)"
                + ("" if ws.config.restorable else ", or set restorable=true"),
            )
    return doomed


def _on_loan(ws: Workspace, pinned: list[Pins]) -> int:
    """Bytes on loan, without those that were released and that only graphs keep."""
    strategy = ws.strategy_object
    lent = strategy.quiesce() if isinstance(strategy, Sleeper) else ws.provider.held().allocated
    kept = {id(one): one for pins in pinned for one in pins.kept if one.parent is ws.provider}
    return lent - sum(_left_to_graphs(one) for one in kept.values())


def _left_to_graphs(one: Pinnable) -> int:
    if isinstance(one, Single):
        return one.block.nbytes if one.dead else 0
    if not isinstance(one, Lease) or not one.released:
        return 0
    if isinstance(one, LazyLease):
        return sum(one.request.extents[position].nbytes for homes in one._kept() for position in homes)
    return one._block.nbytes if one._block is not None else 0


def _borrowers(ws: Workspace) -> list[str]:
    """Owners of what is on loan, as far as anybody keeps them: the pool, statistics, or the calling thread."""
    counted = {owner for owner, held in take_snapshot(ws).owners.items() if held.allocated}
    held = ws.timeline.state.held.holdings()
    return sorted(counted or {one.owner for one in held if isinstance(one, Lease) and one.parent is ws.provider})


def _reads_leases(pins: Pins, ws: Workspace) -> bool:
    """Whether the graph may read leases of before its capture: a sleep loses their contents."""
    return any(one.parent is ws.provider for one in pins.kept)


def _loses_addresses(pins: Pins, ws: Workspace) -> bool:
    """Whether the graph uses bytes that come back at other addresses."""
    if ws.config.restorable:
        return False
    lanes = [lane for lane in pins.lanes if lane.parent is ws.strategy_object]
    return not lanes or any(lane.nbytes for lane in lanes)


def _invalidate(pins: Pins, ws: Workspace, site: str) -> None:
    """Destroy a graph, and leave word of it with its owner."""
    graph = pins.replayable()
    if graph is None:
        return  # dropped since
    if _reads_leases(pins, ws):
        problem = f"reads leases of before its capture, whose contents were lost in a sleep (at {site})"
        remedy = "capture it again after ws.wake()"
    else:
        problem = f"was captured before a sleep (at {site}) that gave its bytes away"
        remedy = "capture it again after ws.wake(), or set restorable=true"
    graph.refusal = GraphError, problem, remedy
    graph.release()
