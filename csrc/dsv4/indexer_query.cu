// The indexer's queries: RoPE, then FP8 with the scales folded into the head weights, FP4 with scales apart, or bf16.
//
// Floor: q read once (256 B a head), its codes written once. Sixteen lanes hold a row of 128; a warp takes kRows rows.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kWarps = 4;
constexpr int kPasses = 4;           // accesses of a warp, two rows each
constexpr int kRows = 2 * kPasses;
constexpr int kDims = 128;
constexpr int kRopeDims = 64;
constexpr int kRowLanes = kDims / kVector;

enum class Output { bf16, fp8, fp4 };

struct QueryArguments {
  const uint4* q;           // [tokens, heads, 128] bf16
  const __nv_bfloat16* weights;
  const int64_t* positions;
  const float* cos_sin;     // [*, 64]
  void* q_out;
  uint8_t* scales_out;      // FP4
  float* weights_out;
  float scale;
  int tokens, heads;
};

// Every lane of the warp takes part in the shuffles; only rows that exist are stored.
template <Output kOutput>
__device__ void write(const QueryArguments& a, int64_t row, bool exists, int of_row, const Eight& turned) {
  const uint4 rounded = pack(turned);
  const int64_t at = row * kRowLanes + of_row;
  int power = 0;  // of the scale that goes into the weight
  if constexpr (kOutput == Output::bf16) {
    if (exists) static_cast<uint4*>(a.q_out)[at] = rounded;
  } else if constexpr (kOutput == Output::fp8) {
    power = fp8_power(group_max<kRowLanes>(largest(rounded)));
    if (exists) static_cast<uint2*>(a.q_out)[at] = to_e4m3(unpack(rounded), power);
  } else {
    const int own = fp4_power(group_max<4>(largest(rounded)));
    if (exists) static_cast<uint32_t*>(a.q_out)[at] = to_e2m1(rounded, own);
    if (exists && of_row % 4 == 0) a.scales_out[row * 4 + of_row / 4] = static_cast<uint8_t>(own + kUE8M0Bias);
  }
  if (exists && of_row == 0) {
    a.weights_out[row] = __fmul_rn(__bfloat162float(a.weights[row]) * power_of_two(power), a.scale);
  }
}

template <Output kOutput>
__global__ void __launch_bounds__(32 * kWarps) query_kernel(const __grid_constant__ QueryArguments a) {
  after_predecessor();
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int groups = (a.heads + kRows - 1) / kRows;
  const int token = warp / groups;
  if (token >= a.tokens) return;
  const int of_row = lane % kRowLanes;
  const int head = (warp - token * groups) * kRows + lane / kRowLanes;
  const int64_t row = static_cast<int64_t>(token) * a.heads + head;
  uint4 raw[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    raw[i] = head + 2 * i < a.heads ? __ldcs(a.q + (row + 2 * i) * kRowLanes + of_row) : uint4{};
  }
  const int rope_lane = of_row - kRowLanes / 2;
  Turn turn{};
  if (rope_lane >= 0) turn = load_turn(a.cos_sin + a.positions[token] * kRopeDims, kRopeDims / 2, rope_lane * 4);
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    Eight v = unpack(raw[i]);
    if (rope_lane >= 0) rotate(v, turn);
    write<kOutput>(a, row + 2 * i, head + 2 * i < a.heads, of_row, v);
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
  if (kOutput == Output::fp4) a.scales_out = r.out("scales_out", {DType::u8}, {&tokens, &heads, 4}, 1).as<uint8_t>();
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
