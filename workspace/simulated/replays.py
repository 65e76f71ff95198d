"""Graphs that draw random numbers: each launch continues from the generator's present state, as on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes

from workspace.simulated.call import Call
from workspace.simulated.graph import SimulatedGraph

if TYPE_CHECKING:
    from workspace.simulated.device import Device


class DrawingGraph(SimulatedGraph):
    """A graph with random operators. Launched inside another capture, it keeps the draws of that capture."""

    def launch(self, stream: int) -> None:
        with self._device.lock:
            with _disable_current_modes(), DisableTorchFunction():
                for node in self.nodes:
                    if isinstance(node.fn, Call):
                        node.fn = node.fn.replayed()
            super().launch(stream)


class Replays:
    """Notices the graphs of a device that hold random operators.

    Parameters
    ----------
    device
        Whose captures to watch.
    """

    def __init__(self, device: Device) -> None:
        self._drawing: set[int] = set()
        device.watch_captures(_nothing, _nothing, self._ended)

    def draws(self, capture: int) -> None:
        """A capture in progress has a random operator."""
        self._drawing.add(capture)

    def _ended(self, stream: int, capture: int, graph: SimulatedGraph | None) -> None:
        if capture in self._drawing and graph is not None:
            graph.__class__ = DrawingGraph
        self._drawing.discard(capture)


def _nothing(*told: Any) -> None:
    """Only the end of a capture matters here."""
