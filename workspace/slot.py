"""Slots: lazy tensors of a lease whose strategy lets ops allocate what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from workspace.errors import LayoutError, LeaseReleased

if TYPE_CHECKING:
    from workspace.layout import Extent
    from workspace.lease import Lease


class Slot:
    """A tensor of a lease that does not exist yet.

    An op that has a returning form tests its ``out=`` for this type, runs that form and calls `fill`. For everything
    else a slot behaves as the tensor it stands for, which comes into being at the first such use: an attribute, an
    index, or as an argument of a torch function (``out=`` included). Another stream that uses it, by the slot or by the
    lease, waits for the one it came into being on; a tensor taken from it in one branch is not to be used in another:
    make what branches share before the fork, ``lease.allocate("x")``. It has no ``len()``: torch would
    take a short slot that indexes a tensor for a tuple of indices.

    Attributes
    ----------
    shape, dtype
        Of the tensor it stands for.
    """

    __slots__ = ("_extent", "_lease", "_position", "_tensor")

    def __init__(self, lease: Lease, position: int, extent: Extent) -> None:
        self._lease: Lease | None = lease
        self._position = position
        self._extent = extent
        self._tensor: Any = None

    def __repr__(self) -> str:
        return f"<slot {self._extent.name} {self._extent.shape} {self._extent.dtype}>"

    @property
    def shape(self) -> tuple[int, ...]:
        return self._extent.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._extent.dtype

    def fill(self, tensor: Any) -> Any:
        """Make a tensor that an op returned the slot's content, and return it.

        It was allocated on the current stream, as what an op returns is: the allocator is told of uses on all others.
        Fill with a tensor of another stream's on that stream, or tell the allocator: ``tensor.record_stream(...)``.
        Nobody else may hold it: who writes the slot writes it. What may be its argument, as ``x.contiguous()`` or
        ``x.to(...)`` may, is to be copied: ``slot.copy_(x)``.

        Raises `LayoutError` if shape or dtype differ from the layout's, `LeaseReleased` after the release.
        """
        lease = self._alive()
        if tuple(tensor.shape) != self._extent.shape or tensor.dtype != self._extent.dtype:
            raise LayoutError(
                f"slot {self._extent.name} of {lease.owner} is {self._extent.shape} {self._extent.dtype}, and was "
                f"filled with {tuple(tensor.shape)} {tensor.dtype}",
                "correct the layout, or what the op returns",
            )
        self._tensor = tensor
        lease.filled(self._position, tensor)
        return tensor

    def tensor(self) -> Any:
        """The tensor, allocated now on the current stream if the slot is empty. Contents are unspecified."""
        lease = self._lease
        if self._tensor is None:
            self._tensor = self._alive().fresh(self._position)
        elif lease is None or lease.stream.capture is None or not lease.released:
            self._alive()._used(self._position)
        # else: a captured lease's tensors are the graph's, and eager breaks use them at each replay
        return self._tensor

    def _alive(self) -> Lease:
        if self._lease is None or self._lease.released:
            raise LeaseReleased(f"{self!r} is used after its lease's release", "use it inside the lease")
        return self._lease

    def __workspace_range__(self) -> tuple[int, int]:
        tensor = self.tensor()
        if hasattr(tensor, "__workspace_range__"):
            return tensor.__workspace_range__()
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        made = self.tensor().__array__(dtype)
        return made.copy() if copy else made

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor()[index] = value

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Slot, Slot.tensor, (tuple(args), dict(kwargs or {})))
        return function(*args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Slot, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*(one.tensor() if isinstance(one, Slot) else one for one in others))

    return method


for _name in (
    *("neg", "pos", "abs", "invert", "bool", "int", "float", "index", "iter", "contains"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul", "rand", "ror", "rxor"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
):
    setattr(Slot, f"__{_name}__", _operator(f"__{_name}__"))
Slot.__hash__ = object.__hash__  # type: ignore[method-assign]  # an own __eq__ would remove it
