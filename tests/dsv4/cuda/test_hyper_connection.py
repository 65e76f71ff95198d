"""The hyper-connections' kernels: many tiles a launch, streams that cancel, and widths that clusters do not take."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.calls import call
from benchmarks.kernels.maker import Call
from dsv4.ops import OpError
from tests.dsv4.cuda.check import bits, check, same_bits

NAMES = ("mhc_pre", "mhc_post_pre", "hc_head")
FEW, MANY = 15, 1500
"""Of one kernel and the other; the head has the first only. On an H200's seven clusters the first has a tile each, or
thirteen and fourteen of the head's 1,500 rows; the other has twenty-seven tiles each, every place in shared memory used
more than once."""


@pytest.mark.parametrize("rows", (FEW, MANY))
@pytest.mark.parametrize("name", NAMES)
def test_many_tiles_give_the_same_bits(name: str, rows: int) -> None:
    """Launched back to back into outs of their own: no launch and no tile disturbs another."""
    calls = [call(name, rows).poison(byte) for byte in (0xFF, 0, 0x33, 0x7F)]
    for one in calls:
        one.run()
    wanted = calls[0].written()
    for one in calls[1:]:
        assert all(same_bits(found, other) for found, other in zip(one.written(), wanted, strict=True))


@pytest.mark.parametrize("rows", (4, 5, 7, 8, 9, 28, 29, 56, 57, 63, 112, 113, 128, 225, 255))
@pytest.mark.parametrize("name", NAMES)
def test_partly_filled_operands_tiles_and_teams(name: str, rows: int) -> None:
    """Eight tokens are an operand, two operands a tile; of a cluster's two teams one may have fewer tiles or none."""
    check(call(name, rows))


@pytest.mark.parametrize(
    "rows", (16, 17, 55, 56, 57, 111, 112, 113, 224, 256, 449, 504, 505, 897, 1345, 2047, 14337, 14343, 14400)
)
@pytest.mark.parametrize("name", ("mhc_pre", "mhc_post_pre"))
def test_partly_filled_tiles_of_many(name: str, rows: int) -> None:
    """Where the other kernel begins, where seven clusters' tiles of eight are full, are as many as have places, or one
    more, and where a block's own tokens are more than a launch takes: the next one has 1 token, 7, or 64."""
    check(call(name, rows))


@pytest.mark.parametrize(("rows", "last"), ((FEW, 1), (FEW, 5), (FEW, 12), (MANY, 16), (MANY, 300)))
@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(name: str, rows: int, last: int) -> None:
    """The last rows of a long call alone: other tiles, other clusters, other owners. Of one kernel each: few rows and
    many are summed up in another order."""
    whole = call(name, rows)
    whole.run()
    alone = call(name, last)
    for one, long in zip(alone.inputs, whole.inputs, strict=True):
        if isinstance(one, torch.Tensor):
            one.copy_(long[-last:] if long.shape[0] == rows else long)
    for found, wanted in zip(alone.poison(0xFF).run(), whole.outs, strict=True):
        assert same_bits(found, wanted[-last:])


@pytest.mark.parametrize("rows", (FEW, MANY))
@pytest.mark.parametrize(("name", "place"), [(name, 0) for name in NAMES] + [("mhc_post_pre", i) for i in (1, 2, 3)])
def test_nan_stays_in_its_row_of_many(name: str, place: int, rows: int) -> None:
    """Rows of a tile share products, barriers and copies: of streams, post, comb and the block's output."""
    wanted = call(name, rows)
    wanted.run()
    spoilt = call(name, rows)
    spoilt.inputs[place].view(torch.uint8)[7::100] = 0xFF
    kept = torch.arange(rows, device="cuda") % 100 != 7
    for found, one in zip(spoilt.run(), wanted.outs, strict=True):
        assert torch.equal(bits(found[kept]), bits(one[kept]))


@pytest.mark.parametrize("rows", (FEW, MANY))
@pytest.mark.parametrize("place", (0, 3))
def test_a_huge_row_leaves_its_neighbours_bits(place: int, rows: int) -> None:
    """Zero times its values is zero, however the tensor cores line up what they add."""
    wanted, huge = call("mhc_post_pre", rows), call("mhc_post_pre", rows)
    wanted.run()
    huge.inputs[place][7::100] = 1e38
    kept = torch.arange(rows, device="cuda") % 100 != 7
    for found, one in zip(huge.run(), wanted.outs, strict=True):
        assert torch.equal(bits(found[kept]), bits(one[kept]))


@pytest.mark.parametrize("rows", (FEW, MANY))
@pytest.mark.parametrize("name", ("mhc_pre", "mhc_post_pre"))
def test_comb_begins_at_sixteen_bytes(name: str, rows: int) -> None:
    """It is written in vectors: elsewhere the kernel would fault."""
    made = call(name, rows)
    comb = made.outs[-1]
    further = torch.empty(comb.numel() + 1, device="cuda")[1:].view(comb.shape)
    with pytest.raises(OpError, match="align it to 16 bytes"):
        Call(made.op, made.inputs, (*made.outs[:-1], further)).run()


@pytest.mark.parametrize("rows", (FEW, MANY))
@pytest.mark.parametrize(("place", "at"), ((0, (7, 2, 77)), (3, (7, 77))))
def test_an_infinity_stays_one_in_its_column(place: int, at: tuple[int, ...], rows: int) -> None:
    """Of a stream or of the block's output: it goes to that column of the token's streams, and no further."""
    wanted, spoilt = call("mhc_post_pre", rows), call("mhc_post_pre", rows)
    wanted.run()
    spoilt.inputs[place][at] = torch.inf
    found = spoilt.run()[0]
    assert found[7, :, 77].isposinf().all()
    found[7, :, 77] = wanted.outs[0][7, :, 77]
    assert same_bits(found, wanted.outs[0])


@pytest.mark.parametrize("rows", (FEW, MANY))
@pytest.mark.parametrize("name", NAMES)
def test_streams_whose_squares_overflow(name: str, rows: int) -> None:
    """The norm divides by an infinity, as the reference in float32 does."""
    made = call(name, rows).poison(0xFF)
    made.inputs[0].mul_(1e19)
    layer_in = made.run()[1 if name == "mhc_post_pre" else 0]
    assert layer_in.shape == (rows, 4096) and not layer_in.any()


@pytest.mark.parametrize("name", ("mhc_pre", "mhc_post_pre"))
def test_other_numbers_of_tokens_at_the_same_addresses(name: str) -> None:
    """What the copying unit is told of a tensor is remembered by its address: it ends where this call's ends."""
    whole = call(name, 300)
    wanted = [one.clone() for one in whole.run()]
    for rows in (64, 300, 17, 129, 64):
        whole.poison(0x55)
        inputs = [one[:rows] if isinstance(one, torch.Tensor) and one.shape[0] == 300 else one for one in whole.inputs]
        Call(whole.op, tuple(inputs), tuple(one[:rows] for one in whole.outs)).run()
        for found, one in zip(whole.outs, wanted, strict=True):
            assert same_bits(found[:rows], one[:rows])
            assert bool((found[rows:].contiguous().view(torch.uint8) == 0x55).all())


@pytest.mark.parametrize("name", ("mhc_pre", "mhc_post_pre"))
def test_more_weights_than_are_remembered(name: str) -> None:
    """Each of 300 at an address of its own, in turn, twice: as at one address, where nothing has to be forgotten."""
    made = call(name, 17)
    place = 1 if name == "mhc_pre" else 4
    only = made.inputs[place]
    every = only * torch.linspace(0.5, 1.5, 300, device=only.device)[:, None, None]
    wanted = []
    for one in every:
        only.copy_(one)
        wanted.append([out.clone() for out in made.run()])
    for which in (*range(300), *range(300)):
        inputs = (*made.inputs[:place], every[which], *made.inputs[place + 1 :])
        found = Call(made.op, inputs, made.outs).run()
        assert all(same_bits(out, other) for out, other in zip(found, wanted[which], strict=True))


LOGITS = {
    "next to nothing": [[60, 0, 0.1, -0.2], [60, 0.3, -0.1, -0.1], [60, 0.6, -0.3, 0], [60, 0.9, -0.5, 0.1]],
    "factors grow": [[-80, -80, 0, -80], [-80, -80, 0, -80], [-80, -80, 0, -60], [-36, -41, 0, -80]],
}  # fmt: skip
"""Of comb. Of the first, three columns' sums are 1e-26 or some eps: their product is no float up to an eps of 1e-16.
Without one the second comes to factors for rows and columns that are far apart: combs made of them are off by 1.5%."""


@pytest.mark.parametrize("hc_eps", (0.0, 1e-30, 1e-16, 1e-6))
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("rows", (FEW, 17))
@pytest.mark.parametrize("name", ("mhc_pre", "mhc_post_pre"))
def test_combs_with_any_eps(name: str, rows: int, logits: list[list[float]], hc_eps: float) -> None:
    """Next to none, too: another kernel divides by sums one by one then."""
    check_combs(name, rows, logits, hc_eps, 20)


@pytest.mark.parametrize(("hc_eps", "iterations"), ((1e-6, 1), (1e-6, 100), (1e-6, 2000), (1.0, 20), (5e9, 2)))
@pytest.mark.parametrize("rows", (FEW, 17))
@pytest.mark.parametrize("name", ("mhc_pre", "mhc_post_pre"))
def test_combs_of_many_iterations_or_with_a_huge_eps(name: str, rows: int, hc_eps: float, iterations: int) -> None:
    """Of factors they are NaN with 2,000 iterations, or with a divisor of 1e10: the other kernel makes these, too."""
    check_combs(name, rows, [[0, -1, -2, -4], [-1, -1, -1, -2], [1, 1, 1, -2], [1, -2, 1, -1]], hc_eps, iterations)


def check_combs(name: str, rows: int, logits: list[list[float]], hc_eps: float, iterations: int) -> None:
    """Of logits that are the same for all tokens, against float64."""
    made = call(name, rows).poison(0xFF)
    inputs = list(made.inputs)
    fn, base, scale, _, _, at = inputs[-7:-1]
    assert fn.shape == (24, 4 * 4096) and at == 1e-6
    scale[2] = 0
    base[8:].view(4, 4).copy_(torch.tensor(logits))
    inputs[-2:] = hc_eps, iterations
    combs = Call(made.op, tuple(inputs), made.outs)
    wanted = combs.reference(torch.float64)[-1]
    torch.testing.assert_close(combs.run()[-1].double(), wanted, rtol=1e-3, atol=0)


@pytest.mark.parametrize("rows", (FEW, 17))
def test_streams_of_the_kernel_before_are_waited_for(rows: int) -> None:
    """Launches overlap: what a long kernel writes last is read at once by a short one.

    Fails without the waits in hyper_connection_cluster.cu or hyper_connection_resident*.
    """
    before, other = call("mhc_post_pre", 4096), call("mhc_pre", rows)
    after = Call(other.op, (before.outs[0][-rows:], *other.inputs[1:]), other.outs)
    before.run()
    torch.cuda.synchronize()
    wanted = [one.clone() for one in after.run()]
    for _ in range(20):
        before.poison(0)
        torch.cuda.synchronize()
        before.run()
        assert all(same_bits(found, one) for found, one in zip(after.run(), wanted, strict=True))


@pytest.mark.parametrize("rows", (33, 300))
@pytest.mark.parametrize("name", ("mhc_pre", "hc_head"))
def test_streams_that_nearly_cancel(name: str, rows: int) -> None:
    """The sum's square comes from the products of the streams, which are 4,096 times larger here."""
    made = call(name, rows)
    residual, base, scale = made.inputs[0], made.inputs[2], made.inputs[3]
    residual[:, 1] = residual[:, 1] / 64 - residual[:, 0]
    residual[:, 3] = residual[:, 3] / 64 - residual[:, 2]
    base[:4] = 0.5
    scale[:1] = 0
    check(made)


@pytest.mark.parametrize("hidden", (512, 1024, 4096, 7168))
@pytest.mark.parametrize("name", NAMES)
def test_hundreds_of_rows_of_other_widths(name: str, hidden: int) -> None:
    """Two kernels elsewhere than at 4,096."""
    check(call(name, 300, hidden=hidden))
