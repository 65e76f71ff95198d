"""A request's tokens and blocks."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4.cache.caches import Caches
from dsv4.cache.sequence import Sequence as Blocks
from dsv4.errors import RequestError


class Context:
    """The tokens a request is made of so far, and its blocks in the caches of each model that runs it.

    Parameters
    ----------
    tokens
        The prompt, at least one token.
    vocabulary
        Ids are below this.
    longest
        Tokens the context may reach, prompt and generated ones together.

    Raises
    ------
    RequestError
        The prompt is empty or too long, or an id is outside the vocabulary; nothing was taken.
    """

    def __init__(self, tokens: Sequence[int], vocabulary: int, longest: int) -> None:
        if not isinstance(tokens, Sequence):
            raise RequestError(f"a prompt of type {type(tokens).__name__}", "pass a list of token ids")
        if not tokens:
            raise RequestError("the prompt is empty", "pass one token or more")
        self.tokens: list[int] = []
        self._vocabulary = vocabulary
        self._longest = longest
        self._blocks: dict[Caches, Blocks] = {}
        self.append(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Take up tokens that were generated."""
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocabulary:
                raise RequestError(
                    f"token {token!r} is outside the vocabulary of {self._vocabulary}",
                    f"ids are integers from 0 to {self._vocabulary - 1}",
                    token=token,
                )
        if len(self.tokens) + len(tokens) > self._longest:
            raise RequestError(
                f"a context of {len(self.tokens) + len(tokens)} tokens is above the {self._longest} of the engine",
                "shorten the prompt, or raise max_model_len",
            )
        self.tokens += tokens

    def blocks_of(self, caches: Caches) -> Blocks:
        """The request's block tables in these caches, empty at first."""
        found = self._blocks.get(caches)
        if found is None:
            found = self._blocks[caches] = caches.sequence()
        return found

    def holds(self, caches: Caches) -> bool:
        """Whether the request has blocks in these caches."""
        found = self._blocks.get(caches)
        return found is not None and any(found.tables.values())

    def truncate(self, length: int) -> None:
        """Drop the tokens behind a length: drafts that were refused. Blocks stay, and are written again."""
        del self.tokens[length:]

    def trim(self, position: int) -> None:
        """Free the blocks that no row at this position or later reads."""
        for blocks in self._blocks.values():
            blocks.trim(position)

    def free(self) -> None:
        """Give every block back: the request is finished or cancelled. Twice is no error."""
        for blocks in self._blocks.values():
            blocks.free()
