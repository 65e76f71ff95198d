"""The replay under every strategy and mode: verdicts, with the edge removed that makes an unfenced pool race."""

from __future__ import annotations

import attrs
import pytest
import torch

import workspace
from dsv4.batch import batch_of
from dsv4.errors import RunError
from dsv4.layouts import stage_layouts
from dsv4.options import REGIONS, Options
from dsv4.plan import dims_of
from dsv4.reserve import live_sets
from dsv4.runner import Runner
from dsv4.shard import Shard
from dsv4.topology import Conditions, layer
from tests.dsv4.replay import ENGINE, SAFE, SMALL, STEPS, device, run, step
from workspace.simulated.ranges import ranges_of

MODES = tuple(REGIONS)

LARGEST = (step(0, 64, (6000, 992), (7000, 992)), step(1, 64), step(2, 0, (6143, 2048)))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", SAFE)
def test_safe_strategies_are_safe_in_every_mode(strategy: str, mode: str, micro_batches: int) -> None:
    found, snapshot = run(strategy, Options(mode=mode, micro_batches=micro_batches))
    assert found.verdict() == "SAFE", found.races()[0]
    assert snapshot.allocated == 0


@pytest.mark.parametrize("mode", MODES)
def test_unfenced_is_ordered_in_the_stock_topology(mode: str) -> None:
    """One runner with every join in place (checker.md): the reverted pool has no unordered pair."""
    for aux_streams in (True, False):
        found, _ = run("unfenced", Options(mode=mode, aux_streams=aux_streams))
        assert found.verdict() == "SAFE", found.races()[0]


@pytest.mark.parametrize("mode", MODES)
def test_unfenced_races_when_two_micro_batches_share_the_pool(mode: str) -> None:
    found, _ = run("unfenced", Options(mode=mode, micro_batches=2))
    assert found.verdict() == "UNSAFE"
    assert {"main", "main.1"} & {race.first.stream_name for race in found.races()}


@pytest.mark.parametrize("stream", ["aux0", "aux1", "aux2"])
def test_a_dropped_join_breaks_unfenced_and_upstream_only(stream: str) -> None:
    """The uses are declared, so a strategy that fences needs no join of the model."""
    options = Options(drop_join=stream)
    for strategy in SAFE:
        found, snapshot = run(strategy, options)
        assert found.verdict() == "SAFE", found.races()[0]
    for strategy in ("unfenced", "upstream"):
        found, _ = run(strategy, options)
        assert found.verdict() == "UNSAFE"
        assert any(stream in (race.first.stream_name, race.second.stream_name) for race in found.races())


def test_event_fenced_pays_for_a_dropped_join_with_fences() -> None:
    _, stock = run("event_fenced")
    _, dropped = run("event_fenced", Options(drop_join="aux1"))
    assert stock.fences == 0 < dropped.fences


@pytest.mark.parametrize("strategy", ["event_fenced", "unfenced"])
def test_merged_launches_judge_as_single_ones_do(strategy: str) -> None:
    for options in (Options(), Options(drop_join="aux0"), Options(micro_batches=2)):
        verdicts = set()
        for merge in (True, False):
            single = Options(merge=merge, drop_join=options.drop_join, micro_batches=options.micro_batches)
            found, _ = run(strategy, single)
            verdicts.add(found.verdict())
        assert len(verdicts) == 1, options


def test_merging_halves_the_launches() -> None:
    merged, _ = run("event_fenced")
    single, _ = run("event_fenced", Options(merge=False))
    assert merged.counters["launch"] < 0.65 * single.counters["launch"]


@pytest.mark.parametrize("strategy", ["event_fenced", "caching"])
def test_launches_touch_exactly_the_lease_s_tensors(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are computed from a lease's address and the layout; they must be those of the tensors it holds."""
    target = device()
    ws = workspace.create(strategy, device=target)
    wanted = {"wq_b": ("preparation", "q"), "moe": ("ffn", "y"), "wo_b": ("projection", "attn_out")}
    launch, seen = target.launch, set()

    def checked(label, reads, writes):  # type: ignore[no-untyped-def]
        node = launch(label, reads, writes)
        if label in wanted:
            lease, name = wanted[label]
            tensor = getattr(micro_batch.lease(lease), name)
            assert list(ranges_of(writes)) == [(tensor.data_ptr(), tensor.nbytes)], label
            seen.add(label)
        return node

    monkeypatch.setattr(target, "launch", checked)
    runner = Runner(ws, Shard(SMALL), ENGINE, Options(merge=False))
    micro_batch = runner.planners[0].micro_batch
    runner.run(STEPS[1])
    assert seen == set(wanted)


def test_bytes_on_loan_are_those_of_the_stages() -> None:
    """The peak of an eager step is the largest sum of leases that live together, by the layouts."""
    one = step(0, 16, (0, 400))
    batch = batch_of(one.rows, Shard(SMALL), ENGINE)
    most = 0
    for kind in set(SMALL.layer_kinds):
        layouts, dims = stage_layouts(Shard(SMALL), kind), dims_of(batch, kind, ENGINE, batch.tokens)
        for leases in live_sets(layer(kind, Conditions(), False)):
            sizes = [layouts[name].size(**{d: dims[d] for d in layouts[name].dim_names}) for name in leases]
            most = max(most, sum(sizes))
    _, snapshot = run("event_fenced", steps=(one,), statistics=True)
    assert snapshot.peak_allocated == most


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_declared_covers_the_largest_step(mode: str, micro_batches: int) -> None:
    """Nothing is refused once locked: full budget, all requests, long contexts.

    What is declared is the largest sum of live leases; a tenth on top leaves room for gaps between them.
    """
    options = Options(mode=mode, micro_batches=micro_batches)
    ws = workspace.create("event_fenced", device=device(), micro_batches=micro_batches, headroom=1.1)
    runner = Runner(ws, Shard(SMALL), ENGINE, options, LARGEST)
    ws.lock()
    for one in LARGEST:
        runner.run(one)
    assert ws.snapshot().growths == 0
    runner.close()
    ws.close()


def test_less_than_what_is_declared_is_not_enough() -> None:
    """The control of the test above: an engine of a thirty-second of the token budget is given the same steps."""
    ws = workspace.create("event_fenced", device=device())
    runner = Runner(ws, Shard(SMALL), attrs.evolve(ENGINE, max_num_batched_tokens=64), Options())
    for one in LARGEST:
        runner.run(one)
    assert ws.snapshot().growths > 0


def test_graphs_replay_where_a_bucket_fits() -> None:
    """Full: decode-only steps; wide and narrow: up to 512 tokens; overflow: up to 8."""
    expected = {"eager": 0, "full": 3, "wide": 4, "narrow": 4, "overflow": 0}
    for mode, segments in (("full", 1), ("wide", 7), ("narrow", 7), ("overflow", 7), ("eager", 0)):
        found, _ = run("event_fenced", Options(mode=mode))
        assert found.counters["graph_launch"] == expected[mode] * segments, mode


def test_a_bucket_no_step_announced_is_captured_when_it_comes() -> None:
    ws = workspace.create("event_fenced", device=device())
    runner = Runner(ws, Shard(SMALL), ENGINE, Options(mode="narrow"))
    captures = ws.device.counters["begin_capture"]
    runner.run(STEPS[0])
    assert ws.device.counters["begin_capture"] > captures
    captures = ws.device.counters["begin_capture"]
    runner.run(STEPS[4])
    assert ws.device.counters["begin_capture"] == captures
    runner.close()
    assert ws.graphs == 0
    ws.close()


@pytest.mark.parametrize("strategy", SAFE)
def test_the_draft_layer_runs_on_the_decode_rows(strategy: str) -> None:
    plain, _ = run(strategy)
    drafted, _ = run(strategy, Options(draft=True))
    assert drafted.verdict() == "SAFE"
    assert drafted.counters["launch"] > plain.counters["launch"]


@pytest.mark.parametrize("settings", [{"indexer": "fp4", "architecture": "sm100"}, {"tensor_parallel": 4}])
def test_other_shards_run(settings: dict[str, object]) -> None:
    found, _ = run("event_fenced", shard=Shard(SMALL, **settings))  # type: ignore[arg-type]
    assert found.verdict() == "SAFE"


def test_one_token_makes_one_micro_batch() -> None:
    found, _ = run("event_fenced", Options(micro_batches=2), steps=(step(0, 1), step(1, 2)))
    assert found.verdict() == "SAFE"


@pytest.mark.parametrize("wrong", [{"mode": "piecewise"}, {"micro_batches": 3}, {"drop_join": "aux0", "mode": "full"}])
def test_a_run_that_does_not_exist_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RunError) as refused:
        Options(**wrong)  # type: ignore[arg-type]
    assert refused.value.remedy


def test_a_replay_needs_a_simulated_device() -> None:
    class Elsewhere:
        device = torch.device("cpu")

    with pytest.raises(RunError, match="simulated device"):
        Runner(Elsewhere(), Shard(SMALL), ENGINE, Options())
