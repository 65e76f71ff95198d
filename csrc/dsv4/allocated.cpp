#include "allocated.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include "private_symbol.h"

namespace dsv4 {
namespace {

using torch::headeronly::ScalarType;

int32_t device_type() {
#ifdef DSV4_ON_CPU  // a test of the host's side
  return aoti_torch_device_type_cpu();
#else
  return aoti_torch_device_type_cuda();
#endif
}

// `THPVariable_Wrap(at::TensorBase&&)`: a handle of the stable ABI is the address of an at::Tensor. Moved from, it holds
// none; a copy would cost an exchange of references with Python.
constexpr char kWrap[] = "_Z16THPVariable_WrapON2at10TensorBaseE";
PyObject* (*wrap)(void*) = nullptr;

ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return ScalarType::Byte;
    case DType::i32:
      return ScalarType::Int;
    case DType::i64:
      return ScalarType::Long;
    case DType::f32:
      return ScalarType::Float;
    case DType::bf16:
      return ScalarType::BFloat16;
    case DType::e4m3:
      return ScalarType::Float8_e4m3fn;
    case DType::boolean:
      return ScalarType::Bool;
    default:
      return ScalarType::Undefined;
  }
}

}  // namespace

bool bind_allocated() {
  wrap = private_symbol<PyObject*(void*)>("libtorch_python.so", kWrap);
  return wrap != nullptr;
}

Allocated::~Allocated() {
  if (handle_) aoti_torch_delete_tensor_object(handle_);
}

bool Allocated::allocate(Operand& one) {
  const int32_t dtype = static_cast<int32_t>(scalar_type(one.dtype));
  if (aoti_torch_empty_strided(one.dims, one.size, one.stride, dtype, device_type(), one.device, &handle_) != 0) {
    return false;
  }
  return aoti_torch_get_data_ptr(handle_, &one.address) == 0;
}

PyObject* Allocated::wrapped() { return wrap(handle_); }

}  // namespace dsv4
