#include "arguments.h"

#include <ATen/dlpack.h>

namespace dsv4 {
namespace {

#ifdef DSV4_ON_CPU  // a test of the host's side
constexpr DLDeviceType kDevice = kDLCPU;
#else
constexpr DLDeviceType kDevice = kDLCUDA;
#endif

const DLPackExchangeAPI* exchange = nullptr;
PyObject* tensor_type = nullptr;
PyObject* refusal = nullptr;

DType dtype_of(DLDataType type) {
  if (type.lanes != 1) return DType::other;
  switch (type.code << 8 | type.bits) {
    case kDLUInt << 8 | 8:
      return DType::u8;
    case kDLInt << 8 | 32:
      return DType::i32;
    case kDLInt << 8 | 64:
      return DType::i64;
    case kDLFloat << 8 | 32:
      return DType::f32;
    case kDLBfloat << 8 | 16:
      return DType::bf16;
    case kDLFloat8_e4m3fn << 8 | 8:
      return DType::e4m3;
    case kDLBool << 8 | 8:
      return DType::boolean;
    default:
      return DType::other;
  }
}

}  // namespace

bool bind_arguments(PyObject* type, PyObject* capsule, PyObject* error) {
  const auto* given = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!given) return false;
  if (given->header.version.major != DLPACK_MAJOR_VERSION || !given->dltensor_from_py_object_no_sync ||
      !given->current_work_stream) {
    PyErr_SetString(PyExc_ImportError, "this PyTorch's DLPack exchange functions are of another version");
    return false;
  }
  Py_INCREF(type);
  Py_INCREF(error);
  exchange = given;
  tensor_type = type;
  refusal = error;
  return true;
}

bool read_tensor(PyObject* object, Operand& one) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != tensor_type) return false;
  DLTensor tensor;
  if (exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.device.device_type != kDevice || tensor.ndim > kMaxDims) return false;
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

bool read_arguments(const char* signature, PyObject* const* args, Py_ssize_t count, Call& call) {
  call.tensors = 0;
  int numbers = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (signature[i] == '\0') return false;
    if (signature[i] == 'f') {
      call.number[numbers++].real = PyFloat_AsDouble(args[i]);
    } else if (signature[i] == 'i' || signature[i] == 'b') {
      call.number[numbers++].integer = PyLong_AsLongLong(args[i]);
    } else {
      Operand& one = call.tensor[call.tensors++];
      if (args[i] == Py_None && signature[i] == 'o') {
        one = Operand{};
      } else if (!read_tensor(args[i], one)) {
        PyErr_Clear();  // of a number before: the dispatcher says what is wrong
        return false;
      }
    }
  }
  return true;
}

Ran run_now(const Op& op, Call& call) {
  void* stream = nullptr;
  if (exchange->current_work_stream(kDevice, call.tensor[0].device, &stream) != 0) return Ran::raised;
  call.stream = static_cast<cudaStream_t>(stream);
  try {
    run(op, call);
  } catch (const NotTaken&) {
    return Ran::not_taken;
  } catch (const Refused& error) {
    PyObject* raised = PyObject_CallFunction(refusal, "ss", error.problem.c_str(), error.remedy.c_str());
    if (raised) PyErr_SetObject(refusal, raised);
    Py_XDECREF(raised);
    return Ran::raised;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return Ran::raised;
  }
  return Ran::launched;
}

}  // namespace dsv4
