#include "reader.h"

namespace dsv4 {
namespace {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return "uint8";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::e4m3:
      return "float8_e4m3fn";
    case DType::boolean:
      return "bool";
    default:
      return "of a dtype that no kernel takes";
  }
}

int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::i64:
      return 8;
    case DType::i32:
    case DType::f32:
      return 4;
    case DType::bf16:
      return 2;
    default:
      return 1;
  }
}

std::string shape_of(const Operand& one) {
  std::string text = "[";
  for (int i = 0; i < one.dims; ++i) text += (i ? ", " : "") + std::to_string(one.size[i]);
  return text + "]";
}

// First byte, and one past the last; nowhere when there are no elements.
struct Span {
  uintptr_t start = 0, end = 0;
};

Span span_of(const Operand& one) {
  const auto start = reinterpret_cast<uintptr_t>(one.address);
  int64_t last = 0;
  for (int i = 0; i < one.dims; ++i) {
    if (one.size[i] == 0) return {};
    last += (one.size[i] - 1) * one.stride[i];
  }
  return {start, start + (last + 1) * bytes_of(one.dtype)};
}

}  // namespace

const Operand& Reader::next(const char* name, Types types, Shape shape, int alignment) {
  names_[place_] = name;
  const Operand& one = call_.tensor[place_++];
  present(name, one);
  bool known = false;
  for (const DType type : types) known |= type == one.dtype;
  if (!known)
    refuse(name, std::string("is ") + name_of(one.dtype), std::string("the kernel takes ") + name_of(*types.begin()));
  same_device(name, one);
  if (one.dims != static_cast<int>(shape.size())) {
    refuse(name, "has shape " + shape_of(one), "it takes " + std::to_string(shape.size()) + " dims");
  }
  int axis = 0;
  for (const Dim& dim : shape) {
    const int64_t size = one.size[axis];
    if (dim.bound && *dim.bound == kUnbound) *dim.bound = size;
    const int64_t wanted = dim.bound ? *dim.bound : dim.fixed;
    if (size != wanted) {
      refuse(name, "has shape " + shape_of(one),
             "dim " + std::to_string(axis) + " is " + std::to_string(wanted) + " here");
    }
    // Kernels index rows in 32 bits.
    if (size > std::numeric_limits<int32_t>::max()) refuse(name, "has shape " + shape_of(one), "split the call");
    ++axis;
  }
  if (reinterpret_cast<uintptr_t>(one.address) % alignment != 0) {
    refuse(name, "starts at an unaligned address", "align it to " + std::to_string(alignment) + " bytes");
  }
  return one;
}

void Reader::contiguous(const char* name, const Operand& one, int dims) const {
  int64_t step = 1;
  for (int i = 0; i < one.dims; ++i) {
    if (one.size[i] == 0) return;  // without elements, strides say nothing
  }
  for (int i = one.dims - 1; i >= one.dims - dims; --i) {
    if (one.size[i] != 1 && one.stride[i] != step) refuse(name, "is not contiguous", "call .contiguous() first");
    step *= one.size[i];
  }
}

void Reader::done() const {
  Span spans[kMaxTensors];
  for (int i = 0; i < call_.tensors; ++i) spans[i] = call_.tensor[i].given ? span_of(call_.tensor[i]) : Span();
  for (int i = 0; i < call_.tensors; ++i) {
    if (!(written_ >> i & 1)) continue;
    for (int j = 0; j < call_.tensors; ++j) {
      if (j != i && spans[i].start < spans[j].end && spans[j].start < spans[i].end) {
        refuse(names_[i], std::string("shares bytes with ") + names_[j], "pass other memory");
      }
    }
  }
}

}  // namespace dsv4
