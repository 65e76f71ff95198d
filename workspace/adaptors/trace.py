"""Trace: one JSON line for each placement and return, in host order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from workspace.adaptors.adaptor import Adaptor
from workspace.block import Block
from workspace.provider import WorkspaceProvider
from workspace.request import Request
from workspace.streams import Stream


class Trace(Adaptor):
    """Appends to a file: ``acquire`` (owner, dims, bytes, address, stream) and ``release`` (address, last uses)."""

    def __init__(self, inner: WorkspaceProvider, path: Path) -> None:
        super().__init__(inner)
        self._path = path
        self._file = path.open("ab")

    def wrap(self, inner: WorkspaceProvider) -> WorkspaceProvider:
        wrapped = Trace.__new__(Trace)
        Adaptor.__init__(wrapped, inner)
        wrapped._path, wrapped._file = self._path, self._file
        return wrapped

    def place(self, request: Request, stream: Stream) -> Block | None:
        block = self.inner.place(request, stream)
        self._write(
            event="acquire", owner=request.owner, dims=dict(request.resolved.dims), nbytes=request.nbytes,
            address=block.address if block is not None else None, stream=stream.name,
            captured=stream.capture is not None,
        )  # fmt: skip
        return block

    def give_back(self, block: Block | None, stream: Stream) -> None:
        if block is not None:
            uses = {str(used): epoch for used, epoch in block.uses.items()}
            self._write(event="release", address=block.address, nbytes=block.nbytes, stream=stream.name, uses=uses)
        self.inner.give_back(block, stream)

    def close(self) -> None:
        self._file.flush()
        super().close()

    def _write(self, **line: Any) -> None:
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
