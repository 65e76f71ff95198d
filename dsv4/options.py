"""How the steps of a session are run."""

from __future__ import annotations

import attrs

from dsv4.engine import CAPTURE_LIMIT, Engine, capture_sizes
from dsv4.errors import RunError

REGIONS = {"eager": "none", "full": "none", "wide": "wide", "narrow": "narrow", "overflow": "narrow"}
"""Eager region of the graphs of each run mode."""

OVERFLOW_LIMIT = 8
"""Largest bucket in mode ``overflow``: nearly every step of a trace is too large for its graphs."""


@attrs.frozen
class Options:
    """How a session's steps are run.

    Attributes
    ----------
    mode
        ``eager``: no graph. ``full``: steps of decode rows only replay one graph. ``wide``, ``narrow``: steps of
        up to 512 tokens replay graphs with eager regions. ``overflow``: graphs exist for up to 8 tokens only.
        A step that no graph fits runs eagerly.
    aux_streams
        Whether layers fork to side streams.
    micro_batches
        1, or 2 that run on streams of their own.
    merge
        Launch consecutive ops of a stream as one.
    draft
        After each eager step with decode rows the MTP layer runs on them.
    drop_join
        Aux stream whose branches are not joined where no op outside reads what they wrote; their uses are
        declared. It takes away the edge that an unfenced pool silently relies on.
    """

    mode: str = "eager"
    aux_streams: bool = True
    micro_batches: int = 1
    merge: bool = True
    draft: bool = False
    drop_join: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.mode not in REGIONS:
            raise RunError(f"mode {self.mode!r} is unknown", f"choose one of {', '.join(REGIONS)}")
        if self.micro_batches not in (1, 2):
            raise RunError(f"{self.micro_batches} micro-batches were asked for", "a step is cut into 1 or 2")
        if self.drop_join and self.mode != "eager":
            raise RunError(f"drop_join in mode {self.mode!r}: a capture needs its joins", "use mode 'eager'")

    @property
    def region(self) -> str:
        """Eager region of the mode's graphs."""
        return REGIONS[self.mode]

    def sizes(self, engine: Engine) -> tuple[int, ...]:
        """Token counts that graphs are captured for."""
        limits = {"eager": 0, "full": min(CAPTURE_LIMIT, engine.max_num_seqs), "overflow": OVERFLOW_LIMIT}
        return capture_sizes(min(limits.get(self.mode, CAPTURE_LIMIT), engine.max_num_batched_tokens))
