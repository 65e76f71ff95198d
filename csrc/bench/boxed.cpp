// The stable ABI: a boxed kernel that builds against one PyTorch and loads into later ones.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#define USE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <tuple>

#include "empty_kernel.h"

using torch::stable::Tensor;

namespace {

cudaStream_t current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

template <class... T>
void enqueue(const Tensor& first, const T&... rest) {
  calling::launch({{first.data_ptr(), rest.data_ptr()...}, first.size(0)}, current_stream(first));
}

void out(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor q, Tensor scale, Tensor w) {
  enqueue(a, b, c, d, e, f, g, q, scale, w);
}

void check(const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index(), "another device");
  STD_TORCH_CHECK(t.is_contiguous(), "not contiguous");
  STD_TORCH_CHECK(t.size(0) == like.size(0), "another token count");
}

void checked_out(
    Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor q, Tensor scale, Tensor w) {
  for (const Tensor* t : {&a, &b, &c, &d, &e, &f, &g, &q, &scale, &w}) check(*t, a);
  enqueue(a, b, c, d, e, f, g, q, scale, w);
}

// The three outputs of the indexer-q stage, FP4: values, scales, weights.
std::tuple<Tensor, Tensor, Tensor> returning(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g) {
  using torch::headeronly::ScalarType;
  const int64_t tokens = a.size(0);
  Tensor q = torch::stable::new_empty(a, {tokens, 64, 64}, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(a, {tokens, 64, 4}, ScalarType::Byte);
  Tensor w = torch::stable::new_empty(a, {tokens, 64}, ScalarType::Float);
  enqueue(a, b, c, d, e, f, g, q, scale, w);
  return {q, scale, w};
}

void one(Tensor a) { calling::launch({{a.data_ptr()}, a.size(0)}, current_stream(a)); }

template <class Library>
void define(Library& m) {
  const char* ten =
      "(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, "
      "Tensor(h!) q, Tensor(i!) scale, Tensor(j!) w) -> ()";
  const char* seven =
      "(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g) -> (Tensor, Tensor, Tensor)";
  m.def((std::string("out") + ten).c_str());
  m.def((std::string("checked_out") + ten).c_str());
  m.def((std::string("returning") + seven).c_str());
  m.def("one(Tensor(a!) a) -> ()");
}

template <class Library>
void implement(Library& m) {
  m.impl("out", TORCH_BOX(&out));
  m.impl("checked_out", TORCH_BOX(&checked_out));
  m.impl("returning", TORCH_BOX(&returning));
  m.impl("one", TORCH_BOX(&one));
}

}  // namespace

// The second library is the same; its ops get a fallthrough for autograd, from Python.
STABLE_TORCH_LIBRARY(calling_boxed, m) { define(m); }
STABLE_TORCH_LIBRARY_IMPL(calling_boxed, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY(calling_boxed_through, m) { define(m); }
STABLE_TORCH_LIBRARY_IMPL(calling_boxed_through, CUDA, m) { implement(m); }
