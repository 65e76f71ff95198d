// Launch arithmetic.
#pragma once
#include "call.h"

namespace dsv4 {

constexpr int ceil_div(int64_t value, int64_t by) { return static_cast<int>((value + by - 1) / by); }

inline void check_launch(const char* op) {
  const cudaError_t code = cudaGetLastError();
  if (code != cudaSuccess) throw LaunchFailed(op, code);
}

}  // namespace dsv4
