"""Where a report goes."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from pathlib import Path

from dsv4.errors import RunError

STANDARD = "-"
OPEN_ALREADY = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""Names of what some process has open: a new file in its place would not be that one."""


class Destination:
    """A file that holds a whole report, or what it held before.

    A regular file, or a name that is free, gets the report by a sibling that is renamed; devices and pipes are written
    directly, ``-`` is the standard output.

    Parameters
    ----------
    path
        Of the file.

    Raises
    ------
    RunError
        It cannot be written, as far as can be known before there is anything to write. Nothing was changed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._sibling = self._prepared()
        except OSError as error:
            raise self._refused(error) from error

    def write(self, text: str) -> None:
        """Write the report. Raises `RunError` when that fails; a regular file then is what it was."""
        try:
            if self.path == STANDARD:
                sys.stdout.write(text)
                sys.stdout.flush()
            elif self._sibling is None:
                Path(self.path).write_text(text, encoding="utf-8")
            else:
                self._replace(self._sibling, text)
        except OSError as error:
            raise self._refused(error) from error

    def _prepared(self) -> Path | None:
        """The sibling's name, once it is known that it can be made; None where none is needed."""
        if self.path == STANDARD:
            return None
        if not self.path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        mode = _mode(self.path)
        if mode is not None:
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(self.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if not stat.S_ISREG(mode) or self.path.startswith(OPEN_ALREADY):
                return None
        # Of the file itself, not of a link to it.
        sibling = Path(self.path).resolve().parent / f".report-{secrets.token_hex(8)}"
        sibling.touch(exist_ok=False)
        sibling.unlink()
        return sibling

    def _replace(self, sibling: Path, text: str) -> None:
        file = Path(self.path).resolve()
        try:
            sibling.write_text(text, encoding="utf-8")
            mode = _mode(self.path)
            if mode is not None:
                sibling.chmod(stat.S_IMODE(mode))
            sibling.replace(file)
        finally:
            sibling.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> RunError:
        return RunError(
            f"the report {self.path!r} cannot be written: {error.strerror}",
            "pass a file in a folder that can be written and has room",
            path=self.path,
        )


def _mode(path: str) -> int | None:
    """Of what is there; None when nothing is."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
