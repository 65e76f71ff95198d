// What becomes of a tile's values. One warp of a block adds up what the others have found and sends each token's to the
// block that owns it; two take turns with the block's own tokens: the weights of the streams' sum and the factor of its
// norm, sent to the blocks that wait for them; then post, and comb by Sinkhorn's iterations, which nobody waits for.
#pragma once
#include "hyper_connection_tile.cuh"

namespace dsv4 {

__device__ inline float reciprocal(float v) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(v));
  return found;
}

// comb_ij = k_ij row_i column_j / product. A divisor is a sum of comb plus eps; rows or columns take the product of the
// other three, and `product` is that of all four, so nothing is divided by before the end. `scale`, a power of two,
// keeps divisors near one: they come out times product * scale, which is from one to two. Rows and columns do not stay
// there: what one has too much the other has too little, and that changes with each half of an iteration.
//
// The first divisors may be as small as five eps, and are divided by at once: the product of four would be zero. Later
// ones are near one: a row has a quarter of its softmax in one column, a sixteenth of that column's sum at least, and
// sums are between those of before from then on.
struct Sinkhorn {
  float k[4][4], row[4] = {1, 1, 1, 1}, column[4], product = 1, scale = 1;

  __device__ void begin(float eps) {
#pragma unroll
    for (int j = 0; j < 4; ++j) column[j] = reciprocal((k[0][j] + k[1][j]) + (k[2][j] + k[3][j]) + eps);
  }
  __device__ void divide(float (&of)[4], const float (&sum)[4], float eps) {
    const float scaled_eps = eps * (product * scale);
    float scaled[4], divisor[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scaled[i] = of[i] * scale;
      divisor[i] = fmaf(scaled[i], sum[i], scaled_eps);
    }
    const float first = divisor[0] * divisor[1], last = divisor[2] * divisor[3];
    of[0] = scaled[0] * divisor[1] * last;
    of[1] = scaled[1] * divisor[0] * last;
    of[2] = scaled[2] * divisor[3] * first;
    of[3] = scaled[3] * divisor[2] * first;
    product = first * last;
    scale = __uint_as_float(0x7f000000u - (__float_as_uint(product) & 0x7f800000u));
  }
  // By rows, then by columns.
  __device__ void iterate(float eps) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] = fmaf(k[i][3], column[3], fmaf(k[i][2], column[2], fmaf(k[i][1], column[1], k[i][0] * column[0])));
    }
    divide(row, sum, eps);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j] = fmaf(k[3][j], row[3], fmaf(k[2][j], row[2], fmaf(k[1][j], row[1], k[0][j] * row[0])));
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
  s.begin(eps);
  for (int i = 1; i < iterations; ++i) s.iterate(eps);
  return select(s.row, lane / 4 % 4) * reciprocal(s.product) * v * select(s.column, lane % 4);
}

// A token's values, added up over blocks: value l in `sum` of lane l, the last four in `more` of lanes 0 to 3 (and of
// every fourth after).
__device__ inline void add_up(const float (&from)[kBlocks][kValues], int lane, float& sum, float& more) {
  sum = 0;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) sum += from[i][lane];
  more = from[lane / 4][32 + lane % 4] + from[8 + lane / 4][32 + lane % 4];
  more += __shfl_xor_sync(kWholeWarp, more, 4);
  more += __shfl_xor_sync(kWholeWarp, more, 8);
  more += __shfl_xor_sync(kWholeWarp, more, 16);
}

// The products of the streams, from the values of their token.
struct Products {
  float sum, more;

  __device__ float operator[](int i) const {
    return i < 8 ? __shfl_sync(kWholeWarp, sum, kSums + i) : __shfl_sync(kWholeWarp, more, i - 8);
  }
  __device__ float squares() const { return (*this)[0] + (*this)[2] + (*this)[7] + (*this)[9]; }
  // |sum_i w_i R_i|^2.
  __device__ float square_of_sum(const float (&w)[4]) const {
    const Products& p = *this;
    const float own = w[0] * w[0] * p[0] + w[1] * w[1] * p[2] + w[2] * w[2] * p[7] + w[3] * w[3] * p[9];
    const float first = w[0] * (w[1] * p[1] + w[2] * p[3] + w[3] * p[5]);
    const float last = w[1] * (w[2] * p[4] + w[3] * p[6]) + w[2] * w[3] * p[8];
    return own + 2 * (first + last);
  }
};

// What a token's values give: the weights of the streams' sum, the factor of its norm, and what post and comb are made
// of, in the lanes of their values.
struct Weighed {
  float4 weights;
  float factor, mix, gate;
};

template <Hyper kHyper>
struct Weighing {
  const CollapseArguments& c;
  const int lane = threadIdx.x % 32;
  const float scale = c.scale[kHyper == Hyper::head || lane < 4 ? 0 : lane < 8 ? 1 : 2];
  const float base = lane < kSumsOf<kHyper> ? c.base[lane] : 0.0f;

  __device__ Products values(const float (&received)[kBlocks][kValues]) const {
    Products products;
    add_up(received, lane, products.sum, products.more);
    return products;
  }
  __device__ float mix(const Products& products) const {
    const float by = rsqrtf(products.squares() / (static_cast<float>(kStreams) * kHidden) + c.eps);
    return lane < kSumsOf<kHyper> ? products.sum * by * scale + base : 0.0f;
  }
  __device__ Weighed answer(const Products& products, float mix) const {
    const float gate = __fdividef(1.0f, 1.0f + __expf(-mix));
    float w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = __shfl_sync(kWholeWarp, gate, j) + c.hc_eps;
    // Of the streams' products, so that a sum smaller than the streams by a factor of f comes with f * f units in 2^22.
    const float found = products.square_of_sum(w), square = found < 0 ? 0 : found;
    // Where products are infinite it is, or NaN: the factor is zero then, and NaN comes from streams that have one.
    return {{w[0], w[1], w[2], w[3]}, fmaxf(rsqrtf(square / kHidden + c.eps), 0.0f), mix, gate};
  }
  __device__ Weighed operator()(const float (&received)[kBlocks][kValues]) const {
    const Products products = values(received);
    return answer(products, mix(products));
  }
};

// Whole tokens of a tile, of all blocks' columns, to the L2 cache: a block fetches the one it owns.
template <Hyper kHyper>
__device__ void fetch_tile(const ClusterArguments& a, const Share& share, int i) {
  if (i >= share.tiles || share.rank >= share.count(i)) return;
  const int64_t token = share.first(i) + share.rank;
  constexpr int kLayerBytes = kHidden * 2;
  constexpr int kTokenBytes = kStreams * kLayerBytes;
  fetch_ahead(reinterpret_cast<const uint8_t*>(a.mix.residual) + token * kTokenBytes, kTokenBytes);
  if constexpr (kHyper == Hyper::post_pre) {
    fetch_ahead(reinterpret_cast<const uint8_t*>(a.mix.y) + token * kLayerBytes, kLayerBytes);
  }
}

// A warp for each team: this block's tokens of its tiles.
template <Hyper kHyper>
__device__ void own_tokens(const ClusterArguments& a, Team& team, const Share& share) {
  constexpr int kSumBytes = kBlocks * kValues * 4, kAnswerBytes = kTile * 20;
  const CollapseArguments& c = a.collapse;
  const int lane = threadIdx.x % 32;
  const Weighing<kHyper> weigh{c};
  if (lane == 0) {
    for (int i = 1; i < kTilesAhead<kHyper>; ++i) fetch_tile<kHyper>(a, share, i);
  }
  wait_for_cluster();
  for (int i = 0; i < share.tiles; ++i) {
    if (lane == 0) {
      fetch_tile<kHyper>(a, share, i + kTilesAhead<kHyper>);
      arrive_and_expect(team.sums, kSumBytes);
    }
    wait(team.sums, i & 1);
    if (lane == 0) arrive_and_expect(team.answers, kAnswerBytes);
    const Weighed found = weigh(team.received);
    if (lane < kBlocks) {
      const uint32_t barrier = place_at(&team.answers, lane);
      send(place_at(&team.weights[share.rank], lane), found.weights, barrier);
      send(place_at(&team.factor[share.rank], lane), found.factor, barrier);
    }
    if constexpr (kHyper == Hyper::head) continue;
    if (share.rank >= share.count(i)) continue;
    const int token = share.first(i) + share.rank;
    if (lane >= 4 && lane < 8) c.post[token * kStreams + lane - 4] = 2.0f * found.gate;
    const float comb = make_comb(found.mix, c.hc_eps, c.iterations, lane);
    if (lane < 16) c.comb[token * 16 + lane] = comb;
  }
}

}  // namespace dsv4
