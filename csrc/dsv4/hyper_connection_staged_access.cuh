// How the staged kernel's threads reach memory: copies to shared memory that run beside them, and accesses that ptxas
// is to leave where they are.
#pragma once
#include "hyper_connection_exchange.cuh"

namespace dsv4::staged {

using dsv4::send;
__device__ inline void send(uint32_t to, float2 v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(barrier)
               : "memory");
}
__device__ inline void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_place(&barrier)) : "memory");
}

// -- barriers of some of the block's warps -----------------------------------------------------------------
enum Barrier { kFetched = 1, kNormed, kMade, kWeighed };  // 0 is the block's
template <int kThreads>
__device__ inline void meet(Barrier which) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(which)), "n"(kThreads) : "memory");
}
// The others may go on when this thread has come.
template <int kThreads>
__device__ inline void pass(Barrier which) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(which)), "n"(kThreads) : "memory");
}

// -- copies ------------------------------------------------------------------------------------------------
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Sixteen bytes that are read once; of no bytes, sixteen zeros. `to` has to differ between threads in a way that ptxas
// 13.0 cannot split: of an address with a uniform part and a policy it makes an illegal instruction.
template <int kTo = 0, int kFrom = 0>
__device__ inline void copy_once(uint32_t to, const uint8_t* from, uint32_t bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0+%4], [%1+%5], 16, %2, %3;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "l"(policy), "n"(kTo), "n"(kFrom)
               : "memory");
}

// -- global memory -----------------------------------------------------------------------------------------
// Sixteen bytes that this thread may have stored, past the L1 cache.
__device__ inline uint4 load_again(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return v;
}
__device__ inline void store(uint8_t* to, const uint4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// -- shared memory -----------------------------------------------------------------------------------------
__device__ inline uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ inline void store_shared(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace dsv4::staged
