// What blocks of a cluster need of sm_90 to exchange values: barriers that count bytes, stores to a neighbour's shared
// memory; and accesses to global memory that run beside the threads.
#pragma once
#include <cstdint>

namespace dsv4 {

__device__ inline uint32_t shared_place(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// -- barriers ----------------------------------------------------------------------------------------------
__device__ inline void make_barrier(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_place(&barrier)), "r"(arrivals) : "memory");
}
// Barriers that were just made become visible to the cluster.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive_and_expect(uint64_t& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_place(&barrier)), "r"(bytes)
               : "memory");
}
// Until the phase of that parity is over; what was written or sent before is visible then.
__device__ inline void wait(uint64_t& barrier, int parity) {
  asm volatile(
      "{ .reg .pred over;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@over bra.uni out;\n"
      "bra.uni again;\n"
      "out: }" ::"r"(shared_place(&barrier)),
      "r"(parity)
      : "memory");
}

// -- the cluster -------------------------------------------------------------------------------------------
__device__ inline int rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Without waiting for what this thread has written: barriers that were made and published are seen all the same.
__device__ inline void arrive_with_barriers() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where a place of this block's shared memory lies in another block's.
__device__ inline uint32_t place_at(const void* at, int rank) {
  uint32_t place;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_place(at)), "r"(rank));
  return place;
}
// A value to another block, counted by a barrier there.
__device__ inline void send(uint32_t to, float v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(v)), "r"(barrier)
               : "memory");
}
__device__ inline void send(uint32_t to, float4 v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
               "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)),
               "r"(__float_as_uint(v.w)), "r"(barrier)
               : "memory");
}

// -- global memory -----------------------------------------------------------------------------------------
__device__ inline void copy_in(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_place(to)), "l"(__cvta_generic_to_global(from))
               : "memory");
}
// Until this thread's copies are there.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Sixteen bytes that nobody writes meanwhile, past the L1 cache.
__device__ inline uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(from)));
  return v;
}
// To the L2 cache.
__device__ inline void fetch_ahead(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes));
}

}  // namespace dsv4
