"""The facade: what model code holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from workspace import argument, watching
from workspace.block import Block
from workspace.capturing import GraphCapture
from workspace.config import WorkspaceConfig
from workspace.driver import Driver
from workspace.errors import (
    CapacityError,
    CaptureError,
    GradModeError,
    GraphError,
    LateUse,
    LayoutError,
    LockError,
    ProcessError,
    SleepError,
    StreamError,
    WorkspaceError,
)
from workspace.event import WorkspaceEvent
from workspace.explain import Reason
from workspace.fork import Branch, Fork
from workspace.graph import Graph
from workspace.layout import ALIGNMENT, Layout, Resolved, TensorSpec, round_up
from workspace.lease import IDLE, Lease
from workspace.pool import named
from workspace.provider import WorkspaceProvider
from workspace.refit import Sizes
from workspace.request import Request
from workspace.reservation import Reservation
from workspace.single import Persistent, Single, fake_mode, lend_single
from workspace.sleep import put_to_sleep, wake_up
from workspace.snapshot import Snapshot, take_snapshot
from workspace.staging import Staging
from workspace.streams import CURRENT, Stream
from workspace.timeline import Timeline

new_object = object.__new__


def _finish(timeline: Timeline, persistent: Persistent, strategy: WorkspaceProvider | None) -> None:
    """Give back what a dropped workspace held; uses of its slabs cannot be awaited while a capture is open."""
    if timeline.captures:
        timeline.deferred.append(partial(_finish, timeline, persistent, strategy))
        timeline.refresh()
        return
    persistent.clear()
    if strategy is not None:
        strategy.close()


def _described(tensor: Any, address: int) -> str:
    """A tensor as its owner may recognise it."""
    return f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.dtype} at {address:#x}"


Result = TypeVar("Result")

REQUESTS_KEPT = 2048
"""Resolved requests remembered; token counts of a long run would otherwise pile up."""


class Workspace:
    """Scratch for model code, under the strategy the config chose. Made by `workspace.create`.

    Thread-safe; a lease belongs to the thread that acquired it. Streams: an omitted ``stream=`` means the caller's
    current stream, an explicit None is refused.

    Attributes
    ----------
    strategy
        Name of the strategy.
    provider
        The strategy in its adaptors.
    config
        The settings.
    closed
        Whether `close` has been called.
    asleep_since
        Where `sleep` was called, empty while the workspace is awake.
    driver, device
        The seam, and the device tensors land on (a `workspace.simulated.Device`, or a `torch.device`).
    """

    def __init__(
        self,
        timeline: Timeline,
        strategy: WorkspaceProvider,
        provider: WorkspaceProvider,
        config: WorkspaceConfig,
        device: Any,
        child: Callable[[str, Workspace], Workspace],
        name: str = "",
        root: Workspace | None = None,
    ) -> None:
        self.timeline = timeline
        self.strategy_object = strategy
        self.provider = provider
        self.config = config
        self.device = device
        self.name = name
        self.attributes = timeline.driver.attributes or config.strict_streams
        self.direct = provider is strategy and not self.attributes
        self.band = round_up(config.guard, ALIGNMENT)
        self.singles: dict[int, Single] = {}
        self.children: dict[str, Workspace] = {}
        self._child = child
        self._key = object()
        self._requests: dict[tuple[Any, ...], Request] = {}
        self._resolved: dict[tuple[Resolved, bool], Request] = {}
        self._sizes: dict[Layout, Sizes] = {}
        # With those that were forgotten: layouts, and leases that somebody keeps, name them still.
        self._every_request: weakref.WeakSet[Request] = weakref.WeakSet()
        self._single_layouts: dict[tuple[Any, ...], Layout] = {}
        self._root = root  # the workspace whose provider an owner shares
        self._reservation = Reservation() if root is None else root.reservation
        self._persistent = Persistent(self)
        # Dropped without close(): uses may be unfinished, so slabs and buffers go only once they are over. A provider
        # that is the root's is the root's to close.
        finish = partial(_finish, timeline, self._persistent, strategy if root is None else None)
        weakref.finalize(self, timeline.later, finish).atexit = False
        self._stagings: dict[str, Staging] = {}
        self._locked = False
        self.asleep_since = ""
        self.closed = False

    def __repr__(self) -> str:
        return f"<workspace {self.name or 'root'}: {self.strategy} on {self.driver.name}>"

    @property
    def strategy(self) -> str:
        return self.provider.name

    @property
    def driver(self) -> Driver:
        return self.timeline.driver

    # -- scratch ---------------------------------------------------------------------------------------------
    if TYPE_CHECKING:

        def lease(self, layout: Layout, /, *, stream: object = ..., zero: bool = ..., **dims: int) -> Lease: ...

    else:
        # Without keyword defaults, which every steady lease would pay for.
        def lease(self, layout, /, **dims):
            """A lease of a layout, acquired by ``with``.

            Parameters
            ----------
            layout
                What to lease.
            stream
                Where the first work on the bytes goes; omitted, the stream current at the acquire.
            zero
                Fill with zeros on that stream, also at each replay of a capture. Otherwise contents are unspecified.
            **dims
                A value for each dim of the layout.

            Raises
            ------
            LayoutError, SizeError
                Dims are missing, unknown, negative or overflow.
            StreamError
                The stream is None or of another device.
            CapacityError
                It does not fit and growth is not allowed; nothing has changed.
            CaptureError
                Inside a capture, and not reserved before.
            GradModeError
                Autograd records and ``allow_grad`` is off.
            """
            # The layers of a step lease a layout at the same dims, one after the other.
            try:
                request = layout.latest
            except AttributeError:
                argument.layout(layout)
                raise
            if request is None or request.dims != dims or request.key is not self._key:
                request = self._known(layout, dims)
                if request is None:
                    return self._lease(layout, **dims)
                layout.latest = request
            for value in dims.values():
                if type(value) is not int:  # 2.0 equals 2, and True 1: refused by name
                    return self._lease(layout, **dims)
            # What `Lease.of` does, without the call.
            lease = new_object(request.lease_type)
            lease.request = request
            lease.workspace = self
            lease._state = IDLE
            return lease

    def _known(self, layout: Layout, dims: dict[str, Any]) -> Request | None:
        """The request of a layout and dims that have been leased before."""
        try:
            request = self._requests[(layout, *dims.values())]
        except (KeyError, TypeError):  # not yet known; or an unhashable dim, which `_request` refuses by name
            return None
        # The key holds the values only: the names are compared.
        return request if request.dims == dims else None

    def _lease(self, layout: Layout, /, *, stream: object = CURRENT, zero: bool = False, **dims: int) -> Lease:
        """A lease that is not yet known, or has a stream or zeros asked for."""
        lease = Lease.of(self._request(layout, zero, dims), self)
        if stream is None:
            raise StreamError("stream=None", "omit the argument for the caller's current stream, or pass a stream")
        return lease if stream is CURRENT else lease.on(stream)

    def acquire(self, layout: Layout, /, *, stream: object = CURRENT, zero: bool = False, **dims: int) -> Lease:
        """As `lease`, acquired at once; the caller releases."""
        return self._lease(layout, stream=stream, zero=zero, **dims).__enter__()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, owner: str = "empty") -> Any:
        """One tensor on the current stream whose bytes return when its storage dies, views included.

        Costs about a ``torch.empty``: for accounting and lifetime, not for speed. Uses on other streams are declared
        with `use`.
        """
        argument.shape(shape)
        argument.dtype(dtype)
        self.check_open(self.owned(owner))
        if torch.is_grad_enabled():
            self._refuse_grad()
        watching.tell(self)
        return lend_single(self, shape, dtype, owner)

    def persistent(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """A buffer of that name for the life of the workspace, zeroed once when made, at a stable address.

        The first request blocks the host until it is zero, and is refused inside a capture.
        """
        self.check_open()
        argument.name("name", name)
        argument.shape(shape)
        argument.dtype(dtype)
        watching.tell(self)
        return self._persistent.get(name, shape, dtype)

    def staging(self, name: str, nbytes: int, *, slots: int = 2) -> Staging:
        """Pinned host memory of that name: a ring of slots for copies to the device that the host does not wait for.

        A slot is filled again only when the copies out of it are over; see `Staging.fill`. It lives as long as the
        workspace, asleep or awake.

        Parameters
        ----------
        nbytes
            Size of each slot, the same for each call of the name.
        slots
            How many copies may be under way before the host waits for the oldest.
        """
        self.check_open()
        argument.name("name", name)
        argument.integer("nbytes", nbytes, least=1)
        argument.integer("slots", slots, least=1)
        with self.timeline.lock:
            found = self._stagings.get(name)
            if found is None:
                found = self._stagings[name] = Staging(self.timeline, name, nbytes, slots)
            if (found.nbytes, found.slots) != (nbytes, slots):
                raise LayoutError(f"{found!r} is asked for as {slots} of {nbytes}", "use one size for each name")
        return found

    def _request(self, layout: Layout, zero: bool, dims: dict[str, int]) -> Request:
        argument.layout(layout)
        self.check_open(self.owned(layout.name))
        resolved = layout.resolve(**dims)
        found = self._resolved.get((resolved, zero))
        if found is None:
            if len(self._resolved) >= REQUESTS_KEPT:
                self._resolved.clear()
                self._requests.clear()
                self._sizes.clear()
            found = Request(resolved, self.owned(layout.name), self, self._key, zero=zero, band=self.band)
            self._resolved[resolved, zero] = found
            with self.timeline.lock:
                self._every_request.add(found)
        if not zero:
            self._requests[(layout, *dims.values())] = found
        return found

    def sizes(self, layout: Layout) -> Sizes:
        """Shelves of a layout's requests, whatever their dims."""
        return self._sizes.setdefault(layout, Sizes())

    def single_request(self, shape: tuple[int, ...], dtype: torch.dtype, owner: str) -> Request:
        """The request behind `empty`, one for each (shape, dtype, owner)."""
        argument.name("owner", owner)
        key = shape, dtype, owner
        layout = self._single_layouts.get(key)
        if layout is None:
            if len(self._single_layouts) >= REQUESTS_KEPT:
                self._single_layouts.clear()
            layout = self._single_layouts[key] = Layout(owner, tensor=TensorSpec(shape, dtype))
        return self._request(layout, False, {})

    def owned(self, owner: str) -> str:
        """The name bytes are accounted under."""
        return f"{self.name}/{owner}" if self.name else owner

    # -- called by leases --------------------------------------------------------------------------------------
    def lends_fake(self, lease: Lease) -> bool:
        """Refusals of an acquire; under FakeTensor the lease gets fake tensors (True)."""
        self.check_open(lease.request.owner)
        if fake_mode():
            device = self.driver.device
            fakes = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in lease.request.extents]
            lease.lend(fakes, self.timeline.current())
            return True
        if torch.is_grad_enabled():
            self._refuse_grad()
        watching.tell(self)  # a lease inside `with device:` takes the long way, as under every mode of torch
        return False

    def _refuse_grad(self) -> None:
        if not self.config.allow_grad:
            raise GradModeError(
                "a lease is asked for while autograd records: its bytes would be reused under saved tensors",
                "run under torch.no_grad() or torch.inference_mode(), or set allow_grad=true",
            )

    def asked(self, stream: object) -> Stream:
        """The stream an acquire named."""
        return self.timeline.inside(self.timeline.of(stream))

    def placed(self, lease: Lease, block: Block) -> None:
        """The uncommon part of a placement: attribution, zeroing, strict streams."""
        request = lease.request
        if self.driver.attributes:
            # An unsafe strategy lends bytes to several leases at once: none of them is an earlier one.
            tensors = block.views.get(request) if self.provider.safe else None
            self.driver.owner_of(block.address, block.nbytes, request.owner, tensors)
        if request.zero and request.payload:
            address = block.address + request.start(block.address)
            self.timeline.call(self.driver.memset, address, request.payload, 0, lease.stream.key)
        if self.config.strict_streams:
            lease.uses = {}

    def await_works(self, lease: Lease, works: list[Any]) -> None:
        """Wait, on the acquiring stream, for the collectives a lease was given to: for all, also when one fails.

        What failed is left to the lease, for the next release; its error is raised, and the lease stays held.
        """
        failed: list[tuple[Any, BaseException]] = []
        with Branch(self.timeline, lease.stream.key):  # also of a self in a capture that has ended
            for work in works:
                try:
                    work.wait()
                except BaseException as error:  # whatever a backend raises: the others are waited for all the same
                    failed.append((work, error))
        if failed:
            lease._works = [work for work, _ in failed]
            raise failed[0][1]

    # -- streams ---------------------------------------------------------------------------------------------
    def stream(self, name: str, *, communication: bool = False) -> Stream:
        """The stream of that name on this device, created at first use and never destroyed.

        `communication`: work on it may spin until another stream makes progress; a fence then never waits for more
        of it than it must.
        """
        argument.name("stream", name)
        return self.timeline.named(name, communication)

    def on(self, stream: object) -> Branch:
        """Make a stream current for a ``with`` block. Orders nothing: use `fork` or an event for that.

        What it returns remembers the stream to go back to: it may be entered again, by one thread at a time.
        """
        return Branch(self.timeline, self.timeline.of(stream).key)

    def fork(self, *streams: Stream) -> Fork:
        """Fork the current stream to others, and join them on exit; see `Fork`.

        Without streams nothing is forked: where side streams are a setting, their list may be empty.
        """
        return Fork(self.timeline, self.timeline.all_of(streams))

    def event(self) -> WorkspaceEvent:
        """An event whose order every workspace of the device knows."""
        return WorkspaceEvent(self.timeline)

    def synchronize(self, stream: object = CURRENT) -> None:
        """Block the host until a stream, or omitted the device, is idle; its bytes may then go to any stream."""
        self.timeline.synchronize(None if stream is CURRENT else self.timeline.of(stream))

    def use(self, bytes_of: Any, stream: object) -> None:
        """Declare that a stream uses a lease, or the lease or single tensor behind a tensor.

        Raises `LateUse` when no live lease of the calling thread, and no single tensor, holds those bytes.
        """
        if isinstance(bytes_of, Lease):
            bytes_of.use(stream)
            return
        argument.memory("a use of", bytes_of)
        with self.timeline.lock:
            target = self.timeline.inside(self.timeline.of(stream))
            holding = self._holding(bytes_of)
            if holding is None:
                if bytes_of.numel():
                    self._use_memory(bytes_of, target)
            elif isinstance(holding, Lease):
                holding.use(target)
            else:
                self._use_single(holding, target)

    def _use_single(self, single: Single, target: Stream) -> None:
        if target.exact and not target.communication:
            raise StreamError(
                f"a single tensor is used on {target!r}, a stream the library does not own",
                "use a scoped lease there: its last use is recorded at release, before the handle can be destroyed",
            )
        if target.capture is not None and single not in target.capture.kept:
            single.pin()
            target.capture.kept.append(single)
        single.declare(target)

    def _use_memory(self, tensor: Any, target: Stream) -> None:
        """A tensor of the framework's allocator, which a graph keeps as a whole."""
        if target.capture is not None:
            target.capture.memory.append(tensor)
        elif tensor.numel() and not self.timeline.call(self.driver.record_use, tensor, target.key):
            raise LateUse(
                f"a use of {_described(tensor, self.driver.address_of(tensor))} is declared, whose bytes the device's "
                "allocator did not hand out",
                "declare uses of leases and of the device's own tensors, in the thread that acquired the lease",
            )

    def _holding(self, tensor: Any) -> Lease | Single | None:
        """What lends the tensor's bytes; None when they are the framework allocator's own, or there are none."""
        address = self.driver.address_of(tensor)
        for lease in self.timeline.state.held.holdings():
            if isinstance(lease, Lease) and lease.covers(address, tensor):
                return lease
        for single in self.singles.values():
            if single.address <= address < single.address + single.nbytes:
                return single
        if not tensor.numel() or not self.provider.lends_tensors:
            return None
        raise LateUse(
            f"a use of {_described(tensor, address)} is declared, and no live lease of this thread holds it",
            "declare uses before the release, in the thread that acquired the lease",
            address=address,
        )

    def until(self, work: Any) -> None:
        """Release the leases this thread holds only after ``work.wait()`` on their streams."""
        argument.work(work)
        leases = [lease for lease in self.timeline.state.held.holdings() if isinstance(lease, Lease)]
        if not leases:
            raise LateUse("until(work) finds no lease held by this thread", "call it before the release")
        for lease in leases:
            lease.until(work)

    # -- captures ----------------------------------------------------------------------------------------------
    def capture(self, lane: str | None = None) -> GraphCapture:
        """Capture the current stream's work into a graph; see `GraphCapture`. The default stream cannot be captured.

        `lane` (omitted: the thread's slot): graphs of a lane share one footprint, so their replays must not interleave.
        """
        self.check_open()
        return GraphCapture(self.timeline, self.provider, self._lane(lane))

    def _lane(self, lane: str | None) -> str:
        """The lane a caller names, omitted: the thread's."""
        if lane is None:
            return self.timeline.state.lane
        argument.name("lane", lane)
        return lane

    def adopt(self, lane: str | None = None) -> Graph:
        """Inside a capture begun elsewhere: promise to replay it through the returned graph only.

        Its bytes may then be lent outside between replays. Raises `GraphError` when the stream does not capture.
        """
        timeline = self.timeline
        with timeline.lock:
            capture = timeline.current().capture
            if capture is None:
                raise GraphError("adopt() outside a capture", "call it inside the capture, before it ends")
            if not capture.foreign:
                raise GraphError("adopt() inside a capture of ws.capture", "its graph is `capture.graph`")
            return capture.adopt(self._lane(lane))

    @contextmanager
    def slot(self, *, lane: str | None = None, micro_batch: int | None = None) -> Iterator[None]:
        """The calling thread's slot for a ``with`` block, resolved at each acquire and capture.

        A micro-batch is to leases what a thread is: those taken in one belong to it, and a fork in it declares its
        branches for these only, also when one host thread interleaves several micro-batches. A fork's join covers what
        a branch leases in the slot that ``branch(stream)`` was called in: change the slot before, not inside.
        """
        if micro_batch is not None:
            argument.integer("micro_batch", micro_batch, least=0)
            if micro_batch >= self.config.micro_batches:
                raise LockError(
                    f"micro_batch={micro_batch} of {self.config.micro_batches}", "raise the setting `micro_batches`"
                )
        state = self.timeline.state
        before = state.lane, state.micro_batch
        state.enter(self._lane(lane), micro_batch if micro_batch is not None else before[1])
        try:
            yield
        finally:
            state.enter(*before)

    # -- size ------------------------------------------------------------------------------------------------
    def declare(
        self, layout: Layout, /, *, phase: str | None = None, lane: str | None = None, count: int = 1, **dims: int
    ) -> None:
        """Declare the largest dims a layout will be leased at; `reserve` holds bytes for all that is declared.

        Parameters
        ----------
        phase
            Leases of different phases never live together; without one, a lease lives beside all phases.
        lane
            The lease is taken inside captures of this lane.
        count
            How many leases of it live at once, at least 1.

        Raises
        ------
        LockError
            The workspace is locked and holds less than would then be declared. Nothing has changed. What fits, and what
            was declared before, may be declared at any time.
        """
        argument.integer("count", count, least=1)
        for what, given in (("lane", lane), ("phase", phase)):
            if given is not None:
                argument.name(what, given)
        request = self._request(layout, False, dims)
        if self.locked:
            self._refuse_larger(self._reservation.with_one(request, lane=lane, phase=phase, count=count), request)
        self._reservation.add(request, lane=lane, phase=phase, count=count)
        if self.locked:
            self._place_by_declared()

    def _place_by_declared(self) -> None:
        """Declared after `lock`, it fits into what is held: from now on a pool is cut so that it still does."""
        pool = getattr(self.strategy_object, "pool", None)
        if pool is None:
            return
        with self.timeline.lock:
            self.provider.reserve(0, self._reservation.requests)
            if sum(self.provider.held().slabs) < self._reservation.side_by_side(**self._multiples):
                pool.crowd()

    def _refuse_larger(self, declared: Reservation, request: Request) -> None:
        """Of a pool that is locked: the bytes would not be there when the lease comes."""
        if getattr(self.strategy_object, "pool", None) is None:
            return
        with self.timeline.lock:
            held = sum(self.provider.held().slabs)
        asked = declared.nbytes(**self._multiples)
        if asked > max(held, self._reservation.nbytes(**self._multiples)):
            raise LockError(
                f"{request!r} is declared after lock(): with it {asked} bytes are declared, and {self!r} holds {held}",
                "declare before reserve() and lock(), or unlock() first, then reserve() and lock() again",
                owner=request.owner, asked=asked, capacity=held,
            )  # fmt: skip

    def reserve(self, *, spare: int = 0) -> int:
        """Hold the declared bytes, in one slab. Call before captures and before the KV cache is sized.

        Parameters
        ----------
        spare
            Bytes that may be held beyond those of the largest phase, if all that was declared then fits side by side:
            no block is cut anew for another layout, which takes longer than a short kernel.

        Returns
        -------
        int
            The declared bytes, the spare ones included; what is held for them, ``snapshot().reserved``, is a multiple
            of ``granularity``, and 0 under strategies that let the framework's allocator place each tensor.
        """
        argument.integer("spare", spare, least=0)
        timeline = self.timeline
        with timeline.lock:
            self.check_open()
            timeline.ready()
            if timeline.current().capture is not None:
                raise CaptureError("reserve() inside a capture", "reserve before the capture begins")
            sizes = self._multiples
            nbytes, beside = self._reservation.nbytes(**sizes), self._reservation.side_by_side(**sizes)
            if nbytes < beside <= min(nbytes + spare, self.config.capacity or beside):
                nbytes = beside
            if nbytes:
                self.provider.reserve(nbytes, self._reservation.requests)
                pool = getattr(self.strategy_object, "pool", None)
                if pool is not None:
                    pool.roomy = nbytes >= beside
            return nbytes + sum(child.reserve(spare=spare) for child in self._own_children())

    @property
    def _multiples(self) -> dict[str, Any]:
        """What declared bytes are multiplied by."""
        return {"micro_batches": self.config.micro_batches, "headroom": self.config.headroom}

    def lock(self) -> None:
        """Forbid growth from now on: a request that does not fit is refused. Twice is no error.

        Without effect under `caching` and `upstream`, which have no pool to grow. An owner that shares its workspace's
        strategy has no pool of its own: its lock is that of the workspace.
        """
        if self._root is not None:
            self._root.lock()
            return
        with self.timeline.lock:
            self._locked = True
            self.provider.lock(True)
            for child in self._own_children():
                child.lock()

    def unlock(self) -> None:
        """Allow growth again. Raises `LockError` while graphs exist: they hold addresses of what is reserved."""
        if self._root is not None:
            self._root.unlock()
            return
        self._await_graphs()
        with self.timeline.lock:
            self.timeline.settle_releases()
            graphs = self.graphs
            if graphs:
                raise LockError(f"unlock() while {graphs} graphs exist", "release the graphs first (Graph.release)")
            self._locked = False
            self.provider.lock(False)
            for child in self._own_children():
                child.unlock()

    @property
    def locked(self) -> bool:
        return self._locked if self._root is None else self._root.locked

    # -- sleep -----------------------------------------------------------------------------------------------
    def sleep(self) -> int:
        """Give the memory of all slabs back to the device until `wake`; returns the bytes. Twice is no error.

        Blocks the host until the device is idle. Contents are lost. Asleep, nothing is lent: acquires and replays raise
        `SleepError`. Persistent buffers, pinned staging memory, and slabs that a view of a released lease keeps alive
        stay; ``snapshot()`` lists them by name. Strategies without slabs have nothing to give back.

        With ``restorable`` set, slabs keep their addresses, and graphs are valid again after `wake`. Without, graphs
        that use bytes of the workspace are destroyed; with and without, so are those that read leases of before their
        capture. Replaying one is a `GraphError` from then on. Graphs that are replayed without the library's knowledge
        must not be replayed while the workspace sleeps.

        An owner that shares its workspace's strategy puts that workspace to sleep; owners with strategies of their own
        sleep with their workspace. Where the device fails half-way, the workspace is asleep with what memory is left,
        which another `sleep` gives back.

        Raises
        ------
        SleepError
            Leases, single tensors or replays are under way, a capture is open, or a graph would lose its bytes whose
            replay the library cannot refuse. Nothing has changed.
        """
        if self._root is not None:
            return self._root.sleep()
        if self.closed:
            raise WorkspaceError(f"{self!r} is closed", "create another")
        self._await_graphs()
        return put_to_sleep(self._everybody())

    def wake(self) -> int:
        """Take as much memory as `sleep` gave back; returns the bytes. Of a workspace that is awake, no error.

        Raises
        ------
        CapacityError
            The device has not got as much (`OutOfMemory`); the workspace sleeps on, as after any other failure.
        CaptureError
            The current stream captures.
        """
        return wake_up(self._everybody()) if self._root is None else self._root.wake()

    @property
    def asleep(self) -> bool:
        """Whether it sleeps, with the workspace whose strategy it shares."""
        return bool(self.asleep_since) if self._root is None else self._root.asleep

    def check_open(self, owner: str = "") -> None:
        """Raise what stands against lending anything to an owner, `SleepError` while asleep."""
        if self.closed:
            raise WorkspaceError(f"{self!r} is closed", "create another")
        if self.timeline.refusal is not None:
            raise self.timeline.refusal
        if self.asleep:
            since = self._sleeping_since()
            with self.timeline.lock:
                self.timeline.explanations.asleep(owner or repr(self), since)
            asks = f"{owner} asks {self!r}, which" if owner else repr(self)
            raise SleepError(f"{asks} is asleep since {since}", "call ws.wake() first", since=since)

    def _sleeping_since(self) -> str:
        return self.asleep_since if self._root is None else self._root._sleeping_since()

    def buffers(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of persistent buffers, and of pinned memory, by name; those of owners included."""
        persistent = {self.owned(name): nbytes for name, nbytes in self._persistent.held().items()}
        staging = {self.owned(name): one.nbytes * one.slots for name, one in self._stagings.items()}
        for child in self.children.values():
            if not child.closed:
                for found, more in zip((persistent, staging), child.buffers(), strict=True):
                    found.update(more)
        return persistent, staging

    def forget_requests(self) -> None:
        """Make every lease take the long way, once, to learn whether it may begin."""
        for request in self._every_request:
            request.direct = False
            request.resolved.layout.latest = None
            if not request.nbytes:
                request.shelves.clear()  # what no provider knows of is on them
        self._resolved.clear()
        self._requests.clear()
        self._sizes.clear()

    def trim(self) -> int:
        """Give idle slabs back to the framework's allocator and empty its cache; returns the bytes given back."""
        with self.timeline.lock:
            self.timeline.settle_releases()
            if self.timeline.captures:
                return 0
            freed = (0 if self.asleep else self.provider.trim()) + sum(child.trim() for child in self._own_children())
            self.timeline.call(self.driver.trim)
            return freed

    def retry_on_oom(self, function: Callable[[], Result]) -> Result:
        """Call a function; when it runs out of memory, trim and call it once more."""
        argument.function(function)
        try:
            return function()
        except (torch.OutOfMemoryError, CapacityError):
            self.trim()
        return function()

    # -- seeing ----------------------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """What the workspace holds now."""
        with self.timeline.lock:
            self.timeline.settle_releases()
            return take_snapshot(self)

    def explain(self, count: int = 10) -> list[tuple[Reason, int]]:
        """The most frequent fences, growths and refusals by pair of call sites, with the missing edge.

        Where a request fences often, one call site in eight is looked up and stands for the others.
        """
        argument.integer("count", count, least=0)
        with self.timeline.lock:
            return self.timeline.explanations.top(count)

    # -- owners and end ----------------------------------------------------------------------------------------
    def owner(self, name: str) -> Workspace:
        """The workspace of one owner, on the same timeline; its own strategy where the setting `owners` names one.

        An owner may have owners in turn: what it leases there is accounted under both names, as ``"model/attention"``.
        """
        self.check_open()
        argument.name("owner", name)
        with self.timeline.lock:
            found = self.children.get(name)
            if found is None or found.closed:
                found = self.children[name] = self._child(name, self)
                if self.locked and found.provider is not self.provider:
                    found.lock()
        return found

    def close(self) -> None:
        """Give everything back, its owners' too. Twice is no error.

        An owner that shares its workspace's strategy gives back its persistent buffers; the pool stays the workspace's.
        ``ws.owner`` makes another of that name.

        Raises `LockError` while leases, single tensors or graphs of this workspace exist; nothing is closed then. Under
        `caching` and `upstream` tensors are the leases' own: the workspace is closed all the same, an owner is not.
        """
        if self.closed:
            return
        self._await_graphs()
        self._give_up_waiting()
        with self.timeline.lock:
            self.timeline.settle_releases()
            for one in self._everybody():
                one._check_idle()
            self._end()

    def _give_up_waiting(self) -> None:
        """Collectives that are gone for good, as no wait for them has succeeded, are over once the device is idle."""
        timeline = self.timeline
        with timeline.lock:
            timeline.settle_releases()
            providers = {id(one.provider) for one in self._everybody()} if self._root is None else set()
            stuck = [lease for lease in timeline.unwaited if id(lease.workspace.provider) in providers]
        if stuck and timeline.synchronize():
            with timeline.lock:
                for lease in stuck:
                    if lease in timeline.unwaited:
                        lease._waited()
                        timeline.unwaited.remove(lease)

    def _await_graphs(self) -> None:
        """Graphs released a moment ago may be under way still, and the driver says late that they are gone."""
        with self.timeline.lock:
            self.timeline.settle_releases()
            some = any(one.graphs for one in self._everybody() if one._root is None)
        if some:
            self.timeline.call(self.driver.settle)

    def _end(self) -> None:
        for child in self.children.values():
            child._end()
        self._persistent.clear()
        for staging in self._stagings.values():
            staging.close()
        self._stagings.clear()
        if self._root is None:
            self.provider.close()
        self.closed = True
        for request in self._every_request:
            request.resolved.layout.latest = None
            request.shelves.clear()  # what no provider knows of is on them still

    @property
    def usable(self) -> bool:
        """Whether it can still lend: not closed, not in a forked child, and no sticky error of the device."""
        return not self.closed and self.timeline.refusal is None

    @property
    def graphs(self) -> int:
        """Number of graphs that exist and use bytes of this workspace."""
        return sum(id(self.provider) in pins.providers for pins in self.timeline.pins)

    def _own_children(self) -> list[Workspace]:
        """Workspaces of owners with a strategy of their own, also of owners that share this one's provider."""
        found: list[Workspace] = []
        for child in self.children.values():
            if child.provider is self.provider:
                found += child._own_children()
            elif not child.closed:
                found.append(child)
        return found

    def _everybody(self) -> list[Workspace]:
        """This workspace, and every one below it with a strategy of its own."""
        return [self, *(one for child in self._own_children() for one in child._everybody())]

    def _check_idle(self) -> None:
        captures = [one.name for one in self.timeline.captures.values() if self.provider in one.providers]
        lanes: list[str] = getattr(self.strategy_object, "under_way", list)()  # also between a capture's segments
        if captures or lanes:
            what = f"{', '.join(captures)} is open" if captures else f"lane {', '.join(lanes)} is under way"
            raise LockError(f"close() of {self!r} while {what}", "close it after the capture or the replay has ended")
        held, graphs = self.provider.held().allocated if self.provider.lends_tensors else 0, self.graphs
        owners = {owner: one.allocated for owner, one in take_snapshot(self).owners.items() if one.allocated}
        if self._root is not None:
            owners = {owner: nbytes for owner, nbytes in owners.items() if owner.startswith(f"{self.name}/")}
            held, graphs = sum(owners.values()), 0
        found = [f"{graphs} graphs exist"] if graphs else []
        if held:
            found.append(f"{held} bytes are on lease{named(owners)}")
        if found:
            raise LockError(
                f"close() of {self!r} while {' and '.join(found)}", "release leases, single tensors and graphs first"
            )

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()

    def __reduce__(self) -> Any:
        raise ProcessError(
            "a workspace cannot be pickled or copied: it holds device memory of this process",
            "pass its config, and call workspace.create(config=...) there; modules keep a workspace.Handle",
        )

    @property
    def reservation(self) -> Reservation:
        """What is declared, by this workspace and the owners that share its provider."""
        return self._reservation
