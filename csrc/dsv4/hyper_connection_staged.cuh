// A tile of 64 tokens in a block of a cluster, of which the block has 256 columns, in four stages of 64: what its warps
// hold in shared memory, and which tiles are whose.
#pragma once
#include "hyper_connection_owner.cuh"
#include "tensor_core.cuh"

namespace dsv4::staged {

constexpr int kTile = 64, kOwned = kTile / kBlocks;  // tokens, of which each block owns four
constexpr int kStageColumns = kRowBytes / 2, kStages = kColumns / kStageColumns;
constexpr int kSlots = 3, kAhead = kSlots - 1;  // stages in shared memory: one is mixed, two are on their way
constexpr int kLag = 5;                         // stages by which collapsing lags behind mixing
constexpr int kMixers = 8, kMultipliers = 4, kOwners = kOwned;  // warps
constexpr int kThreads = 32 * (kMixers + kMultipliers + kOwners);
constexpr int kColumnBytes = kTile * kRowBytes;  // of a stage of one stream
constexpr int kTermRows = 2 * kSums;             // first terms of fn's rows, then second ones
constexpr int kSquares = kStreams * (kStreams + 1) / 2;

// Who sends a tile's values has collapsed a stage of the last tile: all blocks had answered it. So a block's received
// values are read before the next come; and two tiles' answers have places, as no more are waited for.
static_assert(kLag >= kStages && kLag <= kStages + 2);

struct Memory {
  uint8_t fn[kStages][kStreams][kTermRows * kRowBytes];
  uint8_t streams[kSlots][kStreams][kColumnBytes];
  uint8_t layer[kAhead][kColumnBytes];         // the block's output
  float received[kOwned][kBlocks][kValues];    // of this block's tokens, by the blocks that sent it
  float4 mixing[kTile][1 + kStreams];          // post and the rows of comb
  float4 weights[2][kTile];                    // of the streams' sum, of two tiles
  float factor[2][kTile];                      // of its norm
  float norm[kColumns];
  float logits[2][kOwned][kSums];              // of comb, of two tiles
  uint64_t mixed[kSlots], multiplied[kSlots];  // what is in a slot
  uint64_t sums, answers;                      // have been received
};
static_assert(sizeof(Memory) <= 227 * 1024);

struct Arguments {
  MixArguments mix;
  CollapseArguments collapse;
  int rows, tiles;  // tokens of a tile
  uint64_t once;    // how the L2 cache treats what is read once
};

// A cluster's tiles come in steps of the number of clusters.
struct Share {
  int rank, begin, step, tiles, rows, limit;

  __device__ explicit Share(const Arguments& a) : rank(rank_in_cluster()), rows(a.rows), limit(a.mix.tokens) {
    begin = blockIdx.x / kBlocks;
    step = gridDim.x / kBlocks;
    tiles = (a.tiles - begin + step - 1) / step;
  }
  // Of the cluster's tile i: its first token, and how many it has.
  __device__ int first(int i) const { return (begin + i * step) * rows; }
  __device__ int count(int i) const { return min(rows, limit - first(i)); }
};

// Where the block that owns a token of the tile has this block's part of its values.
__device__ inline uint32_t place_of(Memory& m, const Share& share, int token) {
  return place_at(m.received[token % kOwned][share.rank], token / kOwned);
}

}  // namespace dsv4::staged
