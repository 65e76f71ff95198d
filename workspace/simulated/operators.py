"""What an operator's schema says about it: what it reads and writes, what it returns, and how to defer it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch._C import DispatchKey, _dispatch_has_kernel_for_dispatch_key

Key = int | str
"""An argument: its position, or its name when it is keyword-only."""


class Kind(Enum):
    """How the executor treats an operator."""

    DEFERRED = "runs later, as a node"
    COMPOSITE = "decomposed into the operators its kernel calls"
    IMMEDIATE = "touches metadata only (views, questions about shapes); runs at once"
    RESIZE = "may move a tensor to another storage; metadata at once, bytes later"
    LIFT = "carries host values to the device"
    RANDOM = "draws from a generator, a number of values that shapes alone decide"
    HOST = "its result is needed by the host: waits for the stream, as on CUDA"
    SAMPLER = "draws a number of values that depends on its input: run before the host goes on"


# Names have no namespace in these tables: all are ATen's.
ALIASING = frozenset({"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "set_"})
"""Their results alias the input (or are it) although the schema does not say so."""
QUESTIONS = frozenset({
    "_fused_sdp_choice", "_has_same_storage_numel", "_is_zerotensor", "_use_cudnn_ctc_loss", "_version", "can_cast",
    "dense_dim", "dim", "is_coalesced", "is_contiguous", "is_leaf", "is_pinned", "is_same_size", "numel",
    "result_type", "retains_grad", "size", "sparse_dim", "storage_offset", "stride", "sym_is_contiguous", "sym_numel",
    "sym_size", "sym_storage_offset", "sym_stride", "_assert_tensor_metadata",
})  # fmt: skip
"""Answered from metadata."""
RESIZES = frozenset({"resize_", "resize_as_", "_resize_output_"})
LIFTS = frozenset({"lift", "lift_fresh"})
HOST = frozenset({
    "_ctc_loss", "_histogramdd_bin_edges", "_linalg_check_errors", "_pack_padded_sequence", "_unique", "_unique2",
    "bincount", "histc", "linalg_lstsq", "segment_reduce", "unique_consecutive", "unique_dim",
    "unique_dim_consecutive",
})  # fmt: skip
"""Their shapes or control flow depend on values, and no tag says so."""
MASKED = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
"""Tagged as dynamic, or not tagged, whatever their indices are; only masks make the host wait (for ``nonzero``)."""
SAMPLERS = frozenset({
    "_fused_dropout", "_sample_dirichlet", "_standard_gamma", "binomial", "multinomial", "poisson",
    "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional",
})  # fmt: skip
BLANK = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""They write nothing: their results stay poisoned."""
UNRANDOM = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})
"""Tagged as random for a dropout that the CPU kernel refuses."""


class Operator:
    """One operator overload, read once from its schema.

    Attributes
    ----------
    func, call
        The overload, and the C++ function behind it.
    name, label
        ``add`` (or ``dsv4::rope``) and ``aten.add.Tensor``.
    kind
        How to treat it.
    masked
        Its indices may be masks.
    blank
        Its results are not initialised.
    written
        The arguments it writes.
    returned
        For each return the written argument that it is, or None for a new value.
    fresh
        Whether it returns new values.
    single
        Whether it returns one value, and not a tuple.
    outputs
        Written keyword-only arguments (``out=``): overwritten, not read.
    device
        Whether it takes a ``device`` argument.
    takes_tensors
        Whether any argument may be a tensor.
    """

    __slots__ = ("blank", "call", "device", "fresh", "func", "kind", "label", "masked", "name", "outputs", "returned",
                 "single", "takes_tensors", "written")  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.call = func._op
        self.name: str = schema.name.removeprefix("aten::")
        self.label = str(func)
        self.masked = self.name in MASKED
        self.blank = self.name in BLANK
        arguments = [(a.name if a.kwarg_only else index, a) for index, a in enumerate(schema.arguments)]
        self.device = any(a.name == "device" for _, a in arguments)
        self.takes_tensors = any("Tensor" in str(a.type) for _, a in arguments)
        self.written: frozenset[Key] = frozenset(key for key, a in arguments if _writes(a))
        self.outputs = frozenset(key for key in self.written if isinstance(key, str))
        self.returned = tuple(_source(arguments, value) for value in schema.returns)
        self.fresh = any(source is None for source in self.returned)
        self.single = len(self.returned) == 1
        self.kind = _classify(self)

    @property
    def custom(self) -> bool:
        """Whether it is an operator of somebody's library, not ATen's."""
        return "::" in self.name


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _source(arguments: list[tuple[Key, Any]], value: Any) -> Key | None:
    if not _writes(value):
        return None
    for key, argument in arguments:
        if argument.alias_info is not None and argument.alias_info.before_set & value.alias_info.before_set:
            return key
    return None


def _classify(operator: Operator) -> Kind:
    func, name, tags = operator.func, operator.name, operator.func.tags
    returns = func._schema.returns
    if name in LIFTS and not operator.written:
        return Kind.LIFT
    if name in RESIZES and not operator.outputs:
        return Kind.RESIZE
    if name in QUESTIONS or (name in ALIASING and not operator.outputs) or torch.Tag.inplace_view in tags:
        return Kind.IMMEDIATE
    if composite(func):
        return Kind.COMPOSITE
    if name in SAMPLERS:
        return Kind.SAMPLER
    if any(value.alias_info is not None and not value.alias_info.is_write for value in returns):
        return Kind.IMMEDIATE
    if not all("Tensor" in str(value.type) for value in returns) or not (returns or operator.takes_tensors):
        return Kind.HOST if operator.takes_tensors else Kind.IMMEDIATE
    if name in HOST or torch.Tag.data_dependent_output in tags:
        return Kind.HOST
    if torch.Tag.dynamic_output_shape in tags and not operator.masked:
        return Kind.HOST
    if torch.Tag.nondeterministic_seeded in tags and name not in UNRANDOM:
        return Kind.RANDOM
    return Kind.DEFERRED


def composite(func: Any) -> bool:
    """Whether the operator has no kernel of its own, only one that calls other operators."""
    name = func.name()
    return _dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    ) and not _dispatch_has_kernel_for_dispatch_key(name, "CPU")


def decompose(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator's composite kernel, so that the operators inside it are dispatched one by one.

    Not ``func.decompose()``: that one prefers decompositions written in Python, which round differently.
    """
    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
