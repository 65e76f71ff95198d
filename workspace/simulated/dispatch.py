"""The dispatch mode of one thread: operators go to the executor instead of running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode

from workspace.simulated.arguments import PLAIN

if TYPE_CHECKING:
    from workspace.simulated.executor import Executor


class Dispatch(TorchDispatchMode):
    """Hands every operator below autograd to an executor; tensor subclasses unwrap themselves first."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self.executor = executor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented
        with DisableTorchFunction():
            return self.executor.dispatch(func, args, kwargs or {}, self)
