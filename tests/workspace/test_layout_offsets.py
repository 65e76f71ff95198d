"""Offsets of random layouts: disjoint, aligned, inside the size, equal to the sum computed by hand."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workspace.test_layout import DTYPES
from workspace import Exclusive, Layout, spec
from workspace.layout import Resolved, round_up

DIMS = {"T": st.integers(0, 40), "K": st.integers(0, 9)}
SEARCH = settings(derandomize=True, deadline=None, max_examples=150, database=None)
NAMES = "abcdef"
Tensors = dict[str, Any]
"""A `TensorSpec` by name."""

names = st.sampled_from(["T", "K", "3", "0", "1"])
expressions = st.recursive(
    names,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+*"), inner).map(lambda one: f"({one[0]}{one[1]}{one[2]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from("237")).map("".join).map("({})".format),
    ),
    max_leaves=4,
)
specs = st.builds(
    lambda shape, dtype, align: spec(*shape, dtype=dtype, align=align),
    st.lists(st.one_of(st.integers(0, 7), expressions), max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2, 8, 16, 256, 512, 4096]),
)
tensors = st.lists(specs, min_size=1, max_size=len(NAMES)).map(lambda many: dict(zip(NAMES, many, strict=False)))


def resolved(layout: Layout, T: int, K: int) -> Resolved:
    dims = {"T": T, "K": K}
    return layout.resolve(**{name: dims[name] for name in layout.dim_names})


def check_bounds(found: Resolved, made: Tensors, T: int, K: int) -> None:
    """What holds for every tensor of any layout."""
    assert [one.name for one in found.extents] == list(made)
    for one in found.extents:
        expected = 1
        for axis, length in zip(made[one.name].shape, one.shape, strict=True):
            assert length == (axis if isinstance(axis, int) else eval(axis, {"T": T, "K": K}))
            expected *= length
        assert one.nbytes == expected * one.dtype.itemsize
        assert one.offset % made[one.name].align == 0
        assert found.align % made[one.name].align == 0
        assert one.offset + one.nbytes <= found.nbytes
    assert found.nbytes % 256 == 0


@SEARCH
@given(made=tensors, **DIMS)
def test_tensors_share_no_byte(made: Tensors, T: int, K: int) -> None:
    """Offsets add up: every tensor begins at the first aligned byte after the one before."""
    found = resolved(Layout("any", **made), T, K)
    check_bounds(found, made, T, K)
    end = 0
    for one in found.extents:
        assert one.offset == round_up(end, made[one.name].align)
        end = one.offset + one.nbytes
    assert found.nbytes == round_up(end, 256)


@SEARCH
@given(made=tensors, cut=st.integers(1, len(NAMES)), second=st.integers(1, len(NAMES)), **DIMS)
def test_only_exclusive_groups_overlap(made: Tensors, cut: int, second: int, T: int, K: int) -> None:
    """Tensors overlap only across groups that are exclusive of each other."""
    order = list(made)
    groups = tuple(order[:cut]), tuple(order[cut : cut + second])
    if not all(groups):
        return
    found = resolved(Layout("any", exclusive=(Exclusive(groups, ("main", "main")),), **made), T, K)
    check_bounds(found, made, T, K)
    group = {name: index for index, names in enumerate(groups) for name in names}
    for one in found.extents:
        for other in found.extents:
            apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            exclusive = group.get(one.name, -1) != group.get(other.name, -1) and {one.name, other.name} <= group.keys()
            assert one is other or apart or exclusive or not one.nbytes or not other.nbytes
