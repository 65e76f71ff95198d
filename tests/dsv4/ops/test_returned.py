"""The C function of the returning form, over kernels for the host: sizes asked once, nothing kept, nothing leaked."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.ops import OpError, kernels
from dsv4.ops.op import Op
from tests.dsv4.ops.host.build import built
from tests.dsv4.ops.samples import DIMS, OPS, outs, sample
from workspace.errors import LayoutError

NAMES = [name for name in sorted(OPS) if OPS[name].outs]
BF16 = torch.bfloat16
REFUSED, NOT_TAKEN, FAILS = 0x7FFF7F01, 0x7FFF7F02, 0x7FFF7F03
"""What the host's kernels do when their first tensor begins with it (host/kernels.cpp)."""

Returned = Callable[..., Any]


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    module = built(tmp_path_factory.mktemp("host"))
    module.bind(torch.Tensor, torch.Tensor.__dlpack_c_exchange_api__, OpError)
    return module


class Asked:
    """Results that say how often they were asked."""

    def __init__(self, op: Op) -> None:
        self.results, self.times = op._results, 0

    def __call__(self, inputs: Any, dims: Any) -> Any:
        self.times += 1
        return self.results(inputs, dims)


def function(extension: ModuleType, op: Op, results: Any = None) -> Returned:
    one = op._results
    made: Returned = extension.returning(
        op.name, len(op._scalars), one.told, one.like, tuple(one.untold), len(op.outs), results or one, torch.dtype
    )
    return made


def untold(name: str) -> dict[str, Any]:
    told = DIMS.get(name, {}) | {"dtype": torch.float32}
    return {dim: told[dim] for dim in OPS[name].untold}


def listed(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def asking(x: torch.Tensor, what: int) -> torch.Tensor:
    x.view(torch.int32)[0, 0] = what
    return x


def norm(rows: int, width: int = 32, asks: int = 0) -> tuple[Any, ...]:
    x = torch.zeros(rows, width, dtype=BF16)
    return asking(x, asks) if asks else x, torch.ones(width), 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_asked_once(extension: ModuleType, name: str) -> None:
    """Then the outs are of PyTorch's allocator, of the same kinds, and the kernel fills them."""
    op, inputs = OPS[name], sample(name, BF16)
    asked = Asked(op)
    returned = function(extension, op, asked)
    wanted = [(one.shape, one.stride(), one.dtype) for one in outs(name, inputs)[0]]
    for _ in range(3):
        found = listed(returned(inputs, untold(name)))
        assert [(one.shape, one.stride(), one.dtype) for one in found] == wanted
        for one in found:
            assert one.view(torch.uint8).unique().tolist() == [inputs[0].shape[0]]
            assert type(one) is torch.Tensor and one.untyped_storage().resizable() and not one.requires_grad
    assert asked.times == 1


def test_each_combination_of_sizes_has_its_own(extension: ModuleType) -> None:
    asked = Asked(OPS["rms_norm"])
    returned = function(extension, OPS["rms_norm"], asked)
    for _ in range(2):
        for rows, width in ((3, 32), (32, 3), (0, 32), (3, 64)):
            assert returned(norm(rows, width), {}).shape == (rows, width)
        assert returned((torch.zeros(3, 32), torch.ones(32), 1e-6), {}).dtype is torch.float32
    assert asked.times == 5


def test_so_many_are_remembered_and_no_more(extension: ModuleType) -> None:
    """The table is emptied when it is full; what is in it is right."""
    asked = Asked(OPS["rms_norm"])
    returned = function(extension, OPS["rms_norm"], asked)
    sizes = range(1100)
    for rows in sizes:
        assert returned(norm(rows, 8), {}).shape == (rows, 8)
    assert asked.times == len(sizes)
    returned(norm(sizes[-1], 8), {})
    assert asked.times == len(sizes)
    assert returned(norm(1, 8), {}).shape == (1, 8)
    assert asked.times == len(sizes) + 1


def test_dims_by_name(extension: ModuleType) -> None:
    """In any order; other names, kinds or counts are Python's."""
    op, inputs = OPS["gather_keys"], sample("gather_keys", BF16)
    returned = function(extension, op)
    for _ in range(2):
        assert returned(inputs, {"M": 4, "D": 128, "dtype": BF16}).shape == (4, 128)
        assert returned(inputs, {"dtype": torch.float32, "D": 16, "M": 4}).dtype is torch.float32
    name = "".join(["dt", "ype"])  # another string of that name
    assert returned(inputs, {"M": 4, name: BF16, "D": 16}).shape == (4, 16)
    for dims in (
        {}, {"M": 4, "D": 128}, {"M": 4, "D": 128, "dtype": BF16, "K": 1}, {"M": 4, "D": 128, "K": BF16},
        {"M": True, "D": 128, "dtype": BF16}, {"M": 4.0, "D": 128, "dtype": BF16}, {"M": 4, "D": 2**70, "dtype": BF16},
        {"M": 4, "D": 128, "dtype": "bfloat16"},
    ):  # fmt: skip
        assert returned(inputs, dims) is None
    with pytest.raises(LayoutError):
        returned(inputs, {"M": -4, "D": 128, "dtype": BF16})


def test_what_is_not_its_own_is_pythons(extension: ModuleType) -> None:
    returned = function(extension, OPS["rms_norm"])
    x, weight, eps = norm(3)

    class Own(torch.Tensor):
        pass

    for inputs in (
        (x, weight), (x, weight, eps, eps), (None, weight, eps), (x.as_subclass(Own), weight, eps),
        (x.numpy, weight, eps), (x.double(), weight, eps), (x[0, 0], weight, eps),
        (x[None, None, None], weight, eps), norm(3, asks=NOT_TAKEN),
    ):  # fmt: skip
        assert returned(inputs, {}) is None
    with pytest.raises(TypeError):
        returned((x, weight, "eps"), {})
    assert returned((x, weight, eps), {}).shape == (3, 32)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class WatchingFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", (Watching, WatchingFunctions))
def test_under_a_mode_it_is_pythons(extension: ModuleType, mode: Any) -> None:
    """Which shows the mode what happens."""
    returned = function(extension, OPS["rms_norm"])
    for _ in range(2):
        with mode():
            assert returned(norm(3), {}) is None
        assert returned(norm(3), {}).shape == (3, 32)


@pytest.mark.parametrize("results", ([], (), (torch.zeros(2, dtype=BF16), 1), (torch.zeros(2, dtype=torch.float64),)))
def test_results_that_are_none(extension: ModuleType, results: Any) -> None:
    assert function(extension, OPS["rms_norm"], lambda *_: results)(norm(3), {}) is None


def test_an_error_of_the_results_is_the_calls(extension: ModuleType) -> None:
    def results(*_: Any) -> Any:
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        function(extension, OPS["rms_norm"], results)(norm(3), {})


# -- nothing leaks -----------------------------------------------------------------------------------------


@contextmanager
def bytes_kept() -> Iterator[list[int]]:
    """Into the list: the bytes that this thread takes of PyTorch's allocator in the block and does not give back."""
    kept: list[int] = []
    gc.collect()
    gc.disable()  # what is collected in the block would count as given back by it
    try:
        with profile(profile_memory=True) as profiled:
            yield kept
    finally:
        gc.enable()
    kept.append(sum(event.self_cpu_memory_usage for event in profiled.function_events))


OUTCOMES = {REFUSED: OpError, FAILS: RuntimeError, NOT_TAKEN: None, 0: None}


@pytest.mark.parametrize("known", (False, True))
@pytest.mark.parametrize("asks", OUTCOMES, ids=("refused", "fails", "not taken", "returned"))
def test_every_way_out_lets_go_of_the_outs(extension: ModuleType, asks: int, known: bool) -> None:
    """Control: those that are held are counted, to the byte."""
    op, rows, width = OPS["q_kv_rmsnorm"], 5, 640
    returned = function(extension, op)
    x, error = asking(torch.empty(rows, 2 * width, dtype=BF16), 0), OUTCOMES[asks]
    inputs = x, torch.empty(width), torch.empty(width), 1e-6
    if known:
        returned(inputs, {})
    asking(x, asks)
    counts = [sys.getrefcount(one) for one in inputs]
    results = op._results
    counts.append(sys.getrefcount(results))
    with bytes_kept() as kept:
        for _ in range(100):
            if error:
                with pytest.raises(error):
                    returned(inputs, {})
            else:
                assert (returned(inputs, {}) is None) is (asks == NOT_TAKEN)
    assert kept == [0]
    # Others in the process take references, too, but not one a call.
    now = [sys.getrefcount(one) for one in (*inputs, results)]
    assert all(after - earlier < 50 for after, earlier in zip(now, counts, strict=True))
    if asks == 0:
        with bytes_kept() as kept:
            held = [returned(inputs, {}) for _ in range(6)]
        assert kept == [6 * 2 * rows * width * BF16.itemsize]
        assert [sys.getrefcount(one) for one in held[0]] == [sys.getrefcount(one) for one in (torch.empty(1), x[0])]


def test_a_function_lets_go_of_what_it_was_made_with(extension: ModuleType) -> None:
    asked = Asked(OPS["rms_norm"])
    before = sys.getrefcount(asked)
    returned = function(extension, OPS["rms_norm"], asked)
    returned(norm(3), {})
    assert sys.getrefcount(asked) == before + 1
    del returned
    assert sys.getrefcount(asked) == before


# -- the op's face -----------------------------------------------------------------------------------------


@pytest.fixture
def bound(extension: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Op:
    op = OPS["rms_norm"]
    monkeypatch.setattr(kernels, "RETURNING", extension.returning)
    fast = extension.bind(torch.Tensor, torch.Tensor.__dlpack_c_exchange_api__, OpError)
    monkeypatch.setattr(op, "_fast", fast["rms_norm"])
    monkeypatch.setattr(op, "_returned", op._in_one_call())
    return op


def test_an_op_returns_what_the_function_does(bound: Op) -> None:
    """By name, and as a call without outs; what is not the function's own is the reference's."""
    assert bound._returned is not None
    for call in (bound.returning, bound):
        assert call(*norm(3)).view(torch.uint8).unique().tolist() == [3]
    wide = torch.randn(3, 32, dtype=torch.float64)
    assert bound.returning(wide, torch.ones(32), 1e-6).equal(bound(wide, torch.ones(32), 1e-6))
    with pytest.raises(OpError, match="a call"):
        bound.returning(*norm(3, asks=REFUSED))


@pytest.mark.parametrize("eps", ("eps", None, 10**400))
def test_a_number_that_is_none_is_said_by_name(bound: Op, eps: Any) -> None:
    """In both forms: what the C functions raise names no argument."""
    x, weight, _ = norm(3)
    for call in (lambda: bound(x, weight, eps), lambda: bound(x, weight, eps, out=x.clone())):
        with pytest.raises(OpError, match="eps of rms_norm is"):
            call()


def test_compiled_code_has_the_op_instead(bound: Op) -> None:
    """Whole graphs, which the host's kernel has no part in."""
    torch.compiler.reset()
    x, weight, eps = torch.randn(3, 32), torch.ones(32), 1e-6
    wanted = torch.nn.functional.rms_norm(x, (32,), weight, eps)
    for call in (bound.returning, bound):
        run = torch.compile(lambda *inputs, call=call: call(*inputs), backend="eager", fullgraph=True)
        assert torch.allclose(run(x, weight, eps), wanted, atol=1e-5)
    torch.compiler.reset()


def test_an_extension_that_cannot_is_left_alone(bound: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one has no such function, a PyTorch without the symbol none to call."""
    monkeypatch.setattr(kernels, "RETURNING", lambda *_: None)
    assert bound._in_one_call() is None
    monkeypatch.setattr(kernels, "RETURNING", None)
    assert bound._in_one_call() is None
    monkeypatch.setattr(bound, "_returned", None)
    assert bound.returning(*norm(3)).view(torch.uint8).unique().tolist() == [3]
