"""An op: its schema, its reference kernel, and the Python face that checks arguments and takes ``out=``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsv4.ops import kernels
from dsv4.ops.argument import ANY, LIKE, Argument
from dsv4.ops.checks import Checks
from dsv4.ops.errors import OpError
from dsv4.ops.kernels import dispatch_modes, function_modes
from dsv4.ops.numbers import number
from dsv4.ops.results import Results
from dsv4.ops.rules import Call, Rules
from workspace import Layout, Slot, TensorSpec
from workspace.errors import LayoutError

is_compiling = torch.compiler.is_compiling
is_traced = torch.compiler.is_dynamo_compiling
"""A constant, at half the cost; an export besides has modes."""

LIBRARY = torch.library.Library("dsv4", "FRAGMENT")


_NO_NUMBER = (TypeError, OverflowError)
"""What the extension's functions raise when a number of the call is none; the long way says which."""


class Op:
    """One op of the namespace ``dsv4``, registered in out form: it writes what it is given and returns nothing.

    Called as ``op(*inputs, out=..., scratch=...)`` in the order of the schema. Work goes to the caller's current
    stream. Outs and scratch are tensors, slots of a lease (the returning form runs and fills them), or left out (it
    runs and they are returned). What is returned are the outs: one tensor, or a tuple. Without tokens (T = 0)
    nothing is launched.

    Parameters
    ----------
    schema
        Inputs first, then outs, then scratch, as ``torch.library`` takes it.
    reference
        The kernel for the CPU, in float32 or float64 whatever the activations are.
    inputs, outs, scratch
        The tensors by name, in the schema's order; inputs that the op mutates (caches) are inputs here.
    rules
        What the arguments must be together, where shapes and dtypes do not say all; see `dsv4.ops.rules`.
    cuda
        What runs on CUDA where no kernel of the extension does; omitted, the reference.

    Raises
    ------
    OpError
        An argument has another shape, dtype or device than the op says, arguments do not fit together, outs are not
        contiguous, or an out shares bytes with another tensor of the call: nothing was launched. The reference on the
        CPU raises it, too, for an index that points outside, and may have written by then.
    """

    def __init__(
        self,
        schema: str,
        reference: Callable[..., None],
        *,
        inputs: Mapping[str, Argument],
        outs: Mapping[str, Argument] | None = None,
        scratch: Mapping[str, Argument] | None = None,
        rules: Rules | None = None,
        cuda: Callable[..., None] | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.__doc__ = reference.__doc__
        self.reference, self._rules = reference, rules or _none
        self.inputs, self.outs, self.scratch = dict(inputs), dict(outs or {}), dict(scratch or {})
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(self.name, self._on_cpu, "CPU")
        if self.name not in kernels.NAMES:
            LIBRARY.impl(self.name, cuda or reference, "CUDA")
        torch.library.register_fake(f"dsv4::{self.name}", _writes_only, lib=LIBRARY)
        self.overload = getattr(torch.ops.dsv4, self.name).default
        self._names = names = [one.name for one in self.overload._schema.arguments]
        given = len(names) - len(self.outs) - len(self.scratch)
        assert names[given:] == [*self.outs, *self.scratch], f"schema of {self.name} does not end with its outs"
        self._places = [(names.index(name), name, one) for name, one in self.inputs.items()]
        self._scalars = names[:given]
        kinds = {one.name: str(one.type) for one in self.overload._schema.arguments[:given]}
        self._numbers = [(names.index(name), name, kind) for name, kind in kinds.items() if name not in self.inputs]
        self._arguments = self.inputs | self.outs | self.scratch
        self._check = Checks(self.name, self._arguments, self._rules)
        self._fast = kernels.FAST.get(self.name)
        self._count = len(self.outs)
        self._results = Results(self._places, self.outs | self.scratch)
        self._told = bool(self.outs) and not self._results.untold
        self._returned = self._in_one_call()

    def __repr__(self) -> str:
        return f"<op {self.overload._schema}>"

    # -- layout ----------------------------------------------------------------------------------------------
    def specs(self, dtype: torch.dtype | None = None, **dims: int | str) -> dict[str, TensorSpec]:
        """Specs of the outs and the scratch.

        Parameters
        ----------
        dtype
            Of the activations, where an out has theirs.
        **dims
            Values, or other names, for the dims of the op; the rest stay dims of the layout.
        """
        return {name: one.spec(dtype, dims) for name, one in (self.outs | self.scratch).items()}

    def layout(self, T: int | str, dtype: torch.dtype | None = None, **dims: int | str) -> Layout:
        """The layout of the outs and the scratch for T tokens; see `specs`."""
        specs: dict[str, Any] = self.specs(dtype, T=T, **dims)
        return Layout(self.name, **specs)

    # -- call ------------------------------------------------------------------------------------------------
    def __call__(self, *inputs: Any, out: Any = None, scratch: Any = None) -> Any:
        if out is None and scratch is None and self._told:
            return self.returning(*inputs)
        fast = self._fast
        if fast is None or is_traced() or dispatch_modes() or function_modes():
            return self._dispatched(inputs, out, scratch)
        outs = out if type(out) is tuple else _listed(out)
        parts = () if scratch is None else scratch if type(scratch) is tuple else _listed(scratch)
        # The kernel's own checks are the op's; whatever it does not take goes the long way.
        try:
            if fast(*inputs, *outs, *parts):
                return outs[0] if len(outs) == 1 else outs
        except _NO_NUMBER:
            return self._dispatched(inputs, outs or None, parts or None)
        if Slot in map(type, outs + parts):
            # It knows nothing of them: what they stand for is allocated, as the returning form would.
            return self(*inputs, out=_tensors(outs), scratch=_tensors(parts))
        return self._dispatched(inputs, outs or None, parts or None)

    def returning(self, *inputs: Any, **dims: Any) -> Any:
        """The returning form: outs and scratch from PyTorch's allocator, written by the same kernel.

        Parameters
        ----------
        **dims
            Of the outs and the scratch, those that the inputs do not tell: see `untold`.

        Examples
        --------
        >>> q = insert.returning(q, kv, cache, slots, positions, cos_sin, eps, 64, 1, P=64)    # doctest: +SKIP
        """
        returned = self._returned
        if returned is None or is_traced():
            return self._allocated(inputs, dims)
        try:
            found = returned(inputs, dims)
        except _NO_NUMBER:
            found = None
        return self._allocated(inputs, dims) if found is None else found

    def _in_one_call(self) -> Callable[..., Any] | None:
        """The returning form in C: None as long as the call is not its own."""
        if kernels.RETURNING is None or self._fast is None or not self.outs:
            return None
        one = self._results
        return kernels.RETURNING(
            self.name, len(self._scalars), one.told, one.like, tuple(one.untold), self._count, one, torch.dtype
        )

    def _allocated(self, inputs: tuple[Any, ...], dims: Mapping[str, Any]) -> Any:
        """The returning form step by step."""
        try:
            traced = is_compiling() or dispatch_modes()
            made = self._results.traced(inputs, dims) if traced else self._results(inputs, dims)
        except KeyError:
            names = ", ".join(sorted(self.untold)) or "none"
            raise OpError(f"returning form of {self.name} was given {[*dims]}", f"pass its dims: {names}") from None
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            if isinstance(error, RuntimeError) and all(map(_dense, inputs)):
                raise  # no memory
            return self._dispatched(inputs, None, None)  # which says what is wrong with them
        fast, count = self._fast, self._count
        if fast is None or is_compiling() or dispatch_modes() or function_modes():
            return self._dispatched(inputs, made[:count], made[count:])
        try:
            if fast(*inputs, *made):
                return made[0] if count == 1 else made[:count]
        except _NO_NUMBER:
            pass
        return self._dispatched(inputs, made[:count], made[count:])

    @property
    def untold(self) -> frozenset[str]:
        """Dims of the outs and the scratch that no input has; "dtype" where no input has the activations'."""
        return self._results.untold

    def _dispatched(self, inputs: tuple[Any, ...], out: Any, scratch: Any) -> Any:
        if is_compiling():
            outs = out if type(out) is tuple else _listed(out)
            parts = scratch if type(scratch) is tuple else _listed(scratch)
            if (len(outs), len(parts)) == (len(self.outs), len(self.scratch)):
                # The op alone: checks in Python would break the graph, and kernels make their own.
                self.overload(*inputs, *outs, *parts)
                return outs[0] if len(outs) == 1 else outs
        if len(inputs) != len(self._scalars):
            raise OpError(
                f"{self.name} takes {len(self._scalars)} inputs, not {len(inputs)}",
                f"pass {', '.join(self._scalars)}",
            )
        numbers = {name: number(self.name, name, kind, inputs[place]) for place, name, kind in self._numbers}
        given = {name: inputs[place] for place, name, _ in self._places}
        wanted = [*self._given("out", out, self.outs), *self._given("scratch", scratch, self.scratch)]
        like, dims = self._bind(given, wanted)
        device = next(one for one in given.values() if one is not None).device
        tensors = [
            self._place(one, argument, like, dims, device)
            for one, argument in zip(wanted, (*self.outs.values(), *self.scratch.values()), strict=True)
        ]
        written = dict(zip((*self.outs, *self.scratch), tensors, strict=True))
        self._check(given, written, numbers, like, dims, device)
        if dims.get("T") != 0:
            self.overload(*[given[name] if name in given else numbers[name] for name in self._scalars], *tensors)
        kept = [one.fill(tensor) if type(one) is Slot else tensor for one, tensor in zip(wanted, tensors, strict=True)]
        returned = kept[: len(self.outs)]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _on_cpu(self, *arguments: Any) -> None:
        """The reference, behind the rules: compiled code comes here past the face."""
        self._rules(Call(self.name, dict(zip(self._names, arguments, strict=True))))
        try:
            self.reference(*arguments)
        except IndexError as error:
            raise OpError(f"{self.name}: {error}", "pass positions, slots and tables of what is there") from error

    def _given(self, what: str, given: Any, declared: Mapping[str, Argument]) -> Sequence[Any]:
        if given is None:
            return [None] * len(declared)
        many = list(given) if isinstance(given, tuple | list) else [given]
        if len(many) != len(declared):
            raise OpError(
                f"{self.name} was given {len(many)} tensors as {what}=",
                f"pass {len(declared)}: {', '.join(declared) or 'none'}",
            )
        return many

    def _bind(self, given: Mapping[str, Any], wanted: Sequence[Any]) -> tuple[torch.dtype | None, dict[str, int]]:
        """The activations' dtype, and each dim's value where it is first named."""
        dims: dict[str, int] = {}
        like = None
        outs = zip((self.outs | self.scratch).items(), wanted, strict=True)
        every = [(name, one, given[name]) for name, one in self.inputs.items()]
        every += [(name, one, value) for (name, one), value in outs]
        for name, one, value in every:
            if value is None:
                if name in self.inputs and not one.optional:
                    raise OpError(f"{name} of {self.name} is None", "pass a tensor")
                continue
            if not isinstance(value, torch.Tensor if name in given else torch.Tensor | Slot):
                what = "a slot nothing has written" if isinstance(value, Slot) else type(value).__name__
                raise OpError(f"{name} of {self.name} is {what}", "pass a tensor")
            if not _dense(value):
                what = "nested" if value.is_nested else str(value.layout)
                raise OpError(f"{name} of {self.name} is {what}", "pass a dense tensor", name=name)
            if one.dtype == LIKE and like is None:
                like = value.dtype
            if one.shape != ANY and len(value.shape) != len(one.shape):
                raise OpError(
                    f"{name} of {self.name} has shape {tuple(value.shape)}", f"it takes {one.text}", name=name
                )
            for axis, dim in one.names:
                dims.setdefault(dim, value.shape[axis])
        return like, dims

    def _place(
        self, one: Any, argument: Argument, like: torch.dtype | None, dims: Mapping[str, int], device: torch.device
    ) -> torch.Tensor:
        if isinstance(one, torch.Tensor):
            return one
        if argument.partly and one is not None:
            held: torch.Tensor = one.tensor()
            return held
        try:
            shape, _ = argument.spec(like, dims).resolve({})
        except LayoutError as error:
            raise OpError(
                f"{self.name} cannot tell the shape {argument.text} from its inputs", "pass it as out="
            ) from error
        return torch.empty(shape, dtype=argument.dtypes(like)[0], device=device)


def _listed(given: Any) -> tuple[Any, ...]:
    """Outs or scratch one by one."""
    if given is None:
        return ()
    return tuple(given) if type(given) is list else (given,)


def _tensors(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.tensor() if type(one) is Slot else one for one in given)


def _dense(value: Any) -> bool:
    """Whether it is no tensor that has no shape, or no strides."""
    return not isinstance(value, torch.Tensor) or (value.layout is torch.strided and not value.is_nested)


def _none(_: Call) -> None:
    """Shapes and dtypes say all."""


def _writes_only(*_: Any) -> None:
    """Nothing to predict: every out is given."""
