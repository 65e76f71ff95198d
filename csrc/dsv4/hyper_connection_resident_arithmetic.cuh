// What a lane of the resident kernel computes of its eight columns of a token: the streams mixed, their weighted sum.
#pragma once
#include "hyper_connection_resident.cuh"

namespace dsv4::resident {

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

}  // namespace dsv4::resident
