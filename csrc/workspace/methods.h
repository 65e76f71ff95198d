// The methods in C++. Each does the steady case and leaves every other to the Python method of the same name.
#pragma once

#include "lock.h"
#include "parts.h"

namespace workspace {

#define WORKSPACE_FUNCTION(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))

struct Native {
  const char* owner;
  PyMethodDef definition;
  PyObject* python;  // what it stands in for, and falls back to
};

extern Native lease_methods[], lazy_methods[], fork_methods[], branch_methods[], order_methods[];
extern PyGetSetDef lease_address;
extern PyObject* python_address;

// Whether no dispatch mode is active and autograd does not record; -1 with an exception set.
int quiet();

// Whether a lease is held: in one of the states from PLAIN on.
bool is_held(PyObject* lease);

// What the calling thread holds; empty with an exception set.
Ref held_of(const Ref& timeline);

// The Python method, with the same arguments.
PyObject* python(const Native& native, PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                 PyObject* keywords = nullptr);

}  // namespace workspace
