"""Holds what a kernel wrote against the reference."""

from __future__ import annotations

import torch

from tests.dsv4.cuda.calls import FAMILIES, Call

BYTES = (torch.uint8, torch.float8_e4m3fn)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, whatever its strides."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def check(call: Call) -> None:
    """Run a call over poisoned outs, and compare with its reference."""
    family = FAMILIES[call.op.name]
    exact = call.reference(torch.float32)
    near = call.reference(torch.float64) if family.tolerance else exact
    found = call.poison(0xFF).run()
    for place, (one, bitwise, wide) in enumerate(zip(found, exact, near, strict=True)):
        if family.tolerance is None or place in family.exact:
            wanted = bitwise.to(one.dtype)
            if not same_bits(one, wanted):
                wrong = (bits(one) != bits(wanted)).sum().item()
                raise AssertionError(f"{call.op.name}: {wrong} of {bits(one).numel()} bytes of result {place} differ")
        else:
            relative, absolute = family.tolerance
            torch.testing.assert_close(one.double(), wide.double(), rtol=relative, atol=absolute, equal_nan=False)
