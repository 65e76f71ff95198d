"""Torch's operator database, run eagerly and deferred, and compared bit for bit."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from workspace import simulated
from workspace.errors import DriverError
from workspace.simulated.operators import composite, decompose

VARIANTS = ("function", "in-place", "inference", "gradients")
EXEMPT = Path(__file__).with_name("opinfo_exempt.toml")


class Null(TorchDispatchMode):
    """Changes nothing; being there makes torch take the composite paths it takes under any mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if composite(func):
            with self:
                return decompose(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@attrs.frozen
class Case:
    """One operator, dtype and variant."""

    name: str
    dtype: torch.dtype
    variant: str
    call: Callable[..., Any]
    samples: list[Any]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.variant}"


def exemptions() -> dict[tuple[str, str], str]:
    """Rule by (operator, variant)."""
    rules: dict[tuple[str, str], str] = {}
    for entry in tomllib.loads(EXEMPT.read_text()).values():
        for name in entry["operators"]:
            rules.update({(name, variant): entry["rule"] for variant in entry.get("variants", VARIANTS)})
    return rules


def dtypes(supported: set[torch.dtype]) -> list[torch.dtype]:
    """float32, one integer type and bfloat16, as far as an operator supports them; else whatever comes first."""
    integer = [dtype for dtype in (torch.int64, torch.int32, torch.bool) if dtype in supported][:1]
    found = [dtype for dtype in (torch.float32, *integer, torch.bfloat16) if dtype in supported]
    return found or sorted(supported, key=str)[:1]


def cases(op: Any, most: int, variants: tuple[str, ...]) -> Iterator[Case]:
    """What to run of one entry of the database: at most `most` samples of each case."""
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    for dtype in dtypes(op.supported_dtypes("cpu")):
        for variant in variants:
            call = op.inplace_variant if variant == "in-place" else op.op
            gradients = variant == "gradients"
            if call is None or (gradients and (dtype is not torch.float32 or not op.supports_autograd)):
                continue
            torch.manual_seed(0)
            samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), most))
            if variant == "in-place":
                samples = [sample for sample in samples if not sample.broadcasts_input]
            yield Case(name, dtype, variant, call, samples)


def check(case: Case, rule: str) -> str:
    """What is wrong with a case's deferred run; empty if nothing is."""
    for seed, sample in enumerate(case.samples):
        eager, deferred = copied(sample), copied(sample)
        device = simulated.Device(memory="host", execution="deferred", seed=seed)
        if rule in ("composite", "alignment"):
            with Null():
                expected = attempt(case, eager, seed)
        else:
            expected = attempt(case, eager, seed)
        with_device = attempt(case, deferred, seed, device)
        wrong = compare(expected, with_device, rule) or compare(eager, deferred, rule)
        assert device.judge is not None
        unmodelled = [] if rule == "opaque" else list(device.judge.unmodelled)
        if not wrong and (device.races() or unmodelled):
            wrong = f"verdict {device.verdict()}: {unmodelled}"
        if wrong:
            return f"{case}, sample {seed}: {wrong}"
    return ""


def copied(sample: Any) -> Any:
    """A sample's arguments on memory of their own."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(copy, (sample.input, sample.args, sample.kwargs))


def attempt(case: Case, sample: Any, seed: int, device: simulated.Device | None = None) -> Any:
    """The result, or the error, of a call."""
    torch.manual_seed(seed)
    try:
        with torch.inference_mode(case.variant == "inference"):
            if device is None:
                return run(case, sample)
            with device:
                return run(case, sample)
    except Exception as error:
        return error


def run(case: Case, sample: Any) -> Any:
    input_, args, kwargs = sample
    result = case.call(input_, *args, **kwargs)
    if case.variant != "gradients":
        return result
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [t for t in tree_flatten(sample)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        return result
    ones = [torch.ones_like(output) for output in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def compare(expected: Any, found: Any, rule: str) -> str:
    """How two results differ; empty if they do not."""
    if isinstance(expected, Exception) or isinstance(found, Exception):
        return compare_errors(expected, found, rule)
    if isinstance(expected, torch.Tensor):
        return compare_tensors(expected, found, rule)
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return f"{len(found)} values, not {len(expected)}"
        return next(filter(None, (compare(e, f, rule) for e, f in zip(expected, found, strict=True))), "")
    if isinstance(expected, dict):
        return compare(list(expected.values()), list(found.values()), rule)
    if isinstance(expected, (bool, int, float, complex)):
        return "" if expected == found or (expected != expected and found != found) else f"{found}, not {expected}"
    return ""


def compare_errors(expected: Any, found: Any, rule: str) -> str:
    if rule == "late" and isinstance(found, DriverError):
        found = found.__cause__
    return "" if type(expected) is type(found) else f"{found!r}, not {expected!r}"


def compare_tensors(expected: torch.Tensor, found: Any, rule: str) -> str:
    if not isinstance(found, torch.Tensor):
        return f"{type(found).__name__}, not a tensor"
    if (expected.shape, expected.dtype, expected.layout) != (found.shape, found.dtype, found.layout):
        return f"{found.shape} {found.dtype} {found.layout}, not {expected.shape} {expected.dtype} {expected.layout}"
    if expected.layout is not torch.strided:
        with torch.inference_mode(expected.is_inference()):
            return compare_tensors(expected.to_dense(), found.to_dense(), rule)
    if expected.numel() > 1 and expected.stride() != found.stride():
        return f"strides {found.stride()}, not {expected.stride()}"
    if rule == "alignment":
        return "" if torch.allclose(expected, found, rtol=1.3e-6, atol=1e-5) else f"{found}, not {expected}"
    if rule != "uninitialised" and not torch.equal(bits(expected), bits(found)):
        return f"other bits: {found}, not {expected}"
    return ""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, in order."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(torch.uint8)
