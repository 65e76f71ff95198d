"""Random numbers: a deferred call draws what it would have drawn at enqueue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Draw:
    """A generator and the state a call starts from; as a context, the generator is in that state inside it.

    Parameters
    ----------
    generator
        The caller's, or torch's default one.
    advance
        Moves the generator on by what the call draws (a rehearsal on zeros).
    """

    __slots__ = ("_advance", "_present", "_state", "generator")

    def __init__(self, generator: torch.Generator, advance: Callable[[], Any]) -> None:
        self.generator = generator
        self._advance = advance
        self._state = generator.get_state()
        self._present: torch.Tensor | None = None

    def advanced(self) -> Draw:
        """Take the generator's present state for a new call, and move the generator past it."""
        draw = Draw(self.generator, self._advance)
        self._advance()
        return draw

    def rewind(self) -> None:
        """Put the generator back to where the call starts."""
        self.generator.set_state(self._state)

    def __enter__(self) -> None:
        self._present = self.generator.get_state()
        self.rewind()

    def __exit__(self, *raised: object) -> None:
        assert self._present is not None
        self.generator.set_state(self._present)
        self._present = None


def draw(generator: torch.Generator | None, advance: Callable[[], Any]) -> tuple[Draw, Any]:
    """The state a call enqueued now starts from, and what `advance` returned when it moved the generator past it."""
    start = Draw(generator if generator is not None else torch.default_generator, advance)
    try:
        return start, advance()
    except Exception:
        start.rewind()
        raise
