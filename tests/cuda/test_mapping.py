"""Mappings and pinned memory of the CUDA driver, and what sleeps on them, on a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import workspace
from workspace import Layout, Workspace, spec
from workspace.cuda import CudaDriver, cuda_driver
from workspace.driver import Mapping
from workspace.errors import OutOfMemory, SleepError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DELAY = 40_000_000
MIB = 1 << 20
BYTES = Layout("bytes", x=spec("N", dtype=torch.uint8))


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    with torch.no_grad():
        yield cuda_driver("cuda")
    torch.cuda.synchronize()
    cuda_driver("cuda").reclaim()


def tensor(driver: CudaDriver, mapping: Mapping, nbytes: int) -> torch.Tensor:
    return driver.tensor(mapping, 0, (nbytes,), torch.uint8)


class TestMappings:
    def test_addresses_stay_while_memory_goes_and_comes(self, driver: CudaDriver) -> None:
        mapping = driver.map(3 * MIB)
        address = mapping.address
        view = tensor(driver, mapping, 3 * MIB)
        view.fill_(7)
        torch.cuda.synchronize()
        mapping.unmap()
        other = driver.map(3 * MIB)
        assert not address <= other.address < address + 4 * MIB
        mapping.remap()
        assert mapping.address == address
        view.fill_(9)
        assert int(view.sum(dtype=torch.int64)) == 9 * 3 * MIB

    def test_a_mapping_that_is_gone_is_reclaimed(self, driver: CudaDriver) -> None:
        gone = driver._mapped().gone
        before = len(gone)
        mapping = driver.map(MIB)
        view = tensor(driver, mapping, MIB)
        view.fill_(1)
        del mapping
        gc.collect()
        assert len(gone) == before, "a view keeps it"
        del view
        gc.collect()
        assert len(gone) == before + 1
        driver.reclaim()
        assert len(gone) == 0

    def test_what_the_device_has_not_got_is_refused(self, driver: CudaDriver) -> None:
        with pytest.raises(OutOfMemory, match=str(1 << 40)) as refusal:
            driver.map(1 << 40)
        assert refusal.value.remedy

    def test_nothing_is_given_back_while_a_capture_is_open(self, driver: CudaDriver) -> None:
        stream = driver.new_stream("captured")
        mapping = driver.map(MIB)
        driver.begin_capture(stream)
        try:
            del mapping
            driver.reclaim()
            assert driver._mapped().gone
            beside = driver.map(MIB)
        finally:
            driver.abort_capture(stream)
        driver.reclaim()
        assert not driver._mapped().gone and beside.mapped


class TestUploads:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.bfloat16])
    def test_a_copy_runs_behind_its_stream(self, driver: CudaDriver, dtype: torch.dtype) -> None:
        host = driver.pinned(4096)
        assert host.is_pinned() and host.nbytes == 4096
        host.fill_(1)
        out = torch.zeros(1024 // dtype.itemsize, dtype=dtype, device="cuda")
        stream = driver.new_stream("upload")
        torch.cuda.synchronize()
        with driver._graphs.on(stream):
            torch.cuda._sleep(DELAY)
        driver.memset(out.data_ptr(), out.nbytes, 5, stream)
        driver.upload(host, 512, out, stream)  # elsewhere it would come first, and be overwritten
        torch.cuda.synchronize()
        assert bool((out.view(torch.uint8) == 1).all())

    def test_a_tensor_of_inference_mode_is_written(self, driver: CudaDriver) -> None:
        host = driver.pinned(16)
        host.fill_(3)
        with torch.inference_mode():
            out = torch.zeros(16, dtype=torch.uint8, device="cuda")
        driver.upload(host, 0, out, driver.current_stream())
        torch.cuda.synchronize()
        assert out.tolist() == [3] * 16


class TestSleep:
    @pytest.fixture
    def ws(self, driver: CudaDriver) -> Iterator[Workspace]:
        ws = workspace.create("event_fenced", device="cuda", restorable=True)
        with ws.on(ws.stream("main")):
            yield ws
            ws.close()

    def test_restorable_slabs_are_no_memory_of_torch(self, ws: Workspace) -> None:
        """The device's own figure falls by what the workspace holds; torch's never counts it."""
        reserved = torch.cuda.memory_reserved()
        ws.declare(BYTES, N=512 * MIB)
        ws.reserve()
        assert torch.cuda.memory_reserved() == reserved and ws.snapshot().reserved == 512 * MIB
        assert ws.sleep() == 512 * MIB and ws.snapshot().reserved == 0
        assert ws.wake() == 512 * MIB

    def test_a_kernel_in_flight_finishes_before_its_memory_goes(self, ws: Workspace) -> None:
        out = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        with ws.lease(BYTES, N=MIB) as lease:
            lease.x.fill_(5)
            torch.cuda._sleep(DELAY)
            out.copy_(lease.x)
        ws.sleep()
        assert bool((out == 5).all())
        with pytest.raises(SleepError):
            ws.acquire(BYTES, N=MIB)
        ws.wake()
        with ws.lease(BYTES, N=MIB) as lease:
            lease.x.fill_(6)
            assert bool((lease.x == 6).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_sleeps_by_itself() -> None:
    """Memory, copies and kernels are the other device's; the current one stays what it was."""
    with torch.no_grad(), workspace.create("per_stream", device="cuda:1", restorable=True) as ws:
        with ws.on(ws.stream("main")):
            staging = ws.staging("bytes", MIB)
            for value in (1, 2):
                with ws.lease(BYTES, N=MIB) as lease, staging.fill() as slot:
                    slot.memory[:] = bytes([value]) * MIB
                    slot.upload(lease.x)
                    copied = lease.x.clone()
                assert lease.request.owner == "bytes" and copied.device.index == 1
                assert bool((copied == value).all())
                assert ws.sleep() == ws.wake() > 0
        assert torch.cuda.current_device() == 0
