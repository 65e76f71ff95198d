// One call of an op as both faces make it: tensors as addresses with shapes, numbers, a stream. Nothing of torch's.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <exception>
#include <string>

namespace dsv4 {

enum class DType : uint8_t { u8, i32, i64, f32, bf16, e4m3, boolean, other };

constexpr int kMaxDims = 4;
constexpr int kMaxTensors = 16;
constexpr int kMaxNumbers = 8;

// A tensor argument; `given` is false for None.
struct Operand {
  void* address;
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];  // in elements
  int dims;
  DType dtype;
  int device;
  bool given;

  template <class T>
  T* as() const {
    return static_cast<T*>(address);
  }
};

union Number {
  int64_t integer;
  double real;
};

// Tensors and numbers each in the schema's order.
struct Call {
  const char* op;
  Operand tensor[kMaxTensors];
  Number number[kMaxNumbers];
  int tensors;
  cudaStream_t stream;
};

// A call was refused before anything was launched.
struct Refused : std::exception {
  std::string problem, remedy, text;

  Refused(std::string what, std::string then)
      : problem(std::move(what)), remedy(std::move(then)), text(problem + "; " + remedy) {}
  const char* what() const noexcept override { return text.c_str(); }
};

// A call that is another implementation's; nothing was launched.
struct NotTaken : std::exception {};

// CUDA refused a launch.
struct LaunchFailed : std::exception {
  std::string text;

  LaunchFailed(const char* op, cudaError_t code) : text(std::string(op) + ": " + cudaGetErrorString(code)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

// The device of the call that runs.
inline thread_local int device_of_call = 0;

// Makes a device current, and the former one again.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    device_of_call = device;
    cudaGetDevice(&former_);
    if (former_ != device)
      cudaSetDevice(device);
    else
      former_ = -1;
  }
  ~OnDevice() {
    if (former_ >= 0) cudaSetDevice(former_);
  }
  OnDevice(const OnDevice&) = delete;

 private:
  int former_ = -1;
};

}  // namespace dsv4
