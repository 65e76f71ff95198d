// The attention output rotated back and laid out by output group, in bf16 or quantised to FP8 per 128 values.
//
// Floor: o read once, the groups written once. A warp takes kSide heads of kSide tokens and has all of them under way
// before it uses the first; a block's warps have neighbouring tokens, whose scales lie side by side. One row a warp is
// the shortest way through, and enough where little is computed; FP8 of many rows wants four.
#include <type_traits>

#include "divisor.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kChunk = 8;        // tokens of a block
constexpr int kScaleTokens = 4;  // the padding of the scales' rows
constexpr int kWidth = 512, kRope = 64, kBlock = 128;
constexpr int kBlocks = kWidth / kBlock;  // of a row; a lane has four values of each
constexpr int kFirstRopeLane = 16;        // in the last of them

struct InverseArguments {
  const uint2* o;  // [tokens, padded, 512] bf16
  const int64_t* positions;
  const float* cos_sin;  // [*, 64]
  void* grouped;         // [groups, tokens, heads / groups * 512]
  float* scales;         // [groups, heads / groups * 4, tokens rounded up to 4]; null for bf16
  int tokens, padded, heads;
  Divisor head_blocks;  // blocks of a chunk of tokens, kSide heads each
  Divisor group_heads;
};

struct Four {
  float x[4];
};

__device__ Four unpack(uint2 raw) { return {low(raw.x), high(raw.x), low(raw.y), high(raw.y)}; }
__device__ uint2 pack(const Four& v) { return {pack_bf16(v.x[0], v.x[1]), pack_bf16(v.x[2], v.x[3])}; }

// Codes of a block that a warp holds, and its scale. No rounding to bf16 in between.
__device__ uint32_t quantise(const Four& v, float& scale) {
  const float most = fmaxf(fmaxf(fabsf(v.x[0]), fabsf(v.x[1])), fmaxf(fabsf(v.x[2]), fabsf(v.x[3])));
  // Sizes are ordered as their bits are.
  const int power = fp8_power(__uint_as_float(__reduce_max_sync(kWholeWarp, __float_as_uint(most))), 1e-10f);
  const float by = power_of_two(-power);
  scale = power_of_two(power);
  return e4m3x2(v.x[0] * by, v.x[1] * by) | e4m3x2(v.x[2] * by, v.x[3] * by) << 16;
}

// A chunk's scales of some heads, four tokens in a store: single ones would be a quarter more writes than the codes.
template <int kRows>
__device__ void store_scales(const InverseArguments& a, const float (&scales)[kRows][kChunk], int chunk,
                             int first_head) {
  constexpr int kStores = kChunk / kScaleTokens;
  const int row = threadIdx.x / kStores, of_chunk = threadIdx.x % kStores * kScaleTokens;
  const int head = first_head + row / kBlocks, token = chunk * kChunk + of_chunk;
  if (row >= kRows || head >= a.heads || token >= a.tokens) return;
  const int row_tokens = (a.tokens + kScaleTokens - 1) / kScaleTokens * kScaleTokens;
  // Groups follow one another, so that heads may be counted through.
  float* to = a.scales + (static_cast<int64_t>(head) * kBlocks + row % kBlocks) * row_tokens + token;
  const float* own = &scales[row][of_chunk];
  const auto at = [&](int i) { return token + i < a.tokens ? own[i] : 0; };
  *reinterpret_cast<float4*>(to) = {own[0], at(1), at(2), at(3)};
}

template <int kSide>
constexpr int kThreads = 32 * kChunk / kSide;

template <bool kQuantised, int kSide>
__global__ void __launch_bounds__(kThreads<kSide>, 1024 / kThreads<kSide>)
    inverse_kernel(const __grid_constant__ InverseArguments a) {
  constexpr int kTokens = kSide, kHeads = kSide;
  __shared__ float scales[kHeads * kBlocks][kChunk];
  after_predecessor();
  const int chunk = a.head_blocks.quotient(blockIdx.x), head = (blockIdx.x - chunk * a.head_blocks.by) * kHeads;
  const int lane = threadIdx.x % 32, of_chunk = threadIdx.x / 32 * kTokens, token = chunk * kChunk + of_chunk;
  const bool turns = lane >= kFirstRopeLane;
  const auto exists = [&](int i, int h) { return token + i < a.tokens && head + h < a.heads; };
  const uint2* from = a.o + (static_cast<int64_t>(token) * a.padded + head) * kBlock + lane;
  uint2 raw[kTokens][kHeads][kBlocks];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (exists(i, h)) raw[i][h][b] = from[(static_cast<int64_t>(i) * a.padded + h) * kBlock + b * 32];
      }
    }
  }
  int64_t position[kTokens] = {};
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (token + i < a.tokens) position[i] = a.positions[token + i];
  }
  __syncwarp();  // rows before what the positions lead to
  float2 cos[kTokens], sin[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float* row = a.cos_sin + position[i] * kRope + (lane - kFirstRopeLane) * 2;
    if (turns) cos[i] = *reinterpret_cast<const float2*>(row);
    if (turns) sin[i] = *reinterpret_cast<const float2*>(row + kRope / 2);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int group = a.group_heads.quotient(head + h), of_group = head + h - group * a.group_heads.by;
    const int64_t row = static_cast<int64_t>(group) * a.tokens + token;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (!exists(i, h)) continue;
      const int64_t at = ((row + i) * a.group_heads.by + of_group) * kBlock + lane;
      auto* to = static_cast<std::conditional_t<kQuantised, uint32_t, uint2>*>(a.grouped) + at;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        Four v = unpack(raw[i][h][b]);
        if (b == kBlocks - 1 && turns) {
          rotate_pair(v.x[0], v.x[1], cos[i].x, -sin[i].x);
          rotate_pair(v.x[2], v.x[3], cos[i].y, -sin[i].y);
        }
        if constexpr (kQuantised) {
          float scale;
          to[b * 32] = quantise(v, scale);
          if (lane == 0) scales[h * kBlocks + b][of_chunk + i] = scale;
        } else {
          const bool kept = b < kBlocks - 1 || !turns;
          to[b * 32] = kept ? raw[i][h][b] : pack(v);
        }
      }
    }
  }
  if constexpr (kQuantised) {
    __syncthreads();
    store_scales(a, scales, chunk, head);
  }
}

template <bool kQuantised, int kSide>
void launch_rows(const Call& call, InverseArguments a) {
  a.head_blocks = Divisor(static_cast<uint32_t>(ceil_div(a.heads, kSide)));
  launch(call, inverse_kernel<kQuantised, kSide>, ceil_div(a.tokens, kChunk) * a.head_blocks.by, kThreads<kSide>, a);
}

template <bool kQuantised>
void run(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, padded = kUnbound, positions = kUnbound, groups = kUnbound, width = kUnbound;
  InverseArguments a{};
  a.o = r.in("o", {DType::bf16}, {&tokens, &padded, kWidth}).as<const uint2>();
  a.positions = r.in("positions", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  a.cos_sin = r.in("cos_sin", {DType::f32}, {&positions, kRope}).as<const float>();
  a.grouped = r.out("grouped", {kQuantised ? DType::e4m3 : DType::bf16}, {&groups, &tokens, &width}).address;
  const int64_t row = (tokens + kScaleTokens - 1) / kScaleTokens * kScaleTokens;
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
  a.group_heads = Divisor(static_cast<uint32_t>(heads / groups));
  constexpr int kFewTokens = 64;
  if (kQuantised && tokens > kFewTokens) {
    launch_rows<kQuantised, kQuantised ? 2 : 1>(call, a);
  } else {
    launch_rows<kQuantised, 1>(call, a);
  }
}

}  // namespace

void inverse_rope(const Call& call) { run<false>(call); }
void inverse_rope_fp8(const Call& call) { run<true>(call); }

}  // namespace dsv4
