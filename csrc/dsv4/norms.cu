// RMSNorm with weights: of the query latent and of the KV in one launch, and of whole rows.
//
// Floor: every value read once and written once. A warp takes a row (or its part); the row stays in registers.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kWarps = 4;
constexpr int kLaneValues = 32 * kVector;  // values of a row that one access of a whole warp covers

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

// kMost accesses of a warp hold the widest part.
template <int kMost>
__global__ void __launch_bounds__(32 * kWarps) norm_kernel(const __grid_constant__ NormArguments a) {
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / a.parts;
  if (row >= a.rows) return;
  const Norm part = a.part[warp - row * a.parts];
  const uint4* from = a.from + (static_cast<int64_t>(row) * a.row_width + part.start) / kVector + lane;
  uint4 raw[kMost];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i * kLaneValues + lane * kVector < part.width) raw[i] = __ldcs(from + i * 32);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i * kLaneValues + lane * kVector < part.width) sum += sum_of_squares(unpack(raw[i]));
  }
  const float by = 1.0f / sqrtf(group_sum<32>(sum) / part.width + a.eps);
  uint4* to = part.to + static_cast<int64_t>(row) * part.width / kVector + lane;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int at = i * kLaneValues + lane * kVector;
    if (at >= part.width) break;
    Eight x = unpack(raw[i]);
    const Eight weight = load_weights(part.weight, part.weight_is_bf16, at);
#pragma unroll
    for (int j = 0; j < kVector; ++j) x.x[j] = x.x[j] * by * weight.x[j];
    to[i * 32] = pack(x);
  }
}

void launch(const Call& call, NormArguments& a) {
  int widest = 0;
  for (int i = 0; i < a.parts; ++i) widest = max(widest, a.part[i].width);
  const int blocks = ceil_div(static_cast<int64_t>(a.rows) * a.parts, kWarps);
  if (widest <= 4 * kLaneValues) {
    norm_kernel<4><<<blocks, 32 * kWarps, 0, call.stream>>>(a);
  } else if (widest <= 8 * kLaneValues) {
    norm_kernel<8><<<blocks, 32 * kWarps, 0, call.stream>>>(a);
  } else {
    norm_kernel<28><<<blocks, 32 * kWarps, 0, call.stream>>>(a);
  }
  check_launch(call.op);
}

constexpr int kWidest = 28 * kLaneValues;  // 7168, the hidden size of V4-Pro

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
  launch(call, a);
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
  launch(call, a);
}

}  // namespace dsv4
