"""The surroundings a node runs in: no modes, no autograd, no autocast, the settings of its enqueue."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from workspace.simulated import flags
from workspace.simulated.call import Call
from workspace.simulated.node import Node
from workspace.simulated.poison import Poison

HIDDEN = DispatchKeySet(DispatchKey.Python)
for _name in ("PythonTLSSnapshot", "AutocastCPU", "AutocastFunctionality"):
    if hasattr(DispatchKey, _name):
        HIDDEN = HIDDEN.add(getattr(DispatchKey, _name))


def run(node: Node) -> None:
    """Run one node's function."""
    if type(node.fn) is Poison:  # calls no operator
        node.fn()
    elif node.fn is not None:
        run_function(node.fn)


def run_function(fn: Any) -> None:
    """Run a node's function as a device would: out of sight of the caller's modes."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(HIDDEN), torch._C._InferenceMode(True):
        if not isinstance(fn, Call):
            fn()
            return
        now = flags.current()
        if fn.flags == now:
            fn()
            return
        fn.flags.apply()
        try:
            fn()
        finally:
            now.apply()
