"""The table has no gap, and each kind of gap would be seen."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from workspace.testing import SEAMS, all_scenarios, removed, table
from workspace.testing.table import parse

REQUIRED = (
    "a1 a2 a3 a5 a6 a7 a8 b1 b3 c1 c2 d1 d2 d4 d5 d6 d7 d8 d9 d10 e1 e2 e3 f1 f2 f4 g1 g2 g3 h1 h3 i1 i2 i3 j1 j3 k1 "
    "l1 l2 l3 n1 n3 o1"
).split()
"""Ids of the contract that need neither a GPU nor torch.compile; o4 is the suite itself."""


def content() -> dict[str, Any]:
    """The table as it is committed."""
    return tomllib.loads(files("workspace.testing").joinpath("contract.toml").read_text())


def test_table_has_no_gap() -> None:
    """Each scenario, strategy and driver is there, and each exemption has its reason."""
    assert table().gaps() == []


def test_contract_is_covered() -> None:
    """Each id has a scenario by its own name, and a variation beside it for each kind."""
    names = all_scenarios()
    assert set(REQUIRED) == {one.id for one in names.values()}
    assert all(any(name == wanted or name.startswith(f"{wanted}-") for name in names) for wanted in REQUIRED)
    letters = {name[0] for name in names}
    assert all(any("-" in name and name[0] == letter for name in names) for letter in letters)


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    """Remove a key from the table."""

    def change(table: dict[str, Any]) -> None:
        for key in path[:-1]:
            table = table[key]
        del table[path[-1]]

    return change


def put(value: object, *path: str) -> Callable[[dict[str, Any]], None]:
    """Set a key of the table."""

    def change(table: dict[str, Any]) -> None:
        for key in path[:-1]:
            table = table.setdefault(key, {})
        table[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "gap"),
    [
        (without("a1"), "scenario 'a1' has no row"),
        (put({"simulated": ["caching"]}, "z9"), "row 'z9' is no scenario"),
        (put(["caching", "event_fenced"], "a1", "simulated"), "a1: per_stream is missing on simulated"),
        (without("strategies", "exempt", "upstream"), "a1: upstream is missing on simulated"),
        (without("a1", "cuda"), "a1: caching is missing on cuda"),
        (put("", "g3", "exempt", "simulated", "caching"), "g3: caching: no reason"),
        (put(" ", "a2", "uncontrolled", "caching", "fence"), "a2: fence: no reason"),
        (put("why", "a2", "uncontrolled", "caching", "join"), "a2: 'join' is none of its seams"),
        (put("why", "a2", "unshown", "cuda", "join"), "a2: 'join' is none of its seams"),
        (put("why", "a2", "unshown", "tpu", "fence"), "a2: driver 'tpu' is not known"),
        (put(" ", "a2", "unshown", "cuda", "fence"), "a2: fence: no reason"),
        (put("why", "allocators", "native", "z9"), "native: 'z9' is no scenario and no cell"),
        (put("", "allocators", "native", "a1"), "a1: no reason"),
        (put("why", "a1", "exempt", "simulated", "caching"), "a1: caching runs and is exempt on simulated"),
        (put("why", "a1", "exempt", "simulated", "arena"), "a1: strategy 'arena' is not known"),
    ],
)
def test_gap_is_named(change: Callable[[dict[str, Any]], None], gap: str) -> None:
    """With one entry missing, too many or without a reason, the gap is named."""
    changed = content()
    change(changed)
    assert gap in parse(changed).gaps()


def test_seams_are_whole() -> None:
    """Each seam names places that exist, puts back what it took out, and is some scenario's."""
    used = {seam for one in all_scenarios().values() for seam in one.seams}
    assert used == set(SEAMS)
    for name, seam in SEAMS.items():
        before = [owner.__dict__[attribute] for owner, attribute, _ in seam.places]
        with removed(name):
            inside = [owner.__dict__[attribute] for owner, attribute, _ in seam.places]
        after = [owner.__dict__[attribute] for owner, attribute, _ in seam.places]
        assert before == after and before and all(a is not b for a, b in zip(before, inside, strict=True))


def test_safety_has_controls() -> None:
    """A scenario that promises right data or detection has a control under some strategy, or says why it cannot."""
    controlled = {name for name, _, _ in table().controls("simulated")}
    for name, one in all_scenarios().items():
        if one.promise != "R":
            assert name in controlled or one.no_control, name
