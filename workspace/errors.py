"""Typed errors. Each names the value that was refused, the rule, and what to do about it."""

from __future__ import annotations


class WorkspaceError(Exception):
    """Base of every error this library raises on purpose.

    Parameters
    ----------
    problem
        What was refused, with the offending value.
    remedy
        What the caller can change.
    **fields
        The evidence, also available as ``error.fields``.
    """

    def __init__(self, problem: str, remedy: str = "", /, **fields: object) -> None:
        self.problem = problem
        self.remedy = remedy
        self.fields = fields
        super().__init__(f"{problem}\n  remedy: {remedy}" if remedy else problem)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.problem, self.remedy, self.fields))


def _rebuild(cls: type[WorkspaceError], problem: str, remedy: str, fields: dict[str, object]) -> WorkspaceError:
    return cls(problem, remedy, **fields)


class ConfigError(WorkspaceError, ValueError):
    """A setting is unknown or has a bad value."""


class UnknownStrategy(ConfigError):
    """No strategy of that name is registered."""


class UnsafeStrategy(ConfigError):
    """An unsafe strategy was chosen without ``allow_unsafe=True``."""


class ArgumentError(WorkspaceError, ValueError):
    """An argument of a call is not of the kind the call takes."""


class LayoutError(WorkspaceError, ValueError):
    """A layout, a spec or its dims are not valid."""


class SizeError(LayoutError):
    """A size is negative, not an integer, or does not fit 63 bits."""


class StreamError(WorkspaceError, ValueError):
    """A stream is None, unknown, destroyed, or of another device."""


class LeaseError(WorkspaceError, RuntimeError):
    """A lease is used against its rules."""


class LeaseReleased(LeaseError):
    """A lease was read, released or declared used after its release."""


class LateUse(LeaseReleased):
    """A use on another stream was declared after the release."""


class ForkError(WorkspaceError, RuntimeError):
    """A fork or branch is used out of order."""


class CapacityError(WorkspaceError, MemoryError):
    """The request does not fit what was reserved, and growth is not allowed."""


class OutOfMemory(CapacityError):
    """The device has no memory left for a slab."""


class LockError(WorkspaceError, RuntimeError):
    """The workspace cannot be locked or unlocked now."""


class SleepError(WorkspaceError, RuntimeError):
    """The workspace is asleep, or cannot be put to sleep now."""


class CaptureError(WorkspaceError, RuntimeError):
    """Something a capture cannot do safely was refused."""


class CaptureBroken(CaptureError):
    """A call invalidated a capture in progress, as it would on CUDA."""


class GraphError(WorkspaceError, RuntimeError):
    """A graph was replayed, adopted or released against its rules."""


class FootprintBusy(GraphError):
    """Another replay or lease holds bytes of the graph's footprint."""


class ProcessError(WorkspaceError, RuntimeError):
    """The workspace belongs to another process (it was forked), or cannot be pickled."""


class DeviceError(WorkspaceError, ValueError):
    """Memory or a stream belongs to another device."""


class DriverError(WorkspaceError, RuntimeError):
    """The device reported an error; a sticky one refuses everything afterwards."""


class TraceError(WorkspaceError, OSError):
    """The trace cannot be written; the workspace works on without it."""


class GuardError(WorkspaceError, RuntimeError):
    """Bytes outside a lease were written."""


class GradModeError(WorkspaceError, RuntimeError):
    """A lease was asked for while autograd records."""


class Unsupported(WorkspaceError, RuntimeError):
    """The platform, dtype or use is not supported, and the library says so."""
