"""Global settings that change what an operator computes: read at enqueue, in force again when it runs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Flags(NamedTuple):
    """The settings of one moment. Gradients and autocast are not among them: dispatch has applied them already."""

    default_dtype: torch.dtype
    deterministic: bool
    warn_only: bool
    matmul_precision: str
    onednn: bool
    threads: int

    def apply(self) -> None:
        """Set them."""
        torch._C._set_default_dtype(self.default_dtype)
        torch._C._set_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch._C._set_float32_matmul_precision(self.matmul_precision)
        torch._C._set_mkldnn_enabled(self.onednn)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


def current() -> Flags:
    """The settings in force in this thread."""
    return Flags(
        torch.get_default_dtype(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_float32_matmul_precision(),
        torch._C._get_mkldnn_enabled(),
        torch.get_num_threads(),
    )
