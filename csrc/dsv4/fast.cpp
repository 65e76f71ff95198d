// The face for eager steps: CPython's fast call, tensors read through DLPack's exchange functions. No dispatcher.
//
// A function returns True when it launched, and False when the call is not its own: an argument is no plain tensor on a
// CUDA device. The caller then goes through the dispatcher.
#include "arguments.h"
#include "returned.h"

namespace {

PyObject* called(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const auto* op = static_cast<const dsv4::Op*>(PyCapsule_GetPointer(self, "dsv4.Op"));
  if (!op) return nullptr;
  dsv4::Call call;  // read_arguments fills what the op reads
  for (Py_ssize_t i = 0; i <= count; ++i) {
    if ((op->signature[i] == '\0') != (i == count)) Py_RETURN_FALSE;
  }
  if (!dsv4::read_arguments(op->signature, args, count, call)) Py_RETURN_FALSE;
  if (PyErr_Occurred()) return nullptr;  // a number was none
  switch (dsv4::run_now(*op, call)) {
    case dsv4::Ran::launched:
      Py_RETURN_TRUE;
    case dsv4::Ran::not_taken:
      Py_RETURN_FALSE;
    default:
      return nullptr;
  }
}

PyMethodDef call_method = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&called)), METH_FASTCALL,
                           nullptr};

PyObject* functions() {
  PyObject* found = PyDict_New();
  for (int i = 0; found && i < dsv4::kOpCount; ++i) {
    PyObject* capsule = PyCapsule_New(const_cast<dsv4::Op*>(&dsv4::kOps[i]), "dsv4.Op", nullptr);
    PyObject* function = capsule ? PyCFunction_NewEx(&call_method, capsule, nullptr) : nullptr;
    Py_XDECREF(capsule);
    if (!function || PyDict_SetItemString(found, dsv4::kOps[i].name, function) != 0) Py_CLEAR(found);
    Py_XDECREF(function);
  }
  return found;
}

// bind(tensor type, its exchange capsule, exception class): the functions by op.
PyObject* bind(PyObject*, PyObject* args) {
  PyObject *type, *capsule, *error;
  if (!PyArg_ParseTuple(args, "OOO", &type, &capsule, &error)) return nullptr;
  return dsv4::bind_arguments(type, capsule, error) ? functions() : nullptr;
}

PyObject* names(PyObject*, PyObject*) {
  PyObject* found = PyList_New(0);
  for (int i = 0; found && i < dsv4::kDispatchedCount; ++i) {
    PyObject* name = PyUnicode_FromString(dsv4::kOps[i].name);
    if (!name || PyList_Append(found, name) != 0) Py_CLEAR(found);
    Py_XDECREF(name);
  }
  return found;
}

PyMethodDef methods[] = {
    {"bind", &bind, METH_VARARGS, "bind(tensor_type, exchange_capsule, exception) -> {op: function}"},
    {"returning", &dsv4::returning, METH_VARARGS,
     "returning(op, inputs, told, like, untold, outs, results, dtype) -> function or None; see returned.h"},
    {"names", &names, METH_NOARGS, "names() -> [op]"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", "CUDA kernels of the ops.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&definition); }
