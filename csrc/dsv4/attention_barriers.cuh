// How the warps of an attention block wait for one another, and the blocks of a cluster.
//
// Between warps that fetch and warps that multiply: mbarriers, whose phases alternate. Among those that multiply: named
// barriers.
#pragma once
#include <cstdint>

#include "tensor_core.cuh"

namespace dsv4 {

__device__ inline void begin_barrier(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Once for a warp, for what all its threads did before.
__device__ inline void arrive(uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier))
                 : "memory");
  }
}

// Once for each thread, when the copies that it has started are there.
__device__ inline void arrive_with_copies(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Until phase number `phase` is complete.
__device__ inline void wait(uint64_t& barrier, uint32_t phase) {
  uint32_t done = 0;
  const uint32_t address = shared_address(&barrier), parity = phase & 1;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared.b64 done, [%1], %2; selp.b32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; selp.b32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#endif
  }
}

__device__ inline void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900

// All blocks of the cluster have come here, and see what each wrote before.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in another block's shared memory.
__device__ inline uint32_t place_in(uint32_t address, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
__device__ inline void store_there(uint32_t address, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}
__device__ inline void store_there(uint32_t address, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

#endif

}  // namespace dsv4
