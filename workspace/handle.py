"""Handles: what a module keeps, so that it can be copied, pickled and sent to a spawned worker."""

from __future__ import annotations

import threading
from typing import Any

from workspace.config import WorkspaceConfig
from workspace.create import create
from workspace.workspace import Workspace

_WORKSPACES: dict[tuple[bytes, str], Workspace] = {}


class Handle:
    """Resolves to one workspace for each process, (config, device): a copy resolves anew where it lands.

    Parameters
    ----------
    config
        Settings of the workspace.
    device
        Name of the device: ``"cpu"``, ``"cuda:0"``.
    """

    def __init__(self, config: WorkspaceConfig, device: str = "cpu") -> None:
        self.config = config
        self.device = device
        self._workspace: Workspace | None = None

    def __call__(self) -> Workspace:
        """The workspace, created at the process's first use."""
        found = self._workspace
        if found is None or not found.usable:
            found = self._workspace = _resolve(self.config, self.device)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "device": self.device, "_workspace": None}


_LOCK = threading.RLock()


def _resolve(config: WorkspaceConfig, device: str) -> Workspace:
    key = (repr(config).encode(), device)
    with _LOCK:
        found = _WORKSPACES.get(key)
        if found is None or not found.usable:
            found = _WORKSPACES[key] = create(config=config, device=device)
        return found
