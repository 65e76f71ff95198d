"""The porting page is cut from its example, and the example does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import workspace
from examples.porting.__main__ import CPU, STRATEGIES, layers, main, tokens, weights
from examples.porting.after import MIXTURE, STEP, After, Unjoined
from examples.porting.before import TOP_K, Before, angles, swiglu
from examples.porting.serving import offload, reduced, reserve, run
from workspace import simulated
from workspace.errors import GuardError, Unsupported, WorkspaceError
from workspace.testing import leasecheck

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/porting.md").read_text(encoding="utf-8")
EXAMPLE = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples/porting").glob("*.py")}
MISTAKES = dict(re.findall(r"^\| (.*?) \| `(?!RuntimeError)\w+`: (.*?) \|$", PAGE, flags=re.MULTILINE))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def plain(text: str) -> str:
    """Without what differs from run to run and from machine to machine."""
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", text.replace(f"{ROOT}/", ""))


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: textwrap.shorten(block, 40))
def test_every_block_of_the_page_stands_in_the_example(block: str) -> None:
    """Literally, line by line: page and example cannot drift apart."""
    assert any(block in text for text in EXAMPLE.values())


def test_a_block_that_differs_is_noticed() -> None:
    """The control: one changed name, and the block is in no file."""
    block = next(one for one in blocks("python") if "shared_expert" in one)
    assert not any(block.replace("shared_act", "shared_activation") in text for text in EXAMPLE.values())


def test_the_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers before and after, the bytes of each strategy, both verdicts, and the race's report."""
    with torch.inference_mode():
        main()
    printed = plain(capsys.readouterr().out)
    # Positions along a stream follow the number of operators, which is torch's.
    printed, shown = (re.sub(r"(?<= at | to )\d+$|(?<=needs )\d+", "N", one, flags=re.MULTILINE)
                      for one in (printed, "".join(blocks("text"))))  # fmt: skip
    assert set(shown.splitlines()) <= set(printed.splitlines())
    assert printed.count("largest difference 0") == 6
    assert "After: SAFE" in printed and "Unjoined: UNSAFE" in printed


def test_the_race_is_explained_by_its_own_numbers() -> None:
    """The paragraph below the report says what stands in it."""
    report = blocks("text")[1]
    first, second = re.findall(r"at (\d+)$", report, re.MULTILINE)
    known, needed = re.findall(r"up to (\d+), needs (\d+)", report)[0]
    assert first == needed and known == "0"
    for said in (f"number {first} on stream 1", f"number {second} on stream 0", "`up to 0`", f"`needs {needed}`"):
        assert said in PAGE.replace("\n", " ")


@pytest.mark.parametrize(("strategy", "verdict"), [*zip(STRATEGIES, ("SAFE", "UNSAFE", "UNSAFE"), strict=True)])
def test_a_forgotten_join_is_seen_under_a_pool(strategy: str, verdict: str) -> None:
    """Under caching the lease itself waits, as the page says; the joined layer is safe under each."""
    for kind, wanted in ((Unjoined, verdict), (After, "SAFE")):
        device = simulated.Device(execution="deferred", schedule=simulated.StreamFirst(0))
        ws = workspace.create(strategy, device=device)
        with torch.inference_mode(), device:
            run(ws, layers(kind, ws, CPU), tokens(8, CPU))
            ws.synchronize()
        assert device.verdict() == wanted


def test_leasecheck_takes_a_registered_op() -> None:
    """And a function that is none is refused, as the page says."""
    assert leasecheck(torch.ops.aten.add.out, (torch.ones(3), torch.ones(3)), {"out": torch.empty(3)}) == []
    with pytest.raises(Unsupported):
        leasecheck(swiglu, (torch.ones(2, 4),))


@pytest.mark.parametrize("arguments", [["cuda"], ["nonsense"], ["cpu", "cpu"]], ids=" ".join)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_said_in_a_line(arguments: list[str]) -> None:
    """Without a traceback."""
    command = [sys.executable, "-m", "examples.porting", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = {"cuda": "Unsupported: ", "nonsense": "DeviceError: device 'nonsense' is not known", "cpu": "usage: "}
    assert done.returncode == 1 and done.stderr.splitlines()[-2:][0].startswith(said[arguments[0]])
    assert "Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_is_the_same_before_and_after(strategy: str) -> None:
    """The tokens each expert of a layer has had, over two steps."""
    own, x = weights(CPU)[0], tokens(8, CPU)
    old, ws = Before(own, CPU), workspace.create(strategy, device="cpu")
    with torch.inference_mode():
        new = After(own, ws, 0)
        for _ in range(2):
            old.forward(x.clone(), angles(8, CPU))
            run(ws, [new], x)
        assert old.load.sum() == 2 * 8 * TOP_K and new.load.equal(old.load)


@pytest.mark.parametrize(("declared", "verdict"), [(True, "SAFE"), (False, "UNSAFE")])
def test_work_that_nobody_joins_is_declared(declared: bool, verdict: str) -> None:
    """With `use` the next lease waits for the copy; without, it overwrites what is being copied."""
    device = simulated.Device(execution="deferred", schedule=simulated.StreamFirst(0))
    ws = workspace.create("event_fenced", device=device)
    x, host = torch.ones(4, STEP.resolve(T=4).extents[0].shape[1]), torch.empty(4, 256)
    with torch.inference_mode(), device:
        offload(ws, x, host, declared)
        with ws.lease(STEP, T=4) as step:
            step.hidden.zero_()
        ws.synchronize()
    assert device.verdict() == verdict
    assert host.eq(2).all() == declared


def test_a_collective_in_flight_holds_the_lease() -> None:
    """One rank's sum is its own part; the lease ends behind it."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ws = workspace.create("event_fenced", device="cpu")
        x = tokens(4, CPU)
        with torch.inference_mode():
            found = reduced(ws, After(weights(CPU)[0], ws, 0), x, None)
        assert torch.allclose(found, x.square() + x.sum(1, keepdim=True), atol=1e-4)
        assert ws.snapshot().allocated == 0
    finally:
        torch.distributed.destroy_process_group()


def _after_release(ws: workspace.Workspace) -> None:
    with ws.lease(STEP, T=4) as step:
        pass
    _ = step.hidden


def _late(ws: workspace.Workspace) -> None:
    with ws.lease(STEP, T=4) as step:
        kept = step.hidden
    ws.use(kept, ws.stream("copies"))


def _other_branch(ws: workspace.Workspace) -> None:
    with ws.fork(ws.stream("side")) as branch, branch(ws.stream("copies")):
        pass


def _to_itself(ws: workspace.Workspace) -> None:
    with ws.on(ws.stream("side")), ws.fork(ws.stream("side")):
        pass


def _too_large(ws: workspace.Workspace) -> None:
    reserve(ws, 64)
    ws.acquire(MIXTURE, T=1024)


def _declared_late(ws: workspace.Workspace) -> None:
    reserve(ws, 64)
    ws.declare(MIXTURE, T=1024)


def _not_reserved(ws: workspace.Workspace) -> None:
    with ws.on(ws.stream("main")), ws.capture(), ws.lease(MIXTURE, T=64):
        pass


def _break_in_a_branch(ws: workspace.Workspace) -> None:
    side = ws.stream("side")
    with ws.on(ws.stream("main")), ws.capture() as capture, ws.fork(side) as branch, branch(side):
        capture.eager_break(lambda: None)


def _wrong_shape(_: workspace.Workspace) -> None:
    with workspace.create("caching", device="cpu").lease(STEP, T=4) as step:
        step.hidden.fill(torch.ones(3))


def _second_micro_batch(ws: workspace.Workspace) -> None:
    with ws.slot(micro_batch=1):
        pass


def _with_autograd(ws: workspace.Workspace) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        ws.acquire(STEP, T=4)


def _closed_early(ws: workspace.Workspace) -> None:
    lease = ws.acquire(STEP, T=4)
    try:
        ws.close()
    finally:
        lease.release()


MADE: list[Callable[[workspace.Workspace], None]] = [
    _after_release, _late, _other_branch, _to_itself, _too_large, _declared_late, _not_reserved, _break_in_a_branch,
    _wrong_shape, _second_micro_batch, _with_autograd, _closed_early,
]  # fmt: skip
"""In the order of the page."""


@pytest.mark.parametrize(("mistake", "made"), list(zip(MISTAKES, MADE, strict=True)))
def test_each_mistake_is_refused_as_the_page_says(mistake: str, made: Callable[[workspace.Workspace], None]) -> None:
    """The error is of the type and in the words of the page's table."""
    device = simulated.Device(execution="deferred")
    with torch.inference_mode(), device:
        with pytest.raises(WorkspaceError) as caught:
            made(workspace.create("event_fenced", device=device))
    assert MISTAKES[mistake] in plain(str(caught.value))
    assert f"| `{type(caught.value).__name__}`: {MISTAKES[mistake]} |" in PAGE


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_out_of_another_shape_is_torchs_to_refuse(strategy: str) -> None:
    """A larger result is an error in torch's words; a smaller one cuts the tensor short."""
    with torch.inference_mode(), workspace.create(strategy, device="cpu").lease(STEP, T=4) as step:
        with pytest.raises(RuntimeError) as caught:
            torch.mm(torch.ones(4, 8), torch.ones(8, 512), out=step.hidden)
        assert f"| `RuntimeError`: {caught.value};" in PAGE
        torch.mm(torch.ones(3, 8), torch.ones(8, 256), out=step.hidden)
        assert step.hidden.shape == (3, 256) and "cut short in place" in PAGE
    if strategy == "caching":
        return
    ws = workspace.create(strategy, device="cpu", guard=256)
    with torch.inference_mode():
        with pytest.raises(GuardError), ws.lease(STEP, T=4) as step:
            torch.mm(torch.ones(3, 8), torch.ones(8, 256), out=step.hidden)
        with ws.lease(STEP, T=4) as step:
            torch.mm(torch.ones(3, 8), torch.ones(8, 256), out=step.hidden[:3])
            assert step.hidden.shape == (4, 256)
