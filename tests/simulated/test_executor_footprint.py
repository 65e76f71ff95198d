"""The bytes a strided view touches, against the addresses of its elements."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workspace import simulated
from workspace.simulated.footprint import ROWS, extent, footprint

DIMS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4)


def touched(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> set[int]:
    """Every byte, element by element."""
    offsets = [0]
    for size, step in zip(shape, stride, strict=True):
        offsets = [offset + step * index for offset in offsets for index in range(size)]
    return {offset * itemsize + byte for offset in offsets for byte in range(itemsize)}


@settings(max_examples=300, deadline=None)
@given(DIMS, st.sampled_from([1, 2, 4, 8]))
def test_a_footprint_is_the_bytes_of_the_elements(dims: list[tuple[int, int]], itemsize: int) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    intervals, hull = footprint(shape, stride, itemsize)
    covered = [byte for start, length in intervals for byte in range(start, start + length)]
    assert not hull
    assert len(covered) == len(set(covered)) and covered == sorted(covered)
    assert set(covered) == touched(shape, stride, itemsize)
    assert extent(shape, stride, itemsize) == (max(covered) + 1 if covered else 0)


def test_disjoint_columns_of_a_slab_share_no_byte() -> None:
    slab = torch.empty(40, 16)
    left, right = slab[:, :5], slab[:, 5:]
    covered = []
    for view in (left, right):
        intervals, _ = footprint(view.shape, view.stride(), 4)
        start = view.storage_offset() * 4
        covered.append({start + byte for offset, length in intervals for byte in range(offset, offset + length)})
    assert not covered[0] & covered[1] and covered[0] | covered[1] == set(range(40 * 16 * 4))


def test_more_rows_than_the_cap_become_a_hull() -> None:
    shape, stride = (ROWS + 1, 2), (4, 1)
    intervals, hull = footprint(shape, stride, 2)
    assert hull and intervals == ((0, extent(shape, stride, 2)),)
    assert not footprint((ROWS, 2), stride, 2)[1]


def test_a_transposed_dense_tensor_is_one_interval() -> None:
    assert footprint((3, 4, 5), (1, 3, 12), 4) == (((0, 240),), False)


def test_an_expanded_tensor_is_its_source() -> None:
    assert footprint((100, 4), (0, 1), 2) == (((0, 8),), False)


def test_an_operator_whose_bytes_are_a_hull_says_so_in_reports() -> None:
    device = simulated.Device(memory="host", execution="deferred")
    side = device.new_stream("side")
    with device:
        slab = torch.zeros(ROWS + 1, 4)
        device.synchronize()
        slab[:, :1].add_(1)
        with device.on(side):
            slab[:, 2:3].add_(1)
    assert {race.first.label for race in device.races()} == {"aten.add_.Tensor (hull)"}
