"""One tensor-parallel rank's share of a model: what its scratch shapes depend on."""

from __future__ import annotations

import attrs

from dsv4.config import ModelConfig
from dsv4.errors import ModelConfigError, listed

FLASHINFER_HEADS = (8, 16, 32, 64, 128)


@attrs.frozen
class Shard:
    """Sizes of one rank's attention.

    Parameters
    ----------
    config
        The model.
    tensor_parallel
        Ranks that share heads and output groups. The indexer is replicated.
    indexer
        ``"fp8"`` or ``"fp4"``: format of the indexer's queries and keys; FP4 needs ``sm100``.
    attention
        ``"flashmla"`` pads the query heads to 64 or 128, ``"flashinfer"`` to the next of 8, 16, 32, 64, 128
        (vLLM ``get_padded_num_q_heads``).
    architecture
        ``"sm90"`` keeps FP8 block scales as fp32, ``"sm100"`` packs four UE8M0 bytes in an int32.
    """

    config: ModelConfig
    tensor_parallel: int = 1
    indexer: str = "fp8"
    attention: str = "flashmla"
    architecture: str = "sm90"

    def __attrs_post_init__(self) -> None:
        problems = []
        for name, known in (
            ("indexer", ("fp8", "fp4")),
            ("attention", ("flashmla", "flashinfer")),
            ("architecture", ("sm90", "sm100")),
        ):
            if getattr(self, name) not in known:
                problems.append(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        ranks = self.tensor_parallel
        if type(ranks) is not int or ranks < 1:
            problems.append(f"tensor_parallel is {ranks!r}; it must be an integer of 1 or more")
        else:
            for name in ("num_attention_heads", "o_groups"):
                if getattr(self.config, name) % ranks:
                    problems.append(f"{name}={getattr(self.config, name)} is not divisible by {ranks} ranks")
        if self.indexer == "fp4" and self.architecture != "sm100":
            problems.append(f"indexer 'fp4' needs architecture 'sm100', not {self.architecture!r}")
        if problems:
            raise listed("the shard", problems)
        _ = self.padded_heads

    @property
    def heads(self) -> int:
        """Query heads of this rank (n)."""
        return self.config.num_attention_heads // self.tensor_parallel

    @property
    def groups(self) -> int:
        """Output-projection groups of this rank (G)."""
        return self.config.o_groups // self.tensor_parallel

    @property
    def group_width(self) -> int:
        """Columns of one group's slice of the attention output (4096 in both published models)."""
        return self.config.num_attention_heads * self.config.head_dim // self.config.o_groups

    @property
    def padded_heads(self) -> int:
        """Query heads the attention kernel is given (P)."""
        steps = (64, 128) if self.attention == "flashmla" else FLASHINFER_HEADS
        for step in steps:
            if self.heads <= step:
                return step
        raise ModelConfigError(
            f"{self.heads} local heads are above the {steps[-1]} that {self.attention} takes",
            "raise tensor_parallel",
            heads=self.heads,
        )
