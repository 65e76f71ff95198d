"""Tensor parallel over ``torch.distributed``: each rank holds its heads, output groups and experts."""

from dsv4.parallel.errors import ParallelError
from dsv4.parallel.ranks import Ranks, group

__all__ = ["ParallelError", "Ranks", "group"]
