// Compressor states saved token by token: [kv | score + ape].
//
// Floor: kv_score read once and a state written, 8 bytes a column. A block takes a token.
#include "compressor.cuh"
#include "ops.h"

namespace dsv4 {
namespace {

struct SaveArguments {
  const float4* kv_score;  // [tokens, width]
  const float4* ape;       // [ratio, width / 2]
  const int64_t* positions;
  const int64_t* slots;
  float* state;
  int64_t block_stride;
  int tokens, width;
  Divisor rows, ratio;
};

constexpr int kSaveThreads = 128;

__global__ void __launch_bounds__(kSaveThreads) save_kernel(const __grid_constant__ SaveArguments a) {
  after_predecessor();
  const int token = blockIdx.x;
  const int64_t slot = a.slots[token];
  if (slot < 0) return;
  const int vectors = a.width / kQuad, half = vectors / 2;
  const auto at = static_cast<uint32_t>(slot), position = static_cast<uint32_t>(a.positions[token]);
  const uint32_t block = a.rows.quotient(at), row = at - block * a.rows.by;
  float4* to = reinterpret_cast<float4*>(a.state + block * a.block_stride + static_cast<int64_t>(row) * a.width);
  const float4* from = a.kv_score + static_cast<int64_t>(token) * vectors;
  const uint32_t of_group = position - a.ratio.quotient(position) * a.ratio.by;
  const float4* ape = a.ape + static_cast<int64_t>(of_group) * half - half;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += kSaveThreads) {
    float4 v = from[i];
    if (i >= half) {
      const float4 shift = ape[i];
      v = {v.x + shift.x, v.y + shift.y, v.z + shift.z, v.w + shift.w};
    }
    to[i] = v;
  }
}

}  // namespace

void save_partial_states(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, width = kUnbound, ratio = kUnbound, blocks = kUnbound, rows = kUnbound;
  SaveArguments a{};
  a.kv_score = r.in("kv_score", {DType::f32}, {&tokens, &width}).as<const float4>();
  a.ape = r.in("ape", {DType::f32}, {&ratio, width / 2}).as<const float4>();
  a.positions = r.in("positions", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  a.slots = r.in("slots", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  const Operand& state = r.strided("state", {DType::f32}, {&blocks, &rows, &width});
  r.require(width % (2 * kQuad) == 0, "kv_score", "has " + std::to_string(width) + " columns",
            "pass a multiple of 8");
  r.require(state.stride[0] % kQuad == 0 || blocks < 2, "state", "has an unaligned page stride",
            "align pages to 16 bytes");
  r.require(rows > 0 && ratio > 0, "state", "has no rows, or ape none",
            "pass the states of a page and the tokens of a group");
  r.done();
  if (tokens == 0) return;
  a.state = state.as<float>();
  a.block_stride = state.stride[0];
  a.tokens = static_cast<int>(tokens);
  a.width = static_cast<int>(width);
  a.rows = Divisor(static_cast<uint32_t>(rows));
  a.ratio = Divisor(static_cast<uint32_t>(ratio));
  launch(call, save_kernel, a.tokens, kSaveThreads, a);
}

}  // namespace dsv4
