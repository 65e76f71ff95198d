"""The checks that hold CUDA kernels against references: on the references themselves, and on values a step off."""

from __future__ import annotations

import attrs
import pytest
import torch

from benchmarks.kernels.calls import CALLS, call
from benchmarks.kernels.maker import Call
from tests.dsv4.cuda.check import check
from tests.dsv4.cuda.families import FAMILIES

SMALL = (
    "q_norm_rope_kv_insert",
    "rms_norm",
    "indexer_q_rope_fp4",
    "inverse_rope_fp8",
    "store_compressed",
    "indexer_top_k",
)


@attrs.frozen(eq=False)
class Spoilt(Call):
    """Runs, then changes the first value that is not zero, by a tenth or by a bit."""

    def run(self) -> tuple[torch.Tensor, ...]:
        written = super().run()
        one = written[-1] if self.op.name == "store_compressed" else written[0]
        flat = one.view(torch.uint8).view(-1) if one.dtype.itemsize == 1 else one.view(-1)
        at = int(flat.nonzero()[0])
        flat[at] = flat[at] * 1.1 if flat.is_floating_point() else flat[at] ^ 64
        return written


def test_every_kernel_is_held_against_something() -> None:
    assert set(CALLS) == set(FAMILIES)


@pytest.mark.parametrize("name", SMALL)
def test_references_pass_and_a_wrong_value_does_not(name: str) -> None:
    """In the activations' own precision, on the CPU."""
    check(call(name, 5, device="cpu"))
    made = call(name, 5, device="cpu")
    with pytest.raises(AssertionError):
        check(Spoilt(made.op, made.inputs, made.outs, made.scratch))
