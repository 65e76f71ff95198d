"""Every operator of torch's database, deferred, gives the bits of eager execution (exempt: `opinfo_exempt.toml`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.simulated.opinfo import VARIANTS, cases, check, exemptions

SHARDS = 16

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="exemptions were made for the operator database of torch 2.13; 2.11's has operators that crash on a CPU",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def sweep(shard: int, most: int, variants: tuple[str, ...]) -> list[str]:
    """What is wrong with every 16th operator of the database."""
    from torch.testing._internal.common_methods_invocations import op_db

    rules = exemptions()
    wrong = []
    for op in op_db[shard::SHARDS]:
        for case in cases(op, most, variants):
            wrong.append(check(case, rules.get((case.name, case.variant), "")))
    return [message for message in wrong if message]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operator_gives_the_bits_of_eager_execution(shard: int) -> None:
    """float32, an integer type and bfloat16; the first sample of each."""
    assert sweep(shard, 1, ("function",)) == []


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_sample_and_variant_gives_the_bits_of_eager_execution(shard: int) -> None:
    """Eight samples; in place, under inference mode and through autograd too."""
    assert sweep(shard, 8, VARIANTS) == []


def test_exempt_operators_exist() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    names = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name for op in op_db}
    assert {name for name, _ in exemptions()} <= names
