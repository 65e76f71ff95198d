// Python's arguments of an op as a call: tensors read through DLPack's exchange functions.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "table.h"

namespace dsv4 {

// The exchange functions of a tensor type, and the exception class of a refused call. Raises when they are of another
// version.
bool bind_arguments(PyObject* tensor_type, PyObject* exchange, PyObject* refusal);

// False, without an exception, when the object is no plain tensor on a CUDA device.
bool read_tensor(PyObject* object, Operand& one);

// Reads as many arguments as there are; false when there are not that many, or one is not for a kernel. A number that is
// none leaves an exception.
bool read_arguments(const char* signature, PyObject* const* args, Py_ssize_t count, Call& call);

enum class Ran { launched, not_taken, raised };

// Runs the op on the current stream of the device of its first tensor.
Ran run_now(const Op& op, Call& call);

}  // namespace dsv4
