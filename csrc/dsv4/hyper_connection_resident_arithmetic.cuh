// What a lane of the resident kernel computes of its eight columns of a token.
#pragma once
#include "hyper_connection_resident.cuh"

namespace dsv4::resident {

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
