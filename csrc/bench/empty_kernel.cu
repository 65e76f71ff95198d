#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "empty_kernel.h"

namespace calling {
namespace {

bool launching = true;

__global__ void empty(Arguments) {}

}  // namespace

void set_launching(bool on) { launching = on; }

void launch(const Arguments& arguments, cudaStream_t stream) {
  if (!launching) return;
  empty<<<1, 32, 0, stream>>>(arguments);
  const cudaError_t code = cudaGetLastError();
  if (code != cudaSuccess) throw std::runtime_error(std::string("empty kernel: ") + cudaGetErrorString(code));
}

}  // namespace calling
