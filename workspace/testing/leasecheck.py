"""``leasecheck``: does an op keep the rules of leases? What ``torch.library.opcheck`` does not look at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from workspace.errors import ArgumentError, Unsupported
from workspace.testing.arena import Arena, Placed, poison

SEED = 0x1EA5E


class LeaseCheckError(AssertionError):
    """An op breaks the rules of leases; `findings` lists how."""

    def __init__(self, name: str, findings: Sequence[str]) -> None:
        super().__init__(f"{name} breaks the rules of leases:\n  " + "\n  ".join(findings))
        self.findings = tuple(findings)


def leasecheck(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    partial: Collection[str] = (),
    scratch: Collection[str] = (),
    raise_exception: bool = True,
) -> list[str]:
    """Call an op with every tensor in a lease's place, and report what a lease would not survive.

    Found are: a result, or a view that the op keeps, over a lease's bytes (an op never returns what outlives the
    lease); a returned tensor over an arena of the op's own, which its next call overwrites; writes outside an
    argument; an out that is not written in every element, is read before it is written, or is moved to other memory;
    scratch that is read before it is written; and inputs that change although the schema does not declare it.

    Parameters
    ----------
    op
        A registered op: ``torch.library.custom_op``, an overload, or a packet (its default overload).
    args, kwargs
        Of one call. Tensors are copied; they may be of any device that `workspace.create` knows.
    partial
        Names of arguments declared mutated that the op need not write in full, and may read: state.
    scratch
        Names of arguments declared mutated whose contents mean nothing before the call nor after it: the op need not
        write them in full, and nothing it leaves may follow what they held. The other mutated arguments are outs.
    raise_exception
        Raise `LeaseCheckError` when there is something to report.

    Returns
    -------
    list of str
        The findings, empty for an op that keeps the rules.

    Raises
    ------
    Unsupported
        The op has no schema, so that nothing says what it mutates.

    Examples
    --------
    >>> leasecheck(torch.ops.aten.add.out, (torch.ones(3), torch.ones(3)), {"out": torch.empty(3)})
    []
    """
    call = _Call(op, args, dict(kwargs or {}), frozenset(partial), frozenset(scratch))
    with torch.no_grad():
        first, second = call.run(0), call.run(1)
        findings = list(dict.fromkeys(first.findings + second.findings))
        findings += [finding for finding in call.compare(first, second) if finding not in findings]
        findings += [f"reads scratch {name!r} before it writes it" for name in call.read_first(first)]
    if findings and raise_exception:
        raise LeaseCheckError(call.name, findings)
    return findings


class _Ran:
    """One call: what was found at once, and what only the next one can tell."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.left: dict[str, bytes] = {}  # of every mutated argument but scratch
        self.results: list[torch.Tensor] = []
        self.contents: list[bytes] = []


class _Call:
    """An op with its arguments taken apart: tensors by name, everything else in place."""

    def __init__(
        self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], partial: frozenset[str], scratch: frozenset[str]
    ) -> None:
        self._op = op = _overload(op)
        schema = op._schema
        self.name = str(op)
        names = [argument.name for argument in schema.arguments]
        if len(args) > len(names):
            raise ArgumentError(f"{self.name} is given {len(args)} arguments", f"it takes {len(names)}")
        self._given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._positional = names[: len(args)]
        self._mutated = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        unknown = (partial | scratch) - self._mutated
        if unknown:
            raise Unsupported(
                f"{self.name} does not declare {', '.join(sorted(unknown))} mutated", "name mutated arguments only"
            )
        self._scratch = scratch
        self._outs = self._mutated - partial - scratch
        # What the schema says it returns of its arguments; anything else that is returned must be new.
        self._returned = {
            argument.name
            for argument in schema.arguments
            for value in schema.returns
            if argument.alias_info and value.alias_info and value.alias_info.is_write
            if argument.alias_info.before_set & value.alias_info.before_set
        }
        self._tensors = {
            label: tensor for name, value in self._given.items() for label, tensor in _tensors(name, value).items()
        }

    def run(self, turn: int, changed: str = "") -> _Ran:
        """Call the op once, outs filled with the turn's poison; scratch with the first, but for the changed one."""
        ran, arena = _Ran(), Arena(self._tensors)
        for label, one in arena.placed.items():
            name = _argument(label)
            if name in self._outs or name in self._scratch:
                arena.view(label).fill_(poison(one.dtype, turn if name in self._outs else int(name == changed)))
        tensors = {label: arena.tensor(label) for label in arena.placed}
        given = {name: _replaced(name, value, tensors) for name, value in self._given.items()}
        torch.manual_seed(SEED)
        result = self._op(
            *(given[name] for name in self._positional),
            **{name: value for name, value in given.items() if name not in self._positional},
        )
        ran.findings += arena.damage()
        for label, one in arena.placed.items():
            ran.findings += self._look_at(arena, label, one, tensors[label])
            if _argument(label) in self._mutated - self._scratch:
                ran.left[label] = arena.read(one.offset, one.nbytes)
        self._look_at_results(arena, result, ran)
        del tensors, given, result
        ran.findings += [f"keeps a view of {label!r}" for label in arena.kept()]
        return ran

    def _look_at(self, arena: Arena, label: str, one: Placed, tensor: torch.Tensor) -> list[str]:
        if tuple(tensor.shape) != one.shape or (one.nbytes and tensor.data_ptr() != arena.address(label)):
            return [f"moves {label!r} to other memory or another shape"]
        if _argument(label) not in self._mutated and arena.read(one.offset, one.nbytes) != one.before:
            return [f"changes {label!r}, which its schema does not declare mutated"]
        return []

    def _look_at_results(self, arena: Arena, result: Any, ran: _Ran) -> None:
        for place, tensor in _tensors("result", result).items():
            owners = arena.owners(tensor)
            for label in owners:
                if _argument(label) not in self._returned:
                    ran.findings.append(f"returns {place!r} over the bytes of {label!r}: it outlives the lease")
            if not owners and tensor.numel():
                ran.results.append(tensor)
                ran.contents.append(_bytes(tensor))

    def compare(self, first: _Ran, second: _Ran) -> list[str]:
        """What two calls tell that one does not."""
        findings = []
        for label, before in first.left.items():
            if _argument(label) not in self._outs:
                continue
            after, dtype = second.left[label], self._tensors[label].dtype
            unwritten, different = _elements(before, after, dtype)
            if unwritten:
                findings.append(f"leaves {unwritten} elements of {label!r} unwritten")
            if different:
                findings.append(f"reads {label!r} before it writes it: {different} elements follow its old contents")
        spans = [_span(tensor) for tensor in first.results]
        for tensor in second.results:
            if any(start < _span(tensor)[1] and _span(tensor)[0] < end for start, end in spans):
                findings.append("returns memory of its own arena: a second call returns the same bytes")
        for tensor, contents in zip(first.results, first.contents, strict=True):
            if _bytes(tensor) != contents:
                findings.append("returns memory of its own arena: a second call changes what the first returned")
        return findings

    def read_first(self, first: _Ran) -> list[str]:
        """Scratch whose old contents show in what a call leaves."""
        found = []
        for name in sorted(self._scratch):
            other = self.run(0, changed=name)
            if (other.left, other.contents) != (first.left, first.contents):
                found.append(name)
        return found


def _overload(op: Any) -> Any:
    op = getattr(op, "_opoverload", op)
    op = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    if not hasattr(op, "_schema"):
        raise Unsupported(f"{op!r} has no schema", "register it: torch.library.custom_op(..., mutates_args=...)")
    return op


def _tensors(name: str, value: Any) -> dict[str, torch.Tensor]:
    """The tensors of an argument or result by label: its name, or ``name[0]`` in a list."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, list | tuple):
        return {f"{name}[{at}]": one for at, one in enumerate(value) if isinstance(one, torch.Tensor)}
    return {}


def _replaced(name: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return [tensors.get(f"{name}[{at}]", one) for at, one in enumerate(value)]
    return tensors.get(name, value)


def _argument(label: str) -> str:
    return label.split("[")[0]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _elements(first: bytes, second: bytes, dtype: torch.dtype) -> tuple[int, int]:
    """Elements that hold the poison of both calls, and written ones that differ between them."""
    if not first:
        return 0, 0
    calls = [torch.frombuffer(bytearray(one), dtype=torch.uint8).view(-1, dtype.itemsize) for one in (first, second)]
    unwritten = torch.stack([one.eq(poison(dtype, turn)).all(1) for turn, one in enumerate(calls)]).all(0)
    different = calls[0].ne(calls[1]).any(1) & ~unwritten
    return int(unwritten.sum()), int(different.sum())
