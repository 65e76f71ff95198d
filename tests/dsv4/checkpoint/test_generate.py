"""From a folder to tokens: what a server generates does not depend on the folder's format."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dsv4.checkpoint import save
from dsv4.cli import main
from dsv4.model.random_weights import RandomTensors
from dsv4.serve.build import BUILT_IN, SMALL, ModelOptions, deployed
from dsv4.serve.sampling import Sampling
from dsv4.serve.server import Server

CONFIG = BUILT_IN[SMALL]
FORMATS = "deepseek", "transformers"


def generated(options: ModelOptions) -> list[list[int]]:
    """Tokens of two requests side by side, one greedy, one drawn."""
    with deployed(options) as deployment:
        server = Server(deployment.model)
        prompts = [deployment.tokenizer.encode(text) for text in ("The page that a request", "A lease")]
        requests = [
            server.submit(prompt, Sampling(max_new_tokens=12, temperature=temperature, seed=7))
            for prompt, temperature in zip(prompts, (0.0, 1.0), strict=True)
        ]
        while server.unfinished:
            server.step()
        return [one.tokens for one in requests]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small random checkpoint in both formats, and once with other weights."""
    made = {name: tmp_path_factory.mktemp(name) for name in (*FORMATS, "other")}
    for format in FORMATS:
        save(made[format], RandomTensors(CONFIG, 0), CONFIG, format, shard_bytes=1_000_000)
    save(made["other"], RandomTensors(CONFIG, 1), CONFIG)
    return made


def test_both_formats_give_the_same_tokens(folders: dict[str, Path]) -> None:
    """Those of the weights in memory, without a draft model and with the folder's own."""
    wanted = generated(ModelOptions())
    assert all(len(tokens) == 12 for tokens in wanted)
    for format in FORMATS:
        assert generated(ModelOptions(checkpoint=folders[format], drafts=2)) == wanted


def test_the_command_prints_the_same_text(folders: dict[str, Path]) -> None:
    """``dsv4 generate --checkpoint``."""
    command = ["generate", "--prompt", "The page", "--max-new-tokens", "8", "--seed", "1", "--temperature", "1"]
    done = [CliRunner().invoke(main, [*command, "--checkpoint", str(folder)]) for folder in folders.values()]
    assert [one.exit_code for one in done] == [0, 0, 0]
    first, second, other = (one.stdout_bytes for one in done)
    assert first == second != other


def test_other_weights_give_other_tokens(folders: dict[str, Path]) -> None:
    """Control."""
    assert generated(ModelOptions(checkpoint=folders["other"])) != generated(ModelOptions())
