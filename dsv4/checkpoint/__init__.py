"""Checkpoint folders: safetensors under transformers' names or DeepSeek's own, quantised or not, read lazily."""

from dsv4.checkpoint.checkpoint import Checkpoint
from dsv4.checkpoint.errors import CheckpointError
from dsv4.checkpoint.load import Loaded, load
from dsv4.checkpoint.save import save

__all__ = ["Checkpoint", "CheckpointError", "Loaded", "load", "save"]
