"""What calls of ops are made of: random tensors, and a call that can be run, repeated and referred to its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from dsv4.cache.pages import Format, pages_of
from dsv4.config import LayerKind
from dsv4.ops import Op
from dsv4.ops.rope import table
from dsv4.presets import FLASH

BF16, F32 = torch.bfloat16, torch.float32
POSITIONS = 4096

DATA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda x: x,
    "equal": lambda x: torch.full_like(x, 0.3),
    "huge": lambda x: x * 1e15,
    "tiny": lambda x: x * 1e-30,
    "zero": torch.zeros_like,
    "mixed": lambda x: x * torch.logspace(-8, 8, x.shape[0], device=x.device).view(-1, *(1,) * (x.dim() - 1)),
}
"""What the activations hold."""


class Maker:
    """Random tensors of one call."""

    def __init__(self, device: str, seed: int, data: str) -> None:
        self.device, self.data = device, data
        self.generator = torch.Generator(device).manual_seed(seed)

    def noise(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """Activations."""
        return DATA[self.data](self.plain(*shape)).to(dtype)

    def plain(self, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        """Weights and what else is no activation."""
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def positions(self, rows: int) -> torch.Tensor:
        return torch.randint(POSITIONS, (rows,), generator=self.generator, device=self.device)

    def cos_sin(self) -> torch.Tensor:
        return table(FLASH, LayerKind.C4, POSITIONS).to(self.device)

    def slots(self, rows: int, states: int) -> torch.Tensor:
        """Distinct slots, every fifth one -1."""
        found = torch.randperm(states, generator=self.generator, device=self.device)[:rows]
        return found.masked_fill(torch.arange(rows, device=self.device) % 5 == 4, -1)


@attrs.frozen(eq=False)
class Call:
    """One call of an op: what it is given, in the schema's order, and what it writes."""

    op: Op
    inputs: tuple[Any, ...]
    outs: tuple[torch.Tensor, ...]
    scratch: tuple[torch.Tensor, ...] = ()

    def run(self) -> tuple[torch.Tensor, ...]:
        """Through the op's Python face; returns what was written: outs, then mutated inputs."""
        self.op(*self.inputs, out=self.outs or None, scratch=self.scratch or None)
        return self.written()

    @property
    def untold(self) -> dict[str, Any]:
        """What the returning form has to be told besides the inputs."""
        found: dict[str, Any] = {"dtype": self.outs[0].dtype} if "dtype" in self.op.untold else {}
        written = zip((self.op.outs | self.op.scratch).values(), (*self.outs, *self.scratch), strict=True)
        for argument, tensor in written:
            found |= {dim: tensor.shape[axis] for axis, dim in argument.names if dim in self.op.untold}
        return found

    def dispatch(self) -> tuple[torch.Tensor, ...]:
        """Through the dispatcher."""
        self.op.overload(*self.inputs, *self.outs, *self.scratch)
        return self.written()

    def reference(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """What the CPU's reference makes of copies of the arguments, activations in another precision."""
        copied = self.copy()
        inputs = tuple(_wide(one, dtype) for one in copied.inputs)
        outs = tuple(torch.zeros_like(one, dtype=dtype if one.dtype in (BF16, F32) else one.dtype) for one in self.outs)
        self.op.reference(*inputs, *outs, *copied.scratch)
        return Call(self.op, inputs, outs).written()

    def written(self) -> tuple[torch.Tensor, ...]:
        schema = self.op.overload._schema.arguments[: len(self.inputs)]
        mutated = (value for value, one in zip(self.inputs, schema, strict=True) if one.alias_info)
        return (*self.outs, *mutated)

    def copy(self) -> Call:
        """The same call over other memory."""
        return Call(
            self.op,
            tuple(_copy(one) if isinstance(one, torch.Tensor) else one for one in self.inputs),
            tuple(one.clone() for one in self.outs),
            tuple(one.clone() for one in self.scratch),
        )

    def poison(self, byte: int) -> Call:
        """Outs and scratch filled with one byte; what the op writes in part only is zeroed."""
        kept = (one.partly for one in (self.op.outs | self.op.scratch).values())
        for one, partly in zip((*self.outs, *self.scratch), kept, strict=True):
            one.view(torch.uint8).fill_(0 if partly else byte)
        return self


def _copy(one: torch.Tensor) -> torch.Tensor:
    """Strides kept, as a cache's pages have them."""
    made = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
    return made.copy_(one)


def _wide(one: Any, dtype: torch.dtype) -> Any:
    return one.to(dtype) if isinstance(one, torch.Tensor) and one.dtype in (BF16, F32) else one


def made(op: Op, inputs: tuple[Any, ...], **dims: int) -> Call:
    """The call with outs and scratch of the op's own specs."""
    bound: dict[str, int] = {}
    like = None
    for place, _, one in op._places:
        value = inputs[place]
        if value is None:
            continue
        for axis, dim in one.names:
            bound.setdefault(dim, value.shape[axis])
        if one.dtype == "like" and like is None:
            like = value.dtype
    specs = op.specs(like or BF16, **{**bound, **dims})
    device = next(one for one in inputs if isinstance(one, torch.Tensor)).device
    outs = [torch.empty(one.resolve({})[0], dtype=one.dtype, device=device) for one in specs.values()]
    return Call(op, inputs, tuple(outs[: len(op.outs)]), tuple(outs[len(op.outs) :]))


def pages(layout: Format, states: int, block: int, device: str, width: int = 512, stride: int = 0) -> torch.Tensor:
    """An empty cache for so many states; `stride` bytes more than it needs from page to page."""
    own = pages_of(layout, width, 64, block, BF16)
    blocks = -(-states // block)
    if layout is Format.PLAIN:
        return torch.zeros(blocks, block, width, dtype=BF16, device=device)
    held = torch.zeros(blocks, own.page_bytes + stride, dtype=torch.uint8, device=device)
    return held[:, : own.page_bytes]
