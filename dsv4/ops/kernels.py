"""The CUDA kernels of the ops: the extension ``dsv4._kernels``, where it was built for this PyTorch.

Loading it registers the kernels with the dispatcher. `FAST` holds the same launchers as C functions, which read tensors
through DLPack's exchange functions and skip the dispatcher.

`DSV4_KERNELS=off` leaves them out: ops on CUDA tensors then run the references.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from dsv4.ops.errors import OpError


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("DSV4_KERNELS") == "off":
        return None, "DSV4_KERNELS is off"
    if torch.version.cuda is None:
        return None, f"PyTorch {torch.__version__} is a build without CUDA"
    try:
        from dsv4 import _kernels  # type: ignore[attr-defined]
    except ImportError as error:
        return None, f"{error}; build it with `python setup.py build_ext --inplace`"
    return _kernels, ""


_EXTENSION, MISSING = _load()
"""Why there are no kernels; empty when there are."""

NAMES: frozenset[str] = frozenset(_EXTENSION.names() if _EXTENSION else ())
"""Ops that have a CUDA kernel."""

FAST: Mapping[str, Callable[..., bool]] = {}
"""C functions by op: True when one launched, False when the call belongs to the dispatcher."""

_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
if _EXTENSION is not None and _EXCHANGE is not None:
    FAST = _EXTENSION.bind(torch.Tensor, _EXCHANGE, OpError)

RETURNING: Callable[..., Callable[..., Any] | None] | None = getattr(_EXTENSION, "returning", None) if FAST else None
"""Makes the C function that allocates an op's outs and launches; see ``csrc/dsv4/returned.h``."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are active: fake tensors, tracing, whoever wants to see every op."""

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes watch functions."""
