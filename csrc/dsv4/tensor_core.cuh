// Matrix products of 64 rows over shared memory: wgmma where the target has it, mma.sync m16n8k16 elsewhere.
//
// A tile is columns of 64 bf16 values, one after the other; a row of a column is 128 bytes, whose 16-byte chunks are
// permuted by the row's last three bits (the 128-byte swizzle that wgmma reads). The same tile serves as an operand
// whose k runs along its rows (queries, keys of q.k) and as one whose k runs across them (values of p.v).
//
// Results lie as both instructions leave them: warp w of four holds rows 16w to 16w+15; lane 4g+c has in register 4t+i
// of eight columns t: row g (i < 2) or g + 8, column 8t + 2c + i % 2. Packed in pairs they are the rows of a next
// product's first operand, as both instructions take it from registers.
//
// Products are started, and go on while their warps do something else, until `wait_products` says that all but the last
// few of the groups that `commit_products` closed are done. mma.sync does all at once.
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
template <int kRegisters>
__device__ inline void more_registers() {
#ifdef DSV4_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Four matrices of eight rows of sixteen bytes: lane 8i + r has the address of the i-th's row r.
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

#ifdef DSV4_WGMMA

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// 128-byte swizzle; groups of eight rows lie 1024 bytes apart, columns that one instruction takes together `column`.
__device__ inline uint64_t descriptor(uint32_t address, uint32_t column = 1024) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(column >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
}

#define DSV4_FOUR(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define DSV4_SIXTEEN(s, i) DSV4_FOUR(s, i), DSV4_FOUR(s, i + 4), DSV4_FOUR(s, i + 8), DSV4_FOUR(s, i + 12)
#define DSV4_64(s, i) DSV4_SIXTEEN(s, i), DSV4_SIXTEEN(s, i + 16), DSV4_SIXTEEN(s, i + 32), DSV4_SIXTEEN(s, i + 48)

// sum[64 x 64] += a[64 x 16] b[64 x 16]^T
__device__ inline void multiply64(float (&s)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
      "%29,%30,%31}, %32, %33, add, 1, 1, 0, 0; }"
      : DSV4_SIXTEEN(s, 0), DSV4_SIXTEEN(s, 16)
      : "l"(a), "l"(b));
}
// sum[64 x 128] += a[64 x 16] b[16 x 128]
__device__ inline void multiply128(float* s, uint64_t a, uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
      "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
      "%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, add, 1, 1, 0, 1; }"
      : DSV4_64(s, 0)
      : "l"(a), "l"(b));
}
__device__ inline void multiply128(float* s, const uint32_t* a, uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
      "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
      "%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, add, 1, 1, 1; }"
      : DSV4_64(s, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef DSV4_64
#undef DSV4_SIXTEEN
#undef DSV4_FOUR

#else

__device__ inline void begin_products() {}
__device__ inline void commit_products() {}
template <int kPending>
__device__ inline void wait_products() {}

__device__ inline void multiply8(float* s, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// This warp's sixteen rows of a column, values 16 * step to 16 * step + 15.
__device__ inline void load_rows(uint32_t (&a)[4], uint32_t column, int step) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  load_matrices(a, column + swizzled(row, step * 2 + lane / 16));
}
// s[64 x 256] += a b, a the step's sixteen values of each row.
__device__ inline void multiply_step(float (&s)[128], const uint32_t* a, uint32_t b, uint32_t column_bytes, int step) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int pair = 0; pair < 16; ++pair) {
    // Matrices, transposed: rows 0-7 and 8-15 of the step, each with the pair's first and second eight columns.
    uint32_t values[4];
    const uint32_t column = b + pair / 4 * column_bytes;
    load_matrices<true>(values, column + swizzled(step * 16 + lane % 16, pair % 4 * 2 + lane / 16));
    multiply8(s + pair * 8, a, values[0], values[1]);
    multiply8(s + pair * 8 + 4, a, values[2], values[3]);
  }
}

#endif

// s[64 x kRows] += a b^T over the 64 values of a column.
template <int kRows>
__device__ inline void add_products_of_rows(float (&s)[kRows / 2], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#ifdef DSV4_WGMMA
    multiply64(s, descriptor(a) + (step * 32 >> 4), descriptor(b) + (step * 32 >> 4));
#else
    const int lane = threadIdx.x % 32;
    uint32_t rows[4];
    load_rows(rows, a, step);
#pragma unroll
    for (int pair = 0; pair < kRows / 16; ++pair) {
      // Matrices: keys 0-7 and 8-15 of the pair's sixteen, each with the first and the second eight values.
      uint32_t keys[4];
      load_matrices(keys, b + swizzled(pair * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
      multiply8(s + pair * 8, rows, keys[0], keys[1]);
      multiply8(s + pair * 8 + 4, rows, keys[2], keys[3]);
    }
#endif
  }
}

// s[64 x 256] += a b: a one column of kRows values, b four columns of kRows rows; k runs across b's rows.
template <int kRows>
__device__ inline void add_products_across_rows(float (&s)[128], uint32_t a, uint32_t b) {
  constexpr uint32_t kColumn = kRows * kRowBytes;
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
#ifdef DSV4_WGMMA
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply128(s + half * 64, descriptor(a) + (step * 32 >> 4),
                  descriptor(b + half * 2 * kColumn, kColumn) + (step * 16 * kRowBytes >> 4));
    }
#else
    uint32_t rows[4];
    load_rows(rows, a, step);
    multiply_step(s, rows, b, kColumn, step);
#endif
  }
}

// The same, a in registers: results of a product, packed in pairs.
template <int kRows>
__device__ inline void add_products_across_rows(float (&s)[128], const uint32_t (&a)[kRows / 4], uint32_t b) {
  constexpr uint32_t kColumn = kRows * kRowBytes;
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
#ifdef DSV4_WGMMA
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply128(s + half * 64, a + 4 * step,
                  descriptor(b + half * 2 * kColumn, kColumn) + (step * 16 * kRowBytes >> 4));
    }
#else
    multiply_step(s, a + 4 * step, b, kColumn, step);
#endif
  }
}

}  // namespace dsv4
