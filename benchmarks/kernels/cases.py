"""What is measured: calls of the ops at V4-Flash's widths, and the bytes that each must read and write."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from tests.dsv4.cuda.calls import Call, call

ROWS = (1, 2, 8, 64, 256, 512, 1023, 2048, 8192)


@attrs.frozen
class Case:
    """One op at several numbers of rows.

    Attributes
    ----------
    make
        A call of so many rows, with memory of its own.
    floor_bytes
        What any implementation reads and writes, caches and states included.
    """

    make: Callable[[int, int], Call]
    floor_bytes: Callable[[Call], int]
    rows: tuple[int, ...] = ROWS


def moved(*skipped: int) -> Callable[[Call], int]:
    """Every out written, every input tensor read, but for the skipped ones (tables and caches, in place)."""

    def count(made: Call) -> int:
        read = [one for place, one in enumerate(made.inputs) if hasattr(one, "nbytes") and place not in skipped]
        return sum(one.nbytes for one in (*read, *made.outs))

    return count


def insert_bytes(made: Call) -> int:
    """q, kv, slots and positions read, a row of the table a token; q_out and the inserted states written."""
    q, kv, _, slots, positions = made.inputs[:5]
    inserted = int((slots >= 0).sum())
    return q.nbytes + kv.nbytes + slots.nbytes + positions.nbytes * 33 + made.outs[0].nbytes + inserted * 584


def _case(name: str, floor_bytes: Callable[[Call], int]) -> Case:
    return Case(lambda rows, seed: call(name, rows, seed=seed), floor_bytes)


CASES: dict[str, Case] = {
    "q_norm_rope_kv_insert": _case("q_norm_rope_kv_insert", insert_bytes),
    "q_kv_rmsnorm": _case("q_kv_rmsnorm", moved()),
    "rms_norm": _case("rms_norm", moved()),
    "indexer_q_rope_fp8": _case("indexer_q_rope_fp8", moved(3)),
    "indexer_q_rope_fp4": _case("indexer_q_rope_fp4", moved(3)),
    "inverse_rope": _case("inverse_rope", moved(2)),
    "inverse_rope_fp8": _case("inverse_rope_fp8", moved(2)),
}
