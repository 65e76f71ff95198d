"""One call's arguments, bound for the queue: tensors aliased, lists copied, bytes named."""

from __future__ import annotations

from typing import Any

import torch

from workspace.simulated.aliases import Alias, Aliases, Opaque, Span
from workspace.simulated.lendings import Use, lending_of
from workspace.simulated.operators import Key, Operator

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Bound:
    """Arguments as a queued call holds them.

    Parameters
    ----------
    operator, args, kwargs
        The call.
    aliases
        Of the device.
    default
        The default dtype, which results of some operators take.

    Attributes
    ----------
    args, kwargs
        With aliases in place of the caller's tensors.
    key
        What the shape of the result can depend on.
    reads, writes
        Byte spans. A tensor that is updated in place counts as written only: a write conflicts with all a read does.
    lent
        Uses of what has been lent again since.
    written
        Aliases of the tensors the call writes.
    hull
        Whether a span stands for a strided view of too many rows, and covers bytes the call does not touch.
    """

    __slots__ = (
        "_aliases", "_key", "_operator", "_seen", "args", "hull", "kwargs", "lent", "reads", "writes", "written",
    )  # fmt: skip

    def __init__(self, operator: Operator, args: Any, kwargs: Any, aliases: Aliases, default: torch.dtype) -> None:
        self.reads: list[Span] = []
        self.writes: list[Span] = []
        self.hull = False
        self.lent: list[Use] = []
        self.written: list[torch.Tensor] = []
        self._operator = operator
        self._aliases = aliases
        self._seen: list[tuple[torch.Tensor, Alias]] = []
        self._key: list[Any] = [operator, default]
        bind = self._bind
        self.args = [bind(index, value) for index, value in enumerate(args)]
        self.kwargs: dict[str, Any] = {}
        for name, value in kwargs.items():
            self._key.append(name)
            self.kwargs[name] = bind(name, value)

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self._key)

    def _bind(self, key: Key, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return self._tensor(key, value)
        if kind is list or kind is tuple:
            self._key.append(len(value))
            return [self._bind(key, item) for item in value]
        if isinstance(value, torch.Tensor):
            raise Opaque(f"a {kind.__name__}")
        self._key.append(kind if kind is torch.Generator else (kind, value))
        return value

    def _tensor(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        alias = self._alias(value)
        self._key.append(alias.signature)
        self.hull |= alias.hull
        writes = key in self._operator.written
        lending = lending_of(value)
        if lending is not None:
            self.lent.append(Use(lending, alias.spans, writes))
        if writes:
            self.written.append(alias.tensor)
            self.writes += alias.spans
        else:
            self.reads += alias.spans
        return alias.tensor

    def _alias(self, value: torch.Tensor) -> Alias:
        """One alias per tensor object: an operator may ask whether two arguments are the same one."""
        seen = self._seen
        if not seen:
            alias = self._aliases.of(value)
        else:
            for tensor, known in seen:
                if tensor is value:
                    return known
            alias = self._aliases.of(value)
            for _, known in seen:
                if alias is known:
                    alias = self._aliases.twin(alias)
                    break
        seen.append((value, alias))
        return alias
