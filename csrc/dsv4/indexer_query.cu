// The indexer's queries: RoPE, then FP8 with the scales folded into the head weights, FP4 with scales apart, or bf16.
//
// Floor: q read once (256 B a head), its codes written once. Eight lanes hold a row of
// 128: each has eight values of the half that is rotated and eight of the other, so that no lane computes in vain.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kWarps = 4;
constexpr int kDims = 128;
constexpr int kRopeDims = 64;  // the second half of a row
constexpr int kRowVectors = kDims / kVector;
constexpr int kRowLanes = kRowVectors / 2;  // a lane holds eight values of either half
constexpr int kPassRows = 32 / kRowLanes;
constexpr int kPasses = 2;
constexpr int kRows = kPassRows * kPasses;  // of a warp

enum class Output { bf16, fp8, fp4 };

struct QueryArguments {
  const uint4* q;  // [tokens, heads, 128] bf16
  const __nv_bfloat16* weights;
  const int64_t* positions;
  const float* cos_sin;  // [*, 64]
  void* q_out;
  uint32_t* scales_out;  // FP4: the four of a row
  float* weights_out;
  float scale;
  int tokens, heads;
};

// Of the two blocks of 32 that four lanes hold, one in either half of the row.
struct BlockPowers {
  uint32_t scales;  // UE8M0, in bytes 0 and 2
  __nv_bfloat162 by_plain, by_turned;
};

// Both blocks at once, as halves of a word. A bf16's exponent and first bit after 1 tell ceil(log2(absmax / 6)), since
// 6 is 1.5 * 2**2: what `fp4_power` does.
__device__ BlockPowers block_powers(uint4 plain, uint4 turned) {
  const auto pair = [](uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
  const auto bits_of = [](__nv_bfloat162 v) { return *reinterpret_cast<const uint32_t*>(&v); };
  const __nv_bfloat162 first = largest_pair(plain), second = largest_pair(turned);
  __nv_bfloat162 most = __hmax2(__lows2bfloat162(first, second), __highs2bfloat162(first, second));
  most = __hmax2(most, pair(0x01c001c0u));  // 6 * 2**-126
#pragma unroll
  for (int step = 1; step < 4; step *= 2) most = __hmax2(most, __shfl_xor_sync(kWholeWarp, most, step));
  const uint32_t exponents = (bits_of(most) + 0x003f003fu) >> 7 & 0x01ff01ffu;  // of the scales, and 2 too many
  const uint32_t by = (0x01000100u - exponents) << 7;
  return {exponents - 0x00020002u, __low2bfloat162(pair(by)), __high2bfloat162(pair(by))};
}

// Every lane of the warp takes part in the shuffles; only rows that exist are stored.
template <Output kOutput>
__device__ void write(const QueryArguments& a, int64_t row, bool exists, int lane, uint4 plain, uint4 turned) {
  const int64_t at = row * kRowVectors + lane;
  int power = 0;  // of the scale that goes into the weight
  if constexpr (kOutput == Output::bf16) {
    if (exists) static_cast<uint4*>(a.q_out)[at] = plain;
    if (exists) static_cast<uint4*>(a.q_out)[at + kRowLanes] = turned;
  } else if constexpr (kOutput == Output::fp8) {
    power = fp8_power(group_max<kRowLanes>(fmaxf(largest(plain), largest(turned))));
    if (exists) static_cast<uint2*>(a.q_out)[at] = to_e4m3(unpack(plain), power);
    if (exists) static_cast<uint2*>(a.q_out)[at + kRowLanes] = to_e4m3(unpack(turned), power);
  } else {
    const BlockPowers own = block_powers(plain, turned);
    if (exists) static_cast<uint32_t*>(a.q_out)[at] = to_e2m1(plain, own.by_plain);
    if (exists) static_cast<uint32_t*>(a.q_out)[at + kRowLanes] = to_e2m1(turned, own.by_turned);
    const uint32_t scales = own.scales | __shfl_xor_sync(kWholeWarp, own.scales, 4) << 8;
    if (exists && lane == 0) a.scales_out[row] = scales;
  }
  if (exists && lane == 0) {
    a.weights_out[row] = __fmul_rn(__bfloat162float(a.weights[row]) * power_of_two(power), a.scale);
  }
}

template <Output kOutput>
__global__ void __launch_bounds__(32 * kWarps) query_kernel(const __grid_constant__ QueryArguments a) {
  after_predecessor();
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % kRowLanes;
  const int groups = (a.heads + kRows - 1) / kRows;
  const int token = warp / groups;
  if (token >= a.tokens) return;
  const int head = (warp - token * groups) * kRows + threadIdx.x % 32 / kRowLanes;
  const int64_t row = static_cast<int64_t>(token) * a.heads + head;
  uint4 plain[kPasses], turned[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const uint4* from = a.q + (row + i * kPassRows) * kRowVectors + lane;
    plain[i] = turned[i] = uint4{};
    if (head + i * kPassRows < a.heads) plain[i] = from[0], turned[i] = from[kRowLanes];
  }
  const Turn turn = load_turn(a.cos_sin + a.positions[token] * kRopeDims, kRopeDims / 2, lane * 4);
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    Eight v = unpack(turned[i]);
    rotate(v, turn);
    write<kOutput>(a, row + i * kPassRows, head + i * kPassRows < a.heads, lane, plain[i], pack(v));
  }
}

template <Output kOutput>
void run(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, heads = kUnbound, positions = kUnbound;
  QueryArguments a{};
  a.q = r.in("q", {DType::bf16}, {&tokens, &heads, kDims}).as<const uint4>();
  a.weights = r.in("weights", {DType::bf16}, {&tokens, &heads}, 2).as<const __nv_bfloat16>();
  a.positions = r.in("positions", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  a.cos_sin = r.in("cos_sin", {DType::f32}, {&positions, kRopeDims}).as<const float>();
  const int codes = kOutput == Output::fp4 ? kDims / 2 : kDims;
  const DType kind = kOutput == Output::bf16 ? DType::bf16 : kOutput == Output::fp8 ? DType::e4m3 : DType::u8;
  a.q_out = r.out("q_out", {kind}, {&tokens, &heads, codes}).address;
  if (kOutput == Output::fp4) a.scales_out = r.out("scales_out", {DType::u8}, {&tokens, &heads, 4}, 4).as<uint32_t>();
  a.weights_out = r.out("weights_out", {DType::f32}, {&tokens, &heads}, 4).as<float>();
  a.scale = r.real();
  r.done();
  if (tokens == 0 || heads == 0) return;
  a.tokens = static_cast<int>(tokens);
  a.heads = static_cast<int>(heads);
  launch(call, query_kernel<kOutput>, ceil_div(tokens * ceil_div(heads, kRows), kWarps), 32 * kWarps, a);
}

}  // namespace

void indexer_q_rope(const Call& call) { run<Output::bf16>(call); }
void indexer_q_rope_fp8(const Call& call) { run<Output::fp8>(call); }
void indexer_q_rope_fp4(const Call& call) { run<Output::fp4>(call); }

}  // namespace dsv4
