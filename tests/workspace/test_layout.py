"""Layouts: what is refused and how the refusal reads, dtypes, sizes, names, exclusive groups, copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import pytest
import torch

import workspace
from workspace import Exclusive, Layout, spec
from workspace import layout as layout_module
from workspace.errors import LayoutError, SizeError
from workspace.layout import MAX_BYTES, RESOLVED_KEPT
from workspace.lease import Lease
from workspace.simulated import Device

QUANTISED = [torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4]
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}.difference(QUANTISED), key=str
)
BYTE = torch.uint8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_its_size(dtype: torch.dtype) -> None:
    """A layout takes any torch dtype that bytes are enough for: fp8, complex, bool and the shell types included."""
    extent = Layout("any", x=spec(3, "T", dtype=dtype)).resolve(T=5).extents[0]
    assert (extent.nbytes, extent.dtype, extent.shape) == (15 * dtype.itemsize, dtype, (3, 5))


def lent(dtype: torch.dtype, strategy: str) -> torch.dtype:
    """What a lease's tensor has for its dtype, on the host."""
    ws = workspace.create(strategy, device="cpu")
    with torch.no_grad(), ws.lease(Layout("any", x=spec(8, dtype=dtype))) as lease:
        x: torch.Tensor = lease.x.tensor() if isinstance(lease.x, workspace.Slot) else lease.x
        return x.dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("strategy", ["caching", "event_fenced"])
def test_every_dtype_is_lent(strategy: str) -> None:
    assert [lent(dtype, strategy) for dtype in DTYPES] == DTYPES


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_a_quantised_dtype_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: let through, it fails in torch, at the lease."""
    with pytest.raises(LayoutError, match=f"{dtype} is quantised") as caught:
        spec(8, dtype=dtype)
    assert "torch.uint8" in caught.value.remedy
    monkeypatch.setattr(layout_module, "QUANTISED", frozenset())
    for strategy in ("caching", "event_fenced"):
        with pytest.raises(RuntimeError, match="dimensionality"):
            lent(dtype, strategy)


def test_an_empty_tensor_takes_no_bytes() -> None:
    """A dim of zero is valid, and the others keep their value."""
    extents = Layout("some", a=spec("T", 4, dtype=BYTE), b=spec(2, dtype=BYTE)).resolve(T=0).extents
    assert [(one.shape, one.nbytes) for one in extents] == [((0, 4), 0), ((2,), 2)]


def test_a_layout_without_tensors_is_empty() -> None:
    """No spec, no bytes, no dims."""
    assert Layout("none").size() == 0


def test_sizes_beyond_32_bits() -> None:
    """Sizes are Python integers throughout: 70,000 x 40,000 bytes do not wrap."""
    resolved = Layout("large", x=spec("T", 40_000, dtype=BYTE), y=spec(1, dtype=BYTE)).resolve(T=70_000)
    assert resolved.extents[0].nbytes == 2_800_000_000
    assert resolved.extents[1].offset == 2_800_000_000 - 2_800_000_000 % 256 + (256 if 2_800_000_000 % 256 else 0)


def test_the_largest_tensor_is_2_to_the_63_less_one() -> None:
    """2**63 bytes are refused as a tensor; so is a sum that only the rounding takes there."""
    layout = Layout("edge", x=spec("N", dtype=BYTE))
    assert layout.size(N=MAX_BYTES - MAX_BYTES % 256) == MAX_BYTES - MAX_BYTES % 256
    for count in (2**63, 2**63 - 1, 2**200):
        with pytest.raises(SizeError, match=r"2\*\*63-1"):
            layout.size(N=count)
    with pytest.raises(SizeError, match=r"2\*\*63-1"):
        Layout("sum", x=spec("N", dtype=BYTE), y=spec("N", dtype=BYTE)).size(N=2**62)


@pytest.mark.parametrize(
    ("dims", "error", "text"),
    [
        ({}, LayoutError, "'T' of layout 'one' has no value"),
        ({"T": 1, "K": 2}, LayoutError, "has no dim 'K'"),
        ({"K": 2}, LayoutError, "has no dim 'K'"),
        ({"T": 1, "lane": "x"}, LayoutError, "has no dim 'lane'"),
        ({"T": "4", "lane": 1}, LayoutError, "has no dim 'lane'"),
        ({"T": -1}, SizeError, "T=-1 of layout 'one' is negative"),
        ({"T": True}, SizeError, "T=True of layout 'one' is not an int"),
        ({"T": "4"}, SizeError, "is not an int"),
        ({"T": None}, SizeError, "is not an int"),
        ({"T": 2.5}, SizeError, "is not an int"),
        ({"T": 2**70}, SizeError, r"above 2\*\*63-1"),
    ],
)
def test_bad_dims_are_refused_by_name(dims: dict[str, Any], error: type[LayoutError], text: str) -> None:
    """A missing, unknown, negative, overflowing or foreign dim is named in the error, with a remedy."""
    with pytest.raises(error, match=text) as caught:
        Layout("one", x=spec("T", dtype=BYTE)).resolve(**dims)
    assert caught.value.remedy


def test_missing_dims_are_named_together() -> None:
    """With the layout, and without the text of the spec that has them."""
    with pytest.raises(LayoutError, match="^dim 'K', 'T' of layout 'two' has no value") as caught:
        Layout("two", x=spec("T", "K + 1", "M", dtype=BYTE)).resolve(M=1)
    assert "pass K=<int>, T=<int>" in caught.value.remedy and caught.value.fields["dim"] == "K"


@pytest.mark.parametrize(
    ("call", "wrong", "says"),
    [
        ("lease", {"lane": "x"}, "ws.slot(lane=...)"),
        ("acquire", {"micro_batch": 1}, "ws.slot(micro_batch=...)"),
        ("lease", {"phase": "x"}, "ws.declare(layout, phase=...)"),
        ("declare", {"fase": "x"}, "did you mean 'phase'? its dims are T; phase= is for ws.declare"),
        ("lease", {"zeros": True}, "did you mean 'zero'?"),
        ("lease", {"K": 2}, "its dims are T"),
        ("lease", {"TT": 2}, "did you mean 'T'? its dims are T"),
    ],
)
def test_what_is_no_dim_is_named_before_its_value_is_looked_at(call: str, wrong: dict[str, Any], says: str) -> None:
    """A lane or a phase in the wrong call, or misspelt, is no number: the remedy says who takes it."""
    ws = workspace.create("event_fenced", device=Device())
    with pytest.raises(LayoutError, match=f"^layout 'one' has no dim '{next(iter(wrong))}'") as caught:
        getattr(ws, call)(Layout("one", x=spec("T", dtype=BYTE)), T=2, **wrong)
    assert says in caught.value.remedy and "its dims are T" in caught.value.remedy


@pytest.mark.parametrize("value", [[2], {"a": 1}, set()], ids=str)
def test_an_unhashable_dim_is_a_size_error(value: Any) -> None:
    """Whatever is passed as a dim, the error is the library's."""
    with pytest.raises(SizeError):
        Layout("one", x=spec("T", dtype=BYTE)).resolve(T=value)


def test_a_float_dim_is_refused_also_when_the_int_is_cached() -> None:
    """What is refused does not depend on what was resolved before."""
    layout = Layout("one", x=spec("T", dtype=BYTE))
    layout.resolve(T=2)
    with pytest.raises(SizeError):
        layout.resolve(T=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dim", "error", "text"),
    [
        (-1, SizeError, "negative"),
        (True, LayoutError, "neither an integer nor a name"),
        (1.5, LayoutError, "neither an integer nor a name"),
        (None, LayoutError, "neither an integer nor a name"),
        ("", LayoutError, "not an expression"),
        ("T +", LayoutError, "not an expression"),
        ("T; import os", LayoutError, "not an expression"),
        ("T/2", LayoutError, "uses /, whose result is no integer"),
        ("2*(T+T/2)", LayoutError, "uses /"),
        ("T**2", LayoutError, "uses Pow"),
        ("-T", LayoutError, "uses a sign in front"),
        ("f(T)", LayoutError, "uses Call"),
        ("1+max(T,3)", LayoutError, "uses Call"),
        ("T.x", LayoutError, "uses Attribute"),
        ("T*1.5", LayoutError, "uses what is no integer"),
        ("T*True", LayoutError, "uses what is no integer"),
        ("'a'*T", LayoutError, "uses what is no integer"),
        ("T if T else 1", LayoutError, "uses IfExp"),
    ],
)
def test_bad_shapes_are_refused_when_the_spec_is_made(dim: Any, error: type[LayoutError], text: str) -> None:
    """A wrong dim shows where it is written, not at the first lease.

    An expression is data, not code: everything but + - * // % of names and integers is refused.
    """
    for _ in range(2):  # what was refused is not remembered as parsed
        with pytest.raises(error, match=text):
            spec("T", dim, dtype=BYTE)


@pytest.mark.parametrize(("dim", "says"), [("T/2", "use // for /"), ("max(T,3)", "pass as a dim of its own")])
def test_who_writes_more_than_arithmetic_is_told_what_to_write(dim: str, says: str) -> None:
    """And what may stand there."""
    with pytest.raises(LayoutError) as caught:
        spec(dim, dtype=BYTE)
    assert says in caught.value.remedy and "names, integers and + - * // %, with parentheses" in caught.value.remedy


@pytest.mark.parametrize("dim", ["T//(T-4)", "T%(T-4)"])
def test_a_division_by_zero_is_refused_when_it_is_one(dim: str) -> None:
    """By name, at the dims that make it so."""
    layout = Layout("sum", x=spec(dim, dtype=BYTE))
    with pytest.raises(LayoutError, match="divides by zero"):
        layout.resolve(T=4)
    assert layout.resolve(T=5)


def test_a_dim_that_comes_out_negative_is_refused() -> None:
    """The result of an expression is checked, not only its parts."""
    with pytest.raises(SizeError, match="a dim is negative"):
        Layout("sum", x=spec("T-5", dtype=BYTE)).size(T=4)


@pytest.mark.parametrize("align", [0, -1, 3, 257, 2.0, True, None])
def test_an_alignment_is_a_power_of_two(align: Any) -> None:
    """Zero, negative, odd and non-integer alignments are refused."""
    with pytest.raises(LayoutError, match="not a power of two"):
        spec(1, dtype=BYTE, align=align)


@pytest.mark.parametrize("dtype", [None, "float32", float, 4])
def test_a_dtype_is_torchs(dtype: Any) -> None:
    """Names and Python types are not guessed at."""
    with pytest.raises(LayoutError, match="not a torch dtype"):
        spec(1, dtype=dtype)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_layout_has_a_name(name: Any) -> None:
    """The name is the owner in every report."""
    with pytest.raises(LayoutError, match="not a name"):
        Layout(name, x=spec(1, dtype=BYTE))


def test_a_tensor_is_a_spec() -> None:
    """A plain shape is refused, and the remedy says what to write."""
    with pytest.raises(LayoutError, match=r"workspace\.spec"):
        Layout("one", x=(1, 2))  # type: ignore[arg-type]


def test_no_tensor_hides_an_attribute_of_the_lease() -> None:
    """Every public name of a lease is refused as a tensor's, private names too."""
    public = {name for name in dir(Lease) if not name.startswith("_")}
    for name in sorted(public | {"_x", "__len__"}):
        hiding: dict[str, Any] = {name: spec(1, dtype=BYTE)}
        with pytest.raises(LayoutError, match="choose another name"):
            Layout("one", **hiding)


def test_the_cache_of_resolved_dims_is_bounded() -> None:
    """Dims follow request sizes: what is remembered does not grow with every token count."""
    layout = Layout("one", x=spec("T", dtype=BYTE))
    for count in range(RESOLVED_KEPT + 10):
        layout.resolve(T=count)
    assert len(layout._resolved) <= RESOLVED_KEPT


def test_dims_in_any_order_are_one_resolution() -> None:
    """The same dims give the same object, so that requests can be compared by identity."""
    layout = Layout("one", x=spec("A", "B", dtype=BYTE))
    assert layout.resolve(A=1, B=2) is layout.resolve(B=2, A=1)


# -- exclusive groups --------------------------------------------------------------------------------------------


def two_groups(*streams: str) -> Layout:
    group = Exclusive((("a", "b"), ("c",)), streams)
    return Layout("two", exclusive=(group,), a=spec(300, dtype=BYTE), b=spec(100, dtype=BYTE), c=spec("C", dtype=BYTE),
                  d=spec(8, dtype=BYTE))  # fmt: skip


def test_exclusive_groups_share_bytes_and_nothing_else_does() -> None:
    """The larger group decides the size; what stands outside the groups keeps bytes of its own."""
    for count in (1, 5000):
        placed = {one.name: one for one in two_groups("main", "main").resolve(C=count).extents}
        assert placed["c"].offset == placed["a"].offset
        assert placed["b"].offset >= placed["a"].offset + 300
        shared = range(placed["a"].offset, max(placed["b"].offset + 100, placed["c"].offset + count))
        assert placed["d"].offset not in shared and placed["d"].offset + 7 not in shared


def test_exclusive_groups_on_two_streams_are_refused() -> None:
    """Nothing orders two streams, so bytes are shared on one stream only (vllm#41834)."""
    with pytest.raises(LayoutError, match="which nothing orders"):
        two_groups("main", "aux0")


def test_each_exclusive_group_names_a_stream() -> None:
    """A group without a stream has no proof of order."""
    with pytest.raises(LayoutError, match="name one stream for each group"):
        two_groups("main")


def test_a_tensor_stands_in_one_exclusive_group() -> None:
    """Twice in one set of groups is refused."""
    with pytest.raises(LayoutError, match="stands in two"):
        Exclusive((("a",), ("a",)), ("main", "main"))


@pytest.mark.parametrize("other", ["main", "aux0"])
def test_a_tensor_stands_in_one_entry_of_exclusive(other: str) -> None:
    """In two it would share bytes with what another stream uses, and no longer with its own group's."""
    entries = Exclusive((("x",), ("y",)), ("main", "main")), Exclusive((("x",), ("z",)), (other, other))
    with pytest.raises(LayoutError, match="one.x stands in two entries"):
        Layout("one", exclusive=entries, **{name: spec(1024, dtype=BYTE) for name in "xyz"})
    Layout("one", exclusive=entries[:1], **{name: spec(1024, dtype=BYTE) for name in "xyz"})


@pytest.mark.parametrize(
    "wrong", [lambda: Exclusive(3, 4), lambda: Exclusive((3,), ("main",)), lambda: Exclusive((("a",),), "main"),
              lambda: Exclusive((("a",), ("b",)), (None, None)), lambda: Layout("one", exclusive=[3]),
              lambda: Layout("one", exclusive=spec(1, dtype=BYTE))],
)  # fmt: skip
def test_what_names_no_groups_is_refused(wrong: Any) -> None:
    """With a typed error that shows how they are written."""
    with pytest.raises(LayoutError) as caught:
        wrong()
    assert "xclusive" in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("dim", ["stream", "zero", "phase", "lane", "count"])
def test_no_dim_is_called_like_an_argument(dim: str) -> None:
    """It could be neither leased nor declared; also inside an expression."""
    with pytest.raises(LayoutError, match=f"has the dim {dim}"):
        Layout("one", x=spec(f"2*{dim}+1", dtype=BYTE))


@pytest.mark.parametrize("dim", ["self", "layout", "name", "problem", "remedy", "key", "dims"])
def test_every_other_name_is_a_dim(dim: str) -> None:
    """Leased, declared, and refused by size with the dim in the error's fields."""
    layout = Layout("one", x=spec(dim, dtype=BYTE))
    ws = workspace.create(device=Device(memory="virtual"))
    ws.declare(layout, **{dim: 8})
    for _ in range(2):
        with ws.lease(layout, **{dim: 4}):
            ws.acquire(layout, **{dim: 2}).release()
    with pytest.raises(SizeError) as caught:
        Layout("two", x=spec(dim, dtype=BYTE), y=spec(dim, dtype=BYTE)).size(**{dim: 2**63 - 2})
    assert caught.value.fields[dim] == 2**63 - 2


def test_an_exclusive_group_names_tensors_of_the_layout() -> None:
    """A typo is an error with the name in it."""
    with pytest.raises(LayoutError, match="'z'"):
        Layout("one", exclusive=(Exclusive((("z",), ("a",)), ("main", "main")),), a=spec(1, dtype=BYTE))


def test_an_exclusive_group_has_tensors() -> None:
    """An empty group shares nothing."""
    with pytest.raises(LayoutError, match="is empty"):
        Layout("one", exclusive=(Exclusive(((),), ("main",)),), a=spec(1, dtype=BYTE))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_layouts_are_copied_and_pickled(copied: Any) -> None:
    """A layout sent to a spawned worker has the same tensors at the same offsets."""
    layout = two_groups("main", "main")
    twin = copied(layout)
    assert (twin.name, twin.specs, twin.exclusive) == (layout.name, layout.specs, layout.exclusive)
    assert twin.resolve(C=700).extents == layout.resolve(C=700).extents


def test_a_spec_does_not_change() -> None:
    """Requests are cached by layout, so that a spec which could change would lend wrong shapes."""
    one = spec(1, dtype=BYTE)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        one.align = 1  # type: ignore[misc]


@pytest.mark.parametrize("dim", ["+".join(["T"] * 20_000), "T\0"])
def test_an_expression_the_parser_cannot_take_is_refused(dim: str) -> None:
    with pytest.raises(LayoutError):
        spec(dim, dtype=torch.uint8)
