"""Threads that entered the device enqueue on streams of their own; others are refused its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from workspace import simulated
from workspace.errors import DeviceError


@pytest.fixture
def device() -> simulated.Device:
    return simulated.Device(memory="host", execution="deferred", schedule=simulated.InOrder())


def in_thread(body: Callable[[], object]) -> object:
    """The result of `body` in a new thread, or what it raised."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(body())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_thread_that_did_not_enter_is_refused_the_devices_memory(device: simulated.Device) -> None:
    with device:
        x = torch.ones(3)
        refused = in_thread(lambda: x + 1)
        assert isinstance(refused, DeviceError) and "did not enter" in str(refused)
        assert isinstance(in_thread(lambda: x.add_(1)), DeviceError)
        assert isinstance(in_thread(lambda: torch.cat([torch.zeros(1), x])), DeviceError)
        assert x.tolist() == [1, 1, 1]


def test_a_thread_that_did_not_enter_may_use_its_own_memory(device: simulated.Device) -> None:
    with device:
        found = in_thread(lambda: (torch.ones(3) + 1).tolist())
    assert found == [2, 2, 2]


def test_a_thread_that_enters_is_queued_like_the_first(device: simulated.Device) -> None:
    side = device.new_stream("side")
    with device:
        x = torch.ones(3)
        event = device.new_event()
        device.record(event)

        def body() -> list[float]:
            with device, device.on(side):
                device.wait(event)
                y = x + 1
                pending = len(device.queue)
                assert pending and device.current_stream() == side
                return y.tolist()

        assert in_thread(body) == [2, 2, 2]
        assert device.current_stream() == 0
    assert device.verdict() == "SAFE"


def test_leaving_the_device_in_a_thread_makes_it_a_stranger_again(device: simulated.Device) -> None:
    with device:
        x = torch.ones(3)

        def body() -> object:
            with device:
                total = x.sum().item()
            assert total == 3
            return x + 1

        assert isinstance(in_thread(body), DeviceError)


def test_work_given_to_a_pool_that_was_there_before_is_refused(device: simulated.Device) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with device:
            x = torch.ones(3)
            with pytest.raises(DeviceError, match="did not enter"):
                pool.submit(lambda: x + 1).result()


def test_a_pool_whose_threads_enter_first_works(device: simulated.Device) -> None:
    with device:
        x = torch.ones(3)
        device.synchronize()
        with ThreadPoolExecutor(1, initializer=device.__enter__) as pool:
            assert pool.submit(lambda: (x + 1).tolist()).result() == [2, 2, 2]


def test_many_threads_enqueue_at_once(device: simulated.Device) -> None:
    """Each on a stream of its own, all reading one tensor; results are those of one thread."""
    streams = [device.new_stream(f"worker {index}") for index in range(4)]
    results: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(len(streams))
    with device:
        x = torch.arange(12.0).view(3, 4)
        device.synchronize()

        def body(index: int) -> None:
            with device, device.on(streams[index]):
                barrier.wait()
                y = x
                for _ in range(30):
                    y = torch.tanh(y @ y.mT @ x + index)
                results[index] = y
                device.synchronize(streams[index])

        threads = [threading.Thread(target=body, args=(index,)) for index in range(len(streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index in range(len(streams)):
        y = torch.arange(12.0).view(3, 4)
        for _ in range(30):
            y = torch.tanh(y @ y.mT @ torch.arange(12.0).view(3, 4) + index)
        assert torch.equal(results[index], y)
    assert device.verdict() == "SAFE"


def test_a_race_between_threads_is_found(device: simulated.Device) -> None:
    """Negative control: host order between threads orders nothing on the device."""
    side = device.new_stream("side")
    with device:
        x = torch.ones(3)
        device.synchronize()

        def body() -> None:
            with device, device.on(side):
                x.add_(1)

        in_thread(body)
        x.mul_(2)
    assert device.verdict() == "UNSAFE"


def test_nothing_is_watched_once_every_thread_has_left(device: simulated.Device) -> None:
    start = threading.Thread.start
    with device:
        assert threading.Thread.start is not start
        with device:
            pass
        assert threading.Thread.start is not start
    assert threading.Thread.start is start
