"""A workload for ``workspace sweep``: the layer of ``examples/porting``, its steps replayed and its numbers computed.

    python -m workspace sweep --workload examples.workload:Ported --mode eager --mode full --mode narrow

docs/workload.md goes through it.
"""

from __future__ import annotations

from pathlib import Path

from examples.workload.computed import Computed
from examples.workload.replayed import LAYERS, Session
from workspace.errors import ConfigError

__all__ = ["Ported"]


class Ported:
    name = "ported"
    models = tuple(LAYERS)
    drivers = ("simulated",)

    def open(self, model: str, trace: Path | None, seed: int) -> Session:
        if model not in LAYERS:
            raise ConfigError(f"there is no model {model!r}", f"choose {' or '.join(LAYERS)}")
        if trace is not None:
            raise ConfigError(f"trace {trace} is not read: steps are made from the seed", "leave out --trace")
        return Session(model, seed)

    def execution(self, seed: int) -> Computed:
        return Computed(seed)
