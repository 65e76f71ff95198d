// What the owner of a token makes of its sums: the weights of the streams' sum and the factor of its norm, sent to the
// blocks that wait for them; post, and comb by Sinkhorn's iterations, which nobody waits for.
#pragma once
#include "hyper_connection_tile.cuh"

namespace dsv4 {

constexpr int kOwners = 2;  // warps, whose tokens take turns

__device__ inline float reciprocal(float v) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(v));
  return found;
}

// comb_ij = k_ij row_i column_j by. A divisor is a sum of comb plus eps; rows or columns take the product of the other
// three, and `by` the reciprocal of all four, which is there before the next sums are.
struct Sinkhorn {
  float k[4][4], row[4] = {1, 1, 1, 1}, column[4] = {1, 1, 1, 1}, by = 1;

  __device__ void divide(float (&of)[4], const float (&sum)[4], float eps) {
    float divisor[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of[i] *= by;
      divisor[i] = fmaf(of[i], sum[i], eps);
    }
    const float first = divisor[0] * divisor[1], last = divisor[2] * divisor[3];
    by = reciprocal(first * last);
    of[0] *= divisor[1] * last;
    of[1] *= divisor[0] * last;
    of[2] *= divisor[3] * first;
    of[3] *= divisor[2] * first;
  }
  __device__ void normalise_rows(float eps) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] = fmaf(k[i][1], column[1], k[i][0] * column[0]) + fmaf(k[i][3], column[3], k[i][2] * column[2]);
    }
    divide(row, sum, eps);
  }
  __device__ void normalise_columns(float eps) {
    float sum[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j] = fmaf(k[1][j], row[1], k[0][j] * row[0]) + fmaf(k[3][j], row[3], k[2][j] * row[2]);
    }
    divide(column, sum, eps);
  }
};

__device__ inline float select(const float (&of)[4], int which) {
  return which == 0 ? of[0] : which == 1 ? of[1] : which == 2 ? of[2] : of[3];
}

// Lanes 0 to 15 hold comb, row by row.
__device__ inline float make_comb(float mix, float eps, int iterations, int lane) {
  float v = __shfl_sync(kWholeWarp, mix, lane % 16 + 8);
  v = __expf(v - group_max<4>(v));
  v = __fdividef(v, group_sum<4>(v)) + eps;
  Sinkhorn s;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s.k[i][j] = __shfl_sync(kWholeWarp, v, i * 4 + j);
  }
  s.normalise_columns(eps);
  for (int i = 1; i < iterations; ++i) {
    s.normalise_rows(eps);
    s.normalise_columns(eps);
  }
  return select(s.row, lane / 4 % 4) * s.by * v * select(s.column, lane % 4);
}

// |sum_i w_i R_i|^2 from the products of the streams as `add_up` leaves them.
__device__ inline float square_of_sum(const float (&w)[4], float sum, float more) {
  const auto first = [&](int i) { return __shfl_sync(kWholeWarp, sum, kSums + i); };
  const auto last = [&](int i) { return __shfl_sync(kWholeWarp, more, i); };
  const float own = w[0] * w[0] * first(0) + w[1] * w[1] * first(3) + w[2] * w[2] * last(0) + w[3] * w[3] * last(3);
  const float near = w[0] * w[1] * (first(1) + first(2)) + w[2] * w[3] * (last(1) + last(2));
  const float far = w[0] * (w[2] * first(4) + w[3] * first(5)) + w[1] * (w[2] * first(6) + w[3] * first(7));
  return own + near + 2 * far;
}

// Warp `which` of the owners: this block's token of every second tile.
template <Hyper kHyper>
__device__ void own_tokens(const ClusterArguments& a, Memory& m, const Share& share, int which) {
  constexpr int kSumBytes = kCluster * kValues * 4, kAnswerBytes = kTokens * 20;
  const CollapseArguments& c = a.collapse;
  const int lane = threadIdx.x % 32;
  const float scale = c.scale[kHyper == Hyper::head || lane < 4 ? 0 : lane < 8 ? 1 : 2];
  const float base = lane < kSumsOf<kHyper> ? c.base[lane] : 0.0f;
  wait_for_cluster();
  for (int i = which; i < share.tiles; i += kOwners) {
    const int travelling = i % kTravelling;
    if (lane == 0) arrive_and_expect(m.sums[travelling], kSumBytes);
    wait(m.sums[travelling], i / kTravelling & 1);
    if (lane == 0) arrive_and_expect(m.answers[travelling], kAnswerBytes);
    float sum, more;
    add_up(m.received[travelling][0], kValues, lane, sum, more);
    const float squares = __shfl_sync(kWholeWarp, sum, kSums) + __shfl_sync(kWholeWarp, sum, kSums + 3) +
                          __shfl_sync(kWholeWarp, more, 0) + __shfl_sync(kWholeWarp, more, 3);
    const float by = rsqrtf(squares / (static_cast<float>(kStreams) * kHidden) + c.eps);
    const float mix = lane < kSumsOf<kHyper> ? sum * by * scale + base : 0.0f;
    const float gate = __fdividef(1.0f, 1.0f + __expf(-mix));
    float w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = __shfl_sync(kWholeWarp, gate, j) + c.hc_eps;
    const float square = fmaxf(square_of_sum(w, sum, more), 0.0f);
    if (lane < kCluster) {
      const uint32_t barrier = place_at(&m.answers[travelling], lane);
      send(place_at(&m.weights[travelling][share.rank], lane), float4{w[0], w[1], w[2], w[3]}, barrier);
      send(place_at(&m.factor[travelling][share.rank], lane), rsqrtf(square / kHidden + c.eps), barrier);
    }
    if constexpr (kHyper == Hyper::head) continue;
    const int tile = share.tile(i), token = a.first(tile) + share.rank;
    if (share.rank >= a.count(tile)) continue;
    if (lane >= 4 && lane < 8) c.post[token * kStreams + lane - 4] = 2.0f * gate;
    const float comb = make_comb(mix, c.hc_eps, c.iterations, lane);
    if (lane < 16) c.comb[token * 16 + lane] = comb;
  }
}

}  // namespace dsv4
