// TORCH_LIBRARY with unboxed kernels, the packed forms, and plain Python functions that skip the dispatcher.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "empty_kernel.h"

using at::Tensor;

namespace {

cudaStream_t current_stream(const Tensor& on) { return c10::cuda::getCurrentCUDAStream(on.get_device()).stream(); }

template <class... T>
void enqueue(const Tensor& first, const T&... rest) {
  calling::launch({{first.const_data_ptr(), rest.const_data_ptr()...}, first.size(0)}, current_stream(first));
}

void out(
    const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d, const Tensor& e, const Tensor& f,
    const Tensor& g, const Tensor& q, const Tensor& scale, const Tensor& w) {
  enqueue(a, b, c, d, e, f, g, q, scale, w);
}

void check(const Tensor& t, const Tensor& like) {
  TORCH_CHECK(t.is_cuda() && t.get_device() == like.get_device(), "another device");
  TORCH_CHECK(t.is_contiguous(), "not contiguous");
  TORCH_CHECK(t.size(0) == like.size(0), "another token count");
}

void checked_out(
    const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d, const Tensor& e, const Tensor& f,
    const Tensor& g, const Tensor& q, const Tensor& scale, const Tensor& w) {
  for (const Tensor* t : {&a, &b, &c, &d, &e, &f, &g, &q, &scale, &w}) check(*t, a);
  enqueue(a, b, c, d, e, f, g, q, scale, w);
}

std::tuple<Tensor, Tensor, Tensor> returning(
    const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d, const Tensor& e, const Tensor& f,
    const Tensor& g) {
  const int64_t tokens = a.size(0);
  Tensor q = at::empty({tokens, 64, 64}, a.options().dtype(at::kByte));
  Tensor scale = at::empty({tokens, 64, 4}, a.options().dtype(at::kByte));
  Tensor w = at::empty({tokens, 64}, a.options().dtype(at::kFloat));
  enqueue(a, b, c, d, e, f, g, q, scale, w);
  return {q, scale, w};
}

void one(const Tensor& a) { calling::launch({{a.const_data_ptr()}, a.size(0)}, current_stream(a)); }

void tensor_lists(at::TensorList in, at::TensorList outputs) {
  calling::Arguments arguments{};
  int i = 0;
  for (const Tensor& t : in) arguments.address[i++] = t.const_data_ptr();
  for (const Tensor& t : outputs) arguments.address[i++] = t.const_data_ptr();
  arguments.tokens = in[0].size(0);
  calling::launch(arguments, current_stream(in[0]));
}

calling::Arguments unpack(const int64_t* words) {
  calling::Arguments arguments{};
  for (int i = 0; i < calling::kTensors; ++i) arguments.address[i] = reinterpret_cast<const void*>(words[i]);
  arguments.tokens = words[calling::kTensors];
  return arguments;
}

void packed_list(at::IntArrayRef words) {
  calling::launch(unpack(words.data()), c10::cuda::getCurrentCUDAStream().stream());
}

void packed_tensor(const Tensor& words) {
  calling::launch(unpack(words.const_data_ptr<int64_t>()), c10::cuda::getCurrentCUDAStream().stream());
}

// A call of the same tensors, prepared once: only what changes from step to step is passed.
struct Plan {
  std::vector<Tensor> kept;
  calling::Arguments arguments{};

  explicit Plan(std::vector<Tensor> tensors) : kept(std::move(tensors)) {
    TORCH_CHECK(kept.size() == calling::kTensors, "a plan takes ten tensors, got ", kept.size());
    for (int i = 0; i < calling::kTensors; ++i) arguments.address[i] = kept[i].const_data_ptr();
    arguments.tokens = kept[0].size(0);
  }
  void launch_on(uintptr_t stream) const { calling::launch(arguments, reinterpret_cast<cudaStream_t>(stream)); }
  void launch() const { calling::launch(arguments, current_stream(kept[0])); }
  void launch_with(const Tensor& a, const Tensor& b) const {
    calling::Arguments bound = arguments;
    bound.address[0] = a.const_data_ptr();
    bound.address[1] = b.const_data_ptr();
    bound.tokens = a.size(0);
    calling::launch(bound, current_stream(a));
  }
};

PyObject* refuse(const char* what) {
  PyErr_SetString(PyExc_TypeError, what);
  return nullptr;
}

// Ten tensors through CPython's own fast call, no pybind and no dispatcher.
PyObject* fast_out(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != calling::kTensors) return refuse("ten tensors");
  calling::Arguments arguments{};
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!THPVariable_Check(args[i])) return refuse("tensors only");
    arguments.address[i] = THPVariable_Unpack(args[i]).const_data_ptr();
  }
  const Tensor& first = THPVariable_Unpack(args[0]);
  arguments.tokens = first.size(0);
  try {
    calling::launch(arguments, current_stream(first));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* launched(const calling::Arguments& arguments, PyObject* raw_stream) {
  const size_t stream = PyLong_AsSize_t(raw_stream);
  if (PyErr_Occurred()) return nullptr;
  try {
    calling::launch(arguments, reinterpret_cast<cudaStream_t>(stream));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* fast_plan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) return refuse("a plan and a raw stream");
  auto* plan = static_cast<Plan*>(PyCapsule_GetPointer(args[0], "calling.Plan"));
  return plan ? launched(plan->arguments, args[1]) : nullptr;
}

// A capsule's plan with two addresses and the token count of this call.
PyObject* fast_bound(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 5) return refuse("a plan, a raw stream, two addresses and a token count");
  auto* plan = static_cast<Plan*>(PyCapsule_GetPointer(args[0], "calling.Plan"));
  if (!plan) return nullptr;
  calling::Arguments bound = plan->arguments;
  bound.address[0] = PyLong_AsVoidPtr(args[2]);
  bound.address[1] = PyLong_AsVoidPtr(args[3]);
  bound.tokens = PyLong_AsLongLong(args[4]);
  return launched(bound, args[1]);
}

// Ten addresses: nothing of torch's C++ is touched, so one build serves every version of it.
PyObject* fast_addresses(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 + calling::kTensors) return refuse("a raw stream, a token count and ten addresses");
  calling::Arguments arguments{};
  arguments.tokens = PyLong_AsLongLong(args[1]);
  for (int i = 0; i < calling::kTensors; ++i) arguments.address[i] = PyLong_AsVoidPtr(args[2 + i]);
  return launched(arguments, args[0]);
}

PyMethodDef fast[] = {
    {"fast_bound", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fast_bound)), METH_FASTCALL, nullptr},
    {"fast_addresses", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fast_addresses)), METH_FASTCALL,
     nullptr},
    {"fast_out", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fast_out)), METH_FASTCALL, nullptr},
    {"fast_plan", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fast_plan)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

void define(torch::Library& m) {
  const std::string ten =
      "(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, "
      "Tensor(h!) q, Tensor(i!) scale, Tensor(j!) w) -> ()";
  const std::string seven =
      "(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g) -> (Tensor, Tensor, Tensor)";
  m.def(("out" + ten).c_str());
  m.def(("checked_out" + ten).c_str());
  m.def(("returning" + seven).c_str());
  m.def("one(Tensor(a!) a) -> ()");
  m.def("tensor_lists(Tensor[] inputs, Tensor(a!)[] outputs) -> ()");
  m.def("packed_list(int[] words) -> ()");
  m.def("packed_tensor(Tensor words) -> ()");
}

void implement(torch::Library& m) {
  m.impl("out", &out);
  m.impl("checked_out", &checked_out);
  m.impl("returning", &returning);
  m.impl("one", &one);
  m.impl("tensor_lists", &tensor_lists);
}

}  // namespace

// The second library is the same; its ops get a fallthrough for autograd, from Python.
TORCH_LIBRARY(calling_unboxed, m) { define(m); }
TORCH_LIBRARY_IMPL(calling_unboxed, CUDA, m) { implement(m); }
TORCH_LIBRARY(calling_unboxed_through, m) { define(m); }
TORCH_LIBRARY_IMPL(calling_unboxed_through, CUDA, m) { implement(m); }

// Packed arguments are no CUDA tensors, so other keys dispatch them.
TORCH_LIBRARY_IMPL(calling_unboxed, CPU, m) { m.impl("packed_tensor", &packed_tensor); }
TORCH_LIBRARY_IMPL(calling_unboxed, CompositeExplicitAutograd, m) { m.impl("packed_list", &packed_list); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_launching", &calling::set_launching);
  m.def("out", &out);
  m.def("one", &one);
  pybind11::class_<Plan>(m, "Plan")
      .def(pybind11::init<std::vector<Tensor>>())
      .def("launch", &Plan::launch)
      .def("launch_on", &Plan::launch_on)
      .def("launch_with", &Plan::launch_with)
      .def("capsule", [](Plan& plan) { return pybind11::capsule(&plan, "calling.Plan"); });
  if (PyModule_AddFunctions(m.ptr(), fast) != 0) throw pybind11::error_already_set();
}
