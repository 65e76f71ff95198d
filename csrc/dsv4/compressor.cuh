// What compressors read: states of a request's positions, pooled by softmax, for the rows that complete a group.
#pragma once
#include <type_traits>

#include "launch.cuh"
#include "numeric.cuh"
#include "pages.cuh"

namespace dsv4 {

constexpr int kQuad = 4;  // channels of a thread, or a copy: one 16-byte access of float32

// Blocks that a multiprocessor holds: 528 in all on an H200, where 2048 tokens make 512. With room for a few more, the
// next kernel's first blocks go where some are left over, and its work lies unevenly.
constexpr int kResident = 4;

struct States {
  const float4* base;
  uint32_t block_quads;  // from one block to the next
  const int32_t* table;  // null without entries: there is nothing to compress
  uint32_t table_stride;
  int rows, width;  // of a block, and of a row: kv, then score
  Divisor blocks;   // positions to blocks
};

// The block that holds a request's position; the caller has made sure that there is one.
__device__ inline int block_of(const States& s, int request, uint32_t at) {
  return s.table[static_cast<uint32_t>(request) * s.table_stride + s.blocks.quotient(at)];
}

// Where the row of a position begins, in 16-byte units.
__device__ inline uint32_t row_offset(const States& s, int block, uint32_t at) {
  const uint32_t in_block = at - s.blocks.quotient(at) * s.rows;
  return static_cast<uint32_t>(max(0, block)) * s.block_quads + in_block * (s.width / kQuad);
}

// Copies 16 bytes to shared memory without a register in between.
__device__ inline void copy_async(float4* to, const float4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
// The thread's own copies are there; a barrier shows them to others.
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Rows of a window that ends at `last` which lie before the first position: they weigh nothing, whatever they hold.
__device__ inline int rows_before(int last, int window) { return max(0, window - 1 - last); }

// What stands for four channels of a row that is not there.
__device__ inline float4 absent(bool score) {
  const float v = score ? -INFINITY : 0;
  return {v, v, v, v};
}

__device__ inline float channel(const float4& v, int c) { return c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w; }

// Softmax-gated sum of a channel of some rows.
struct Pooled {
  float most = -3e38f, weight = 0, sum = 0;  // finite, so that differences to it are numbers
};

__device__ inline float weight_of(float score, float most) {
  float weight;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"((score - most) * 1.4426950408889634f));
  return weight;
}

template <int kRows>
__device__ Pooled pool(const float (&kv)[kRows], const float (&score)[kRows]) {
  Pooled p;
  float most[4] = {score[0], score[1], score[2], score[3]};  // short chains of what depends on one another
#pragma unroll
  for (int r = 4; r < kRows; ++r) most[r % 4] = fmaxf(most[r % 4], score[r]);
  p.most = fmaxf(p.most, fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
  float weight[2] = {}, sum[2] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float w = weight_of(score[r], p.most);
    weight[r % 2] += w;
    sum[r % 2] = fmaf(w, kv[r], sum[r % 2]);
  }
  p.weight = weight[0] + weight[1], p.sum = sum[0] + sum[1];
  return p;
}

__device__ inline Pooled merge(const Pooled& a, const Pooled& b) {
  const float most = fmaxf(a.most, b.most), of_a = weight_of(a.most, most), of_b = weight_of(b.most, most);
  return {most, a.weight * of_a + b.weight * of_b, a.sum * of_a + b.sum * of_b};
}

__device__ inline float value_of(const Pooled& p) {
  float by;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(by) : "f"(p.weight));
  return p.sum * by;
}

// Where the rows go, and what they are; `request` may be null.
struct Rows {
  const int64_t* slots;
  const int64_t* positions;
  const int32_t* request;
  int tokens, chunk;  // chunk: rows that a unit looks at
};

// Has what a unit is told fetched into the L2 cache, by its threads in turn. Nothing is read, so this comes before the
// wait for the kernel before, whose end then hides it.
__device__ inline void fetch_ahead(const Rows& rows, int unit, int thread) {
  constexpr int kSectorRows = 4;
  const int of_chunk = thread * kSectorRows, row = unit * rows.chunk + of_chunk;
  if (of_chunk >= rows.chunk || row >= rows.tokens) return;
  const auto fetch = [](const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); };
  fetch(rows.slots + row);
  fetch(rows.positions + row);
  if (rows.request) fetch(rows.request + row);
}

// What a kernel is told of a row.
struct Told {
  int slot = -1, position = 0, request = 0;  // all of 31 bits
};

// Of a row of a unit's chunk; without a slot if there is no such row.
__device__ inline Told look_up(const Rows& rows, int unit, int of_chunk) {
  Told told;
  const int row = unit * rows.chunk + of_chunk;
  if (of_chunk < rows.chunk && row < rows.tokens) {
    told.slot = static_cast<int>(rows.slots[row]);
    told.position = static_cast<int>(rows.positions[row]);
    if (rows.request) told.request = rows.request[row];
  }
  return told;
}

// Calls body(token, slot, position, request) for the rows of a unit's chunk that have a slot. What it is told is loaded
// for all of them at once, kLooks rows a lane, one or two.
template <int kLooks = 1, class Body>
__device__ void for_each_slot(const Rows& rows, int unit, Body body) {
  Told told[kLooks];
  std::conditional_t<kLooks == 1, uint32_t, uint64_t> left = 0;
#pragma unroll
  for (int i = 0; i < kLooks; ++i) told[i] = look_up(rows, unit, i * 32 + threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kLooks; ++i) left |= decltype(left){__ballot_sync(kWholeWarp, told[i].slot >= 0)} << 32 * i;
  for (; left; left &= left - 1) {
    const int at = kLooks == 1 ? __ffs(left) - 1 : __ffsll(static_cast<long long>(left)) - 1;
    const auto from = [&](int Told::*what) {
      return __shfl_sync(kWholeWarp, at < 32 ? told[0].*what : told[kLooks - 1].*what, at % 32);
    };
    body(unit * rows.chunk + at, from(&Told::slot), from(&Told::position), from(&Told::request));
  }
}

// Rows a unit looks at. One in four has a slot in C4; one in 128 in C128. Few rows have units of their own.
inline int chunk_for(int64_t tokens, int ratio) {
  constexpr int kFewRows = 64, kMost = 32;
  if (tokens <= kFewRows) return 1;
  return ratio < kMost ? ratio : kMost;
}

inline States read_states(Reader& r, Rows& rows_of_call, int64_t& tokens) {
  int64_t blocks = kUnbound, rows = kUnbound, width = kUnbound, requests = kUnbound, listed = kUnbound;
  const Operand& state = r.strided("state", {DType::f32}, {&blocks, &rows, &width});
  r.require(state.stride[0] % kQuad == 0 || blocks < 2, "state", "has an unaligned page stride",
            "align pages to 16 bytes");
  const int64_t stride = blocks < 2 ? rows * width : state.stride[0];
  r.require(blocks * stride / kQuad <= std::numeric_limits<uint32_t>::max(), "state", "has more than 2**36 bytes",
            "split it");
  const Operand& table = r.strided("table", {DType::i32}, {&requests, &listed}, 4);
  rows_of_call.positions = r.in("positions", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  rows_of_call.request = r.in("request", {DType::i32}, {&tokens}, 4).as<const int32_t>();
  r.require(requests * table.stride[0] <= std::numeric_limits<uint32_t>::max(), "table", "has more than 2**32 entries",
            "split it");
  return {state.as<const float4>(),
          static_cast<uint32_t>(stride / kQuad),
          requests * listed > 0 ? table.as<const int32_t>() : nullptr,
          static_cast<uint32_t>(table.stride[0]),
          static_cast<int>(rows),
          static_cast<int>(width),
          Divisor(static_cast<uint32_t>(rows))};
}

}  // namespace dsv4
