// A tile of eight tokens in a block of a cluster, of which the block has 256 columns: what its warps hold in shared
// memory, and which tokens are whose.
#pragma once
#include <cuda.h>

#include <algorithm>

#include "hyper_connection_owner.cuh"

namespace dsv4::resident {

constexpr int kTile = 8;
constexpr int kSlots = 9;                    // tiles in shared memory, from their copying until they are collapsed
constexpr int kLayers = 4;                   // outputs of the block have fewer places: they are needed until mixing
constexpr int kReceived = (kSlots + 1) / 2;  // so have a block's own tokens: every second tile has one
constexpr int kMostOwn = 128;                // of them in a launch

// Warps, in this order. The first are those that others wait for: one copies, two add up, one answers.
constexpr int kAdders = 2, kFirst = 2 + kAdders, kMultipliers = 8, kMixers = 8, kRows = kTile;
constexpr int kThreads = 32 * (kFirst + kMultipliers + kMixers + kRows);

// Of a tile a stream lies after the other, in groups of 64 columns, of which a token has a row of 128 bytes. Chunks of
// sixteen bytes are permuted by the three bits of their address above a row's. A stream begins two rows further than it
// has to: so the same chunk of a stream's eight tokens lies in banks of its own, and so does that of two neighbours'
// four streams.
constexpr int kRow = 128, kGroupBytes = kTile * kRow, kGroups = kColumns * 2 / kRow;
constexpr int kLayerBytes = kGroups * kGroupBytes, kStreamBytes = kLayerBytes + 2 * kRow;
constexpr int kSlotBytes = kStreams * kStreamBytes;

// The block's part of fn lies at first where the later tiles will be, a stream after the other: for each warp that
// multiplies the rows of its 32 columns, of all sums.
constexpr int kPartBytes = kSums * kColumns * 4, kFree = kSlots - (kStreams * kPartBytes + kSlotBytes - 1) / kSlotBytes;

constexpr int kParts = 2;                   // of a block's columns, that warps mix
constexpr int kProducts = kValues - kSums;  // of a token's streams with each other; padded as values are
constexpr int kPartValues = 28;             // of its sums, padded for accesses to banks of their own
constexpr int kSentBytes = kValues * 4, kAnswerBytes = 20;  // of a token

struct Memory {
  uint8_t streams[kSlots][kSlotBytes];
  uint8_t layer[kLayers][kLayerBytes];                                    // the block's output
  float4 post[kLayers][kTile], comb[kLayers][kTile][kStreams];            // by which they are mixed
  float part[2][kMultipliers][kTile][kPartValues];                        // sums of two tiles, by warps
  float4 products[kSlots][kParts][kTile][kProducts / 4];                  // of the streams with each other
  float received[kReceived][kBlocks][kValues];                            // of own tokens, by the blocks that sent it
  float4 answer[kSlots][kTile][2];                                        // the sum's weights; its norm's factor
  float logits[kMostOwn][kStreams * kStreams];                            // of comb
  float4 norm[2][32];                                                     // weights of a lane's columns, by halves
  uint64_t there[kSlots], mixed[kSlots], answers[kSlots], left[kSlots];   // a tile's, in turn
  uint64_t full[2], empty[2], sums[kReceived], answered;
  uint64_t weights[kStreams], taken[kStreams];                            // fn is there, by streams; in registers
};
static_assert(sizeof(Memory) <= 227 * 1024);

struct Arguments {
  MixArguments mix;
  CollapseArguments collapse;
  CUtensorMap streams, layer, weights, mixed;  // what is copied from, and to
  int clusters, each, more;                    // tiles of a cluster; clusters that have one more

  // Of `tokens` tokens from `first` on, shared out to at most so many clusters.
  Arguments from(int first, int tokens, int most) const {
    constexpr int64_t kWords = kHidden / kVector;
    const int tiles = (tokens + kTile - 1) / kTile, shared = std::min(most, tiles);
    Arguments part{mix, collapse, {}, {}, {}, {}, shared, tiles / shared, tiles % shared};
    part.mix.tokens = tokens;
    part.mix.residual += first * kStreams * kWords;
    part.collapse.layer_in += first * kWords;
    part.collapse.post += first * kStreams;
    part.collapse.comb += first * kStreams * kStreams;
    if (mix.mixed != nullptr) {
      part.mix.mixed += first * kStreams * kWords;
      part.mix.y += first * kWords;
      part.mix.post += first;
      part.mix.comb += first * kStreams;
    }
    return part;
  }
};

// A cluster's tiles: clusters take them in turn, so that they are near each other in memory at any time, and where that
// is slow none is left behind. Blocks 0 to 7 own the tokens of its even tiles, 8 to 15 those of its odd ones.
struct Share {
  int rank, first, step;  // the first tile's first token, and how much further the next tile's is
  int tiles, count;       // `count` of tokens

  __device__ explicit Share(const Arguments& a) : rank(rank_in_cluster()) {
    const int which = blockIdx.x / kBlocks;
    first = which * kTile;
    step = a.clusters * kTile;
    tiles = a.each + (which < a.more ? 1 : 0);
    count = (tiles - 1) * kTile + min(kTile, a.mix.tokens - token(tiles - 1));
  }
  __device__ int token(int tile) const { return first + tile * step; }
  __device__ int tokens(int tile) const { return min(kTile, count - tile * kTile); }
  __device__ int own() const { return (count - rank + kBlocks - 1) / kBlocks; }
  __device__ int own_token(int k) const { return token(2 * k + rank / kTile) + rank % kTile; }
};

// Where a chunk of a token lies in a stream's group, and in one of its block's output.
__device__ inline uint32_t place_of_chunk(int token, int stream, int chunk) {
  return stream * kStreamBytes + token * kRow + (chunk ^ (token + 2 * stream) % 8) * 16;
}
__device__ inline uint32_t place_of_layer_chunk(int token, int chunk) { return token * kRow + (chunk ^ token) * 16; }

}  // namespace dsv4::resident
