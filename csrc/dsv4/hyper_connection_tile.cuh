// A tile of sixteen tokens in a block of a cluster: where its columns lie in shared memory, how they are mixed, and
// their products with fn and with each other.
#pragma once
#include "hyper_connection.cuh"
#include "hyper_connection_exchange.cuh"

namespace dsv4 {

constexpr int kCluster = 16, kColumns = 256, kHidden = kCluster * kColumns;
constexpr int kWarps = 16;  // sixteen columns each; and one token each, whose values they add up
constexpr int kLag = 2;                 // tiles between mixing and collapsing
constexpr int kTravelling = kLag + 1;  // tiles whose sums or weights are under way
constexpr int kSlots = 5;              // tiles in shared memory
constexpr int kProducts = 12, kValues = kSums + kProducts;

// Paddings keep the eight-byte accesses of four rows, and the sixteen-byte ones of eight streams, on distinct banks.
constexpr int kPieceBytes = kColumns * 2;
constexpr int kStreamStep = kPieceBytes + 16, kTokenStep = kStreams * kStreamStep + 32;
constexpr int kPartStep = 40, kPartOfWarp = kTokens * kPartStep + 4;

// A tile from its arrival until it is collapsed.
struct __align__(16) Slot {
  uint8_t streams[kTokens][kTokenStep];
  float4 post[kTokens], comb[kTokens][kStreams];
};

struct Memory {
  Slot slot[kSlots];
  float part[kWarps][kPartOfWarp];                 // a token's values, by the warps whose columns they are of
  float received[kTravelling][kCluster][kValues];  // those of this block's token, by the blocks that sent them
  float4 weights[kTravelling][kTokens];            // of the streams' sum
  float factor[kTravelling][kTokens];              // of its norm
  uint64_t part_full, part_empty, collapsed, sums[kTravelling], answers[kTravelling];
};
static_assert(sizeof(Memory) <= 227 * 1024);

struct ClusterArguments {
  MixArguments mix;
  CollapseArguments collapse;
  int rows, tiles;  // tokens of a tile

  __device__ int first(int tile) const { return tile * rows; }
  __device__ int count(int tile) const { return min(rows, mix.tokens - first(tile)); }
};

// What a cluster does: tiles in steps of the number of clusters.
struct Share {
  int rank, first, step, tiles;

  __device__ explicit Share(const ClusterArguments& a) : rank(rank_in_cluster()) {
    first = blockIdx.x / kCluster;
    step = gridDim.x / kCluster;
    tiles = (a.tiles - first + step - 1) / step;
  }
  __device__ int tile(int i) const { return first + i * step; }
};

struct Four {
  float x[4];
};
__device__ inline Four unpack(uint2 raw) { return {low(raw.x), high(raw.x), low(raw.y), high(raw.y)}; }
__device__ inline uint2 pack(const Four& v) { return {pack_bf16(v.x[0], v.x[1]), pack_bf16(v.x[2], v.x[3])}; }
__device__ inline uint2& eight_bytes(uint8_t* at) { return *reinterpret_cast<uint2*>(at); }

// The block's part of fn on its way to registers: for each stream and sum a row of columns, where later tiles and parts
// are. The padding keeps eight-byte accesses of four rows on distinct banks.
constexpr int kStagedRow = kColumns * 4, kStagedStep = kStagedRow + 32, kFirstStaged = kSlots - kLag;
static_assert(kStreams * kSums * kStagedStep <= kLag * sizeof(Slot) + sizeof(Memory::part));

// Of sixteen columns: the operands b0 and b1 of each tile of eight sums and each stream, in two terms.
template <Hyper kHyper>
struct Weights {
  static constexpr int kCount = kSumsOf<kHyper>, kTiles = (kCount + 7) / 8;

  uint2 term[kTiles][kStreams][2];

  // All warps of columns.
  __device__ static void stage(uint8_t* to, const float* fn, int rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int row = warp; row < kStreams * kCount; row += kWarps) {
      const int stream = row / kCount, sum = row - stream * kCount;
      const float* from = fn + (sum * kStreams + stream) * kHidden + rank * kColumns + lane * 4;
      copy_in(to + row * kStagedStep + lane * 16, from);
      copy_in(to + row * kStagedStep + 512 + lane * 16, from + 128);
    }
  }
  __device__ Weights(const uint8_t* staged, int column, int group) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        const int sum = tile * 8 + group;
        float2 first{}, last{};
        if (sum < kCount) {
          const uint8_t* at = staged + (stream * kCount + sum) * kStagedStep + column * 4;
          first = *reinterpret_cast<const float2*>(at);
          last = *reinterpret_cast<const float2*>(at + 32);
        }
        Four one, two;
        split(first.x, one.x[0], two.x[0]);
        split(first.y, one.x[1], two.x[1]);
        split(last.x, one.x[2], two.x[2]);
        split(last.y, one.x[3], two.x[3]);
        term[tile][stream][0] = pack(one);
        term[tile][stream][1] = pack(two);
      }
    }
  }
};

// Four columns of a token's streams, mixed in place.
__device__ inline void mix(uint8_t* streams, float4 post, const float4* of_comb, uint2 layer) {
  const Four y = unpack(layer);
  Four out[kStreams];
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    out[0].x[v] = post.x * y.x[v];
    out[1].x[v] = post.y * y.x[v];
    out[2].x[v] = post.z * y.x[v];
    out[3].x[v] = post.w * y.x[v];
  }
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const Four from = unpack(eight_bytes(streams + i * kStreamStep));
    const float4 comb = of_comb[i];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      out[0].x[v] = fmaf(comb.x, from.x[v], out[0].x[v]);
      out[1].x[v] = fmaf(comb.y, from.x[v], out[1].x[v]);
      out[2].x[v] = fmaf(comb.z, from.x[v], out[2].x[v]);
      out[3].x[v] = fmaf(comb.w, from.x[v], out[3].x[v]);
    }
  }
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    eight_bytes(streams + j * kStreamStep) = pack(out[j]);
  }
}

__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}

// Sums of the sixteen tokens over this warp's columns, as the tensor cores leave them.
using Sums = float[kSumTiles][4];

template <Hyper kHyper>
__device__ void multiply_weights(const uint8_t* slot, const Weights<kHyper>& weights, int first_byte, int lane,
                                 Sums& sums) {
  const uint32_t from = shared_place(slot) + lane % 16 * kTokenStep + first_byte + lane / 16 * 16;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    uint32_t a[4];
    load_matrices(a, from + j * kStreamStep);
#pragma unroll
    for (int term = 0; term < 2; ++term) {
#pragma unroll
      for (int tile = 0; tile < Weights<kHyper>::kTiles; ++tile) {
        const uint2 b = weights.term[tile][j][term];
        multiply(sums[tile], a[0], a[1], a[2], a[3], b.x, b.y);
      }
    }
  }
}
__device__ inline void keep_sums(float* part, int lane, const Sums& sums) {
  float* to = part + lane / 4 * kPartStep + lane % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < kSumTiles; ++tile) {
    *reinterpret_cast<float2*>(to + tile * 8) = {sums[tile][0], sums[tile][1]};
    *reinterpret_cast<float2*>(to + tile * 8 + 8 * kPartStep) = {sums[tile][2], sums[tile][3]};
  }
}

// Streams times streams of the sixteen tokens at this warp's columns, to its part. An operand's eight rows are the
// streams of two tokens, two apart for the banks' sake; of the product's two by two blocks those of a token with itself
// are kept.
__device__ inline void multiply_streams(const uint8_t* slot, float* part, int first_byte, int lane) {
  const int group = lane / 4, quarter = lane % 4;
  const int stream = group % 4, pair = quarter % 2;
  const bool kept = group / 4 == quarter / 2 && (pair == 1 || stream < 2);
  float* to = part + 2 * (group / 4) * kPartStep + kSums + 2 * (pair == 0 ? stream : 2 + stream);
  const int row = lane % 16;
  const int token = row / 8 + 2 * (row / 4 % 2);
  const uint32_t from =
      shared_place(slot) + token * kTokenStep + row % 4 * kStreamStep + first_byte + lane / 16 * 16;
#pragma unroll
  for (int four = 0; four < kTokens / 4; four += 2) {  // two at a time: each is a chain of latencies
    uint32_t m[2][4];
    float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices(m[i], from + (four + i) * 4 * kTokenStep);
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_half(upper[i], m[i][half], m[i][half + 1], m[i][half]);
        multiply_half(lower[i], m[i][half], m[i][half + 1], m[i][half + 1]);
      }
    }
    if (!kept) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(to + (four + i) * 4 * kPartStep) = {upper[i][0], upper[i][1]};
      *reinterpret_cast<float2*>(to + ((four + i) * 4 + 1) * kPartStep) = {lower[i][2], lower[i][3]};
    }
  }
}

// A token's values, added up over warps or blocks: value l in `sum` of lane l, the last four in `more` of lanes 0 to 3
// (and of every fourth after).
__device__ inline void add_up(const float* from, int step, int lane, float& sum, float& more) {
  sum = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum += from[i * step + lane];
  const int at = lane / 4 * step + 32 + lane % 4;
  more = from[at] + from[8 * step + at];
  more += __shfl_xor_sync(kWholeWarp, more, 4);
  more += __shfl_xor_sync(kWholeWarp, more, 8);
  more += __shfl_xor_sync(kWholeWarp, more, 16);
}

}  // namespace dsv4
