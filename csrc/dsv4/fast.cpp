// The face for eager steps: CPython's fast call, tensors read through DLPack's exchange functions. No dispatcher.
//
// A function returns True when it launched, and False when the call is not its own: an argument is no plain tensor on a
// CUDA device. The caller then goes through the dispatcher.
#define PY_SSIZE_T_CLEAN
#include <ATen/dlpack.h>
#include <Python.h>

#include "table.h"

namespace {

const DLPackExchangeAPI* exchange = nullptr;
PyObject* tensor_type = nullptr;
PyObject* refusal = nullptr;  // the exception class of a refused call

dsv4::DType dtype_of(DLDataType type) {
  if (type.lanes != 1) return dsv4::DType::other;
  switch (type.code << 8 | type.bits) {
    case kDLUInt << 8 | 8:
      return dsv4::DType::u8;
    case kDLInt << 8 | 32:
      return dsv4::DType::i32;
    case kDLInt << 8 | 64:
      return dsv4::DType::i64;
    case kDLFloat << 8 | 32:
      return dsv4::DType::f32;
    case kDLBfloat << 8 | 16:
      return dsv4::DType::bf16;
    case kDLFloat8_e4m3fn << 8 | 8:
      return dsv4::DType::e4m3;
    case kDLBool << 8 | 8:
      return dsv4::DType::boolean;
    default:
      return dsv4::DType::other;
  }
}

// False, without an exception, when the object is not for this face.
bool read_tensor(PyObject* object, dsv4::Operand& one) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != tensor_type) return false;
  DLTensor tensor;
  if (exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.device.device_type != kDLCUDA || tensor.ndim > dsv4::kMaxDims) return false;
  one.address = static_cast<char*>(tensor.data) + tensor.byte_offset;
  one.dims = tensor.ndim;
  for (int i = 0; i < one.dims; ++i) {
    one.size[i] = tensor.shape[i];
    one.stride[i] = tensor.strides[i];
  }
  one.dtype = dtype_of(tensor.dtype);
  one.device = tensor.device.device_id;
  one.given = true;
  return true;
}

bool read_arguments(const char* signature, PyObject* const* args, dsv4::Call& call) {
  int numbers = 0;
  for (int i = 0; signature[i]; ++i) {
    if (signature[i] == 'f') {
      call.number[numbers++].real = PyFloat_AsDouble(args[i]);
    } else if (signature[i] == 'i' || signature[i] == 'b') {
      call.number[numbers++].integer = PyLong_AsLongLong(args[i]);
    } else {
      dsv4::Operand& one = call.tensor[call.tensors++];
      one = dsv4::Operand{};
      if (args[i] == Py_None && signature[i] == 'o') continue;
      if (!read_tensor(args[i], one)) return false;
    }
  }
  return true;
}

PyObject* called(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const auto* op = static_cast<const dsv4::Op*>(PyCapsule_GetPointer(self, "dsv4.Op"));
  if (!op) return nullptr;
  dsv4::Call call;  // read_arguments fills what the op reads
  call.tensors = 0;
  for (Py_ssize_t i = 0; i <= count; ++i) {
    if ((op->signature[i] == '\0') != (i == count)) Py_RETURN_FALSE;
  }
  if (!read_arguments(op->signature, args, call)) Py_RETURN_FALSE;
  if (PyErr_Occurred()) return nullptr;  // a number was none
  void* stream = nullptr;
  if (exchange->current_work_stream(kDLCUDA, call.tensor[0].device, &stream) != 0) return nullptr;
  call.stream = static_cast<cudaStream_t>(stream);
  try {
    dsv4::run(*op, call);
  } catch (const dsv4::NotTaken&) {
    Py_RETURN_FALSE;
  } catch (const dsv4::Refused& error) {
    PyObject* raised = PyObject_CallFunction(refusal, "ss", error.problem.c_str(), error.remedy.c_str());
    if (raised) PyErr_SetObject(refusal, raised);
    Py_XDECREF(raised);
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_TRUE;
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
  exchange = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!exchange) return nullptr;
  if (exchange->header.version.major != DLPACK_MAJOR_VERSION || !exchange->dltensor_from_py_object_no_sync ||
      !exchange->current_work_stream) {
    PyErr_SetString(PyExc_ImportError, "this PyTorch's DLPack exchange functions are of another version");
    return nullptr;
  }
  Py_INCREF(type);
  Py_INCREF(error);
  tensor_type = type;
  refusal = error;
  return functions();
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
    {"names", &names, METH_NOARGS, "names() -> [op]"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", "CUDA kernels of the ops.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&definition); }
