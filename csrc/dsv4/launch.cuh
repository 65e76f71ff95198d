// Launches that may begin while the kernel before them on the stream ends.
//
// On devices that can (sm_90 and newer) every kernel is launched with programmatic stream serialization: its blocks may
// be resident while its predecessor still runs. So every thread, on every path, calls `after_predecessor` before it
// touches memory of the device: it lets the next kernel do the same, then waits until the predecessor is over and its
// writes are visible. Barriers in shared memory may be made between the two.
//
// A kernel of a wave or less does better to wait first, and to let the next one's blocks come once its own reads are
// under way: then one grid waits at a time. Where several pile up, the later ones' blocks go where others end first,
// some multiprocessors get twice their share, and the fullest sets the time.
#pragma once
#include "call.h"

namespace dsv4 {

constexpr int ceil_div(int64_t value, int64_t by) { return static_cast<int>((value + by - 1) / by); }

constexpr int kDevices = 64;

inline int current_device() { return device_of_call; }

// Whether the current device is of sm_90 or newer.
inline bool is_hopper() {
  static int known[kDevices] = {};  // 0 not asked yet, 1 no, 2 yes; writers agree
  const int device = current_device();
  if (device >= kDevices) return false;
  if (known[device] == 0) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    known[device] = major >= 9 ? 2 : 1;
  }
  return known[device] == 2;
}

// Of the current device.
inline int multiprocessors() {
  static int known[kDevices] = {};  // 0 not asked yet; writers agree
  const int device = current_device();
  int count = device < kDevices ? known[device] : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < kDevices) known[device] = count;
  }
  return count;
}

// Lets a kernel have more than 48 KB of dynamic shared memory; once a device.
template <auto kKernel>
void allow_shared(int bytes) {
  static bool known[kDevices] = {};
  const int device = current_device();
  if (device < kDevices && known[device]) return;
  cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (device < kDevices) known[device] = true;
}

// `cluster`: how many blocks, neighbours along y, share one another's shared memory.
template <class Arguments>
void launch(const Call& call, void (*kernel)(Arguments), dim3 grid, int threads, const Arguments& arguments,
            size_t shared = 0, int cluster = 1) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {1, static_cast<unsigned>(cluster), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = call.stream;
  config.attrs = attributes;
  config.numAttrs = is_hopper() ? (cluster > 1 ? 2 : 1) : 0;
  const cudaError_t code = cudaLaunchKernelEx(&config, kernel, arguments);
  if (code != cudaSuccess) {
    cudaGetLastError();  // the error is reported here, not by whoever launches next
    throw LaunchFailed(call.op, code);
  }
}

#ifdef __CUDACC__
// Lets the next kernel's blocks become resident, once every block of this one has said so.
__device__ inline void let_successor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before is over and its writes are visible.
__device__ inline void await_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(DSV4_WITHOUT_WAIT)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void after_predecessor() {
  let_successor();
  await_predecessor();
}
#endif

}  // namespace dsv4
