// What a lane of the staged kernel computes of its eight columns of a token: the streams mixed, their products with
// each other, and their weighted sum.
#pragma once
#include "hyper_connection_staged.cuh"
#include "hyper_connection_staged_access.cuh"

namespace dsv4::staged {

// Two words of each stream, mixed by post and the rows of comb.
__device__ inline void mix_pair(const uint2 (&from)[kStreams], uint2 layer, const float4 (&mixing)[1 + kStreams],
                                uint2 (&to)[kStreams]) {
  const float y[4] = {low(layer.x), high(layer.x), low(layer.y), high(layer.y)};
  float out[kStreams][4];
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    out[0][v] = mixing[0].x * y[v];
    out[1][v] = mixing[0].y * y[v];
    out[2][v] = mixing[0].z * y[v];
    out[3][v] = mixing[0].w * y[v];
  }
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float in[4] = {low(from[i].x), high(from[i].x), low(from[i].y), high(from[i].y)};
    const float4 comb = mixing[1 + i];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      out[0][v] = fmaf(comb.x, in[v], out[0][v]);
      out[1][v] = fmaf(comb.y, in[v], out[1][v]);
      out[2][v] = fmaf(comb.z, in[v], out[2][v]);
      out[3][v] = fmaf(comb.w, in[v], out[3][v]);
    }
  }
#pragma unroll
  for (int j = 0; j < kStreams; ++j) to[j] = {pack_bf16(out[j][0], out[j][1]), pack_bf16(out[j][2], out[j][3])};
}

// Half of the columns at a time, which needs half of the registers.
__device__ inline void mix(const uint4 (&from)[kStreams], uint4 layer, const float4 (&mixing)[1 + kStreams],
                           uint4 (&to)[kStreams]) {
  uint2 half[kStreams];
  mix_pair({{from[0].x, from[0].y}, {from[1].x, from[1].y}, {from[2].x, from[2].y}, {from[3].x, from[3].y}},
           {layer.x, layer.y}, mixing, half);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) to[j].x = half[j].x, to[j].y = half[j].y;
  mix_pair({{from[0].z, from[0].w}, {from[1].z, from[1].w}, {from[2].z, from[2].w}, {from[3].z, from[3].w}},
           {layer.z, layer.w}, mixing, half);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) to[j].z = half[j].x, to[j].w = half[j].y;
}

// The products of a token's streams with each other. As operands of m16n8k16 four lanes are a row, and a token's eight
// lanes two rows: of the products of rows with rows its own are on the diagonal, which lanes with q = g / 2 have.
struct Squares {
  float products[kSquares / 2][4] = {};  // of two streams, a half each, with a third one

  __device__ void add(const uint4 (&v)[kStreams]) {
    const auto both = [&](int k, const uint4& upper, const uint4& lower, const uint4& with) {
      multiply(products[k], upper.x, lower.x, upper.y, lower.y, with.x, with.y);
      multiply(products[k], upper.z, lower.z, upper.w, lower.w, with.z, with.w);
    };
    both(0, v[1], v[2], v[0]);
    both(1, v[0], v[3], v[0]);
    both(2, v[1], v[3], v[1]);
    both(3, v[2], v[1], v[2]);
    both(4, v[3], v[2], v[3]);
  }
  // In order: 00 10 11 02 12 03 13 22 32 33. Of a token's lanes one has both of its rows' after the exchange.
  __device__ void send_to(uint32_t to, uint32_t barrier, int lane) const {
    const bool odd = lane / 4 % 2 != 0;
    const auto own = [&](int k, int half) {
      const float v = odd ? products[k][half * 2 + 1] : products[k][half * 2];
      return v + __shfl_xor_sync(kWholeWarp, v, 4);
    };
    const float4 first{own(1, 0), own(0, 0), own(2, 0), own(0, 1)}, second{own(3, 1), own(1, 1), own(2, 1), own(3, 0)};
    const float2 third{own(4, 1), own(4, 0)};
    if (lane % 9 != 0) return;
    send(to, first, barrier);
    send(to + 16, second, barrier);
    send(to + 32, third, barrier);
  }
};

// The streams' weighted sum, rounded, times its norm's factor and weights.
__device__ inline uint4 collapse(const uint4 (&streams)[kStreams], float4 weights, float factor, const Eight& norm) {
  Eight total;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const Eight in = unpack(streams[j]);
    const float weight = j == 0 ? weights.x : j == 1 ? weights.y : j == 2 ? weights.z : weights.w;
#pragma unroll
    for (int v = 0; v < kVector; ++v) total.x[v] = j == 0 ? weight * in.x[v] : fmaf(weight, in.x[v], total.x[v]);
  }
  Eight rounded = rounded_to_bf16(total);
#pragma unroll
  for (int v = 0; v < kVector; ++v) rounded.x[v] = rounded.x[v] * factor * norm.x[v];
  return pack(rounded);
}

}  // namespace dsv4::staged
