// How the keys of a tile come into shared memory: found by slot, read, dequantised, stored as tensor cores read them.
//
// Some warps of a block do nothing else, so that reading, dequantising and multiplying go on at once. Four dequantise:
// they keep the bytes of the next tile in registers while they wait for a place. Plain keys need no registers on their
// way, and eight warps to issue their copies.
#pragma once
#include "launch.cuh"
#include "states.cuh"
#include "tensor_core.cuh"

namespace dsv4 {

constexpr int kConsumers = 256;
template <bool kQuantised>
constexpr int kProducers = kQuantised ? 128 : 256;
template <bool kQuantised>
constexpr int kThreads = kConsumers + kProducers<kQuantised>;
constexpr int kStages = 2;
constexpr int kHeads = 64;  // of a block
constexpr int kColumns = kWidth / 64;

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
  int padded, splits, format;
};

// The tiles of a block.
struct Range {
  int row, first, last;
  int first_count, count;  // keys of the first list, and of both
};

// Shared memory of a block. Columns start at multiples of 1024 bytes.
template <int kTile>
struct __align__(1024) Shared {
  static constexpr int kKeyColumn = kTile * kRowBytes, kHeadColumn = kHeads * kRowBytes;

  uint8_t q[kColumns * kHeadColumn];
  uint8_t keys[kStages][kColumns * kKeyColumn];
  uint8_t weights[kHeadColumn];
  uint8_t there[kStages][kTile];  // whether there is such a key
  float largest[2][kHeads];       // by warp group
  float weight[2][kHeads];
};

// Named barriers. A stage is filled, then emptied; consumers have one among themselves.
enum Barrier : int { kFilled = 1, kEmptied = kFilled + kStages, kConsumersOnly = kEmptied + kStages };

__device__ inline void sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Zeroes where there is nothing to read; `from` is an address all the same.
__device__ inline void copy16(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// The slot of a place in both lists together; -1 where there is none.
__device__ inline int32_t slot_of(const AttentionArguments& a, const Range& range, int place) {
  if (place >= range.count) return -1;
  const bool second = place >= range.first_count;
  const Keys& keys = a.keys[second];
  return keys.slots[static_cast<int64_t>(range.row) * keys.listed + place - (second ? range.first_count : 0)];
}

// One key as a thread holds it: four neighbouring threads share a key, and take every fourth chunk of 16 bytes.
struct RawKey {
  static constexpr int kChunks = kStateBytes / 64;

  uint4 chunk[kChunks];
  uint2 scales;
  bool there;
};

__device__ inline RawKey load_key(const AttentionArguments& a, const Range& range, int place, int32_t slot,
                                  int quarter) {
  RawKey key{};
  key.there = slot >= 0;
  if (!key.there) return key;
  const Pages& cache = a.keys[place >= range.first_count].cache;
  int offset;
  const uint8_t* page = page_of(cache, slot, offset);
  const auto* state = reinterpret_cast<const uint4*>(page + offset * kStateBytes) + quarter;
#pragma unroll
  for (int i = 0; i < RawKey::kChunks; ++i) key.chunk[i] = __ldg(state + i * 4);
  key.scales = __ldg(reinterpret_cast<const uint2*>(page + static_cast<int64_t>(cache.block_size) * kStateBytes +
                                                    offset * kScaleBytes));
  return key;
}

template <int kTile>
__device__ void store_key(Shared<kTile>& s, int stage, int at, int quarter, const RawKey& key) {
  uint8_t* keys = s.keys[stage];
#pragma unroll
  for (int i = 0; i < kNope / 64; ++i) {
    // Four chunks of codes are one block of 64, one column.
    const uint4 codes = key.chunk[i];
    const float scale = ue8m0((i < 4 ? key.scales.x >> (8 * i) : key.scales.y >> (8 * (i - 4))) & 0xffu);
    const uint2 a = bf16_of_e4m3x4(codes.x, scale), b = bf16_of_e4m3x4(codes.y, scale);
    const uint2 c = bf16_of_e4m3x4(codes.z, scale), d = bf16_of_e4m3x4(codes.w, scale);
    uint8_t* column = keys + i * Shared<kTile>::kKeyColumn;
    *reinterpret_cast<uint4*>(column + swizzled(at, quarter * 2)) = {a.x, a.y, b.x, b.y};
    *reinterpret_cast<uint4*>(column + swizzled(at, quarter * 2 + 1)) = {c.x, c.y, d.x, d.y};
  }
  uint8_t* column = keys + (kColumns - 1) * Shared<kTile>::kKeyColumn;
  *reinterpret_cast<uint4*>(column + swizzled(at, quarter)) = key.chunk[7];
  *reinterpret_cast<uint4*>(column + swizzled(at, quarter + 4)) = key.chunk[8];
  if (quarter == 0) s.there[stage][at] = key.there;
}

template <bool kQuantised>
__device__ void wait_for_place(const Range& range, int tile) {
  const int stage = (tile - range.first) % kStages;
  if (tile - range.first >= kStages) sync(kEmptied + stage, kThreads<kQuantised>);
}

template <int kTile>
__device__ void produce_quantised(const AttentionArguments& a, Shared<kTile>& s, const Range& range) {
  constexpr int kTogether = kProducers<true> / 4, kKeys = kTile / kTogether;
  const int thread = threadIdx.x - kConsumers, quarter = thread % 4;
  RawKey raw[kKeys];
  int32_t slot[kKeys];
  const auto place = [&](int tile, int i) { return tile * kTile + i * kTogether + thread / 4; };
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    raw[i] = load_key(a, range, place(range.first, i), slot_of(a, range, place(range.first, i)), quarter);
    slot[i] = slot_of(a, range, place(range.first + 1, i));
  }
  for (int tile = range.first; tile < range.last; ++tile) {
    const int stage = (tile - range.first) % kStages;
    wait_for_place<true>(range, tile);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      store_key<kTile>(s, stage, i * kTogether + thread / 4, quarter, raw[i]);
      if (tile + 1 < range.last) {
        raw[i] = load_key(a, range, place(tile + 1, i), slot[i], quarter);
        slot[i] = slot_of(a, range, place(tile + 2, i));
      }
    }
    publish();
    arrive(kFilled + stage, kThreads<true>);
  }
}

// A warp copies every eighth key of a tile; its first lanes hold their slots.
template <int kTile>
__device__ void copy_plain(const AttentionArguments& a, Shared<kTile>& s, const Range& range, int tile, int stage,
                           int32_t slots) {
  constexpr int kWarps = kProducers<false> / 32, kChunks = kWidth / kVector;
  const uint32_t keys = shared_address(s.keys[stage]);
  const int warp = (threadIdx.x - kConsumers) / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTile / kWarps; ++i) {
    const int at = i * kWarps + warp;
    const int32_t slot = __shfl_sync(kWholeWarp, slots, i);
    const Pages& cache = a.keys[tile * kTile + at >= range.first_count].cache;
    int offset;
    const uint8_t* page = page_of(cache, max(slot, 0), offset);
    const uint8_t* state = page + static_cast<int64_t>(offset) * 2 * kWidth;
#pragma unroll
    for (int chunk = lane; chunk < kChunks; chunk += 32) {
      const void* from = slot >= 0 ? static_cast<const void*>(state + chunk * 16) : a.q;
      copy16(keys + chunk / 8 * Shared<kTile>::kKeyColumn + swizzled(at, chunk % 8), from, slot >= 0);
    }
    if (lane == 0) s.there[stage][at] = slot >= 0;
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kTile>
__device__ void produce_plain(const AttentionArguments& a, Shared<kTile>& s, const Range& range) {
  constexpr int kWarps = kProducers<false> / 32;
  const int warp = (threadIdx.x - kConsumers) / 32, lane = threadIdx.x % 32;
  const auto slots_of = [&](int tile) {
    return lane < kTile / kWarps ? slot_of(a, range, tile * kTile + lane * kWarps + warp) : -1;
  };
  int32_t slots = slots_of(range.first);
  for (int tile = range.first; tile < range.last; ++tile) {
    const int stage = (tile - range.first) % kStages;
    wait_for_place<false>(range, tile);
    const int32_t next = slots_of(tile + 1);
    copy_plain<kTile>(a, s, range, tile, stage, slots);
    slots = next;
    if (tile == range.first) continue;
    // The tile before has arrived when this one's copies alone are on their way.
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    publish();
    arrive(kFilled + (stage + 1) % kStages, kThreads<false>);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  publish();
  arrive(kFilled + (range.last - 1 - range.first) % kStages, kThreads<false>);
}

}  // namespace dsv4
