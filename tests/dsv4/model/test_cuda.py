"""The runner on a GPU: every safe strategy computes the bits of `caching` in every mode, at any timing of streams."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.ops import kernels
from tests.dsv4.model.cells import MODES, SAFE
from tests.dsv4.model.cuda_cells import MODELS, distance, mismatches, ran, reference, rounded_once, same


def _why_not() -> str:
    return kernels.MISSING if torch.cuda.is_available() else "needs a CUDA device"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "runs")]

ROOT = Path(__file__).parents[3]
POOLS = tuple(name for name in SAFE if name != "caching")
SETTINGS = list(product(MODES, (True, False), (1, 2)))
ACROSS_MODES = 0.25
"""Root mean square of what a token's logits differ by between two modes, their standard deviation being about 1.
GEMMs of other shapes sum in another order, and a rounding to bfloat16 may choose another expert or key, or make a step
of an FP8 cache. A single rounding of the embeddings takes a mode as far from itself."""


def name_of(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    mode, aux, parts = value
    return f"{mode}{'' if aux else '-serial'}-x{parts}"


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
@pytest.mark.parametrize("strategy", SAFE)
def test_tokens_and_logits_are_bit_equal_to_caching(strategy: str, setting: Any) -> None:
    """Twice on one workspace, whose graphs are replayed the second time."""
    wanted = reference("small", setting)
    assert all(same(one, wanted) for one in ran("small", strategy, setting, 2))


@pytest.mark.parametrize("setting", [(mode, True, 1) for mode in MODES], ids=name_of)
@pytest.mark.parametrize("strategy", POOLS)
def test_flash_shapes_are_bit_equal_to_caching(strategy: str, setting: Any) -> None:
    assert same(ran("flash", strategy, setting)[0], reference("flash", setting))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("setting", SETTINGS[1:], ids=name_of)
def test_modes_agree_within_rounding(model: str, setting: Any) -> None:
    """The known tokens' logits; what is generated may part from there on."""
    if model == "flash" and (not setting[1] or setting[2] == 2):
        pytest.skip("at Flash's shapes with aux streams and one micro-batch only")
    assert distance(reference(model, SETTINGS[0]), reference(model, setting)) <= ACROSS_MODES


@pytest.mark.parametrize("model", MODELS)
def test_a_rounding_of_the_embeddings_is_no_farther_than_modes_may_be(model: str) -> None:
    """What the tolerance across modes allows is rounding: of another token the logits are four times as far."""
    eager = reference(model, SETTINGS[0])
    with rounded_once(model, seed=1):
        moved = ran(model, "caching", SETTINGS[0])[0]
    assert 0 < distance(eager, moved) <= ACROSS_MODES
    assert distance(eager, [one.roll(1, 0) for one in eager]) > 4 * ACROSS_MODES


def test_the_logits_are_no_constants() -> None:
    """What is compared varies: over tokens, and over the rows of a step."""
    for one in reference("small", SETTINGS[0])[2:]:
        assert one.float().std(0).mean() > 0.1
        assert one.float().std(1).min() > 0.3


@pytest.mark.parametrize("setting", [(mode, True, parts) for mode in MODES for parts in (1, 2)], ids=name_of)
@pytest.mark.parametrize("strategy", SAFE)
def test_delays_and_poison_change_nothing(strategy: str, setting: Any) -> None:
    """40 steps; `python -m benchmarks.decode_step stress` makes 1,000 of them."""
    assert mismatches("small", strategy, setting, 40, seed=1, poison=True) == (40, 0)


@pytest.mark.parametrize("strategy", POOLS)
def test_nothing_is_written_beside_a_lease(strategy: str) -> None:
    """Guard bands; in a capture they are only written."""
    assert mismatches("small", strategy, ("eager", True, 1), 10, delayed=False, guard=256, poison=True) == (10, 0)


def in_a_process(name: str, *arguments: str) -> str:
    """Output of `cuda_alone`; what reads foreign bytes as an index may leave a device that is lost to its process."""
    command = [sys.executable, "-m", "tests.dsv4.model.cuda_alone", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    if done.returncode:
        lost = ("CUDA error", "context is lost")
        return "device lost" if any(words in done.stderr for words in lost) else done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("mode", ("wide", "narrow", "full"))
def test_a_graph_may_be_the_first_thing_a_process_does(mode: str) -> None:
    """Nothing that a capture cannot set up is left to it."""
    assert in_a_process("first", mode) == "0 wrong"


def test_an_unfenced_pool_is_caught_with_two_micro_batches() -> None:
    """Control: views by size for everybody. The model's own joins order it while one micro-batch runs alone."""
    assert in_a_process("unfenced", "1") == "0 wrong"
    assert caught(in_a_process("unfenced", "2"))


def test_a_fork_that_nobody_joins_is_caught() -> None:
    """Control: what branches write is read without waiting for them."""
    assert caught(in_a_process("unjoined"))


def caught(output: str) -> bool:
    """Wrong bits, or an access outside all memory."""
    assert output == "device lost" or output.endswith(" wrong"), output
    return output != "0 wrong"
