"""One tensor-parallel rank's share of a model: what its scratch shapes depend on."""

from __future__ import annotations

import attrs

from dsv4.config import ModelConfig
from dsv4.errors import ModelConfigError, listed

FLASHINFER_HEADS = (8, 16, 32, 64, 128)

SHARED_OUT = ("num_attention_heads", "o_groups", "n_routed_experts", "moe_intermediate_size")
"""What the ranks divide; the inner size of the shared expert only."""


@attrs.frozen(cache_hash=True)
class Shard:
    """Sizes of one rank's attention.

    Parameters
    ----------
    config
        The model.
    tensor_parallel
        Ranks that share heads, output groups and experts. The indexer and the vocabulary are replicated.
    indexer
        ``"fp8"`` or ``"fp4"``: format of the indexer's queries and keys; FP4 needs ``sm100``.
    attention
        ``"flashmla"`` pads the query heads to 64 or 128, ``"flashinfer"`` to the next of 8, 16, 32, 64, 128
        (vLLM ``get_padded_num_q_heads``).
    architecture
        ``"sm90"`` keeps FP8 block scales as fp32, ``"sm100"`` packs four UE8M0 bytes in an int32.
    rank
        Which of the ranks this is; it chooses the slice of the weights, and changes no size.
    """

    config: ModelConfig
    tensor_parallel: int = 1
    indexer: str = "fp8"
    attention: str = "flashmla"
    architecture: str = "sm90"
    rank: int = 0

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
            for name in SHARED_OUT:
                if getattr(self.config, name) % ranks:
                    problems.append(f"{name}={getattr(self.config, name)} is not divisible by {ranks} ranks")
            if type(self.rank) is not int or not 0 <= self.rank < ranks:
                problems.append(f"rank is {self.rank!r}; it must be one of 0 to {ranks - 1}")
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
    def experts(self) -> int:
        """Routed experts of this rank (E)."""
        return self.config.n_routed_experts // self.tensor_parallel

    @property
    def first_expert(self) -> int:
        """Number of this rank's first routed expert; they are consecutive."""
        return self.rank * self.experts

    @property
    def shared_inner(self) -> int:
        """Inner columns of the shared expert on this rank; 0 where there is none."""
        return self.config.moe_intermediate_size * self.config.n_shared_experts // self.tensor_parallel

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
