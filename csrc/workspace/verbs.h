// The verbs of a driver that every fork and fence makes, as callables without a Python frame or ctypes in between.
#pragma once

#include "ref.h"

namespace workspace {

// Adds the functions that make them to the module's. False with an exception set.
bool add_verbs(PyObject* module);

}  // namespace workspace
