// What every calling convention under test hands to its kernel: ten addresses and a token count.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace calling {

constexpr int kTensors = 10;
constexpr int kInputs = 7;  // the other three are outputs

struct Arguments {
  const void* address[kTensors];
  int64_t tokens;
};

// Enqueues a kernel that does nothing; returns at once with `set_launching(false)`, to time the call alone.
// A launch the driver refuses throws std::runtime_error.
void launch(const Arguments& arguments, cudaStream_t stream);
void set_launching(bool on);

}  // namespace calling
