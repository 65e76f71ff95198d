// The attention output rotated back and laid out by output group, in bf16 or quantised to FP8 per 128 values.
//
// Floor: o read once, the groups written once. A warp takes one head of kTokens tokens, so that its scales, which lie
// token by token, are neighbours.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kWarps = 4;
constexpr int kTokens = 4;  // the padding of the scales' rows, too
constexpr int kWidth = 512, kRope = 64, kBlock = 128;
constexpr int kRowVectors = kWidth / kVector;
constexpr int kBlockLanes = kBlock / kVector;
constexpr int kFirstRopeLane = 24;

struct InverseArguments {
  const uint4* o;  // [tokens, padded, 512] bf16
  const int64_t* positions;
  const float* cos_sin;  // [*, 64]
  void* grouped;         // [groups, tokens, heads / groups * 512]
  float* scales;         // [groups, heads / groups * 4, tokens rounded up to 4]; null for bf16
  int tokens, padded, heads, group_heads;
};

// One row: 16 values a lane, in two accesses of 256 values each. Sixteen lanes hold a block, and get its scale.
template <bool kQuantised>
__device__ void store(const InverseArguments& a, const Eight (&v)[2], int64_t at, float (&scale)[2]) {
  if constexpr (!kQuantised) {
    static_cast<uint4*>(a.grouped)[at] = pack(v[0]);
    static_cast<uint4*>(a.grouped)[at + 32] = pack(v[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // No rounding to bf16 in between.
      const int power = fp8_power(group_max<kBlockLanes>(largest(v[i])), 1e-10f);
      static_cast<uint2*>(a.grouped)[at + 32 * i] = to_e4m3(v[i], power);
      scale[i] = power_of_two(power);
    }
  }
}

template <bool kQuantised>
__global__ void __launch_bounds__(32 * kWarps) inverse_kernel(const __grid_constant__ InverseArguments a) {
  after_predecessor();
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = warp / a.heads, head = warp - chunk * a.heads;
  const int token = chunk * kTokens;
  if (token >= a.tokens) return;
  const int there = min(kTokens, a.tokens - token);
  const uint4* from = a.o + (static_cast<int64_t>(token) * a.padded + head) * kRowVectors + lane;
  const int64_t step = static_cast<int64_t>(a.padded) * kRowVectors;
  uint4 raw[kTokens][2];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (i < there) {
      raw[i][0] = from[i * step];
      raw[i][1] = from[i * step + 32];
    }
  }
  const int group = head / a.group_heads, of_group = head - group * a.group_heads;
  const int row_tokens = (a.tokens + kTokens - 1) / kTokens * kTokens;
  const int64_t row_vectors = static_cast<int64_t>(a.group_heads) * kRowVectors;
  int64_t at = (static_cast<int64_t>(group) * a.tokens + token) * row_vectors + of_group * kRowVectors + lane;
  float scale[kTokens][2] = {};  // of tokens behind the last: 0
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (i < there) {
      Eight v[2] = {unpack(raw[i][0]), unpack(raw[i][1])};
      if (lane >= kFirstRopeLane) {
        const float* row = a.cos_sin + a.positions[token + i] * kRope;
        rotate<true>(v[1], load_turn(row, kRope / 2, (lane - kFirstRopeLane) * 4));
      }
      store<kQuantised>(a, v, at + i * row_vectors, scale[i]);
    }
  }
  if (kQuantised && lane % kBlockLanes == 0) {
    // Four tokens of a block at once: single scales would be a quarter more writes than the codes are.
    float* rows = a.scales +
                  ((static_cast<int64_t>(group) * a.group_heads + of_group) * 4 + lane / kBlockLanes) * row_tokens +
                  token;
    *reinterpret_cast<float4*>(rows) = {scale[0][0], scale[1][0], scale[2][0], scale[3][0]};
    *reinterpret_cast<float4*>(rows + 2 * row_tokens) = {scale[0][1], scale[1][1], scale[2][1], scale[3][1]};
  }
}

template <bool kQuantised>
void run(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, padded = kUnbound, positions = kUnbound, groups = kUnbound, width = kUnbound;
  InverseArguments a{};
  a.o = r.in("o", {DType::bf16}, {&tokens, &padded, kWidth}).as<const uint4>();
  a.positions = r.in("positions", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  a.cos_sin = r.in("cos_sin", {DType::f32}, {&positions, kRope}).as<const float>();
  a.grouped = r.out("grouped", {kQuantised ? DType::e4m3 : DType::bf16}, {&groups, &tokens, &width}).address;
  const int64_t row = (tokens + kTokens - 1) / kTokens * kTokens;
  if (kQuantised) a.scales = r.out("scales", {DType::f32}, {&groups, width / kBlock, row}).as<float>();
  const int64_t heads = r.integer();
  r.require(heads > 0 && heads <= padded, "heads", "is " + std::to_string(heads), "pass at most o's heads");
  r.require(heads % groups == 0, "grouped", "does not divide the heads", "pass [G, T, heads / G * 512]");
  r.require(heads / groups * kWidth == width, "grouped", "has another width", "pass [G, T, heads / G * 512]");
  r.done();
  if (tokens == 0) return;
  a.tokens = static_cast<int>(tokens);
  a.padded = static_cast<int>(padded);
  a.heads = static_cast<int>(heads);
  a.group_heads = static_cast<int>(heads / groups);
  const int64_t warps = ceil_div(tokens, kTokens) * heads;
  launch(call, inverse_kernel<kQuantised>, ceil_div(warps, kWarps), 32 * kWarps, a);
}

}  // namespace

void inverse_rope(const Call& call) { run<false>(call); }
void inverse_rope_fp8(const Call& call) { run<true>(call); }

}  // namespace dsv4
