// How the warps of an attention block wait for one another, and the blocks of a cluster.
//
// Between warps that fetch and warps that multiply: mbarriers, whose phases alternate. Among those that multiply: named
// barriers. Between blocks: mbarriers as well, on which other blocks' warps arrive, or the bytes that they send.
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

// For barriers that other blocks of the cluster know; then each thread arrives, and waits before it uses one of theirs.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Arrives, and so many bytes have to arrive, too.
__device__ inline void expect(uint64_t& barrier, uint32_t bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
                   shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}
// The same place in another block's shared memory.
__device__ inline uint32_t place_in(uint32_t address, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
// Once for a warp, at the barriers of all other blocks, when it has what it read. What it wrote is not published.
__device__ inline void arrive_elsewhere(uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    for (int block = 0; block < static_cast<int>(gridDim.y); ++block) {
      if (block == static_cast<int>(blockIdx.y)) continue;
      asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                       place_in(shared_address(&barrier), block))
                   : "memory");
    }
  }
  __syncwarp();
}
// Stores in another block's shared memory; the bytes arrive at a barrier there.
__device__ inline void send(uint32_t address, uint4 v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}
__device__ inline void send(uint32_t address, float2 v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(v.x), "f"(v.y), "r"(barrier)
               : "memory");
}

#endif

}  // namespace dsv4
