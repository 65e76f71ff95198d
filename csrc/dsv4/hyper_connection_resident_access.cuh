// How the resident kernel's threads meet and reach memory.
#pragma once
#include "hyper_connection_exchange.cuh"

namespace dsv4::resident {

__device__ inline void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_place(&barrier)) : "memory");
}

// The lane, asked for again: what follows from it is not kept in registers.
__device__ inline uint32_t lane_again() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Whether this is the one lane of the warp that acts for it. ptxas knows that there is one, so what it asks the copying
// unit for is uniform: else a loop looks for the lanes that differ, 100 cycles for each copy.
__device__ inline bool is_elected() {
  uint32_t one;
  asm volatile("{ .reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one; }" : "=r"(one));
  return one != 0;
}

// -- barriers of some of the block's warps -----------------------------------------------------------------
enum Barrier { kNormed = 1 };  // 0 is the block's
template <int kOfThem>
__device__ inline void meet(Barrier which) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(which)), "n"(kOfThem) : "memory");
}

// -- copies that count the bytes that are there ------------------------------------------------------------
// Where `real` is false they are asked for by no one: so their code has been there before it is waited for.
//
// Boxes that are read stay in the L2 cache while there is something else that can leave, and those that are written
// leave first: so reads do not have to wait until they do.
constexpr uint64_t kStays = 0x14f0000000000000;   // as createpolicy makes it for L2::evict_last
constexpr uint64_t kLeaves = 0x12f0000000000000;  // and for L2::evict_first

// Boxes of tensors whose rows are whole: from a place in the further dimensions on.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& from, int second, int third, int fourth,
                                uint64_t& there, bool real) {
  asm volatile(
      "{ .reg .pred real;\n"
      "setp.ne.u32 real, %8, 0;\n"
      "@real cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7; }" ::"r"(to),
      "l"(&from), "r"(0), "r"(second), "r"(third), "r"(fourth), "r"(shared_place(&there)), "l"(kStays),
      "r"(static_cast<uint32_t>(real))
      : "memory");
}
__device__ inline void copy_box(uint32_t to, const CUtensorMap& from, int second, int third, uint64_t& there,
                                bool real) {
  asm volatile(
      "{ .reg .pred real;\n"
      "setp.ne.u32 real, %7, 0;\n"
      "@real cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6; }" ::"r"(to),
      "l"(&from), "r"(0), "r"(second), "r"(third), "r"(shared_place(&there)), "l"(kStays),
      "r"(static_cast<uint32_t>(real))
      : "memory");
}
__device__ inline void copy_bytes(void* to, const void* from, int bytes, uint64_t& there, bool real) {
  asm volatile(
      "{ .reg .pred real;\n"
      "setp.ne.u32 real, %4, 0;\n"
      "@real cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3]; }" ::"r"(
          shared_place(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_place(&there)), "r"(static_cast<uint32_t>(real))
      : "memory");
}
__device__ inline void fetch_description(const CUtensorMap& of) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&of) : "memory");
}
// The other way.
__device__ inline void copy_box_out(const CUtensorMap& to, uint32_t from, int second, int third, int fourth) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;" ::
          "l"(&to),
      "r"(from), "r"(0), "r"(second), "r"(third), "r"(fourth), "l"(kLeaves)
      : "memory");
}
// This thread's copies since the last group are one.
__device__ inline void commit_copies() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all groups but the last so many have been read.
template <int kLast>
__device__ inline void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLast) : "memory");
}
// What threads have read and written, as far as this one knows of it, comes before what such copies read and write.
__device__ inline void before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -- accesses that the compiler is to leave where they are -------------------------------------------------
__device__ inline void store(uint8_t* to, const uint4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ inline float load_shared_float(uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}
__device__ inline void store_shared(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void store_shared(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
// Four matrices of eight rows of sixteen bytes, as `load_matrices` has them.
__device__ inline void store_matrices(uint32_t to, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}
// Here, and not behind stores: those have to read their address first.
__device__ inline void advance(uint8_t*& at, uint32_t by) {
  at += by;
  asm volatile("" : "+l"(at));
}

}  // namespace dsv4::resident
