// What a block of attention is given, what it keeps in shared memory, and which rows and keys are its own.
#pragma once
#include "attention_barriers.cuh"
#include "launch.cuh"
#include "states.cuh"

namespace dsv4 {

constexpr int kGroupThreads = 128;  // of a warp group
constexpr int kConsumers = 2 * kGroupThreads;
constexpr int kHeads = 64;  // of a block
constexpr int kStages = 2;  // tiles in shared memory: one of each consuming warp group
constexpr int kColumns = kWidth / 64;
constexpr int kHalf = kWidth / 2;  // dims that a warp group sums

// Keys of a tile, and threads that fetch. Without wgmma there is less shared memory, and registers stay where they are.
constexpr int kWgmmaTile = 64, kMmaTile = 32;
constexpr int kWgmmaThreads = 2 * kConsumers, kMmaThreads = kConsumers + kGroupThreads;
#ifdef DSV4_WGMMA
constexpr int kTile = kWgmmaTile, kThreads = kWgmmaThreads;
#else
constexpr int kTile = kMmaTile, kThreads = kMmaThreads;
#endif
constexpr int kProducers = kThreads - kConsumers;

// Keys by slot: pages of a cache, or gathered rows as one page.
struct Keys {
  Pages cache;
  const int32_t* slots;  // [rows, listed]
  const int32_t* lens;   // [rows]; null when there is no such list
  int listed;
};

struct AttentionArguments {
  const uint4* q;  // [rows, padded, 512] bf16
  Keys keys[2];    // the first list comes before the second
  const float* sink;
  uint4* o;        // [rows, padded, 512] bf16
  float* partial;  // [rows, splits, padded, 514]: sums, largest score, weight
  float scale;     // of scores, to base 2
  int rows, padded;
  Divisor groups;   // of kHeads heads
  Divisor parts;    // blocks that share the keys of a row
  bool in_partial;  // whether a kernel merges them; else the blocks do, as a cluster
};

// Shared memory of a block. Columns start at multiples of 1024 bytes.
template <int kKeys>
struct __align__(1024) SharedOf {
  static constexpr int kKeyColumn = kKeys * kRowBytes, kHeadColumn = kHeads * kRowBytes;

  uint8_t q[kColumns * kHeadColumn];
  uint8_t keys[kStages][kColumns * kKeyColumn];
  uint8_t weights[2][kHeadColumn];  // by warp group
  uint8_t there[kStages][kKeys];    // whether there is such a key
  float reference[2][kHeads];       // which score weights of 1 had, to base 2
  float weight[2][2][kHeads];       // of rows in turn, by warp group
  float2 part[kColumns][kHeads];    // reference and weight of each block of the cluster
  uint64_t filled[kStages][2];   // of the dims that the tile's owner sums, and of the others
  uint64_t emptied[kStages][2];  // of the dims of each warp group
  uint64_t q_emptied;
  uint64_t vacant, received;     // of a cluster: others are done with their q; what they sent is here
};
using Shared = SharedOf<kTile>;

// Each warp once, when it neither reads nor fills q any more: where kParts blocks share a row as a cluster, others may
// use its place.
template <int kParts>
__device__ inline void vacate_q(Shared& s) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kParts > 1) {
    cluster_wait();
    arrive_elsewhere(s.vacant);
  }
#endif
}

// Row after row, and group of heads after group, in the order in which blocks take them.
struct Items {
  int item = blockIdx.x;

  __device__ void forward() { item += gridDim.x; }
  __device__ bool valid(const AttentionArguments& a) const { return item < a.rows * static_cast<int>(a.groups.by); }
  __device__ int row(const AttentionArguments& a) const { return static_cast<int>(a.groups.quotient(item)); }
  __device__ int first_head(const AttentionArguments& a) const {
    return (item - row(a) * static_cast<int>(a.groups.by)) * kHeads;
  }
};

// What a row's lens say of both lists; only looked at when the row's turn comes, so that nobody waits for them.
struct Lens {
  int first, second;

  __device__ int in_first(const AttentionArguments& a) const { return min(first, a.keys[0].listed); }
  __device__ int keys(const AttentionArguments& a) const { return in_first(a) + min(second, a.keys[1].listed); }
};

// None behind the last item.
__device__ inline Lens lens_of(const AttentionArguments& a, const Items& items) {
  Lens lens{0, 0};
  if (items.valid(a)) {
    const int row = items.row(a);
    if (a.keys[0].lens) lens.first = a.keys[0].lens[row];
    if (a.keys[1].lens) lens.second = a.keys[1].lens[row];
  }
  return lens;
}

// The tiles of a block in a row of so many keys.
struct Range {
  int first, last;
};

__device__ inline Range range_of(const AttentionArguments& a, int keys) {
  const int tiles = (keys + kTile - 1) / kTile;
  const int each = static_cast<int>(a.parts.quotient(tiles + a.parts.by - 1));
  const int first = min(tiles, static_cast<int>(blockIdx.y) * each);
  return {first, min(tiles, first + each)};
}

}  // namespace dsv4
