// What a warp does with its thirty-two columns of its team's tiles: it mixes the streams, stores them, multiplies them
// with fn and with each other, and collapses them when the weights have come.
#pragma once
#include <type_traits>

#include "hyper_connection_weights.cuh"

namespace dsv4 {

// Eight columns of a token's streams, and of the block's output, as they were loaded.
struct Loaded {
  uint4 stream[kStreams], layer;
};

// Eight columns of a token's streams, mixed.
__device__ inline void mix(const Loaded& from, const float4 (&mixing)[1 + kStreams], Streams& to) {
  const Eight y = unpack(from.layer);
  const float4 post = mixing[0];
  Eight out[kStreams];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    out[0].x[v] = post.x * y.x[v];
    out[1].x[v] = post.y * y.x[v];
    out[2].x[v] = post.z * y.x[v];
    out[3].x[v] = post.w * y.x[v];
  }
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const Eight in = unpack(from.stream[i]);
    const float4 comb = mixing[1 + i];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      out[0].x[v] = fmaf(comb.x, in.x[v], out[0].x[v]);
      out[1].x[v] = fmaf(comb.y, in.x[v], out[1].x[v]);
      out[2].x[v] = fmaf(comb.z, in.x[v], out[2].x[v]);
      out[3].x[v] = fmaf(comb.w, in.x[v], out[3].x[v]);
    }
  }
#pragma unroll
  for (int j = 0; j < kStreams; ++j) to.of[j] = pack(out[j]);
}

// A team's shared memory needs no barrier but the one before sums are sent: whoever has got a tile's answers knows that
// all of the team have sent theirs, and who is at the next tile's barrier has collapsed this one.
template <Hyper kHyper>
struct Columns {
  static constexpr bool kMixing = kHyper == Hyper::post_pre;
  static constexpr int64_t kLayerBytes = kHidden * 2, kTokenBytes = kStreams * kLayerBytes;

  const ClusterArguments& a;
  Memory<kHyper>& m;
  const int which = threadIdx.x / (32 * kWarps), warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32;
  const int group = lane / 4, own = warp * kWarpColumns + lane % 4 * kVector;
  const Share share{a, which};
  const int column = share.rank * kColumns + own;
  Team& team = m.team[which];

  // Where the lane's columns of a token are, in rows of so many bytes.
  template <class T>
  __device__ auto at(T* of, int token, int64_t bytes) const {
    return reinterpret_cast<uint8_t*>(const_cast<std::remove_const_t<T>*>(of)) + token * bytes + column * 2;
  }

  // Of the lane's token of eight of a tile; of the last one where there are fewer.
  __device__ void load(int i, int eight, Loaded& to) const {
    const int token = share.first(i) + min(eight * kEight + group, share.count(i) - 1);
    const uint8_t* from = at(a.mix.residual, token, kTokenBytes);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) to.stream[j] = load_once(from + j * kLayerBytes);
    if constexpr (kMixing) to.layer = load_once(at(a.mix.y, token, kLayerBytes));
  }
  // Of two tokens of the warp: post and the rows of comb.
  __device__ void load_mixing(int i) const {
    constexpr int kEach = 1 + kStreams, kOwn = kTile / kWarps;
    const int token = warp * kOwn + lane / kEach, row = lane % kEach;
    if (!kMixing || lane >= kOwn * kEach || token >= share.count(i)) return;
    const int from = share.first(i) + token;
    copy_in(&team.mixing[i % 2][token][row], row == 0 ? a.mix.post + from : a.mix.comb + from * kStreams + row - 1);
  }

  __device__ void take(int i, int eight, const Loaded& loaded, Streams& now) const {
    if constexpr (!kMixing) {
#pragma unroll
      for (int j = 0; j < kStreams; ++j) now.of[j] = loaded.stream[j];
      return;
    }
    const int token = eight * kEight + group;
    float4 mixing[1 + kStreams];
#pragma unroll
    for (int k = 0; k <= kStreams; ++k) mixing[k] = team.mixing[i % 2][token][k];
    mix(loaded, mixing, now);
    if (token >= share.count(i)) return;
    uint8_t* to = at(a.mix.mixed, share.first(i) + token, kTokenBytes);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) *reinterpret_cast<uint4*>(to + j * kLayerBytes) = now.of[j];
  }

  // A warp adds up what the team has of two tokens, four values a lane, and sends it to the blocks that own them.
  __device__ void send_sums() const {
    constexpr int kFours = kValues / 4, kOwn = kTile / kWarps;
    if (lane >= kOwn * kFours) return;
    const int token = warp * kOwn + lane / kFours, first = lane % kFours * 4;
    float4 sum{};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 v = *reinterpret_cast<const float4*>(&team.part[w][token][first]);
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    send(place_at(&team.received[share.rank][first], token), sum, place_at(&team.sums, token));
  }

  __device__ void collapse(int i, int eight, const Streams& now) const {
    const int token = eight * kEight + group;
    const float4 w = team.weights[token];
    const float by = team.factor[token];
    Eight total{};
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const Eight in = unpack(now.of[j]);
      const float weight = j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w;
#pragma unroll
      for (int v = 0; v < kVector; ++v) total.x[v] = fmaf(weight, in.x[v], total.x[v]);
    }
    Eight rounded = rounded_to_bf16(total);
    const Eight norm = load_weights(m.norm, false, own);
#pragma unroll
    for (int v = 0; v < kVector; ++v) rounded.x[v] = rounded.x[v] * by * norm.x[v];
    if (token >= share.count(i)) return;
    *reinterpret_cast<uint4*>(at(a.collapse.layer_in, share.first(i) + token, kLayerBytes)) = pack(rounded);
  }

  __device__ void do_tile(int i, const Weights<kHyper>& weights, Loaded& loaded) const {
    const bool both = share.count(i) > kEight;
    float(*part)[kValues] = team.part[warp];
    if (i + 1 < share.tiles) load_mixing(i + 1);
    Streams now[kOperands]{};
    take(i, 0, loaded, now[0]);
    if (both) load(i, 1, loaded);
    multiply_streams(now[0], part, lane);
    if (both) take(i, 1, loaded, now[1]);
    wait_for_copies();  // before the loads that follow: they would be waited for as well
    if (i + 1 < share.tiles) load(i + 1, 0, loaded);
    if (both) multiply_streams(now[1], part + kEight, lane);
    weights.multiply(now, part);
    meet();
    send_sums();
    wait(team.answers, i & 1);
    collapse(i, 0, now[0]);
    if (both) collapse(i, 1, now[1]);
  }

  // The norm's weights, some of the block's columns each.
  __device__ void keep_norm() const {
    const int at = threadIdx.x, from = share.rank * kColumns + at;
    if (at >= kColumns) return;
    const void* weights = a.collapse.norm_weight;
    m.norm[at] = a.collapse.weight_is_bf16 ? low(static_cast<const uint16_t*>(weights)[from])
                                           : static_cast<const float*>(weights)[from];
  }

  __device__ void work() const {
    Loaded loaded;
    if (share.tiles > 0) {
      load(0, 0, loaded);
      load_mixing(0);
    }
    keep_norm();
    Weights<kHyper>::make_all(m, a.mix.fn + share.rank * kColumns);
    wait_for_copies();
    asm volatile("bar.sync %0, %1;" ::"n"(1 + kTeams), "n"(32 * kTeams * kWarps) : "memory");
    wait_for_cluster();
    const Weights<kHyper> weights{m.operand[warp], lane};
    for (int i = 0; i < share.tiles; ++i) do_tile(i, weights, loaded);
  }
  // The team's warps.
  __device__ void meet() const { asm volatile("bar.sync %0, %1;" ::"r"(1 + which), "n"(32 * kWarps) : "memory"); }
};

}  // namespace dsv4
