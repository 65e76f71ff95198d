"""The two forms of the steady path: methods in Python, which are the reference, and in C++, where they are built.

The C++ methods (``csrc/workspace``) keep their state in the slots of the Python classes, do the steady case only, and
leave every other to the Python method they stand in for; so does each of them while a method that it calls inline is
not what it was. What is no method in C++ serves both forms: the timeline's lock, the streams' clocks, and the verbs of
CUDA's driver that every fork and fence makes. ``WORKSPACE_NATIVE=0`` keeps to the Python form, ``1`` refuses to do
without the other, when the first workspace is made.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from workspace import clocks, timeline
from workspace.block import Block, Shelf, Slab
from workspace.clocks import Clocks
from workspace.errors import ConfigError, DriverError, WorkspaceError
from workspace.explain import LOOKED_UP, ONE_IN, Explanations
from workspace.fork import Branch, Fork
from workspace.holding import Held, Holding
from workspace.layout import Extent, Layout
from workspace.lazy import LazyLease
from workspace.lease import FORKED, IDLE, PLAIN, Lease
from workspace.pool import Pool
from workspace.refit import Sizes
from workspace.request import Request
from workspace.slot import Slot
from workspace.strategies.caching import Caching
from workspace.strategies.upstream import Upstream
from workspace.streams import Event, Stream
from workspace.timeline import Timeline
from workspace.workspace import Workspace

_GIVEN: dict[str, Any] = {
    **{
        one.__name__: one
        for one in (
            *(
                Block,
                Branch,
                Caching,
                Clocks,
                Event,
                Extent,
                Fork,
                Holding,
                Layout,
                LazyLease,
                Lease,
                Pool,
                Request,
                Shelf,
                Sizes,
                Slab,
            ),
            *(Slot, Stream, Timeline, Upstream, Workspace, DriverError, WorkspaceError),
        )
    },
    "IDLE": IDLE,
    "PLAIN": PLAIN,
    "FORKED": FORKED,
    "LOOKED_UP": LOOKED_UP,
    "ONE_IN": ONE_IN,
    "modes": torch._C._len_torch_dispatch_stack,
    "grad_enabled": torch.is_grad_enabled,
}

_INLINED: dict[type, str] = {
    Timeline: "current record wait in_progress all_of of ordered fence fenceable _owed stream_of",
    Clocks: "record wait ordered",
    Fork: "__init__ _enclose _join _leave _still_held _encloses branches_of",
    Branch: "__init__",
    Held: "acquired_inside forks_around _behind",
    Lease: "forked unforked of _from_another_shelf _take",
    LazyLease: "forked unforked _receive _make _note _follow _keep _give_back",
    Request: "start positions keep",
    Pool: "largest refitted",
    Sizes: "take",
    Explanations: "fence",
    Caching: "place fresh received returned unordered",
    Upstream: "place fresh received returned",
}


def extension() -> Any:
    """The module in C++; None where it is not built, or not wanted."""
    if not _NATIVE:
        return None
    from workspace import _native

    return _native


_BUILD = "build it with a C++ compiler: python setup.py build_ext --inplace"


def _bound() -> dict[tuple[type, str], Any]:
    """The methods in C++; none where they are not built, or not wanted."""
    wanted = os.environ.get("WORKSPACE_NATIVE", "")
    if wanted not in ("", "0", "1"):
        raise ConfigError(
            f"WORKSPACE_NATIVE={wanted} is no form", "write 0 for the Python form, 1 to demand the one in C++"
        )
    if wanted == "0":
        return {}
    try:
        from workspace import _native

        return _native.bind(_GIVEN, [(owner, name) for owner, names in _INLINED.items() for name in names.split()])
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        stale = not isinstance(error, ImportError)
        problem = f"the C++ form {'was built for other sources' if stale else 'cannot be loaded'}: {error}"
        if wanted:
            raise ConfigError(f"WORKSPACE_NATIVE=1, and {problem}", _BUILD) from error
        if stale:
            warnings.warn(f"{problem}; {_BUILD}", RuntimeWarning, stacklevel=2)
        return {}


_NATIVE: dict[tuple[type, str], Any] = {}
_refusal: ConfigError | None = None
try:
    _NATIVE = _bound()
except ConfigError as error:  # an import that raises would be a traceback, whatever command it is for
    _refusal = error
_PYTHON = {(owner, name): owner.__dict__[name] for owner, name in _NATIVE}
_form = "Python"


def built() -> bool:
    """Whether there is a form in C++."""
    return bool(_NATIVE)


def check() -> None:
    """Raise `ConfigError` where ``WORKSPACE_NATIVE`` asks for what there is not; every workspace is made after it."""
    if _refusal is not None:
        raise _refusal.with_traceback(None)


def form() -> str:
    """The form that runs, ``"C++"`` or ``"Python"``."""
    return _form


def use(native: bool) -> None:
    """Choose the form, for all workspaces of the process and also for leases that are held.

    Raises
    ------
    ConfigError
        The form in C++ is asked for and not built.
    """
    global _form
    if native and not _NATIVE:
        raise ConfigError("the form in C++ is not built", _BUILD)
    for (owner, name), method in (_NATIVE if native else _PYTHON).items():
        setattr(owner, name, method)
    _form = "C++" if native else "Python"


if _NATIVE:
    use(True)
    timeline.new_lock, clocks.new_clock, clocks.new_seen = extension().Lock, extension().Clock, extension().Seen
