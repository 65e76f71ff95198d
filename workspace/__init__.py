"""Scratch allocation on GPUs as a setting: one interface for model code, strategies chosen in config."""

from workspace import errors, native
from workspace.config import LoadedConfig, WorkspaceConfig, load_config
from workspace.create import create
from workspace.errors import WorkspaceError
from workspace.handle import Handle
from workspace.layout import Exclusive, Layout, TensorSpec, spec
from workspace.lease import Lease
from workspace.provider import WorkspaceProvider
from workspace.slot import Slot
from workspace.workspace import Workspace

__all__ = [
    "Exclusive",
    "Handle",
    "Layout",
    "Lease",
    "LoadedConfig",
    "Slot",
    "TensorSpec",
    "Workspace",
    "WorkspaceConfig",
    "WorkspaceError",
    "WorkspaceProvider",
    "create",
    "errors",
    "load_config",
    "native",
    "spec",
]
