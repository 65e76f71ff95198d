"""The safetensors files of a folder, and what is stored in which; nothing is read before it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dsv4.checkpoint.errors import CheckpointError, listed

INDEX = "model.safetensors.index.json"
WHOLE = "copy the checkpoint anew: every file of it, whole"


class Folder:
    """Stored tensors by the names they have in the files.

    Parameters
    ----------
    path
        A folder with one ``.safetensors`` file, or several and their index.

    Attributes
    ----------
    shard_of
        Name of the file that holds a stored tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, Any] = {}
        self.shard_of = self._indexed() if (path / INDEX).exists() else self._single()

    def leave_out(self, stored: Iterable[str]) -> None:
        """Forget some tensors, as if they were not there."""
        for name in stored:
            del self.shard_of[name]

    def shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._file(stored).get_slice(stored).get_shape())

    def dtype(self, stored: str) -> str:
        """As safetensors spells it: ``"F32"``, ``"F8_E4M3"``, ..."""
        return str(self._file(stored).get_slice(stored).get_dtype())

    def read(self, stored: str, *part: int | slice) -> torch.Tensor:
        """A tensor, or a part of it, on the CPU; only that part is read."""
        if not part:
            return self._file(stored).get_tensor(stored)
        return self._file(stored).get_slice(stored)[part]

    def require(self, stored: Iterable[str]) -> None:
        """Open the files of these tensors.

        Raises
        ------
        CheckpointError
            Lists every file that is absent, damaged, or lacks a tensor that the index says it holds.
        """
        wanted: dict[str, list[str]] = {}
        for name in stored:
            wanted.setdefault(self.shard_of[name], []).append(name)
        problems = []
        for shard in sorted(wanted):
            try:
                held = set(self._shard(shard).keys())
            except CheckpointError as error:
                problems.append(error.problem)
                continue
            absent = [name for name in wanted[shard] if name not in held]
            problems += [f"{shard} lacks {name}, which the index says it holds" for name in absent]
        if problems:
            raise listed(self.path, problems, WHOLE)

    def _file(self, stored: str) -> Any:
        return self._shard(self.shard_of[stored])

    def _shard(self, shard: str) -> Any:
        found = self._open.get(shard)
        if found is None:
            try:
                if (self.path / shard).is_dir():
                    raise CheckpointError(f"{shard} is a directory, not a safetensors file", WHOLE)
                found = self._open[shard] = safe_open(self.path / shard, "pt")
            except OSError as error:
                raise CheckpointError(f"{shard} cannot be read: {error}", WHOLE) from error
            except SafetensorError as error:
                raise CheckpointError(f"{shard} is no whole safetensors file: {error}", WHOLE) from error
        return found

    def _single(self) -> dict[str, str]:
        files = sorted(one.name for one in self.path.glob("*.safetensors"))
        if len(files) != 1:
            found = f"{len(files)} .safetensors files and no {INDEX}" if files else "no .safetensors file"
            raise CheckpointError(f"{self.path} has {found}", f"pass a folder with one such file, or with {INDEX}")
        return dict.fromkeys(self._shard(files[0]).keys(), files[0])

    def _indexed(self) -> dict[str, str]:
        file = self.path / INDEX
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
            shards = {str(name): str(shard) for name, shard in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{file} is no index of shards: {error!r}", WHOLE) from error
        problems = []
        for shard in sorted(set(shards.values())):
            if shard in ("", ".", ".."):
                problems.append(f"the index names {shard!r} as a file, which is the name of none")
            elif Path(shard).name != shard:
                problems.append(f"the index names {shard!r}, outside the folder")
        if problems:
            raise listed(self.path, problems, WHOLE)
        return shards
