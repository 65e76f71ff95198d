// A tile of sixteen tokens in a block of a cluster: what its warps hold in shared memory, and which tiles are whose.
#pragma once
#include "hyper_connection.cuh"
#include "hyper_connection_exchange.cuh"

namespace dsv4 {

constexpr int kBlocks = 16, kHidden = 4096, kColumns = kHidden / kBlocks;
constexpr int kTile = kBlocks;                                      // tokens, of which each block owns one
constexpr int kEight = 8, kOperands = kTile / kEight;               // of them are the columns of m16n8k16
constexpr int kTeams = 2;                                           // of warps, with tiles of their own
constexpr int kWarpColumns = 32, kWarps = kColumns / kWarpColumns;  // of a team
constexpr int kSteps = kStreams * kWarpColumns / 16;                // in which a warp multiplies
constexpr int kValues = 36;  // of a token: 24 sums and ten products; padded for accesses of sixteen bytes

// A team's tiles that are fetched to the L2 cache before they are loaded.
template <Hyper kHyper>
constexpr int kTilesAhead = kHyper == Hyper::post_pre ? 1 : 2;

// Operands of a step: 24 sums in two terms are 48 rows; the head's four are 8.
template <Hyper kHyper>
constexpr int kTerms = kHyper == Hyper::head ? 1 : 3;

// What a team has of its tile.
struct Team {
  float part[kWarps][kTile][kValues];   // of each token, by the warps whose columns they are of
  float received[kBlocks][kValues];     // those of this block's token, by the blocks that sent them
  float4 mixing[2][kTile][1 + kStreams];  // post and the rows of comb, of this tile and the next
  float4 weights[kTile];                // of the streams' sum
  float factor[kTile];                  // of its norm
  uint64_t sums, answers;               // have been received
};

template <Hyper kHyper>
struct Memory {
  uint4 operand[kWarps][kSteps][kTerms<kHyper>][32];  // fn's part of a warp's columns as its lanes need it
  float norm[kColumns];
  Team team[kTeams];
};
static_assert(sizeof(Memory<Hyper::pre>) <= 227 * 1024);

struct ClusterArguments {
  MixArguments mix;
  CollapseArguments collapse;
  int rows, tiles;  // tokens of a tile
};

// What a team does: every second one of its cluster's tiles, which come in steps of the number of clusters.
struct Share {
  int rank, begin, step, tiles, rows, limit;

  __device__ Share(const ClusterArguments& a, int team) : rank(rank_in_cluster()), rows(a.rows), limit(a.mix.tokens) {
    const int clusters = gridDim.x / kBlocks;
    begin = blockIdx.x / kBlocks + team * clusters;
    step = kTeams * clusters;
    tiles = max(0, (a.tiles - begin + step - 1) / step);
  }
  // Of the team's tile i: its first token, and how many it has.
  __device__ int first(int i) const { return (begin + i * step) * rows; }
  __device__ int count(int i) const { return min(rows, limit - first(i)); }
};

}  // namespace dsv4
