"""What belongs to one process: it is neither copied nor pickled, and in a forked child the device is out of reach."""

from __future__ import annotations

from typing import Any, NoReturn

from workspace.errors import ProcessError

ASKS_NO_DEVICE = frozenset(
    """address_of current_stream on_graph_release owned owner_of poll set_stream tensor watch_captures""".split()
)
"""Verbs of `workspace.driver.Driver` that say or change what the host keeps."""


class OfProcess:
    """Base of what names streams, events or memory of this process's device."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise ProcessError(
            f"a {type(self).__name__} cannot be pickled or copied: it is of this process's device",
            "make it where it is used: modules keep a workspace.Handle, and ask it for streams, events and graphs",
        )


class ParentsDriver:
    """A driver in a forked child: what would ask the parent's device raises."""

    def __init__(self, driver: Any, refusal: ProcessError) -> None:
        self._driver = driver
        self._refusal = refusal

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if callable(found) and name not in ASKS_NO_DEVICE:
            raise self._refusal
        return found
