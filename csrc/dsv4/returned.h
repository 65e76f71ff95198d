// The returning form of an op as a C function: outs and scratch from PyTorch's allocator, then the kernel.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace dsv4 {

// returning(op, inputs, told, like, untold, outs, results, dtype) -> function
//
// None where this PyTorch cannot do it. The function takes the op's inputs in a tuple, and in a dict the dims that they
// do not tell; it returns the outs, or None when the call is Python's, as under any mode. Sizes of what is new are asked
// of `results`, which takes the same and returns a tuple of tensors, once a key: the sizes `told` by inputs, pairs of
// place and axis, the dtype of the input at the place `like`, and the values of the names `untold` (integers, or an
// instance of `dtype`).
PyObject* returning(PyObject* module, PyObject* args);

}  // namespace dsv4
