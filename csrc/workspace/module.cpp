// workspace._native: the methods of the steady path in C++, made for the Python classes that `bind` is given.

#include "clock.h"
#include "methods.h"
#include "verbs.h"

namespace {

using namespace workspace;

// The methods that C++ has, as {(class name, name): descriptor}; the Python ones are remembered to fall back to.
bool add_methods(PyObject* found, PyObject* classes, Native* methods) {
  for (Native* one = methods; one->owner != nullptr; ++one) {
    PyObject* const owner = PyDict_GetItemString(classes, one->owner);
    if (owner == nullptr || !PyType_Check(owner)) {
      PyErr_Format(PyExc_TypeError, "class %s is not given", one->owner);
      return false;
    }
    const char* const name = one->definition.ml_name;
    Ref original(PyObject_GetAttrString(owner, name));
    if (!original) return false;
    const Ref text(PyObject_GetAttrString(original.get(), "__doc__"));
    if (!text) return false;
    // The Python function keeps its text, and is kept itself.
    if (text.get() != Py_None) one->definition.ml_doc = PyUnicode_AsUTF8(text.get());
    const Ref made(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(owner), &one->definition));
    const Ref key(Py_BuildValue("(Os)", owner, name));
    if (!made || !key || PyDict_SetItem(found, key.get(), made.get())) return false;
    parts.inlined.allow(owner, name, made.get());
    one->python = original.release();
  }
  return true;
}

bool add_address(PyObject* found) {
  auto* const owner = reinterpret_cast<PyObject*>(parts.lease);
  const Ref property(PyObject_GetAttrString(owner, "address"));
  Ref getter(property ? PyObject_GetAttrString(property.get(), "fget") : nullptr);
  const Ref made(getter ? PyDescr_NewGetSet(parts.lease, &lease_address) : nullptr);
  const Ref key(Py_BuildValue("(Os)", owner, "address"));
  if (!made || !key || PyDict_SetItem(found, key.get(), made.get())) return false;
  python_address = getter.release();
  return true;
}

PyObject* bind_once(PyObject*, PyObject* arguments) {
  PyObject *given, *inlined;
  if (!PyArg_ParseTuple(arguments, "O!O:bind", &PyDict_Type, &given, &inlined)) return nullptr;
  Ref found(PyDict_New());
  if (parts.bound) return found.release();  // the package is imported anew: its first classes keep the C++ form
  if (!found || !names.make() || !bind(given, inlined)) return nullptr;
  for (Native* methods : {lease_methods, lazy_methods, fork_methods, branch_methods, order_methods}) {
    if (!add_methods(found.get(), given, methods)) return nullptr;
  }
  return add_address(found.get()) ? found.release() : nullptr;
}

PyMethodDef functions[] = {
    {"bind", bind_once, METH_VARARGS,
     "The methods in C++ by (class, name), for these classes and inlined methods; none the second time."},
    {nullptr, nullptr, 0, nullptr},
};

int execute(PyObject* module) { return add_verbs(module) && add_lock(module) && add_clocks(module) ? 0 : -1; }

// The steady path counts on the interpreter's lock: a list's pop and a dict's update are one step under it.
PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(execute)},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "workspace._native", "The steady path in C++.", 0, functions, slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
