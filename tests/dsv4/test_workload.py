"""The sweep's workload: the same steps for the same arguments, from a trace file or a generated one."""

from __future__ import annotations

from pathlib import Path

import pytest

import workspace
from dsv4.engine import Engine
from dsv4.errors import ModelConfigError, RequestError, TraceError
from dsv4.trace import HEADER
from dsv4.workload import DSV4, WARM_UP
from tests.dsv4.replay import device

TRACE = (HEADER, "2023-11-16 18:15:46.6805900,374,4", "2023-11-16 18:15:46.6905900,396,3")


def write(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(lines))
    return file


def test_it_is_registered_under_its_name() -> None:
    assert DSV4.name == "dsv4" and DSV4.models == ("flash", "pro")


def test_the_same_arguments_give_the_same_steps() -> None:
    first, again = (list(DSV4().open("flash", None, 5).steps(30)) for _ in range(2))
    other = list(DSV4().open("flash", None, 6).steps(30))
    assert first == again != other
    assert [step.index for step in first] == list(range(30))
    for step in first:
        assert step.tokens == step.prefill_tokens + step.decode_tokens
        assert step.requests == len(step.rows)


def test_the_default_trace_starts_under_load_and_mixes_prompts_with_decoding() -> None:
    steps = list(DSV4().open("flash", None, 0).steps(None))
    assert len(steps) == 100
    assert all(step.decode_tokens > 8 for step in steps)
    assert any(step.prefill_tokens for step in steps) and any(not step.prefill_tokens for step in steps)


def test_a_short_trace_is_replayed_from_its_first_step_to_its_last(tmp_path: Path) -> None:
    steps = list(DSV4().open("flash", write(tmp_path, *TRACE), 0).steps(WARM_UP))
    assert [step.tokens for step in steps] == [374, 397, 2, 2]
    assert [step.prefill_tokens for step in steps] == [374, 396, 0, 0]


def test_an_idle_server_waits_for_the_next_arrival(tmp_path: Path) -> None:
    late = "2023-11-16 19:15:46.6805900,10,1"
    steps = list(DSV4().open("flash", write(tmp_path, *TRACE, late), 0).steps(None))
    assert steps[-1].prefill_tokens == 10


@pytest.mark.parametrize("aux_streams", [True, False])
def test_a_prepared_runner_replays_a_trace(aux_streams: bool) -> None:
    session = DSV4().open("flash", None, 0)
    assert "43 layers" in session.description
    ws = workspace.create("event_fenced", device=device())
    steps = list(session.steps(3))
    runner = session.prepare(ws, "narrow", aux_streams, 1)
    for step in steps:
        runner.run(step)
    assert ws.device.verdict() == "SAFE"
    assert (ws.device.counters["graph_launch"] > 0) == any(step.tokens <= 512 for step in steps)
    runner.close()
    ws.close()


def test_bad_input_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError):
        DSV4().open("flush", None, 0)
    with pytest.raises(TraceError, match="line 4"):
        DSV4().open("flash", write(tmp_path, *TRACE, "2023"), 0)
    with pytest.raises(ModelConfigError, match="not divisible by 3 ranks"):
        DSV4(tensor_parallel=3).open("flash", None, 0)
    short = DSV4(Engine(max_model_len=100)).open("flash", write(tmp_path, *TRACE), 0)
    with pytest.raises(RequestError, match="max_model_len=100"):
        next(iter(short.steps(1)))
