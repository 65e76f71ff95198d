// Launches of clusters of sixteen blocks, as many as the device runs at a time.
#pragma once
#include "launch.cuh"

namespace dsv4 {

constexpr int kClusterBlocks = 16;

struct ClusterLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int clusters, int threads, size_t shared) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {kClusterBlocks, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(kClusterBlocks * clusters);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.attrs = attributes;
    config.numAttrs = 2;
  }
};

// How many clusters of a kernel the current device runs at a time; 0 where it has none of sixteen, or cannot tell now.
template <auto kKernel>
int most_clusters(int threads, size_t shared) {
  static int known[kDevices] = {};  // one more than the number, 0 not asked yet; writers agree
  const int device = current_device();
  if (device >= kDevices || !is_hopper()) return 0;
  if (known[device] == 0) {
    int found = 0;
    const ClusterLaunch one(1, threads, shared);
    if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared)) != cudaSuccess ||
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&found, kKernel, &one.config) != cudaSuccess) {
      cudaGetLastError();  // not to be reported by whoever launches next
      return 0;
    }
    known[device] = 1 + found;
  }
  return known[device] - 1;
}

template <auto kKernel, class Arguments>
void launch_clusters(const Call& call, int clusters, int threads, size_t shared, const Arguments& arguments) {
  ClusterLaunch launch(clusters, threads, shared);
  launch.config.stream = call.stream;
  const cudaError_t code = cudaLaunchKernelEx(&launch.config, kKernel, arguments);
  if (code != cudaSuccess) {
    cudaGetLastError();  // the error is reported here, not by whoever launches next
    throw LaunchFailed(call.op, code);
  }
}

}  // namespace dsv4
