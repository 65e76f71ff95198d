"""Layouts: named tensor specs, with symbolic dims, that live together in one lease."""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import attrs
import torch

from workspace.errors import LayoutError, SizeError

ALIGNMENT = 256
"""Default alignment of every tensor in bytes: what the caching allocator and vectorised kernels rely on."""

MAX_BYTES = 2**63 - 1

QUANTISED = frozenset((torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4))
"""Dtypes whose tensors hold a scale beside their bytes, so that none can be made over bytes alone."""

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


ALLOWED = "names, integers and + - * // %, with parentheses"
"""What a dim may be made of."""

LONGEST_DIM = 256
"""Characters of an expression: Python's parser nests as deep as the text is long."""


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > LONGEST_DIM:
        raise LayoutError(f"dim {text[:40]!r}... has {len(text)} characters", f"write {LONGEST_DIM} at most")
    try:
        body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: a null character
        raise LayoutError(f"dim {text!r} is not an expression", f"write {ALLOWED}") from error
    _check_arithmetic(body, text)
    return body


def _check_arithmetic(node: ast.expr, text: str) -> None:
    """Refuse what `_evaluate` has no value for."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Div):
            raise LayoutError(f"dim {text!r} uses /, whose result is no integer", f"use // for /: write {ALLOWED}")
        if type(node.op) not in _OPERATORS:
            raise _not_allowed(text, node.op)
        _check_arithmetic(node.left, text)
        _check_arithmetic(node.right, text)
    elif not isinstance(node, ast.Name) and not (isinstance(node, ast.Constant) and type(node.value) is int):
        raise _not_allowed(text, node)


def _not_allowed(text: str, node: ast.AST) -> LayoutError:
    kind = {"UnaryOp": "a sign in front", "Constant": "what is no integer"}.get(
        type(node).__name__, type(node).__name__
    )
    return LayoutError(
        f"dim {text!r} uses {kind}",
        f"write {ALLOWED}; what takes more, compute where you lease, and pass as a dim of its own",
    )


def evaluate(dim: int | str, dims: Mapping[str, int]) -> int:
    """Value of a dim: an integer, a name, or ``+ - * // %`` of both with parentheses."""
    if isinstance(dim, int):
        return dim
    return _evaluate(_parse(dim), dim, dims)


def _evaluate(node: ast.expr, text: str, dims: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant):
        return cast(int, node.value)
    if isinstance(node, ast.Name):
        if node.id not in dims:
            raise LayoutError(f"dim {node.id!r} of {text!r} has no value", f"pass {node.id}=<int>", dim=node.id)
        return dims[node.id]
    assert isinstance(node, ast.BinOp)  # `_parse` lets nothing else through
    left, right = _evaluate(node.left, text, dims), _evaluate(node.right, text, dims)
    if right == 0 and isinstance(node.op, ast.FloorDiv | ast.Mod):
        raise LayoutError(f"dim {text!r} divides by zero for {dict(dims)}", "pass a divisor above 0")
    return _OPERATORS[type(node.op)](left, right)


def _names(dim: int | str) -> set[str]:
    if isinstance(dim, int):
        return set()
    return {node.id for node in ast.walk(_parse(dim)) if isinstance(node, ast.Name)}


@attrs.frozen
class TensorSpec:
    """Shape, dtype and alignment of one tensor of a layout. Made with `spec`.

    Parameters
    ----------
    shape
        Dims: integers, names such as ``"T"``, or expressions such as ``"(C+3)//4"``.
    dtype
        Any torch dtype but the quantised ones; packed fp4 is kept as ``torch.uint8`` with half the elements.
    align
        Bytes; a power of two. The address is a multiple of it.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    align: int = ALIGNMENT

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise LayoutError(f"dtype {self.dtype!r} is not a torch dtype", "pass e.g. torch.bfloat16")
        if self.dtype in QUANTISED:
            raise LayoutError(
                f"dtype {self.dtype} is quantised: its tensors hold a scale, which bytes on loan do not",
                "lease the integers, e.g. as torch.uint8 or torch.int32, and the scale beside them",
            )
        if type(self.align) is not int or self.align < 1 or self.align & (self.align - 1):
            raise LayoutError(f"alignment {self.align!r} is not a power of two", "pass 1, 2, 4, ... bytes")
        for dim in self.shape:
            if type(dim) is int and dim < 0:
                raise SizeError(f"dim {dim} of shape {self.shape} is negative", "dims are 0 or more")
            if type(dim) not in (int, str):
                raise LayoutError(f"dim {dim!r} is neither an integer nor a name", "pass an int or a str")
            _names(dim)

    def resolve(self, dims: Mapping[str, int]) -> tuple[tuple[int, ...], int]:
        """Concrete shape and its bytes (0 for an empty tensor)."""
        shape = tuple(evaluate(dim, dims) for dim in self.shape)
        if any(dim < 0 for dim in shape):
            raise SizeError(f"shape {self.shape} is {shape} for {dict(dims)}: a dim is negative", "dims are 0 or more")
        nbytes = math.prod(shape) * self.dtype.itemsize
        if nbytes > MAX_BYTES:
            raise SizeError(f"shape {shape} of {self.dtype} takes {nbytes} bytes, above 2**63-1", "check the dims")
        return shape, nbytes


def spec(*shape: int | str, dtype: torch.dtype, align: int = ALIGNMENT) -> TensorSpec:
    """A tensor spec: ``spec("T", 64, 128, dtype=torch.float8_e4m3fn)``. See `TensorSpec`."""
    return TensorSpec(tuple(shape), dtype, align)


def _names_only(names: object) -> bool:
    return isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)


@attrs.frozen
class Exclusive:
    """Groups of a layout's tensors of which only one group is used at a time, so that they may share bytes.

    Sharing is only accepted where the order between the groups is known: every group names the stream its uses
    are on, and they name the same one.

    Parameters
    ----------
    groups
        Tuples of tensor names, pairwise disjoint.
    streams
        For each group, the name of the one stream (``"main"``, ``"aux0"``, ...) it is used on.
    """

    groups: tuple[tuple[str, ...], ...]
    streams: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        listed = isinstance(self.groups, tuple | list)
        if not listed or not all(map(_names_only, (self.streams, *self.groups))):
            raise LayoutError(
                f"Exclusive({self.groups!r}, {self.streams!r}) does not name tensors and streams",
                'pass tuples of names: Exclusive((("a", "b"), ("c",)), ("main", "main"))',
            )
        if len(self.groups) != len(self.streams):
            raise LayoutError(
                f"{len(self.groups)} exclusive groups but {len(self.streams)} streams", "name one stream for each group"
            )
        if len(set(self.streams)) > 1:
            raise LayoutError(
                f"exclusive groups {self.groups} are used on different streams {self.streams}, which nothing orders",
                "give each group bytes of its own, or use them on one stream",
            )
        if not all(self.groups):
            raise LayoutError(f"one of the exclusive groups {self.groups} is empty", "name the tensors of each group")
        names = [name for group in self.groups for name in group]
        if len(set(names)) != len(names):
            raise LayoutError(f"a tensor stands in two of the exclusive groups {self.groups}", "name each tensor once")


@attrs.frozen
class Extent:
    """Where one tensor of a resolved layout lies: offset and size in bytes, shape, dtype."""

    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen(eq=False)
class Resolved:
    """A layout with every dim given: the extents and the total size in bytes."""

    layout: Layout
    dims: tuple[tuple[str, int], ...]
    extents: tuple[Extent, ...]
    nbytes: int
    align: int


class Layout:
    """A named set of tensor specs that one lease holds together.

    Offsets add up: no two tensors share a byte, unless they are in `Exclusive` groups.

    Parameters
    ----------
    name
        Also the default owner of the bytes in every report.
    exclusive
        Groups that may share bytes; see `Exclusive`.
    family
        Only the unsafe strategy ``unfenced`` reads it: layouts of one family overlay each other, as the
        families of the reverted pool did.
    **specs
        The tensors, by the attribute name they get on the lease. None at all is no error: a lease of it holds nothing.

    Examples
    --------
    >>> Layout("indexer", q=spec("T", 64, 128, dtype=torch.uint8)).size(T=2)
    16384
    """

    __slots__ = ("__weakref__", "_resolved", "dim_names", "exclusive", "family", "latest", "name", "specs")

    def __init__(
        self, name: str, /, *, exclusive: tuple[Exclusive, ...] = (), family: str | None = None, **specs: TensorSpec
    ) -> None:
        if not name or not isinstance(name, str):
            raise LayoutError(f"layout name {name!r} is not a name", "pass a non-empty str")
        for key, value in specs.items():
            if not isinstance(value, TensorSpec):
                raise LayoutError(f"{name}.{key} is {value!r}, not a spec", "use workspace.spec(*shape, dtype=...)")
            if key in RESERVED or key.startswith("_"):
                raise LayoutError(f"{name}.{key}: the lease itself has an attribute {key!r}", "choose another name")
        _check_exclusive(name, exclusive, specs)
        self.name = name
        self.specs = specs
        self.exclusive = exclusive
        self.family = family
        self.dim_names = frozenset(dim for one in specs.values() for axis in one.shape for dim in _names(axis))
        if taken := sorted(self.dim_names & ARGUMENTS):
            raise LayoutError(
                f"layout {name!r} has the dim {', '.join(taken)}, an argument of what leases and declares it",
                "choose another name",
            )
        self.latest: Any = None  # the request leased last, by whichever workspace: a look-up saved
        self._resolved: dict[tuple[tuple[str, int], ...], Resolved] = {}

    def __repr__(self) -> str:
        return f"Layout({self.name!r}, {', '.join(self.specs)})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.name, self.exclusive, self.family, self.specs)

    def resolve(self, /, **dims: int) -> Resolved:
        """Offsets, shapes and total bytes. Raises `LayoutError` for missing, unknown or negative dims."""
        for dim, value in dims.items():
            if type(value) is not int:
                self._check_names(dims)  # what is no dim is no number either: a lane, a misspelt argument
                raise SizeError(f"dim {dim}={value!r} of layout {self.name!r} is not an int", "pass a Python int")
        key = tuple(sorted(dims.items()))
        found = self._resolved.get(key)
        if found is None:
            # Dims come from request sizes: without a bound the cache would grow with every token count ever seen.
            if len(self._resolved) >= RESOLVED_KEPT:
                self._resolved.clear()
            found = self._resolved[key] = self._resolve(dims, key)
        return found

    def size(self, /, **dims: int) -> int:
        """Bytes of one lease, each tensor aligned."""
        return self.resolve(**dims).nbytes

    def _resolve(self, dims: Mapping[str, int], key: tuple[tuple[str, int], ...]) -> Resolved:
        self._check_names(dims)
        if missing := sorted(self.dim_names - dims.keys()):
            raise LayoutError(
                f"dim {', '.join(map(repr, missing))} of layout {self.name!r} has no value",
                f"pass {', '.join(f'{dim}=<int>' for dim in missing)}",
                dim=missing[0],
            )
        for dim, value in dims.items():
            if value < 0:
                raise SizeError(f"dim {dim}={value} of layout {self.name!r} is negative", "dims are 0 or more")
        placed: dict[str, Extent] = {}
        end = 0
        for names, start in self._groups():
            offset = end if start is None else placed[start].offset
            for name in names:
                shape, nbytes = self.specs[name].resolve(dims)
                offset = round_up(offset, self.specs[name].align)
                placed[name] = Extent(name, offset, nbytes, shape, self.specs[name].dtype)
                offset += nbytes
            end = max(end, offset)
        align = max((one.align for one in self.specs.values()), default=1)
        nbytes = round_up(end, ALIGNMENT)
        if nbytes > MAX_BYTES:
            raise SizeError(f"layout {self.name!r} takes {nbytes} bytes, above 2**63-1", "check the dims", **dims)
        return Resolved(self, key, tuple(placed[name] for name in self.specs), nbytes, align)

    def _check_names(self, dims: Mapping[str, object]) -> None:
        unknown = sorted(dims.keys() - self.dim_names)
        if unknown:
            near = {dim: self._nearest(dim) for dim in unknown}
            meant = [f"did you mean {close!r}? " for dim, close in near.items() if close and close != dim]
            taken = [
                f"; {name}= is for {TAKEN_BY[name]}"
                for name in near.values()
                if name in TAKEN_BY.keys() - self.dim_names
            ]
            raise LayoutError(
                f"layout {self.name!r} has no dim {', '.join(map(repr, unknown))}",
                f"{''.join(meant)}its dims are {', '.join(sorted(self.dim_names)) or 'none'}{''.join(taken)}",
            )

    def _nearest(self, unknown: str) -> str:
        """The dim that may have been meant, or else what calls take beside dims; empty where nothing is near."""
        if unknown in TAKEN_BY:
            return unknown
        near = difflib.get_close_matches(unknown, self.dim_names, 1)
        return (near or difflib.get_close_matches(unknown, TAKEN_BY, 1) or [""])[0]

    def _groups(self) -> list[tuple[tuple[str, ...], str | None]]:
        """Names in placement order, with the tensor at whose offset an overlaying group starts."""
        grouped = {name for one in self.exclusive for names in one.groups for name in names}
        order: list[tuple[tuple[str, ...], str | None]] = []
        order.extend(((name,), None) for name in self.specs if name not in grouped)
        for one in self.exclusive:
            # The widest alignment first, so that the shared start suits every group.
            first = max(one.groups, key=lambda names: self.specs[names[0]].align)
            order.append((first, None))
            order.extend((names, first[0]) for names in one.groups if names is not first)
        return order


RESOLVED_KEPT = 512

RESERVED = frozenset(
    """acquire address allocate asked covers declare events filled forked fresh held joined last_uses lend let_go nbytes
    of on outlived_capture owner parent pin pins release released replayed replays request slot stamped stream tensors
    unforked unpin until use uses workspace""".split()
)
"""Attribute names of a lease, which no tensor of a layout may take."""

ARGUMENTS = frozenset(("stream", "zero", "phase", "lane", "count"))
"""What `Workspace.lease` and `Workspace.declare` take by keyword beside dims, so that no dim may be called so."""

TAKEN_BY = {
    "stream": "ws.lease(layout, stream=...)",
    "zero": "ws.lease(layout, zero=True)",
    "phase": "ws.declare(layout, phase=...)",
    "count": "ws.declare(layout, count=...)",
    "lane": "ws.declare(layout, lane=...), and a lease has the lane of `with ws.slot(lane=...):`",
    "micro_batch": "`with ws.slot(micro_batch=...):`",
}
"""Who takes what is no dim but looks like one in a call."""


def _check_exclusive(name: str, exclusive: object, specs: Mapping[str, TensorSpec]) -> None:
    """Groups name tensors of the layout, each in one entry: nothing orders one entry's uses after another's."""
    if not isinstance(exclusive, tuple | list) or not all(isinstance(one, Exclusive) for one in exclusive):
        raise LayoutError(f"exclusive={exclusive!r} of layout {name!r} is no tuple of Exclusive", "use Exclusive(...)")
    seen: set[str] = set()
    for key in (key for one in exclusive for names in one.groups for key in names):
        if key not in specs:
            raise LayoutError(f"exclusive group names {key!r}, which layout {name!r} lacks", "fix the name")
        if key in seen:
            raise LayoutError(
                f"{name}.{key} stands in two entries of `exclusive`, whose uses nothing orders",
                "name each tensor in one entry: what is used on one stream may be groups of one",
            )
        seen.add(key)


def _rebuild(name: str, exclusive: tuple[Exclusive, ...], family: str | None, specs: dict[str, TensorSpec]) -> Layout:
    return Layout(name, exclusive=exclusive, family=family, **specs)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple not below the value."""
    return -(-value // multiple) * multiple
