// A tile of eight tokens in a block of a cluster, of which the block has 256 columns: what its warps hold in shared
// memory, and which tokens are whose.
#pragma once
#include <cuda.h>

#include <algorithm>

#include "hyper_connection_owner.cuh"

namespace dsv4::resident {

constexpr int kTile = 8;
constexpr int kSlots = 10;                   // tiles in shared memory, from their copying until they are collapsed
constexpr int kLag = 5;                      // by how many tiles collapsing lags behind mixing
constexpr int kLayers = 4;                   // outputs of the block have fewer places: they are needed until mixing
constexpr int kReceived = (kSlots + 1) / 2;  // so have a block's own tokens: every second tile has one
constexpr int kMostOwn = 128;                // of them in a launch

// Warps, in this order. The first are those that others wait for: one copies, two add up, one answers.
constexpr int kAdders = 2, kFirst = 2 + kAdders, kMultipliers = 8, kRows = kTile;
constexpr int kThreads = 32 * (kFirst + kMultipliers + kRows);

// A tile lies in groups of 64 columns: the 128 bytes that a token has of one, their chunks of sixteen permuted, beside
// the next token's. The same chunks of eight tokens lie in banks of their own.
constexpr int kGroupRow = 128, kStreamBytes = kTile * kGroupRow, kGroupBytes = kStreams * kStreamBytes;
constexpr int kGroups = kColumns * 2 / kGroupRow, kSlotBytes = kGroups * kGroupBytes;
constexpr int kLayerBytes = kGroups * kStreamBytes;

// The block's part of fn is in pieces of a sum and a stream, at first where the later slots will be.
constexpr int kPieces = kStreams * kSums, kPieceBytes = kColumns * 4, kFree = 3;
static_assert((kSlots - kFree) * kSlotBytes >= kPieces * kPieceBytes);

constexpr int kSentBytes = kValues * 4, kAnswerBytes = 20;  // of a token

struct Memory {
  uint8_t streams[kSlots][kSlotBytes];
  uint8_t layer[kLayers][kLayerBytes];                                    // the block's output
  float4 post[kLayers][kTile], comb[kLayers][kTile][kStreams];            // by which they are mixed
  float part[2][kMultipliers][kTile][kValues];                            // of two tiles, by the warps that made it
  float received[kReceived][kBlocks][kValues];                            // of own tokens, by the blocks that sent it
  float4 answer[kSlots][kTile][2];                                        // the sum's weights; its norm's factor
  float logits[kMostOwn][kStreams * kStreams];                            // of comb
  float4 norm[2][32];                                                     // weights of a lane's columns, by halves
  uint64_t there[kSlots], mixed[kSlots], answers[kSlots], left[kSlots];   // a tile's, in turn
  uint64_t full[2], empty[2], sums[kReceived], answered;
};
static_assert(sizeof(Memory) <= 227 * 1024);

struct Arguments {
  MixArguments mix;
  CollapseArguments collapse;
  CUtensorMap streams, layer;  // what tiles are copied from
  int clusters, each, more;    // tokens of a cluster; clusters that have one more

  // Of `tokens` tokens from `first` on, shared out to at most so many clusters.
  Arguments from(int first, int tokens, int most) const {
    constexpr int64_t kWords = kHidden / kVector;
    const int shared = std::min(most, (tokens + kTile - 1) / kTile);
    Arguments part{mix, collapse, {}, {}, shared, tokens / shared, tokens % shared};
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

// A cluster's tokens, which are neighbours. Each block owns one of every two tiles': half of them the first's.
struct Share {
  int rank, first, count, tiles;

  __device__ explicit Share(const Arguments& a) : rank(rank_in_cluster()) {
    const int which = blockIdx.x / kBlocks;
    first = which * a.each + min(which, a.more);
    count = a.each + (which < a.more ? 1 : 0);
    tiles = (count + kTile - 1) / kTile;
  }
  __device__ int tokens(int tile) const { return min(kTile, count - tile * kTile); }
  __device__ int own() const { return (count - rank + kBlocks - 1) / kBlocks; }
  __device__ int token(int own) const { return first + own * kBlocks + rank; }
};

// Of a token's row of a group, a chunk.
__device__ inline uint32_t place_of_chunk(int token, int chunk) { return token * kGroupRow + (chunk ^ token) * 16; }

}  // namespace dsv4::resident
