"""What a model computes and keeps its caches in."""

from __future__ import annotations

import attrs
import torch

from dsv4.cache.caches import Storage
from dsv4.cache.pages import Format


@attrs.frozen(cache_hash=True)
class Precision:
    """Dtypes of one run.

    Attributes
    ----------
    activations
        bfloat16 as served; float32 or float64 for comparisons.
    keys
        Format of the key caches: `Format.FP8_DS_MLA` or `Format.PLAIN` (in the activations' dtype).
    indexer
        Format of the indexer's keys, and with them of its queries.
    """

    activations: torch.dtype = torch.float32
    keys: Format = Format.PLAIN
    indexer: Format = Format.PLAIN

    @property
    def wide(self) -> torch.dtype:
        """What is accumulated, scored or kept as a state."""
        return torch.float64 if self.activations is torch.float64 else torch.float32

    @property
    def storage(self) -> Storage:
        """How caches of this precision keep what they hold."""
        return Storage(self.keys, self.indexer, plain=self.activations, states=self.wide)


SERVED = Precision(torch.bfloat16, Format.FP8_DS_MLA, Format.INDEXER_FP8)
"""As the published models are served, and as the CUDA kernels take it."""
