"""What every op promises of its registration, its forms, its checks and its layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workspace
from dsv4.ops import OpError
from tests.dsv4.ops.samples import DIMS, OPS, outs, sample

NAMES = sorted(OPS)


def returned(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def called(name: str, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Every tensor that the out form writes: outs, then mutated inputs."""
    op, inputs = OPS[name], sample(name, dtype)
    made, scratch = outs(name, inputs, fill)
    returned(op(*inputs, out=made or None, scratch=scratch or None))
    return made + mutated(name, inputs)


def mutated(name: str, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    arguments = OPS[name].overload._schema.arguments[: len(inputs)]
    return [value for value, one in zip(inputs, arguments, strict=True) if one.alias_info]


def test_every_op_has_a_sample() -> None:
    """A new op comes with one."""
    for name in NAMES:
        assert sample(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_registration_passes_opcheck(name: str) -> None:
    """Schema, autograd registration, fake tensors, and AOT dispatch with dynamic shapes."""
    inputs = sample(name)
    made, scratch = outs(name, inputs)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(one.dtype is torch.float8_e4m3fn for one in made):
        checks.remove("test_schema")  # it compares with torch.allclose, which has no FP8 kernel
    torch.library.opcheck(OPS[name].overload, (*inputs, *made, *scratch), test_utils=checks)


@pytest.mark.parametrize("name", NAMES)
def test_every_element_of_an_out_is_written(name: str) -> None:
    """Outs poisoned with NaN and with 3 end up the same (but what the op says it writes in part)."""
    first, second = called(name, float("nan")), called(name, 3.0)
    for argument, one, other in zip(OPS[name].outs.values(), first, second, strict=False):
        if not argument.partly:
            assert one.view(torch.uint8).equal(other.view(torch.uint8))
            assert not one.is_floating_point() or not one.float().isnan().any()


@pytest.mark.parametrize("name", [name for name in NAMES if OPS[name].outs])
def test_tensors_slots_and_the_returning_form_agree(name: str) -> None:
    """Leased tensors are returned as they are; a slot holds what the returning form made."""
    op, inputs = OPS[name], sample(name)
    wanted = called(name)
    like = next(
        (value.dtype for value in inputs if isinstance(value, torch.Tensor) and value.is_floating_point()), None
    )
    given = {key: inputs[place] for place, key, _ in op._places}
    dims = op._bind(given, [None] * (len(op.outs) + len(op.scratch)))[1] | DIMS.get(name, {})
    layout = op.layout(dtype=like, **{"T": 0, **dims})
    for strategy in ("caching", "event_fenced"):
        ws = workspace.create(strategy, device="cpu")
        with torch.no_grad(), ws.lease(layout) as lease:
            for key, argument in op.outs.items():
                if argument.partly:
                    getattr(lease, key).fill_(0)
            found = returned(
                op(
                    *sample(name),
                    out=tuple(getattr(lease, key) for key in op.outs),
                    scratch=tuple(getattr(lease, key) for key in op.scratch) or None,
                )
            )
            for key, one, other in zip(op.outs, found, wanted, strict=False):
                assert getattr(lease, key) is one
                assert one.view(torch.uint8).equal(other.view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_is_that_of_the_outs(name: str) -> None:
    """Symbolic in T, and bytes as the tensors have them."""
    op, inputs = OPS[name], sample(name)
    made, scratch = outs(name, inputs)
    given = {key: inputs[place] for place, key, _ in op._places}
    like, dims = op._bind(given, [None] * (len(op.outs) + len(op.scratch)))
    dims |= DIMS.get(name, {})
    tokens = dims.pop("T", 0)
    layout = op.layout("tokens", like, **dims)
    extents = layout.resolve(**({"tokens": tokens} if layout.dim_names else {})).extents
    assert [(one.shape, one.dtype) for one in extents] == [(tuple(one.shape), one.dtype) for one in made + scratch]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_other_precisions_stay_near_float32(name: str, dtype: torch.dtype) -> None:
    """float64 within float32's rounding, bf16 within its own; integers and packed bytes may move by a step."""
    plain, other = called(name), called(name, dtype=dtype)
    tolerance = 1e-5 if dtype is torch.float64 else 0.1
    for one, found in zip(plain, other, strict=True):
        if one.is_floating_point() and one.dtype.itemsize > 1:
            assert torch.allclose(one.double(), found.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            same = (one.view(torch.uint8) == found.view(torch.uint8)).double().mean()
            assert same > (0.999 if dtype is torch.float64 else 0.5)


REFUSALS = {
    "shape": (lambda i, o: (i, [o[0][:, :-1].contiguous(), *o[1:]]), "has shape"),
    "dtype": (lambda i, o: (i, [o[0].int(), *o[1:]]), "is torch.int32"),
    "strides": (lambda i, o: (i, [o[0].T.contiguous().T, *o[1:]]), "not contiguous"),
    "count": (lambda i, o: (i, o[:1]), "was given 1 tensors"),
    "missing": (lambda i, o: (i[:-1], o), "takes 4 inputs, not 3"),
    "none": (lambda i, o: ((None, *i[1:]), o), "is None"),
    "rows": (lambda i, o: ((i[0][0], *i[1:]), o), r"it takes \[T, Q\+D\]"),
}


@pytest.mark.parametrize("refused", REFUSALS)
def test_wrong_arguments_are_refused_by_name(refused: str) -> None:
    """One typed error each, before anything is written."""
    change, says = REFUSALS[refused]
    inputs = sample("q_kv_rmsnorm")
    made, _ = outs("q_kv_rmsnorm", inputs, 5.0)
    with pytest.raises(OpError, match=says):
        given, wanted = change(inputs, made)
        OPS["q_kv_rmsnorm"](*given, out=wanted)
    assert all((one == 5).all() for one in made)


def test_an_out_over_another_tensors_bytes_is_refused() -> None:
    """Also when two storages share the bytes, which torch's own check cannot see."""
    inputs = sample("rms_norm")
    again = torch.frombuffer(inputs[0].numpy().data, dtype=torch.float32).view(inputs[0].shape)
    assert again.untyped_storage()._cdata != inputs[0].untyped_storage()._cdata
    with pytest.raises(OpError, match="y of rms_norm shares bytes with x"):
        OPS["rms_norm"](*inputs, out=again)


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64], ids=str)
def test_activations_are_floats_also_where_no_out_has_their_dtype(dtype: torch.dtype) -> None:
    o, *others = sample("inverse_rope_fp8")
    with pytest.raises(OpError, match="o of inverse_rope_fp8 is torch"):
        OPS["inverse_rope_fp8"].returning(o.to(dtype), *others, **DIMS["inverse_rope_fp8"])


def test_a_sparse_tensor_is_refused() -> None:
    x, *others = sample("rms_norm")
    with pytest.raises(OpError, match="pass a dense tensor"):
        OPS["rms_norm"].returning(x.to_sparse(), *others)


def test_a_slot_nothing_has_written_is_no_input() -> None:
    """It would be read before it is written."""
    layout = OPS["rms_norm"].layout(3, torch.float32, N=3, H=32)
    with torch.no_grad(), workspace.create("caching", device="cpu").lease(layout) as lease:
        with pytest.raises(OpError, match="a slot nothing has written"):
            OPS["rms_norm"](lease.y, torch.ones(32), 1e-6)


def test_what_inputs_do_not_tell_must_be_given() -> None:
    """The padded number of heads is the out's."""
    with pytest.raises(OpError, match="pass it as out="):
        OPS["q_norm_rope_kv_insert"](*sample("q_norm_rope_kv_insert"))


ROWS = [name for name in NAMES if name not in ("compress", "gather_keys", "store_compressed", "pool_states",
                                               "save_partial_states", "combine_indices", "global_top_k")]  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_nan_stays_in_its_row(name: str) -> None:
    """The activations of token 2 are NaN; every other token's outs are what they were."""
    op = OPS[name]
    wanted = called(name)
    inputs = sample(name)
    place, key, argument = op._places[0]
    assert argument.shape[0] in ("T", "N")
    inputs[place][2] = float("nan")
    made, scratch = outs(name, inputs)
    op(*inputs, out=made, scratch=scratch or None)
    for one, found, other in zip(op.outs.values(), made, wanted, strict=False):
        axis = next((axis for axis, dim in enumerate(one.shape) if dim in ("T", "N") and axis < 2), None)
        axis = one.shape.index("(T+3)//4*4") if axis is None else axis
        kept = [row for row in range(found.shape[axis]) if row != 2]
        rows = torch.tensor(kept)
        left, right = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (found, other))
        assert torch.allclose(
            left.index_select(axis, rows).double(), right.index_select(axis, rows).double(), rtol=1e-5, atol=1e-6
        )


def test_without_tokens_nothing_is_launched() -> None:
    """A step may have no decode rows, or none of prefill."""
    empty = torch.empty(0, 8)
    weights = torch.empty(0, 3)
    experts, _ = OPS["route"](empty, None, None, torch.empty(0, dtype=torch.int64), 1.5,
                              out=(torch.empty(0, 3, dtype=torch.int32), weights))  # fmt: skip
    assert experts.shape == (0, 3)
    found = OPS["indexer_top_k"](empty, torch.empty(0, dtype=torch.int32), out=torch.empty(0, 4, dtype=torch.int32))
    assert found.shape == (0, 4)
