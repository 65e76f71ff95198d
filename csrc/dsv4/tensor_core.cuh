// Matrix products of 64 rows over shared memory: wgmma where the target has it, mma.sync m16n8k16 elsewhere.
//
// A tile is columns of 64 bf16 values, one after the other; a row of a column is 128 bytes, whose 16-byte chunks are
// permuted by the row's last three bits (the 128-byte swizzle that wgmma reads). The same tile serves as an operand
// whose k runs along its rows (queries, keys of q.k) and as one whose k runs across them (values of p.v).
//
// Results lie as both instructions leave them: warp w of four holds rows 16w to 16w+15; lane 4g+c has in register 4t+i
// of eight columns t: row g (i < 2) or g + 8, column 8t + 2c + i % 2.
#pragma once
#include <cstdint>

namespace dsv4 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(DSV4_WITHOUT_WGMMA)
#define DSV4_WGMMA 1
#endif

constexpr int kRowBytes = 128;  // of a column

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Where a 16-byte chunk of a row lies in a column.
__device__ inline int swizzled(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

// Before tensor cores read what ordinary stores wrote; a barrier has to follow.
__device__ inline void publish() {
#ifdef DSV4_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Warps that only fetch give registers to those that multiply. All start with what a thread of the block has at most.
template <int kRegisters>
__device__ inline void fewer_registers() {
#ifdef DSV4_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
__device__ inline void more_registers() {
#ifdef DSV4_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
#endif
}

#ifdef DSV4_WGMMA

// 128-byte swizzle; groups of eight rows lie 1024 bytes apart.
__device__ inline uint64_t descriptor(uint32_t address) {
  constexpr uint64_t kGroup = 1024 >> 4;
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | kGroup << 16 | kGroup << 32 | 1ull << 62;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// sum[64 x 32] += a[64 x 16] b[32 x 16]^T
__device__ inline void multiply32(float (&s)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, 0, 0; }"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), "+f"(s[8]),
        "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15])
      : "l"(a), "l"(b), "r"(1));
}
// sum[64 x 64] += a[64 x 16] b[16 x 64]
__device__ inline void multiply64(float (&s)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31}, %32, %33, add, 1, 1, 0, 1; }"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), "+f"(s[8]),
        "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15]), "+f"(s[16]),
        "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]),
        "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31])
      : "l"(a), "l"(b), "r"(1));
}

#else

__device__ inline void begin_products() {}
__device__ inline void end_products() {}

#endif

template <bool kTransposed = false>
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
  }
}
__device__ inline void multiply8(float* s, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// This warp's sixteen rows of a column, values 16 * step to 16 * step + 15.
__device__ inline void load_rows(uint32_t (&a)[4], uint32_t column, int first_row, int step) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, column + swizzled(first_row + lane % 16, step * 2 + lane / 16));
}

// s[64 x kRows] += a b^T over the 64 values of a column; b's rows start at first_row. Sixteen rows are multiplied by
// mma.sync everywhere.
template <int kRows>
__device__ inline void add_products_of_rows(float (&s)[kRows / 2], uint32_t a, uint32_t b, int first_row) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#ifdef DSV4_WGMMA
    if constexpr (kRows == 32) {
      multiply32(s, descriptor(a) + (step * 32 >> 4), descriptor(b + first_row * kRowBytes) + (step * 32 >> 4));
      continue;
    }
#endif
    const int lane = threadIdx.x % 32;
    uint32_t rows[4];
    load_rows(rows, a, threadIdx.x / 32 % 4 * 16, step);
#pragma unroll
    for (int pair = 0; pair < kRows / 16; ++pair) {
      // Matrices: keys 0-7 and 8-15 of the pair's sixteen, each with the first and the second eight values.
      uint32_t keys[4];
      const int row = first_row + pair * 16 + lane / 16 * 8 + lane % 8;
      load_matrices(keys, b + swizzled(row, step * 2 + lane / 8 % 2));
      multiply8(s + pair * 8, rows, keys[0], keys[1]);
      multiply8(s + pair * 8 + 4, rows, keys[2], keys[3]);
    }
  }
}

// s[64 x 64] += a b, a one column of kRows values, b a column of kRows rows: k runs across b's rows.
template <int kRows>
__device__ inline void add_products_across_rows(float (&s)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
#ifdef DSV4_WGMMA
    if constexpr (kRows == 64) {
      multiply64(s, descriptor(a) + (step * 32 >> 4), descriptor(b) + (step * 16 * kRowBytes >> 4));
      continue;
    }
#endif
    const int lane = threadIdx.x % 32;
    uint32_t rows[4];
    load_rows(rows, a, threadIdx.x / 32 % 4 * 16, step);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      // Matrices, transposed: rows 0-7 and 8-15 of the step, each with the pair's first and second eight columns.
      uint32_t values[4];
      load_matrices<true>(values, b + swizzled(step * 16 + lane % 16, pair * 2 + lane / 16));
      multiply8(s + pair * 8, rows, values[0], values[1]);
      multiply8(s + pair * 8 + 4, rows, values[2], values[3]);
    }
  }
}

}  // namespace dsv4
