"""What the benchmark on a GPU is built of, as far as a CPU can show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import workspace
from benchmarks.decode_step.bare import UNREAD, Bare
from benchmarks.decode_step.interval import paired
from benchmarks.decode_step.model import flash
from benchmarks.decode_step.report import table
from dsv4.model.precision import SERVED
from dsv4.model.scratch import experts_layout
from dsv4.shard import Shard

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "decode_step"
LAYOUT = workspace.Layout(
    "stage", a=workspace.spec("T", 4, dtype=torch.float32), none=workspace.spec("K", 4, dtype=torch.float32)
)


def test_the_interval_is_of_pairs() -> None:
    """A host that drifts by a factor of 3 hides nothing; ten pairs that lie apart move the interval, not the median."""
    under = [10.0 + 0.1 * at for at in range(200)]
    over = [0.9 * one for one in under]
    assert paired(over, under) == pytest.approx((0.9, 0.9, 0.9))
    over[:10] = [50.0] * 10
    middle, low, high = paired(over, under)
    assert (middle, low) == pytest.approx((0.9, 0.9)) and high <= 1


def test_bare_leases_are_fresh_tensors() -> None:
    """A new tensor at each acquire, none kept behind the release, and none made where there is nothing to hold."""
    ws = Bare(workspace.create("upstream", device="cpu", allow_unsafe=True))
    with ws.lease(LAYOUT, T=3, K=0) as scratch:
        first = scratch.a
        assert first.shape == (3, 4) and scratch.tensors.keys() == {"a", "none"}
        with ws.lease(LAYOUT, T=3, K=0) as other:
            assert other.a.data_ptr() != first.data_ptr()
            assert other.none is scratch.none
    with pytest.raises(AttributeError):
        _ = scratch.a


def test_the_baseline_is_not_charged_for_what_nobody_touches() -> None:
    """Scratch of the experts that their kernels for a few rows leave alone; larger steps use it."""
    ws = Bare(workspace.create("upstream", device="cpu", allow_unsafe=True))
    layout = experts_layout(Shard(flash(3), attention="flashinfer"), SERVED)
    for tokens, kept in ((2, UNREAD), (11, frozenset())):
        with ws.lease(layout, T=tokens) as one, ws.lease(layout, T=tokens) as two:
            same = {name for name in one.tensors if one.tensors[name] is two.tensors[name]}
        assert same == kept


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_can_be_shown(path: Path) -> None:
    lines = table(json.loads(path.read_text()))
    assert len(lines) > 5 and not any(line.startswith("failed") for line in lines)
