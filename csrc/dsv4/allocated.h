// New tensors of PyTorch's allocator, without the Python call that would make them.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "call.h"

struct AtenTensorOpaque;

namespace dsv4 {

// Finds what wraps a tensor for Python; false where this PyTorch does not have it.
bool bind_allocated();

// An uninitialised tensor, on the current stream as any other: its memory is used on that stream only, and goes back to
// the allocator with the last reference. DLPack's own allocation would hand out foreign memory, whose `record_stream`
// does nothing.
class Allocated {
 public:
  Allocated() = default;
  ~Allocated();
  Allocated(const Allocated&) = delete;

  // Of the sizes, strides and dtype of `one`, on its device; sets its address. False when there is no memory.
  bool allocate(Operand& one);
  // The tensor as Python's, whose it is from then on: a new reference, or null with an exception.
  PyObject* wrapped();

 private:
  AtenTensorOpaque* handle_ = nullptr;
};

}  // namespace dsv4
