"""A decoder block in plain torch on three streams, whose edges can be dropped one at a time."""

from __future__ import annotations

import torch

from workspace import simulated

TOKENS, WIDTH, HEADS = 6, 32, 4
EDGES = (
    "fork keys",
    "fork gate",
    "join keys",
    "fork values",
    "join values",
    "join gate",
    "fork next",
    "join next",
)


class Edges:
    """Event edges between streams, by name; the one named `dropped` is left out.

    Parameters
    ----------
    device
        Records and waits.
    dropped
        Name of the edge to leave out, empty for none.
    """

    def __init__(self, device: simulated.Device, dropped: str) -> None:
        self._device = device
        self._dropped = dropped

    def __call__(self, name: str, source: int, target: int) -> None:
        assert name in EDGES
        if name != self._dropped:
            event = self._device.new_event()
            self._device.record(event, source)
            self._device.wait(event, target)


class Block(torch.nn.Module):
    """Attention and a gated MLP; keys and values on one side stream, the gate on another.

    Shapes: input and output (TOKENS, WIDTH). Weights are read by all streams.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=dtype)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        self.gate, self.up, self.down = (torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))

    def forward(self, x: torch.Tensor, scratch: torch.Tensor, device: simulated.Device, edge: Edges) -> torch.Tensor:
        """Run the block on the current stream; `scratch` (2, TOKENS, WIDTH) is written anew by each use."""
        main, side, aux = device.current_stream(), 1, 2
        x = self.norm(x)
        edge("fork keys", main, side)
        edge("fork gate", main, aux)
        with device.on(side):
            torch.add(self.k(x), 0, out=scratch[0])
        with device.on(aux):
            gate = torch.nn.functional.silu(self.gate(x))
        q = _heads(self.q(x))
        edge("join keys", side, main)
        scores = torch.softmax(q @ _heads(scratch[0]).mT / WIDTH**0.5, dim=-1)
        edge("fork values", main, side)
        with device.on(side):
            torch.add(self.v(x), 0, out=scratch[0])  # takes the keys' place
        edge("join values", side, main)
        attended = (scores @ _heads(scratch[0])).transpose(0, 1).reshape(TOKENS, WIDTH)
        y = x + self.o(attended)
        edge("join gate", aux, main)
        return y + self.down(gate * self.up(y))


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(TOKENS, HEADS, -1).transpose(0, 1)


class Program:
    """Two blocks over one scratch slab, then a reduction on a side stream.

    Parameters
    ----------
    dtype
        Of weights and activations.
    dropped
        The edge to leave out.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, dropped: str = "") -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.blocks = [Block(dtype), Block(dtype)]
            self.x = torch.randn(TOKENS, WIDTH, dtype=dtype)
        self.dtype = dtype
        self.dropped = dropped

    def __call__(self, device: simulated.Device, main: int = 0) -> torch.Tensor:
        """Enqueue it, from stream `main`, which is current."""
        for name in ("side", "aux"):
            if len(list(device.streams)) < 3:
                device.new_stream(name)
        edge = Edges(device, self.dropped)
        with torch.no_grad():
            scratch = torch.zeros(2, TOKENS, WIDTH, dtype=self.dtype)
            x = self.x
            for block in self.blocks:
                x = block(x, scratch, device, edge)
            edge("fork next", main, 2)
            with device.on(2):
                total = (x * x).sum(-1)
            edge("join next", 2, main)
            return total + x[:, 0]

    def eager(self) -> torch.Tensor:
        """What it computes without a device."""
        return self(_NoDevice())  # type: ignore[arg-type]


class _NoDevice:
    """One stream and no order to keep."""

    streams = (0, 1, 2)

    def current_stream(self) -> int:
        return 0

    def on(self, stream: int) -> torch.no_grad:
        return torch.no_grad()

    def new_event(self) -> int:
        return 0

    def record(self, event: int, stream: int) -> None:
        pass

    def wait(self, event: int, stream: int) -> None:
        pass
