"""The sweep of steps that run: in turn, counted, written setting by setting, and taken up again."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import workspace
from workspace.errors import Unsupported
from workspace.sweep import pictures, timed
from workspace.sweep.plan import Replay
from workspace.sweep.timed import Setting, Timing, ratio
from workspace.sweep.timed_command import run
from workspace.sweep.timed_report import Record, draw, timings_of, title_of

OUTPUT = workspace.Layout("output", out=workspace.spec("T", 128, dtype=torch.float32))
SAFE = {"caching": True, "event_fenced": True, "upstream": False}
ORDER: list[str] = []
"""Strategies in the order of their steps."""

PLACES: list[tuple[str, int]] = []
"""Strategy and step of what a trace ran."""


class Model:
    """A lease that is filled."""

    description = "one lease"

    def __init__(self) -> None:
        self.prepared: list[Setting] = []

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int, tokens: int) -> Filled:
        if mode == "wide":
            raise Unsupported("no wide regions here", "choose another mode")
        self.prepared.append(Setting(mode, micro_batches, aux_streams, tokens))
        return Filled(ws, tokens)

    def load(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Trace:
        return Trace(ws)

    def differs(self, mode: str, tokens: int) -> bool:
        return mode != "full" or tokens == 2


class Trace:
    """Five steps, of which the first is not timed; one request waits at step 1 and has its token at step 3."""

    steps, skipped, first_tokens = 5, 1, ((1, 3),)

    def __init__(self, ws: Any) -> None:
        self.ws = ws
        ws.declare(OUTPUT, T=5)
        ws.reserve()

    def run(self, place: int) -> None:
        PLACES.append((self.ws.strategy, place))
        with self.ws.lease(OUTPUT, T=place + 1) as scratch:
            scratch.out.fill_(1)

    def close(self) -> None:
        """Nothing outlives a step."""


class Filled:
    def __init__(self, ws: Any, tokens: int) -> None:
        self.ws, self.tokens = ws, tokens
        ws.declare(OUTPUT, T=tokens)
        ws.reserve()

    def run(self) -> None:
        ORDER.append(self.ws.strategy)
        with self.ws.lease(OUTPUT, T=self.tokens) as scratch:
            scratch.out.fill_(1)

    def close(self) -> None:
        """Nothing outlives a step."""


class CpuClock:
    """Counts where the device would measure."""

    device = "cpu"

    def __init__(self) -> None:
        self._us, self._calls = count(100), count()

    def idle(self) -> None:
        """The CPU runs what it is given at once."""

    def begin(self) -> None:
        """Its time is a count."""

    def elapsed_us(self) -> float:
        return float(next(self._us))

    def allocations(self) -> int:
        return next(self._calls)

    def allocated(self) -> int:
        return 1000

    def peak(self, reset: bool = False) -> int:
        return 3000


class Workload:
    name = "filled"
    models = ("small",)
    drivers = ("cuda",)
    made = Model()

    def timed(self, model: str, seed: int, device: str) -> Model:
        return self.made


class Untimed:
    name = "untimed"
    models = ("small",)
    drivers = ("simulated",)


def sweep(out: Path, *modes: str, workload: type = Workload, **how: Any) -> tuple[int, str]:
    console = Console(record=True, width=200)
    replay = Replay(f"{__name__}:{workload.__name__}", "", None, "cuda", 3, 0)
    given: dict[str, Any] = {"allow_refused": False, "clock": CpuClock()} | how
    code = run(console, replay, SAFE, modes, (1,), (True,), given.pop("tokens", (2, 64)), out, **given)
    return code, console.export_text()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Workload.made = Model()
    ORDER.clear()
    PLACES.clear()


def test_every_strategy_takes_a_step_in_each_round(tmp_path: Path) -> None:
    code, text = sweep(tmp_path, "eager")
    assert code == 0
    rounds = ORDER[-9:]
    assert all(sorted(rounds[at : at + 3]) == sorted(SAFE) for at in (0, 3, 6))
    made = json.loads((tmp_path / "timed.json").read_text())
    assert [one["tokens"] for one in made["settings"]] == [2, 64]
    for setting in made["settings"]:
        assert [one["strategy"] for one in setting["timings"]] == list(SAFE)
        for one in setting["timings"]:
            assert [len(one[key]) for key in ("step_us", "host_us", "device_us")] == [3, 3, 3]
            assert one["allocator_calls"] == 1 and one["peak"] == 2000
            assert one["owners"] == {"output": -(-setting["tokens"] * 512 // 256) * 256}
    assert made["settings"][1]["timings"][1]["reserved"] >= 64 * 512
    assert "upstream (!)" in text and (tmp_path / "timed.png").exists()


def test_slow_steps_take_fewer_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fewer than the least, though."""
    monkeypatch.setattr(timed, "LONGEST_S", 0.0)
    monkeypatch.setattr(timed, "LEAST_ROUNDS", 2)
    sweep(tmp_path, "eager")
    made = json.loads((tmp_path / "timed.json").read_text())
    assert {len(one["step_us"]) for setting in made["settings"] for one in setting["timings"]} == {2}


def test_a_second_run_times_what_is_missing_only(tmp_path: Path) -> None:
    sweep(tmp_path, "eager")
    Workload.made.prepared.clear()
    _, text = sweep(tmp_path, "eager", "full")
    assert {(one.mode, one.tokens) for one in Workload.made.prepared} == {("full", 2)}
    assert text.count("done before") == 2
    assert len(Record(tmp_path, json.loads((tmp_path / "timed.json").read_text())["plan"]).done) == 3


def test_a_step_that_no_graph_takes_is_timed_once(tmp_path: Path) -> None:
    """In mode eager; what was timed before is shown again."""
    sweep(tmp_path, "eager")
    _, text = sweep(tmp_path, "full")
    assert "full x1, 64 tokens: no graph takes such a step" in text
    assert "eager x1, 64 tokens" in text and "full x1, 2 tokens" in text


def test_ranges_are_for_a_profiler_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each strategy's leases have them then, and what is timed with them is not mixed with what is timed without."""
    begun: list[str] = []

    class Ranges:
        def range_start(self, msg: str, /) -> int:
            begun.append(msg)
            return 0

        def range_end(self, range_id: int, /) -> None:
            """Counted by its start."""

    monkeypatch.setattr(workspace.create().driver, "ranges", Ranges())
    sweep(tmp_path, "eager", tokens=(2, 0))
    assert begun == []
    steps, timed_before = len(ORDER) + len(PLACES), len(Workload.made.prepared)
    sweep(tmp_path, "eager", tokens=(2, 0), nvtx=True)
    assert begun == ["workspace:output"] * steps
    assert len(Workload.made.prepared) == 2 * timed_before
    assert json.loads((tmp_path / "timed.json").read_text())["plan"]["nvtx"] is True


def test_another_plan_begins_anew(tmp_path: Path) -> None:
    sweep(tmp_path, "eager")
    assert Record(tmp_path, {"workload": "another"}).done == {}


def test_a_refusal_is_kept_and_fails_the_sweep(tmp_path: Path) -> None:
    code, text = sweep(tmp_path, "wide", "eager")
    assert code == 1
    assert "no wide regions here" in text
    assert sweep(tmp_path, "wide", allow_refused=True)[0] == 0


def test_the_steps_of_a_trace_are_run_in_turn(tmp_path: Path) -> None:
    """Once before and once timed; nobody runs a step before all have run the one before."""
    code, text = sweep(tmp_path, "eager", tokens=(0,))
    assert code == 0 and "eager x1, trace" in text
    assert [place for _, place in PLACES] == [place for _ in range(2) for place in range(5) for _ in SAFE]
    assert all({name for name, _ in PLACES[at : at + 3]} == set(SAFE) for at in range(0, len(PLACES), 3))
    (setting,) = json.loads((tmp_path / "timed.json").read_text())["settings"]
    for one in setting["timings"]:
        assert len(one["step_us"]) == 4 and one["peak"] == 2000
        # What the clock says of a step counts up by one, whose turn it is.
        (waited,), device = one["first_token_us"], one["device_us"]
        assert waited >= 0 and device == sorted(device)
    assert list(Record(tmp_path, json.loads((tmp_path / "timed.json").read_text())["plan"]).done)[0].tokens == 0


@pytest.mark.parametrize(("peaks", "scale"), [((40, 3), "log"), ((40, 4), "linear"), ((40, 0), "linear")])
def test_bytes_more_than_a_decade_apart_have_a_logarithmic_axis(
    peaks: tuple[int, int], scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in all panels, so that none of one reads as another's; else each begins at 0, which a log has not."""
    figures: list[Any] = []
    monkeypatch.setattr(pictures.pyplot, "close", figures.append)
    found = {
        Setting("eager", 1, True, tokens): [
            Timing(name, (1000.0,), peak=peak << 20) for name, peak in zip(("caching", "upstream"), own, strict=True)
        ]
        for tokens, own in ((2, (5, 5)), (64, peaks))
    }
    draw(found, SAFE, "title", tmp_path / "timed.png")
    monkeypatch.undo()
    (figure,) = figures
    pictures.pyplot.close(figure)
    assert [panel.get_yscale() for panel in figure.axes] == [scale] * 2
    limits = [panel.get_ylim() for panel in figure.axes]
    assert (limits[0] == limits[1]) == (scale == "log") and (limits[0][0] == 0) == (scale == "linear")


def test_a_picture_names_its_gpu(tmp_path: Path) -> None:
    """Which is not there where the steps ran on a CPU; a written file gives the same timings again."""
    sweep(tmp_path, "eager")
    made = json.loads((tmp_path / "timed.json").read_text())
    made["made"]["gpu"] = "NVIDIA H200"
    assert title_of(made) == "Peak bytes and time of a step on one NVIDIA H200\none lease"
    made["made"]["gpu"] = None
    assert title_of(made) == "Peak bytes and time of a step\none lease"
    assert timings_of(made) == Record(tmp_path, made["plan"]).done


def test_a_workload_without_timed_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="does not run on the 'cuda' driver"):
        sweep(tmp_path, "eager", workload=Untimed)


def test_the_ratio_is_of_pairs() -> None:
    """Times that drift together by far more than they differ."""
    base = [100.0 * (1 + at) for at in range(50)]
    middle, low, high = ratio(Timing("a", tuple(0.9 * one for one in base)), Timing("b", tuple(base)))
    assert low == pytest.approx(0.9) and middle == pytest.approx(0.9) and high == pytest.approx(0.9)
