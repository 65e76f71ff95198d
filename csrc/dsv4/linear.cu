// Products of a few rows with weight matrices.
//
// Floor: the weights read once, at the memory's pace, whatever the rows. A warp takes four columns of the output: their
// weights lie one behind the other, and each vector of them is multiplied with every row while it is in registers.
// Where that gives too few warps, the eight of a block share four columns and add up their parts of the depth. How a
// row is summed does not depend on the rows beside it. More rows are cuBLAS's, by way of PyTorch.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kColumns = 4;
constexpr int kMostRows = 8;
constexpr int kEnough = 2 * 132 * kWarps;  // warps of four columns each: two blocks for every SM of an H200

struct LinearArguments {
  const uint4* x;       // [groups, rows, depth] bf16
  const uint4* weight;  // [groups, columns, depth] bf16
  void* out;            // [rows, groups, columns], bf16 or float32
  int rows, groups, columns, vectors;
  bool wide, add;
};

__device__ float dot(const Eight& a, const Eight& b, float sum) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum = fmaf(a.x[i], b.x[i], sum);
  return sum;
}

// Read once: not worth a place in the L1.
__device__ uint4 streamed(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ void write(const LinearArguments& a, int row, int column, float sum) {
  const int64_t at = (static_cast<int64_t>(row) * a.groups + blockIdx.y) * a.columns + column;
  if (a.wide) {
    float* out = static_cast<float*>(a.out) + at;
    *out = a.add ? *out + sum : sum;
  } else {
    auto* out = static_cast<__nv_bfloat16*>(a.out) + at;
    *out = __float2bfloat16_rn(a.add ? __bfloat162float(*out) + sum : sum);
  }
}

// kSplit warps share four columns.
template <int kRows, int kSplit>
__global__ void __launch_bounds__(kThreads) linear_kernel(const __grid_constant__ LinearArguments a) {
  __shared__ float parts[kSplit > 1 ? kWarps : 1][kColumns * kRows];
  after_predecessor();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = (kSplit > 1 ? blockIdx.x : blockIdx.x * kWarps + warp) * kColumns;
  if (first >= a.columns) return;  // with a split, for the whole block
  const uint4* x = a.x + static_cast<int64_t>(blockIdx.y) * a.rows * a.vectors;
  const uint4* weight[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int64_t column = static_cast<int64_t>(blockIdx.y) * a.columns + min(first + c, a.columns - 1);
    weight[c] = a.weight + column * a.vectors;
  }
  float sum[kColumns][kRows] = {};
#pragma unroll 2
  for (int v = lane + (kSplit > 1 ? 32 * warp : 0); v < a.vectors; v += 32 * kSplit) {
    uint4 raw[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) raw[c] = streamed(weight[c] + v);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Eight own = unpack(x[min(r, a.rows - 1) * a.vectors + v]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c][r] = dot(unpack(raw[c]), own, sum[c][r]);
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float whole = group_sum<32>(sum[c][r]);
      if (kSplit > 1) {
        if (lane == 0) parts[warp][c * kRows + r] = whole;
      } else if (lane == c * kRows + r && r < a.rows && first + c < a.columns) {
        write(a, r, first + c, whole);
      }
    }
  }
  if (kSplit == 1) return;
  __syncthreads();
  const int c = threadIdx.x / kRows, r = threadIdx.x % kRows;
  if (c >= kColumns || r >= a.rows || first + c >= a.columns) return;
  float whole = 0;
#pragma unroll
  for (int part = 0; part < kSplit; ++part) whole += parts[part][threadIdx.x];
  write(a, r, first + c, whole);
}

template <int kRows>
void launch_linear(const Call& call, const LinearArguments& a) {
  const int fours = ceil_div(a.columns, kColumns);
  if (fours * a.groups >= kEnough) {
    launch(call, linear_kernel<kRows, 1>, dim3(ceil_div(fours, kWarps), a.groups), kThreads, a);
  } else {
    launch(call, linear_kernel<kRows, kWarps>, dim3(fours, a.groups), kThreads, a);
  }
}

// A row's dims as one, where its elements lie one behind the other.
void flatten(Operand& one) {
  if (one.dims != 3 || one.stride[2] != 1 || one.stride[1] != one.size[2]) return;
  one.size[1] *= one.size[2];
  one.stride[1] = 1;
  one.dims = 2;
}

}  // namespace

// x [T, K] times weight [K, N] into out [T, N], K and N of one dim or two; or x [G, T, K] times weight [G, K, N] into
// out [T, G, N].
void few_linear(const Call& given) {
  Call call = given;
  Operand &x = call.tensor[0], &out = call.tensor[2];
  const bool grouped = call.tensor[1].dims == 3;
  if (!grouped) {
    flatten(x);
    flatten(out);
  }
  if (x.dtype != DType::bf16 || x.dims < 2 || x.size[x.dims - 2] > kMostRows || x.size[x.dims - 1] % kVector != 0)
    throw NotTaken();
  Reader r(call);
  int64_t groups = grouped ? kUnbound : 1, rows = kUnbound, depth = kUnbound, columns = kUnbound;
  LinearArguments a{};
  if (grouped) {
    a.x = r.in("x", {DType::bf16}, {&groups, &rows, &depth}).as<const uint4>();
    a.weight = r.columns("weight", {DType::bf16}, {groups, depth, &columns}).as<const uint4>();
  } else {
    a.x = r.in("x", {DType::bf16}, {&rows, &depth}).as<const uint4>();
    a.weight = r.columns("weight", {DType::bf16}, {depth, &columns}).as<const uint4>();
  }
  a.add = r.integer() != 0;
  a.out = grouped ? r.out("out", {DType::bf16, DType::f32}, {rows, groups, columns}, 4).address
                  : r.out("out", {DType::bf16, DType::f32}, {rows, columns}, 4).address;
  r.done();
  if (rows == 0 || columns == 0 || groups == 0) return;
  r.require(depth > 0, "x", "has no columns", "pass at least 8");
  a.rows = static_cast<int>(rows);
  a.groups = static_cast<int>(groups);
  a.columns = static_cast<int>(columns);
  a.vectors = static_cast<int>(depth / kVector);
  a.wide = out.dtype == DType::f32;
  if (rows == 1) {
    launch_linear<1>(call, a);
  } else if (rows == 2) {
    launch_linear<2>(call, a);
  } else if (rows <= 4) {
    launch_linear<4>(call, a);
  } else {
    launch_linear<8>(call, a);
  }
}

}  // namespace dsv4
