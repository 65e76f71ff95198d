"""The limits a serving engine is started with."""

from __future__ import annotations

import attrs

CAPTURE_LIMIT = 512
"""vLLM's largest capture size off SM10x: min(2 * max_num_seqs * decode length, 512)."""


@attrs.frozen
class Engine:
    """Limits of one engine.

    Attributes
    ----------
    max_num_batched_tokens
        Tokens of the largest step.
    max_num_seqs
        Requests that run at the same time.
    max_model_len
        Longest context in tokens; it sets the width of decode logits and of C128 index rows.
    step_seconds, token_seconds
        How long a step takes: a constant, and a part for each of its tokens. They are assumptions, which only
        decide how many requests of a trace are in flight together.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 32768
    step_seconds: float = 0.02
    token_seconds: float = 2e-5


def capture_sizes(limit: int = CAPTURE_LIMIT) -> tuple[int, ...]:
    """Tokens graphs are captured for: 1, 2, 4, 8 to 256 by 8, then by 16 (vLLM ``cudagraph_utils.py``)."""
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16))
    return tuple(size for size in sizes if size <= limit)
