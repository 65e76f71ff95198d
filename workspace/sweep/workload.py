"""What the sweep replays. A workload registers itself in the entry-point group ``workspace.workloads``.

The entry point names a class without constructor arguments; each worker process makes its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

MODES = ("eager", "full", "wide", "narrow", "overflow")
"""No graph; one graph; graphs with wide or narrow eager regions; a step too large for the graphs."""


@attrs.frozen
class Step:
    """One forward pass of the model.

    Attributes
    ----------
    index
        Position in the session, from 0.
    tokens
        Tokens in the step: ``prefill_tokens + decode_tokens``.
    prefill_tokens, decode_tokens
        Prompt tokens, and one token for each request that generates.
    requests
        Requests with tokens in the step.
    """

    index: int
    tokens: int
    prefill_tokens: int
    decode_tokens: int
    requests: int


class Runner(Protocol):
    """A model made ready on one workspace: streams created, layouts reserved, graphs captured."""

    def run(self, step: Any) -> None:
        """Enqueue one step of the session that prepared this runner, in its mode."""

    def close(self) -> None:
        """Release what the runner holds: leases, graphs, streams. The workspace stays open."""


class Session(Protocol):
    """A model and a sequence of steps; the same arguments give the same steps in every process."""

    description: str

    def steps(self, count: int | None) -> Iterator[Any]:
        """The first `count` steps (`Step`, or a class with its attributes); None: the session's default."""

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Runner:
        """Make the model ready on a workspace.

        Parameters
        ----------
        ws
            The workspace; its device may be simulated with virtual memory.
        mode
            One of `MODES`.
        aux_streams
            Whether the model forks to side streams.
        micro_batches
            Parts each step is cut into, which run on streams of their own.
        """


class Program(Protocol):
    """A small configuration made ready on one workspace, to be run under many schedules."""

    def run(self) -> Sequence[Any]:
        """Compute everything anew, from the same start each time; tensors of the workspace's device, at least 1-D."""

    def close(self) -> None:
        """Release what the program holds. The workspace stays open."""


class Execution(Protocol):
    """A small configuration that computes real numbers, alike in every process."""

    @property
    def description(self) -> str:
        """Model and script in a line."""

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Program:
        """Make it ready on a workspace of a simulated device that defers torch's operators, and has been entered.

        Parameters are those of `Session.prepare`.
        """


class Repeated(Protocol):
    """One step of a model made ready on one workspace, to be run again and again."""

    def run(self) -> None:
        """Enqueue the step."""

    def close(self) -> None:
        """Release what it holds. The workspace stays open."""


class Loaded(Protocol):
    """The steps of a request trace made ready on one workspace, the same under every strategy.

    Attributes
    ----------
    steps, skipped
        How many there are; the first so many are there for the load to build up.
    first_tokens
        Of requests: the step at which each began to wait, and the one that gave its first token.
    """

    steps: int
    skipped: int
    first_tokens: Sequence[tuple[int, int]]

    def run(self, place: int) -> None:
        """Enqueue a step. All strategies run it before one of them runs the next; the first begins the trace anew."""

    def close(self) -> None:
        """Release what it holds. The workspace stays open."""


class Timed(Protocol):
    """A model whose steps run on a GPU; many workspaces share its weights, and one setting's inputs."""

    description: str

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int, tokens: int) -> Repeated:
        """Make a step of so many tokens ready; other parameters are those of `Session.prepare`."""

    def load(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Loaded:
        """Make the steps of a request trace ready; parameters as of `prepare`."""

    def differs(self, mode: str, tokens: int) -> bool:
        """Whether such a step is another one than in mode ``eager``; True of that mode itself."""


class Workload(Protocol):
    """A family of models that can be replayed.

    One that can compute as well has a method ``execution(seed) -> Execution``, for ``sweep --execute``; one whose
    steps run on a GPU ``timed(model, seed, device) -> Timed``, for ``sweep --driver cuda``.
    """

    name: str
    models: tuple[str, ...]
    """Presets; the first is the default. Anything else is read as the path of a config file."""
    drivers: tuple[str, ...]
    """Drivers its runners work on: ``"simulated"``, ``"cuda"``."""

    def open(self, model: str, trace: Path | None, seed: int) -> Session:
        """A session over the request trace (None: a generated one).

        Raises
        ------
        WorkspaceError
            The model is neither a preset nor a valid config file, or the trace is truncated or foreign.
        """
