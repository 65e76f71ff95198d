"""Trace: one JSON line for each placement and return, in host order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

from workspace.adaptors.adaptor import Adaptor
from workspace.block import Block
from workspace.errors import ConfigError, TraceError
from workspace.provider import WorkspaceProvider
from workspace.request import Request
from workspace.streams import Stream


class TraceFile:
    """The file behind a workspace's trace, which its captures share. After a failure nothing more is written.

    Raises `ConfigError` where the path cannot be opened to append to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = False
        try:
            # Not buffered: a line that cannot be written is the error of its own acquire or release.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"trace = {str(path)!r} cannot be written: {error.strerror}",
                "give the path of a file in a folder that exists",
                key="trace",
                value=path,
            ) from None

    def write(self, **line: Any) -> None:
        """Append a line. Raises `TraceError` the first time that it cannot be written."""
        if self._failed:
            return
        try:
            written = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:  # an integer of more than 64 bits
            written = json.dumps(line).encode() + b"\n"
        try:
            while written:
                written = written[self._file.write(written) :]
        except OSError as error:
            self._failed = True
            raise TraceError(
                f"the trace {self.path} ends here: {error.strerror}", "make room, and create another workspace"
            ) from None


class Trace(Adaptor):
    """Appends to a file: ``acquire`` (owner, dims, bytes, address, stream) and ``release`` (address, last uses).

    A line that cannot be written is a `TraceError`: of the acquire, which then took nothing, or of the release, which
    has given everything back. The workspace then works on, untraced.
    """

    def __init__(self, inner: WorkspaceProvider, file: TraceFile) -> None:
        super().__init__(inner)
        self._file = file

    def wrap(self, inner: WorkspaceProvider) -> WorkspaceProvider:
        return Trace(inner, self._file)

    def place(self, request: Request, stream: Stream) -> Block | None:
        block = self.inner.place(request, stream)
        try:
            self._file.write(
                event="acquire", owner=request.owner, dims=dict(request.resolved.dims), nbytes=request.nbytes,
                address=block.address if block is not None else None, stream=stream.name,
                captured=stream.capture is not None,
            )  # fmt: skip
        except TraceError:
            if block is not None:
                self.undo(block, stream, request.timeline)
            raise
        return block

    def give_back(self, block: Block | None, stream: Stream) -> None:
        uses = {str(used): epoch for used, epoch in block.uses.items()} if block is not None else {}
        self.inner.give_back(block, stream)
        if block is not None:
            self._file.write(event="release", address=block.address, nbytes=block.nbytes, stream=stream.name, uses=uses)
