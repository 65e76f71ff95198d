// Consecutive states of some requests, dequantised, one request after the other.
//
// Floor: 584 bytes read and 1024 written a state. A warp takes a state.
#include "launch.cuh"
#include "ops.h"
#include "states.cuh"

namespace dsv4 {
namespace {

constexpr int kWarps = 4;

struct GatherArguments {
  Pages cache;
  const int32_t* table;
  int64_t table_stride;
  const int32_t* request;
  const int32_t* first;
  const int32_t* starts;  // [groups + 1]
  uint4* keys;            // [rows, 512] bf16
  int groups, rows, format;
};

// The group whose rows hold this one.
__device__ int group_of(const GatherArguments& a, int row) {
  int low = 0, high = a.groups;  // starts[low] <= row < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (a.starts[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(32 * kWarps) gather_kernel(const __grid_constant__ GatherArguments a) {
  after_predecessor();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= a.rows || row < a.starts[0] || row >= a.starts[a.groups]) return;
  const int group = group_of(a, row);
  const int state = a.first[group] + row - a.starts[group];
  const int block = a.cache.pages.quotient(state), offset = state - block * a.cache.block_size;
  const int64_t page = a.table[a.request[group] * a.table_stride + block];
  const uint8_t* from = a.cache.base + page * a.cache.stride;
  uint4* to = a.keys + static_cast<int64_t>(row) * (kWidth / kVector);
  if (a.format == kPlain) {
    const auto* vectors = reinterpret_cast<const uint4*>(from + static_cast<int64_t>(offset) * 2 * kWidth);
    to[lane] = vectors[lane];
    to[lane + 32] = vectors[lane + 32];
    return;
  }
  const uint8_t* data = from + offset * kStateBytes;
  const uint8_t* scales = from + static_cast<int64_t>(a.cache.block_size) * kStateBytes + offset * kScaleBytes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int vector = lane + 32 * i, dim = vector * kVector;
    if (dim >= kNope) {
      to[vector] = *reinterpret_cast<const uint4*>(data + kNope + (dim - kNope) * 2);
    } else {
      const uint2 codes = *reinterpret_cast<const uint2*>(data + dim);
      const float scale = ue8m0(scales[dim / 64]);
      const uint2 a0 = bf16_of_e4m3x4(codes.x, scale), a1 = bf16_of_e4m3x4(codes.y, scale);
      to[vector] = {a0.x, a0.y, a1.x, a1.y};
    }
  }
}

}  // namespace

void gather_keys(const Call& call) {
  Reader r(call);
  int64_t requests = kUnbound, listed = kUnbound, groups = kUnbound, rows = kUnbound;
  GatherArguments a{};
  const Operand& cache = r.cache("cache");
  const Operand& table = r.strided("table", {DType::i32}, {&requests, &listed}, 4);
  a.request = r.in("request", {DType::i32}, {&groups}, 4).as<const int32_t>();
  a.first = r.in("first", {DType::i32}, {&groups}, 4).as<const int32_t>();
  a.starts = r.in("starts", {DType::i32}, {groups + 1}, 4).as<const int32_t>();
  a.keys = r.out("keys", {DType::bf16}, {&rows, kWidth}).as<uint4>();
  const int64_t rope = r.integer(), block_size = r.integer(), format = r.integer();
  r.require(rope == kRope, "rope", "is " + std::to_string(rope), "states have 64 rotated dims");
  r.require(format == kPlain || format == kFp8DsMla, "format", "is " + std::to_string(format),
            "pass PLAIN or FP8_DS_MLA");
  a.cache = pages(r, "cache", cache, block_size, format, format == kPlain ? 2 * kWidth : kStateBytes + kScaleBytes);
  r.require(a.cache.vectors, "cache", "has pages that are not aligned", "align them to 16 bytes");
  r.done();
  if (groups == 0 || rows == 0) return;
  a.table = table.as<const int32_t>();
  a.table_stride = table.stride[0];
  a.groups = static_cast<int>(groups);
  a.rows = static_cast<int>(rows);
  a.format = static_cast<int>(format);
  launch(call, gather_kernel, ceil_div(rows, kWarps), 32 * kWarps, a);
}

}  // namespace dsv4
