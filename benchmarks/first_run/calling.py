"""What it costs the host to call an op with ten tensors, by calling convention; the kernel is empty."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.first_run import triton_kernel
from benchmarks.first_run.build import build
from benchmarks.first_run.timing import interleaved

TOKENS = 2
_TEN = "a, b, c, d, e, f, g, q, scale, w"
_SEVEN = "a, b, c, d, e, f, g"

_OPS = ("out", "checked_out", "returning", "one")
LIBRARIES = {
    "boxed": _OPS,
    "boxed_through": _OPS,
    "unboxed": (*_OPS, "tensor_lists", "packed_list", "packed_tensor"),
    "unboxed_through": (*_OPS, "tensor_lists"),
}
"""Ops of each library of csrc/bench that the statements call."""

STATEMENTS = {
    "empty statement": "pass",
    "boxed, out form": f"boxed_out({_TEN})",
    "boxed, returning form": f"boxed_returning({_SEVEN})",
    "boxed, out form, autograd fallthrough": f"boxed_through_out({_TEN})",
    "boxed, returning form, autograd fallthrough": f"boxed_through_returning({_SEVEN})",
    "boxed, out form, autograd fallthrough, checks": f"boxed_through_checked_out({_TEN})",
    "boxed, one tensor, autograd fallthrough": "boxed_through_one(a)",
    "unboxed, out form": f"unboxed_out({_TEN})",
    "unboxed, returning form": f"unboxed_returning({_SEVEN})",
    "unboxed, out form, autograd fallthrough": f"unboxed_through_out({_TEN})",
    "unboxed, returning form, autograd fallthrough": f"unboxed_through_returning({_SEVEN})",
    "unboxed, out form, autograd fallthrough, checks": f"unboxed_through_checked_out({_TEN})",
    "unboxed, one tensor, autograd fallthrough": "unboxed_through_one(a)",
    "unboxed, out form, autograd fallthrough, through torch.ops": (f"ops.calling_unboxed_through.out({_TEN})"),
    "unboxed, out form, autograd fallthrough, C function kept": f"unboxed_function({_TEN})",
    "boxed, out form, autograd fallthrough, C function kept": f"boxed_function({_TEN})",
    "unboxed, two tensor lists, autograd fallthrough": (
        "unboxed_through_tensor_lists([a, b, c, d, e, f, g], [q, scale, w])"
    ),
    "packed list, kept": "unboxed_packed_list(words)",
    "packed list, made anew": (
        "unboxed_packed_list([a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), e.data_ptr(), "
        "f.data_ptr(), g.data_ptr(), q.data_ptr(), scale.data_ptr(), w.data_ptr(), a.shape[0]])"
    ),
    "packed tensor, kept": "unboxed_packed_tensor(words_tensor)",
    "packed tensor, made anew": (
        "unboxed_packed_tensor(tensor([a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), "
        "e.data_ptr(), f.data_ptr(), g.data_ptr(), q.data_ptr(), scale.data_ptr(), w.data_ptr(), "
        "a.shape[0]]))"
    ),
    "pybind, ten tensors": f"module.out({_TEN})",
    "pybind, one tensor": "module.one(a)",
    "C function, ten tensors": f"module.fast_out({_TEN})",
    "plan, stream looked up": "plan.launch()",
    "plan, raw stream passed": "plan.launch_on(stream)",
    "plan, raw stream read in Python and passed": "plan.launch_on(raw_stream(0))",
    "plan, two tensors and token count bound anew": "plan.launch_with(a, b)",
    "plan as a capsule, raw stream passed": "fast_plan(capsule, stream)",
    "plan as a capsule, raw stream, two addresses and token count bound anew": (
        "fast_bound(capsule, raw_stream(0), a.data_ptr(), b.data_ptr(), a.shape[0])"
    ),
    "C function, ten addresses read in Python": (
        "fast_addresses(raw_stream(0), a.shape[0], a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), "
        "e.data_ptr(), f.data_ptr(), g.data_ptr(), q.data_ptr(), scale.data_ptr(), w.data_ptr())"
    ),
    "is the compiler tracing": "is_compiling()",
    "is a dispatch mode active": "modes()",
    "Triton, ten tensors": "triton_empty[grid](a, b, c, d, e, f, g, q, scale, w)",
    "three torch.empty of the outputs": (
        "empty((2, 64, 64), dtype=uint8, device=cuda); empty((2, 64, 4), dtype=uint8, device=cuda); "
        "empty((2, 64), dtype=float32, device=cuda)"
    ),
}


def tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """Seven inputs and the three outputs of the indexer-q stage, T = 2."""
    made = {name: torch.randn(TOKENS, 64, 128, device=device, dtype=torch.bfloat16) for name in "a b c d e f g".split()}
    made["q"] = torch.empty(TOKENS, 64, 64, device=device, dtype=torch.uint8)
    made["scale"] = torch.empty(TOKENS, 64, 4, device=device, dtype=torch.uint8)
    made["w"] = torch.empty(TOKENS, 64, device=device, dtype=torch.float32)
    return made


def scope_of(module: Any) -> dict[str, Any]:
    """Every name the statements use."""
    device = torch.device("cuda", 0)
    ten = tensors(device)
    words = [tensor.data_ptr() for tensor in ten.values()] + [TOKENS]
    plan = module.Plan(list(ten.values()))
    kept = {
        f"{library}_{op}": getattr(getattr(torch.ops, f"calling_{library}"), op).default
        for library, ops in LIBRARIES.items()
        for op in ops
    }
    return (
        ten
        | kept
        | {
            "module": module,
            "ops": torch.ops,
            "boxed_function": kept["boxed_through_out"]._op,
            "unboxed_function": kept["unboxed_through_out"]._op,
            "words": words,
            "words_tensor": torch.tensor(words),
            "tensor": torch.tensor,
            "plan": plan,
            "capsule": plan.capsule(),
            "fast_plan": module.fast_plan,
            "fast_bound": module.fast_bound,
            "fast_addresses": module.fast_addresses,
            "is_compiling": torch.compiler.is_compiling,
            "modes": torch._C._len_torch_dispatch_stack,
            "stream": torch._C._cuda_getCurrentRawStream(0),
            "raw_stream": torch._C._cuda_getCurrentRawStream,
            "triton_empty": triton_kernel.empty,
            "empty": torch.empty,
            "uint8": torch.uint8,
            "float32": torch.float32,
            "cuda": device,
            "grid": (1,),
        }
    )


def let_autograd_fall_through() -> list[torch.library.Library]:
    """Take the boxed autograd fallback of custom ops out of the way for one copy of each op.

    The registrations last as long as the libraries returned.
    """
    libraries = []
    for name in ("boxed_through", "unboxed_through"):
        library = torch.library.Library(f"calling_{name}", "IMPL", "Autograd")
        for op in LIBRARIES[name]:
            library.impl(op, torch.library.fallthrough_kernel)
        libraries.append(library)
    return libraries


def measure() -> dict[str, Any]:
    """Every convention, with and without the launch, outside and inside inference mode."""
    module, seconds = build()
    libraries = let_autograd_fall_through()
    scope = scope_of(module)
    without_launch = {name: text for name, text in STATEMENTS.items() if not name.startswith("Triton")}
    results: dict[str, Any] = {"build_seconds": round(seconds, 1)}
    for mode, guard in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        for launching in (True, False):
            module.set_launching(launching)
            with guard():
                results[f"{mode}, {'launch' if launching else 'no launch'}"] = interleaved(
                    STATEMENTS if launching else without_launch, scope, settle=torch.cuda.synchronize
                )
    del libraries
    return results
