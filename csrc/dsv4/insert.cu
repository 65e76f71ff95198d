// Queries normed, rotated and padded; keys rotated, quantised and inserted into the paged cache: one launch.
//
// Floor: q read once, q_out written once (2 KiB a head); keys add 1.6 KiB a token. A warp takes kHeads rows of 512
// values at a time, all their loads issued before the first use: with four, 4 KiB in flight a warp, which is what keeps
// the memory busy; with one, the shortest way through for a few tokens.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "pages.cuh"

namespace dsv4 {
namespace {

constexpr int kWarps = 4;

struct InsertArguments {
  const uint4* q;        // [tokens, heads, 512] bf16
  const uint4* kv;       // [tokens, 512] bf16
  const int64_t* slots;  // [inserted]
  const int64_t* positions;
  const float* cos_sin;  // [*, 64]
  uint4* q_out;          // [tokens, padded, 512] bf16
  Pages cache;
  float eps;
  int tokens, heads, padded, inserted, format;
};

constexpr int kRowVectors = kWidth / kVector;  // 64: two a lane, the second one's last eight lanes hold the RoPE dims
constexpr int kFirstRopeLane = 24;

__device__ Turn turn_of(const InsertArguments& a, int token, int lane) {
  const float* row = a.cos_sin + a.positions[token] * kRope;
  return load_turn(row, kRope / 2, (lane - kFirstRopeLane) * 4);
}

template <int kHeads>
__device__ void queries(const InsertArguments& a, int token, int head, int lane) {
  const uint4* from = a.q + (static_cast<int64_t>(token) * a.heads + head) * kRowVectors + lane;
  uint4* to = a.q_out + (static_cast<int64_t>(token) * a.padded + head) * kRowVectors + lane;
  const int there = min(kHeads, a.heads - head);
  uint4 raw[kHeads][2];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i < there) {
      raw[i][0] = from[i * kRowVectors];
      raw[i][1] = from[i * kRowVectors + 32];
    }
  }
  Turn turn{};
  if (lane >= kFirstRopeLane && there > 0) turn = turn_of(a, token, lane);
  let_successor();  // once the reads are under way: see launch.cuh
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (head + i >= a.padded) break;
    uint4 first{}, second{};  // padding heads are zero
    if (i < there) {
      Eight x = unpack(raw[i][0]), y = unpack(raw[i][1]);
      const float mean = group_sum<32>(sum_of_squares(x) + sum_of_squares(y)) * (1.0f / kWidth);
      const float by = rsqrtf(mean + a.eps);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        x.x[j] *= by;
        y.x[j] *= by;
      }
      if (lane >= kFirstRopeLane) rotate(y, turn);
      first = pack(x);
      second = pack(y);
    }
    to[i * kRowVectors] = first;
    to[i * kRowVectors + 32] = second;
  }
}

__device__ void key(const InsertArguments& a, int token, int lane) {
  const int64_t slot = a.slots[token];
  if (slot < 0) return;
  const uint4* from = a.kv + static_cast<int64_t>(token) * kRowVectors + lane;
  Eight x = unpack(from[0]), y = unpack(from[32]);
  let_successor();  // once the reads are under way: see launch.cuh
  const bool rope = lane >= kFirstRopeLane;
  if (rope) rotate(y, turn_of(a, token, lane));
  const uint4 first = pack(x), second = pack(y);
  int offset;
  uint8_t* page = page_of(a.cache, slot, offset);
  if (a.format == kPlain) {
    uint8_t* row = page + static_cast<int64_t>(offset) * 2 * kWidth + lane * 16;
    store_bytes<16>(row, &first, a.cache.vectors);
    store_bytes<16>(row + kWidth, &second, a.cache.vectors);
    return;
  }
  // What is quantised is the bf16 value. Eight lanes hold a block of 64; the RoPE lanes' second block is not quantised.
  x = unpack(first);
  y = unpack(second);
  const int power_x = fp8_power(group_max<8>(largest(x))), power_y = fp8_power(group_max<8>(largest(y)));
  uint8_t* row = page + offset * kStateBytes;
  const uint2 codes_x = to_e4m3(x, power_x);
  store_bytes<8>(row + lane * 8, &codes_x, a.cache.vectors);
  if (rope) {
    store_bytes<16>(row + kNope + (lane - kFirstRopeLane) * 16, &second, a.cache.vectors);
  } else {
    const uint2 codes_y = to_e4m3(y, power_y);
    store_bytes<8>(row + 256 + lane * 8, &codes_y, a.cache.vectors);
  }
  uint8_t* scales = page + static_cast<int64_t>(a.cache.block_size) * kStateBytes + offset * kScaleBytes;
  if (lane % 8 == 0) {
    scales[lane / 8] = static_cast<uint8_t>(power_x + kUE8M0Bias);
    scales[4 + lane / 8] = rope ? 0 : static_cast<uint8_t>(power_y + kUE8M0Bias);
  }
}

template <int kHeads>
__global__ void __launch_bounds__(32 * kWarps) insert_kernel(const __grid_constant__ InsertArguments a) {
  await_predecessor();
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  // Keys first: theirs is the longest chain of dependent loads.
  if (warp < a.inserted) return key(a, warp, lane);
  const int groups = (a.padded + kHeads - 1) / kHeads;
  const int row = warp - a.inserted, token = row / groups;
  if (token < a.tokens) queries<kHeads>(a, token, (row - token * groups) * kHeads, lane);
}

template <int kHeads>
void launch_rows(const Call& call, const InsertArguments& a) {
  const int64_t warps = a.inserted + static_cast<int64_t>(a.tokens) * ceil_div(a.padded, kHeads);
  launch(call, insert_kernel<kHeads>, ceil_div(warps, kWarps), 32 * kWarps, a);
}

// Rows up to which one row a warp still leaves multiprocessors idle.
constexpr int64_t kFewRows = 2048;

}  // namespace

void q_norm_rope_kv_insert(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, heads = kUnbound, padded = kUnbound, inserted = kUnbound, rows = kUnbound;
  InsertArguments a{};
  a.q = r.in("q", {DType::bf16}, {&tokens, &heads, kWidth}).as<const uint4>();
  a.kv = r.in("kv", {DType::bf16}, {&tokens, kWidth}).as<const uint4>();
  const Operand& cache = r.cache("cache");
  a.slots = r.in("slots", {DType::i64}, {&inserted}, 8).as<const int64_t>();
  a.positions = r.in("positions", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  a.cos_sin = r.in("cos_sin", {DType::f32}, {&rows, kRope}).as<const float>();
  a.q_out = r.out("q_out", {DType::bf16}, {&tokens, &padded, kWidth}).as<uint4>();
  a.eps = r.real();
  const int64_t block_size = r.integer(), format = r.integer();
  r.require(format == kPlain || format == kFp8DsMla, "format", "is " + std::to_string(format),
            "pass PLAIN or FP8_DS_MLA");
  a.cache = pages(r, "cache", cache, block_size, format, format == kPlain ? 2 * kWidth : kStateBytes + kScaleBytes);
  r.require(inserted <= tokens, "slots", "are more than tokens", "pass at most one a token");
  r.require(padded >= heads, "q_out", "has fewer heads than q", "pass at least as many");
  r.done();
  if (tokens == 0) return;
  a.tokens = static_cast<int>(tokens);
  a.heads = static_cast<int>(heads);
  a.padded = static_cast<int>(padded);
  a.inserted = static_cast<int>(inserted);
  a.format = static_cast<int>(format);
  if (tokens * padded <= kFewRows) {
    launch_rows<1>(call, a);
  } else {
    launch_rows<4>(call, a);
  }
}

}  // namespace dsv4
