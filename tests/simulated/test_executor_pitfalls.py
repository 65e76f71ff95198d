"""Ways in which deferring an operator can change what it computes, each found the hard way."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workspace import Layout, create, simulated, spec
from workspace.errors import DriverError, Unsupported


@pytest.fixture
def device() -> simulated.Device:
    """Runs nothing before somebody synchronises: whatever happens after an enqueue happens before its execution."""
    return simulated.Device(memory="host", execution="deferred", schedule=simulated.InOrder())


# -- arguments that change after the enqueue ---------------------------------------------------------------


def test_transposing_an_argument_in_place_afterwards_changes_nothing(device: simulated.Device) -> None:
    with device:
        x = torch.arange(6.0).view(2, 3)
        total = x.sum(0)
        x.t_()
    assert total.tolist() == [3, 5, 7]


def test_pointing_an_argument_at_other_bytes_afterwards_changes_nothing(device: simulated.Device) -> None:
    with device:
        x = torch.ones(3)
        total = x.sum()
        x.data = torch.zeros(3)
    assert total.item() == 3 and x.tolist() == [0, 0, 0]


def test_changing_a_list_afterwards_changes_nothing(device: simulated.Device) -> None:
    with device:
        parts = [torch.ones(1), torch.zeros(1)]
        joined = torch.cat(parts)
        parts.reverse()
        parts.pop()
    assert joined.tolist() == [1, 0]


def test_one_tensor_given_twice_stays_one_tensor(device: simulated.Device) -> None:
    with torch.library._scoped_library("pitfalls", "FRAGMENT") as library:
        library.define("same(Tensor q, Tensor k) -> Tensor")
        library.impl("same", lambda q, k: torch.full((), float(q is k)), "CPU")
        library.impl("same", lambda q, k: q.new_empty(()), "Meta")
        with device:
            x = torch.ones(3)
            same = torch.ops.pitfalls.same(x, x)
            views = torch.ops.pitfalls.same(x.view(3), x.view(3))
            device.synchronize()
    assert same.item() == 1 and views.item() == 0


# -- composites --------------------------------------------------------------------------------------------


def test_composites_are_decomposed_under_inference_mode(device: simulated.Device) -> None:
    labels = record_labels(device)
    x, w, b = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(x, w, b)
        with device:
            found = torch.nn.functional.linear(x, w, b)
    assert "aten.addmm.default" in labels and "aten.linear.default" not in labels
    assert torch.equal(found, expected)


def test_a_mode_changes_some_composites_and_the_reference_must_be_taken_under_one(device: simulated.Device) -> None:
    class Null(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    matrix = torch.randn(5, 5)
    with Null():
        expected = torch.linalg.cond(matrix)
    with device:
        found = torch.linalg.cond(matrix)
    assert torch.equal(found, expected)


def test_autocast_has_been_applied_when_an_operator_is_queued(device: simulated.Device) -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = x @ x, x.softmax(-1)
        with device:
            found = x @ x, x.softmax(-1)
            device.synchronize()
    assert found[0].dtype is torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tensors_made_under_inference_mode_can_be_used_after_it(device: simulated.Device) -> None:
    with device:
        with torch.inference_mode():
            x = torch.ones(3)
            x.add_(1)
        y = x * 2
        with torch.inference_mode():
            x.add_(1)
    assert y.tolist() == [4, 4, 4] and x.tolist() == [3, 3, 3]


def test_settings_in_force_at_the_call_are_in_force_when_it_runs(device: simulated.Device) -> None:
    with device:
        torch.set_default_dtype(torch.float64)
        try:
            wide = torch.ones(3) / 3
        finally:
            torch.set_default_dtype(torch.float32)
        narrow = torch.ones(3) / 3
        device.synchronize()
        assert torch.get_default_dtype() is torch.float32
    assert wide.dtype is torch.float64 and wide[0].item() == 1 / 3
    assert narrow.dtype is torch.float32


def test_deterministic_algorithms_are_those_of_the_call(device: simulated.Device) -> None:
    with torch.library._scoped_library("pitfalls", "FRAGMENT") as library:
        library.define("strict(Tensor x) -> Tensor")
        library.impl("strict", lambda x: x + torch.are_deterministic_algorithms_enabled(), "CPU")
        library.impl("strict", lambda x: torch.empty_like(x), "Meta")
        with device:
            x = torch.zeros(1)
            torch.use_deterministic_algorithms(True)
            try:
                strict = torch.ops.pitfalls.strict(x)
            finally:
                torch.use_deterministic_algorithms(False)
            loose = torch.ops.pitfalls.strict(x)
            device.synchronize()
    assert strict.item() == 1 and loose.item() == 0


# -- the host reads ----------------------------------------------------------------------------------------

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "asarray": lambda t: numpy.asarray(t).tolist(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).tolist(),
    "save": lambda t: saved(t).tolist(),
    "deepcopy": lambda t: copy.deepcopy(t).tolist(),
    "tensor": lambda t: quiet(lambda: torch.tensor(t).tolist()),
    "tensor of tensors": lambda t: torch.tensor([t[0], t[1], t[2]]).tolist(),
    "as_tensor": lambda t: torch.as_tensor(t).tolist(),
    "item": lambda t: [t[0].item(), t[1].item(), t[2].item()],
    "float": lambda t: [float(x) for x in t],
    "int": lambda t: [int(x) for x in t],
    "iteration over a range": lambda t: [len(range(t[0].int())), len(range(t[1].int())), len(range(t[2].int()))],
    "bool": lambda t: [1.0 if bool(t[0] == 1) else 0.0, 2.0, 3.0],
    "equal": lambda t: [1, 2, 3] if torch.equal(t, torch.tensor([1.0, 2.0, 3.0])) else [],
    "allclose": lambda t: [1, 2, 3] if torch.allclose(t, torch.tensor([1.0, 2.0, 3.0])) else [],
    "repr": lambda t: [1, 2, 3] if repr(t) == "tensor([1., 2., 3.])" else [],
    "format": lambda t: [float(f"{t[0]:.1f}"), float(f"{t[1]:.1f}"), float(f"{t[2]:.1f}")],
    "slice by tensor": lambda t: torch.arange(1.0, 9.0)[: t[2].int()].tolist(),
    "contains": lambda t: [1, 2, 3] if 2.0 in t else [],
}


def quiet(read: Callable[[], object]) -> object:
    """Torch advises against both uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return read()


def saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("way", READS)
def test_a_host_read_waits_for_the_stream(device: simulated.Device, way: str) -> None:
    with device:
        t = torch.ones(3)
        t[1:] += 1
        t[2:] += 1
        pending = len(device.queue)
        assert pending
        assert READS[way](t) == [1, 2, 3]
    assert device.verdict() == "SAFE"


def test_splitting_at_a_tensor_reads_it_where_dispatch_does_not_see(device: simulated.Device) -> None:
    with device:
        where = torch.ones(2, dtype=torch.int64)
        where[1:] += 2
        pieces = torch.tensor_split(torch.arange(6), where)
        assert [len(piece) for piece in pieces] == [1, 2, 3]


def test_lengths_are_read_and_written_where_dispatch_does_not_see(device: simulated.Device) -> None:
    """ctc_loss reads them through a pointer, pad_packed_sequence fills them through one."""
    torch.manual_seed(0)
    x, scores = torch.randn(4, 3, 6), torch.randn(20, 3, 5).log_softmax(-1)
    targets = torch.randint(1, 5, (3, 6))
    expected = torch.nn.functional.ctc_loss(scores, targets, torch.tensor([20, 20, 20]), torch.tensor([6, 6, 5]))
    with device:
        lengths = torch.full((3,), 4)
        lengths[1:] -= 1
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
        padded, found = torch.nn.utils.rnn.pad_packed_sequence(packed)
        assert found.tolist() == [4, 3, 3] and torch.equal(padded[:3], x[:3])
        short = torch.full((3,), 6)
        short[2:] -= 1
        loss = torch.nn.functional.ctc_loss(scores, targets, torch.full((3,), 20), short)
    assert torch.equal(loss, expected)


def test_a_host_read_does_not_wait_for_other_streams() -> None:
    """It is a copy on the current stream: what another one has pending stays pending, and a race."""
    device = simulated.Device(memory="host", execution="deferred", schedule=simulated.StreamFirst(0))
    side = device.new_stream("side")
    with device:
        x = torch.zeros(2)
        device.synchronize()
        with device.on(side):
            x.add_(1)
        assert x.tolist() == [0, 0]
    assert device.verdict() == "UNSAFE"


def test_an_array_made_from_a_tensor_is_a_copy(device: simulated.Device) -> None:
    with device:
        x = torch.ones(3)
        array = x.numpy()
        x.add_(1)
        device.synchronize()
        assert array.tolist() == [1, 1, 1]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


@pytest.mark.parametrize(
    "way",
    [
        lambda t: t.untyped_storage(),
        lambda t: t.storage(),
        lambda t: torch.from_dlpack(t),
        lambda t: numpy.from_dlpack(t),
        lambda t: torch.utils.dlpack.to_dlpack(t),
        lambda t: t.share_memory_(),
        lambda t: t.apply_(lambda x: x),
    ],
)
def test_raw_access_is_refused(device: simulated.Device, way: Callable[[torch.Tensor], object]) -> None:
    with device:
        x = torch.ones(3)
        with pytest.raises(Unsupported, match="simulated device"):
            way(x)


def test_an_address_that_escapes_makes_the_verdict_unknown(device: simulated.Device) -> None:
    with device:
        x = torch.ones(3)
        assert simulated.SimulatedDriver(device).address_of(x) % 512 == 0
        assert device.verdict() == "SAFE"
        x.data_ptr()
    assert device.verdict() == "UNKNOWN"


# -- shapes that depend on values --------------------------------------------------------------------------

DYNAMIC: dict[str, Callable[[torch.Tensor], object]] = {
    "mask": lambda t: t[t > 1].tolist() == [2, 3],
    "uint8 mask": lambda t: quiet(lambda: t[(t > 1).to(torch.uint8)].tolist() == [2, 3]),
    "masked_select": lambda t: t.masked_select(t > 2).tolist() == [3],
    "nonzero": lambda t: t.nonzero().tolist() == [[1], [2]],
    "where": lambda t: torch.where(t > 1)[0].tolist() == [1, 2],
    "unique": lambda t: t.unique().tolist() == [0, 2, 3],
    "repeat_interleave": lambda t: torch.arange(3).repeat_interleave(t.long()).tolist() == [1, 1, 2, 2, 2],
    "bincount": lambda t: t.long().bincount().tolist() == [1, 0, 1, 1],
    "out of a mask": lambda t: torch.masked_select(t, t > 1, out=torch.empty(0)).tolist() == [2, 3],
}


@pytest.mark.parametrize("way", DYNAMIC)
def test_a_shape_that_depends_on_values_waits_for_them(device: simulated.Device, way: str) -> None:
    with device:
        t = torch.zeros(3)
        t[1:] += 2
        t[2:] += 1
        assert DYNAMIC[way](t)
    assert device.verdict() == "SAFE"


def test_indexing_by_integers_does_not_wait(device: simulated.Device) -> None:
    """`index.Tensor` is always tagged as dynamic."""
    x, index = torch.arange(4.0), torch.tensor([3, 1])
    with device:
        picked = x[index]
        assert device.queue.executed == 0
    assert picked.tolist() == [3, 1]


def test_writing_through_a_mask_waits_as_on_cuda(device: simulated.Device) -> None:
    with device:
        x = torch.arange(4.0)
        x[x > 1] = torch.tensor([7.0, 8.0])
        assert device.queue.executed > 0
    assert x.tolist() == [0, 1, 7, 8]


# -- outputs -----------------------------------------------------------------------------------------------


def test_views_alias_a_slab_exactly(device: simulated.Device) -> None:
    with device:
        slab = torch.zeros(64, dtype=torch.uint8)
        halves = slab[16:32].view(torch.bfloat16)
        halves.fill_(1.0)
        again = slab[16:32].view(torch.bfloat16)
        assert device.queue.executed == 0
    assert again.tolist() == [1.0] * 8 and slab[:16].sum() == 0


@pytest.mark.parametrize("operator", ["unsafe_split", "unsafe_chunk"])
def test_unsafe_views_are_views(device: simulated.Device, operator: str) -> None:
    with device:
        x = torch.zeros(4)
        first, second = getattr(torch, operator)(x, 2)
        second.add_(1)
    assert x.tolist() == [0, 0, 1, 1]


def test_in_place_views_run_at_once(device: simulated.Device) -> None:
    with device:
        x = torch.arange(6).view(2, 3)
        x.transpose_(0, 1).unsqueeze_(0)
        assert x.shape == (1, 3, 2)
        y = x + 0
    assert y[0, 2].tolist() == [2, 5]


GROWING: dict[str, Callable[[torch.Tensor], object]] = {
    "out=": lambda q: torch.mm(torch.ones(3, 2), torch.ones(2, 11), out=q),
    "out= of a mask": lambda q: torch.masked_select(torch.ones(33), torch.ones(33) > 0, out=q),
    "resize_": lambda q: q.resize_(33),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("way", GROWING)
@pytest.mark.parametrize("strategy", ["caching", "event_fenced", "per_stream"])
def test_bytes_of_a_pool_do_not_grow(strategy: str, way: str, device: simulated.Device) -> None:
    """They are part of a slab: torch refuses, as without the device. What the allocator handed out grows."""
    ws = create(strategy, device=device)
    with torch.inference_mode(), device, ws.lease(Layout("part", q=spec("T", 8, dtype=torch.float32)), T=4) as lease:
        if strategy == "caching":
            tensor = lease.q.tensor()
            GROWING[way](tensor)
            assert tensor.numel() == 33
            return
        with pytest.raises(RuntimeError, match="storage that is not resizable"):
            GROWING[way](lease.q)
        assert lease.q.shape == (4, 8)


def test_an_out_tensor_of_the_wrong_size_is_resized_at_the_call(device: simulated.Device) -> None:
    with device:
        out = torch.empty(0)
        torch.add(torch.ones(5), 1, out=out)
        assert out.shape == (5,)
        larger = torch.zeros(3)
        larger.resize_(6)
        assert larger.shape == (6,)
        larger[3:] = 4
    assert out.tolist() == [2] * 5 and larger.tolist() == [0, 0, 0, 4, 4, 4]


def test_out_tensors_that_fit_are_written_in_place(device: simulated.Device) -> None:
    with device:
        slab = torch.zeros(8)
        torch.add(torch.ones(4), 1, out=slab[2:6])
    assert slab.tolist() == [0, 0, 2, 2, 2, 2, 0, 0]


def test_none_lists_and_other_results(device: simulated.Device) -> None:
    with device:
        with torch.profiler.record_function("named"):
            parts = torch.ops.aten._foreach_add([torch.ones(2), torch.zeros(3)], 1)
        grads = torch.ops.aten.native_layer_norm_backward(
            torch.ones(2, 3),
            torch.ones(2, 3),
            [3],
            torch.zeros(2, 1),
            torch.ones(2, 1),
            None,
            None,
            [True, False, False],
        )
    assert [part.tolist() for part in parts] == [[2, 2], [1, 1, 1]]
    assert grads[0].shape == (2, 3) and grads[1] is None


def test_host_values_arrive_by_a_copy(device: simulated.Device) -> None:
    """An array that the host changes afterwards is not the device's memory."""
    with device:
        array = numpy.ones(3, dtype=numpy.float32)
        x = torch.from_numpy(array)
        array[:] = 7
        assert x.tolist() == [1, 1, 1]


# -- random numbers ----------------------------------------------------------------------------------------


def draws() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(3), torch.rand(2, 20), torch.randint(0, 99, (4,)), torch.randperm(7)]
    drawn += [torch.empty(5).uniform_(), torch.empty(40).normal_(), torch.empty(3).exponential_()]
    drawn += [torch.bernoulli(torch.full((9,), 0.5)), torch.normal(torch.zeros(3), torch.ones(3))]
    drawn += [torch.randn(3, generator=generator), torch.nn.functional.dropout(torch.ones(20), 0.5)]
    drawn += [torch.multinomial(torch.ones(6), 4), torch.poisson(torch.full((5,), 4.0))]
    drawn += [torch.rand(2, generator=generator), torch.rand(2), torch.rand_like(torch.ones(3))]
    return drawn


def test_random_numbers_are_those_drawn_at_the_call(device: simulated.Device) -> None:
    torch.manual_seed(3)
    expected = draws()
    after = torch.rand(1)
    torch.manual_seed(3)
    with device:
        found = draws()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(torch.rand(1), after)
    assert device.verdict() == "SAFE"


def test_a_draw_that_depends_on_a_value_does_not_lose_the_generators_place(device: simulated.Device) -> None:
    torch.manual_seed(0)
    expected = torch.randint_like(torch.zeros(3), torch.tensor(9)), torch.rand(2)
    torch.manual_seed(0)
    with device:
        found = torch.randint_like(torch.zeros(3), torch.tensor(9)), torch.rand(2)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_tensors_of_another_device_are_none_of_its_business(device: simulated.Device) -> None:
    with device:
        meta = torch.empty(3, device="meta") + torch.tensor([1.0], device="meta")
        assert meta.device.type == "meta" and not len(device.queue)
    assert not device.races() and device.counters["launch"] == 0


def test_seeding_between_calls_takes_effect_between_them(device: simulated.Device) -> None:
    with device:
        torch.manual_seed(1)
        first = torch.rand(3)
        torch.manual_seed(1)
        second = torch.rand(3)
        device.synchronize()
    assert torch.equal(first, second)


def test_random_numbers_do_not_depend_on_the_order_of_execution() -> None:
    values = set()
    for schedule in (simulated.StreamFirst(0), simulated.StreamFirst(1)):
        device = simulated.Device(memory="host", execution="deferred", schedule=schedule)
        side = device.new_stream("side")
        torch.manual_seed(0)
        with device:
            a = torch.rand(2)
            with device.on(side):
                b = torch.rand(2)
        values.add((*a.tolist(), *b.tolist()))
    assert len(values) == 1


# -- errors ------------------------------------------------------------------------------------------------


def test_a_failed_operator_stops_the_device(device: simulated.Device) -> None:
    with pytest.raises(DriverError), device:
        picked = torch.ones(2).index_select(0, torch.tensor([5]))
        picked.tolist()
    with pytest.raises(DriverError):
        device.synchronize()


def test_an_error_of_a_host_read_is_the_callers(device: simulated.Device) -> None:
    """Negative control of the sticky error: the call itself failed, and the device did not."""
    with device:
        with pytest.raises(RuntimeError, match="(?i)bincount"):
            (torch.ones(3, dtype=torch.int64) * -1).bincount()
        assert torch.ones(2).sum().item() == 2


def record_labels(device: simulated.Device) -> list[str]:
    labels: list[str] = []
    launch = device.launch

    def recorded(label: str, *args: object, **kwargs: object) -> object:
        labels.append(label)
        return launch(label, *args, **kwargs)  # type: ignore[arg-type]

    device.launch = recorded  # type: ignore[method-assign, assignment]
    return labels


def test_poison_is_not_a_number() -> None:
    """What `empty` returns is poison, so that a program that reads it is seen."""
    device = simulated.Device(memory="host", execution="deferred")
    with device:
        values = torch.empty(3).tolist()
        integers = torch.empty(2, dtype=torch.int32).tolist()
    assert all(math.isnan(value) for value in values) and integers == [-1, -1]
