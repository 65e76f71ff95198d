// The face for the dispatcher: kernels of the ops' schemas for CUDA, boxed, through PyTorch's stable ABI.
#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#endif
#ifndef USE_CUDA
#define USE_CUDA
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <utility>

#include "table.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::to;

dsv4::DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return dsv4::DType::u8;
    case ScalarType::Int:
      return dsv4::DType::i32;
    case ScalarType::Long:
      return dsv4::DType::i64;
    case ScalarType::Float:
      return dsv4::DType::f32;
    case ScalarType::BFloat16:
      return dsv4::DType::bf16;
    case ScalarType::Float8_e4m3fn:
      return dsv4::DType::e4m3;
    case ScalarType::Bool:
      return dsv4::DType::boolean;
    default:
      return dsv4::DType::other;
  }
}

dsv4::Operand operand(const Tensor& tensor) {
  dsv4::Operand one{};
  one.address = tensor.data_ptr();
  one.dims = static_cast<int>(tensor.dim());
  STD_TORCH_CHECK(one.dims <= dsv4::kMaxDims, "a tensor of ", one.dims, " dims, at most ", dsv4::kMaxDims);
  for (int i = 0; i < one.dims; ++i) {
    one.size[i] = tensor.size(i);
    one.stride[i] = tensor.stride(i);
  }
  one.dtype = dtype_of(tensor.scalar_type());
  // The kernel is that of CUDA tensors, but another argument of the call may still be the CPU's.
  one.device = tensor.is_cuda() ? tensor.get_device_index() : -1;
  one.given = true;
  return one;
}

void take(const dsv4::Op& op, StableIValue* stack) {
  dsv4::Call call{};
  int numbers = 0;
  for (int i = 0; op.signature[i]; ++i) {
    switch (op.signature[i]) {
      case 't':
        call.tensor[call.tensors++] = operand(to<Tensor>(stack[i]));
        break;
      case 'o': {
        const auto maybe = to<std::optional<Tensor>>(stack[i]);
        call.tensor[call.tensors++] = maybe ? operand(*maybe) : dsv4::Operand{};
        break;
      }
      case 'f':
        call.number[numbers++].real = to<double>(stack[i]);
        break;
      case 'b':
        call.number[numbers++].integer = to<bool>(stack[i]);
        break;
      default:
        call.number[numbers++].integer = to<int64_t>(stack[i]);
    }
  }
  // To make that device current would leave an error for whatever is launched next.
  if (call.tensor[0].device < 0) {
    throw dsv4::Refused(std::string("the first tensor of ") + op.name + " is on another device than others",
                        "pass tensors of one device");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(call.tensor[0].device, &stream));
  call.stream = static_cast<cudaStream_t>(stream);
  dsv4::run(op, call);
}

// The library wants one function an op.
template <int I>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  take(dsv4::kOps[I], stack);
}

template <int... I>
void implement(torch::stable::detail::StableLibrary& library, std::integer_sequence<int, I...>) {
  (library.impl(dsv4::kOps[I].name, &boxed<I>), ...);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dsv4, CUDA, m) { implement(m, std::make_integer_sequence<int, dsv4::kDispatchedCount>()); }
