"""Tensors that torch left in another shape when it refused an op's out are not lent again."""

from __future__ import annotations

import pytest
import torch

import workspace
from tests.workspace.forms import BOTH
from workspace import Layout, lease, spec

PAIR = Layout("pair", q=spec("T", 64, dtype=torch.float32), r=spec("T", 64, dtype=torch.float32))


def overlap(strategy: str, several: bool) -> bool:
    """Whether, after an op whose result was too large for `q`, the next lease's `q` lies over its `r`."""
    ws = workspace.create(strategy, device="cpu")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="resize"), ws.lease(PAIR, T=4) as failed:
            if several:
                ws.use(failed, ws.stream("other"))  # what several streams use is released the long way
            torch.mm(torch.ones(8, 3), torch.ones(3, 64), out=failed.q)
        with ws.lease(PAIR, T=4) as following:
            following.r.fill_(0)
            following.q.fill_(7)
            if following.q.shape != (4, 64) or following.r.any():
                return True
    ws.close()
    return False


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("form", BOTH, indirect=True)
@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("looked", [True, False])
def test_an_out_that_torch_refused_does_not_come_back(
    strategy: str, several: bool, looked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch gives it the shape of the result first. Control: without the look it covers its neighbour's bytes."""
    if not looked:
        monkeypatch.setattr(lease, "changed", lambda *_: None)
    assert overlap(strategy, several) is not looked


@pytest.mark.parametrize("form", BOTH, indirect=True)
def test_another_error_keeps_the_tensors() -> None:
    """Only what was changed is made anew."""
    ws = workspace.create("event_fenced", device="cpu")
    found = []
    for _ in range(3):
        with pytest.raises(ValueError, match="mine"), ws.lease(PAIR, T=2) as failed:
            found.append(failed.q)
            raise ValueError("mine")
    assert found[0] is found[1] is found[2]
    ws.close()


@pytest.mark.parametrize("form", BOTH, indirect=True)
@pytest.mark.parametrize("several", [False, True])
def test_a_look_that_fails_loses_nothing(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes come back whatever the look meets."""

    def fails(*_: object) -> None:
        raise KeyError("look")

    monkeypatch.setattr(lease, "changed", fails)
    ws = workspace.create("event_fenced", device="cpu")
    for _ in range(3):
        with pytest.raises(KeyError, match="look"), ws.lease(PAIR, T=2) as failed:
            if several:
                ws.use(failed, ws.stream("other"))
            raise ValueError("mine")
        assert ws.snapshot().allocated == 0
    ws.close()
