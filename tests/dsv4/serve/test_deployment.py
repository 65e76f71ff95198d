"""Real models as they are deployed: the tokens of each request do not depend on how, or beside whom, it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from dsv4.errors import ModelConfigError, RequestError, RunError
from dsv4.ops import kernels
from dsv4.options import Options
from dsv4.serve.build import Deployment, ModelOptions, deployed
from dsv4.serve.errors import BudgetError
from dsv4.serve.sampling import Sampling
from dsv4.serve.server import Server
from tests.dsv4.serve.made import ENGINE, OPTIONS, generated, prompt, tiny
from workspace import Workspace
from workspace.errors import UnknownStrategy, WorkspaceError

PROMPTS = [prompt(length, seed) for seed, length in enumerate((30, 130, 7, 61, 100))]
COUNT = 8


def together(one: Deployment) -> list[list[int]]:
    """All prompts at once; what they generate."""
    server = Server(one.model)
    asked = [server.submit(tokens, Sampling(max_new_tokens=COUNT)) for tokens in PROMPTS]
    while server.unfinished:
        server.step()
    return [generation.tokens for generation in asked]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What each prompt generates on a server of its own."""
    with tiny() as one:
        return [generated(one, tokens, COUNT) for tokens in PROMPTS]


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": "caching", "engine": attrs.evolve(ENGINE, max_num_batched_tokens=17)},
        {"strategy": "per_stream", "drafts": 2},
        {"run": Options(micro_batches=2), "drafts": 1},
        {"run": Options(mode="full", aux_streams=False), "device": "simulated"},
        {"run": Options(mode="narrow", micro_batches=2), "device": "simulated", "drafts": 1},
    ],
    ids=str,
)
def test_a_batch_gives_each_request_what_it_gets_alone(changed: dict[str, Any], alone: list[list[int]]) -> None:
    """Whatever the strategy, the chunks, the run mode, the micro-batches; no two accesses of a simulated run race."""
    with tiny(**changed) as one:
        assert together(one) == alone
        if changed.get("device") == "simulated":
            assert one.workspace.device.verdict() == "SAFE"


def test_a_pool_without_lifetimes_races_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the check sees what two micro-batches do to shared bytes that nothing orders."""
    monkeypatch.setenv("WORKSPACE_ALLOW_UNSAFE", "true")
    run = Options(mode="narrow", micro_batches=2)
    with tiny(strategy="unfenced", run=run, device="simulated", drafts=1) as one:
        together(one)
        assert one.workspace.device.verdict() == "UNSAFE"


def test_evictions_change_no_token() -> None:
    """Caches for one context of the longest length: the first request grows into the blocks of the others."""
    prompts = [prompt(252, 9), *PROMPTS[:1], *PROMPTS[2:3]]
    with tiny() as one:
        wanted = [generated(one, tokens, COUNT) for tokens in prompts]
        held = one.workspace_bytes
    with tiny(memory=_enough(held)) as one:
        server = Server(one.model)
        asked = [server.submit(tokens, Sampling(max_new_tokens=COUNT)) for tokens in prompts]
        while server.unfinished:
            server.step()
        assert server.evictions > 0
        assert [generation.tokens for generation in asked] == wanted


def _enough(workspace: int) -> int:
    """A memory that leaves the caches what they need at least, found by asking for too little."""
    with pytest.raises(BudgetError) as refused, tiny(memory=workspace + 1):
        pass
    fields = refused.value.fields
    assert fields["workspace"] == workspace
    return workspace + int(str(fields["caches"]))


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": "event_fenced"},
        {"strategy": "caching"},
        {"run": Options(mode="narrow", micro_batches=2), "device": "simulated"},
    ],
    ids=str,
)
def test_workspace_and_caches_stay_within_their_memory(
    changed: dict[str, Any], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace is locked: it never grows, what is on loan at once was declared, and what is kept is counted."""
    kept: dict[str, int] = {}
    persistent = Workspace.persistent

    def noted(ws: Workspace, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        assert name in kept or not ws.locked, f"{name} is made behind the lock"
        found = persistent(ws, name, shape, dtype)
        kept[name] = found.nbytes
        return found

    monkeypatch.setattr(Workspace, "persistent", noted)
    with tiny(memory=60 << 20, **changed) as one:
        assert together(one) == alone
        snapshot = one.workspace.snapshot()
        assert one.workspace_bytes + one.cache_bytes <= 60 << 20
        assert one.workspace.locked and snapshot.growths == 0
        assert 0 < snapshot.peak_allocated <= one.workspace_bytes
        assert snapshot.reserved + sum(kept.values()) <= one.workspace_bytes
        assert ("metadata.1" in kept) == ("run" in changed)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"strategy": "cachin"}, UnknownStrategy, "cachin"),
        ({"model": "flsh"}, ModelConfigError, "did you mean 'flash'"),
        ({"layers": 7}, ModelConfigError, "layers=7"),
        ({"engine": attrs.evolve(ENGINE, max_model_len=5000)}, RequestError, "4096 positions"),
        ({"memory": 1000}, BudgetError, "1000 bytes is too small"),
        ({"drafts": 9}, RequestError, "guess 1 to 8"),
        ({"run": Options(mode="full")}, RunError, "no graphs"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_deployed_is_refused(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says), tiny(**changed):
        pass


def test_a_model_that_the_cuda_kernels_do_not_take_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the widths they have, and the way around. Without kernels, the references take it; here is no device."""
    monkeypatch.setattr(kernels, "MISSING", "")
    with pytest.raises(RunError, match="do not take head_dim=32, .*precision 'float32'.*\n.*DSV4_KERNELS=off"):
        with tiny(device="cuda"):
            pass
    monkeypatch.setattr(kernels, "MISSING", "for the test")
    if not torch.cuda.is_available():
        with pytest.raises(WorkspaceError, match="CUDA"), tiny(device="cuda"):
            pass


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    """A sound one is served; one with heads not divisible by groups and an unknown ratio is refused with both."""
    text = (
        '{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 16,'
        '"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "sliding_window": 32, "compress_ratios": [0, 4],'
        '"index_n_heads": 4, "index_head_dim": 32, "index_topk": 8, "moe_intermediate_size": 16,'
        '"n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 300, "routed_scaling_factor": 1.5,'
        '"num_hash_layers": 1, "num_nextn_predict_layers": 0}'
    )
    file = tmp_path / "config.json"
    file.write_text(text)
    options = attrs.evolve(OPTIONS, model=str(file))
    with deployed(options) as one:
        assert len(generated(one, [1, 2, 3], 4)) == 4
    with pytest.raises(RequestError, match="no MTP block"), deployed(attrs.evolve(options, drafts=1)):
        pass
    file.write_text(text.replace('"o_groups": 2', '"o_groups": 3').replace("[0, 4]", "[0, 5]"))
    with pytest.raises(ModelConfigError, match="not divisible by o_groups=3") as refused, deployed(options):
        pass
    assert any("compress_ratios[1] is 5" in problem for problem in refused.value.problems)


def test_the_defaults_serve_the_built_in_model() -> None:
    with deployed(ModelOptions()) as one:
        assert len(generated(one, one.tokenizer.encode("hello"), 2)) == 2
