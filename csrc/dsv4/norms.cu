// RMSNorm with weights: of the query latent and of the KV in one launch, and of whole rows.
//
// Floor: every value read once and written once. kLanes threads hold a row, or its part, in registers; the weights come
// while the sum is under way.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kThreads = 128;

struct Norm {
  const void* weight;
  uint4* to;
  int start, width;  // columns of the row
  bool weight_is_bf16;
};

struct NormArguments {
  const uint4* from;
  Norm part[2];
  float eps;
  int rows, row_width, parts;
};

// Sum over the kLanes threads of a row: a warp, or the block.
template <int kLanes>
__device__ float row_sum(float v) {
  v = group_sum<32>(v);
  if constexpr (kLanes == 32) return v;
  __shared__ float part[kThreads / 32];
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) sum += part[i];
  return sum;
}

// kMost accesses of 16 bytes a thread hold the widest part.
template <int kLanes, int kMost>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormArguments a) {
  await_predecessor();
  const int of_block = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int unit = blockIdx.x * (kThreads / kLanes) + of_block, row = unit / a.parts;
  if (row >= a.rows) return;
  const Norm part = a.part[unit - row * a.parts];
  const uint4* from = a.from + (static_cast<int64_t>(row) * a.row_width + part.start) / kVector + lane;
  const int vectors = part.width / kVector;
  uint4 raw[kMost];
  Eight weight[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (lane + i * kLanes < vectors) raw[i] = __ldcs(from + i * kLanes);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (lane + i * kLanes < vectors)
      weight[i] = load_weights(part.weight, part.weight_is_bf16, (lane + i * kLanes) * kVector);
  }
  let_successor();  // once this kernel's reads are under way: see launch.cuh
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (lane + i * kLanes < vectors) sum += sum_of_squares(unpack(raw[i]));
  }
  const float by = rsqrtf(row_sum<kLanes>(sum) / part.width + a.eps);
  uint4* to = part.to + static_cast<int64_t>(row) * vectors + lane;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (lane + i * kLanes >= vectors) break;
    Eight x = unpack(raw[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) x.x[j] = x.x[j] * by * weight[i].x[j];
    to[i * kLanes] = pack(x);
  }
}

template <int kLanes, int kMost>
void launch_rows(const Call& call, const NormArguments& a) {
  const int blocks = ceil_div(static_cast<int64_t>(a.rows) * a.parts, kThreads / kLanes);
  launch(call, norm_kernel<kLanes, kMost>, blocks, kThreads, a);
}

constexpr int kWidest = 7 * kThreads * kVector;  // 7168, the hidden size of V4-Pro

void launch_widest(const Call& call, const NormArguments& a) {
  int widest = 0;
  for (int i = 0; i < a.parts; ++i) widest = max(widest, a.part[i].width);
  if (widest <= 4 * 32 * kVector) {
    launch_rows<32, 4>(call, a);
  } else if (widest <= 2 * kThreads * kVector) {
    launch_rows<kThreads, 2>(call, a);
  } else if (widest <= 4 * kThreads * kVector) {
    launch_rows<kThreads, 4>(call, a);
  } else {
    launch_rows<kThreads, 7>(call, a);
  }
}

void check_width(const Reader& r, const char* name, int64_t width) {
  r.require(width % kVector == 0 && width <= kWidest, name, "has " + std::to_string(width) + " columns",
            "pass a multiple of 8 up to " + std::to_string(kWidest));
}

}  // namespace

void q_kv_rmsnorm(const Call& call) {
  Reader r(call);
  int64_t rows = kUnbound, together = kUnbound, q = kUnbound, kv = kUnbound;
  NormArguments a{};
  a.from = r.in("qr_kv", {DType::bf16}, {&rows, &together}).as<const uint4>();
  const Operand& q_weight = r.in("q_weight", {DType::f32, DType::bf16}, {&q});
  const Operand& kv_weight = r.in("kv_weight", {DType::f32, DType::bf16}, {&kv});
  a.eps = r.real();
  r.require(q + kv == together, "qr_kv", "has another width than its parts", "pass [T, Q+D]");
  check_width(r, "q_weight", q);
  check_width(r, "kv_weight", kv);
  uint4* qr_to = r.out("qr", {DType::bf16}, {&rows, &q}).as<uint4>();
  uint4* kv_to = r.out("kv", {DType::bf16}, {&rows, &kv}).as<uint4>();
  r.done();
  if (rows == 0) return;
  a.part[0] = {q_weight.address, qr_to, 0, static_cast<int>(q), q_weight.dtype == DType::bf16};
  a.part[1] = {kv_weight.address, kv_to, static_cast<int>(q), static_cast<int>(kv), kv_weight.dtype == DType::bf16};
  a.rows = static_cast<int>(rows);
  a.row_width = static_cast<int>(together);
  a.parts = 2;
  launch_widest(call, a);
}

void rms_norm(const Call& call) {
  Reader r(call);
  int64_t rows = kUnbound, width = kUnbound;
  NormArguments a{};
  a.from = r.in("x", {DType::bf16}, {&rows, &width}).as<const uint4>();
  const Operand& weight = r.in("weight", {DType::f32, DType::bf16}, {&width});
  a.eps = r.real();
  check_width(r, "x", width);
  uint4* to = r.out("y", {DType::bf16}, {&rows, &width}).as<uint4>();
  r.done();
  if (rows == 0) return;
  a.part[0] = {weight.address, to, 0, static_cast<int>(width), weight.dtype == DType::bf16};
  a.rows = static_cast<int>(rows);
  a.row_width = static_cast<int>(width);
  a.parts = 1;
  launch_widest(call, a);
}

}  // namespace dsv4
