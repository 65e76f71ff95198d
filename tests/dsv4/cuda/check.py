"""Holds what a kernel wrote against the reference."""

from __future__ import annotations

import torch

from benchmarks.kernels.maker import Call
from dsv4.cache.pages import Format, pages_of
from tests.dsv4.cuda.families import FAMILIES

BYTES = (torch.uint8, torch.float8_e4m3fn)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, whatever its strides."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def give(call: Call, other: Call) -> None:
    """Write the other call's inputs over this one's, on the current stream."""
    for one, value in zip(call.inputs, other.inputs, strict=True):
        if isinstance(one, torch.Tensor):
            one.copy_(value)


def check(call: Call) -> None:
    """Run a call over poisoned outs, and compare with its reference."""
    family = FAMILIES[call.op.name]
    exact = call.reference(torch.float32)
    near = call.reference(torch.float64) if family.tolerance or family.packed else exact
    found = call.poison(0xFF).run()
    for place, (one, bitwise, wide) in enumerate(zip(found, exact, near, strict=True)):
        if family.packed:
            _check_packed(call, one, wide)
        elif family.tolerance is None or place in family.exact:
            wanted = bitwise.to(one.dtype)
            if not same_bits(one, wanted):
                wrong = (bits(one) != bits(wanted)).sum().item()
                raise AssertionError(f"{call.op.name}: {wrong} of {bits(one).numel()} bytes of result {place} differ")
        else:
            _check_near(f"result {place} of {call.op.name}", one, wide, *family.tolerance)


def _check_near(what: str, one: torch.Tensor, wide: torch.Tensor, relative: float, of_row: float) -> None:
    """|one - wide| <= relative * |wide| + of_row * the row's largest finite value; infinities match."""
    if not wide.numel():
        return
    finite = wide.double().masked_fill(wide.isinf(), 0)
    allowed = relative * finite.abs() + of_row * finite.abs().amax(-1, keepdim=True)
    wrong = ~((one.double() - wide).abs() <= allowed) & (one.double() != wide)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        pair = f"{one[tuple(at)]} for {wide[tuple(at)]}"
        raise AssertionError(f"{what}: {wrong.sum().item()} of {wrong.numel()} values are off, first {at}: {pair}")


STEP = {Format.FP8_DS_MLA: (0.13, 2.0**-16), Format.INDEXER_FP8: (0.13, 2.0**-16), Format.INDEXER_FP4: (0.51, 0.1),
        Format.PLAIN: (0.01, 1e-6)}  # fmt: skip
"""A step of each format: relative, and to the largest value of the row."""


def _check_packed(call: Call, one: torch.Tensor, wide: torch.Tensor) -> None:
    """Values of whole caches, and how many bytes differ from what float64 rounds to."""
    block, layout = call.inputs[-2], Format(call.inputs[-1])
    width = 512 if layout in (Format.FP8_DS_MLA, Format.PLAIN) else 128
    pages = pages_of(layout, width, 64, block, torch.bfloat16)
    every = torch.arange(one.shape[0] * block, device=one.device)
    wide = wide.to(one.dtype)
    found, wanted = (pages.read(cache, every, torch.float64) for cache in (one, wide))
    _check_near(f"cache of {call.op.name}", found, wanted, *STEP[layout])
    differ = (bits(one) != bits(wide)).double().mean().item()
    assert differ < 2e-3, f"{differ:.2%} of the cache's bytes differ"
