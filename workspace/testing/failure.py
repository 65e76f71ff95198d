"""What a scenario raises when the contract is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workspace.errors import CaptureError, WorkspaceError


class ContractBroken(AssertionError):
    """A scenario found the contract broken."""


def require(condition: object, what: str) -> None:
    """Raise `ContractBroken` unless the condition holds."""
    if not condition:
        raise ContractBroken(what)


class Refusal:
    """The error a `refused` block ended with."""

    error: WorkspaceError

    def names(self, *words: object) -> None:
        """Require that the message mentions each word, and says what to do."""
        text = str(self.error)
        for word in words:
            require(str(word) in text, f"the refusal does not mention {word!r}: {text}")
        require(self.error.remedy, f"the refusal has no remedy: {text}")


@contextmanager
def refused(*kinds: type[WorkspaceError]) -> Iterator[Refusal]:
    """Require that the block is refused with a typed error that says what to do."""
    refusal = Refusal()
    try:
        yield refusal
    except kinds as error:
        refusal.error = error
        refusal.names()
        return
    raise ContractBroken(f"not refused: expected {' or '.join(kind.__name__ for kind in kinds)}")


def fails(body: Callable[[], None]) -> None:
    """Run a capture that must fail, by a KeyError of its body or by the capture's own error."""
    try:
        body()
    except KeyError:
        return
    except WorkspaceError as error:
        require(isinstance(error, CaptureError), f"{type(error).__name__} instead of a capture's error: {error}")
        return
    raise ContractBroken("the capture did not fail")
