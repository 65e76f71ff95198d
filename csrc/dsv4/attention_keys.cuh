// How the keys of a tile come into shared memory: found by slot, read, dequantised, stored as tensor cores read them.
//
// Some warps of a block do nothing else, row after row, so that reading, dequantising and multiplying go on at once.
// They know the slots of a tile two tiles ahead, and hold its bytes in registers one tile ahead. Warps run in order:
// whatever is computed from what was read makes them wait, so that slots, lens and scales are left alone until their
// turn comes. Plain keys need no registers on their way. The first tile of a row waits for its q, too. The half of the
// dims that a tile's owner sums comes first: its place is free earlier, and scores begin with it.
#pragma once
#include <climits>

#include "attention_block.cuh"

namespace dsv4 {

// Zeroes where there is nothing to read; `from` is an address all the same.
__device__ inline void copy16(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Where a key lies: a slot, or a negative number, of one of the lists.
struct Place {
  int32_t slot;
  bool second;
};

// A tile of a row; tiles follow one another over all rows of the block.
struct Tiles {
  const AttentionArguments& a;
  Items items;
  Lens next;  // of the row after the tile's, read a row ahead
  int tile, first, last, in_first, keys;

  __device__ explicit Tiles(const AttentionArguments& arguments) : a(arguments), tile(0), last(0) {
    next = lens_of(a, items);
    items.item -= gridDim.x;
    forward();
  }
  __device__ bool valid() const { return tile < last; }
  // The item when its tiles begin here; behind the last one else.
  __device__ Items begun() const { return valid() && tile == first ? items : Items{INT_MAX}; }
  __device__ void forward() {
    if (++tile < last) return;
    do {
      items.forward();
      in_first = next.in_first(a);
      keys = next.keys(a);
      const Range range = range_of(a, keys);
      tile = first = range.first;
      last = range.last;
      Items ahead = items;
      ahead.forward();
      next = lens_of(a, ahead);
    } while (!valid() && items.valid(a));
  }
  // Nothing is done with the slot, so that nobody waits for it yet.
  __device__ Place place(int at) const {
    const int key = tile * kTile + at;
    const bool second = key >= in_first;
    const Keys& list = a.keys[second];
    Place place{-1, second};
    if (valid() && key < keys) {
      place.slot = list.slots[static_cast<int64_t>(items.row(a)) * list.listed + key - (second ? in_first : 0)];
    }
    return place;
  }
};

// q of an item. A thread takes the same chunk of each column.
__device__ inline void copy_q(const AttentionArguments& a, Shared& s, const Items& items) {
  constexpr int kTogether = kProducers / 8;
  const int thread = threadIdx.x - kConsumers, head = items.first_head(a) + thread / 8;
  const uint4* q = a.q + (static_cast<int64_t>(items.row(a)) * a.padded + head) * (kWidth / kVector) + thread % 8;
  const uint32_t to = shared_address(s.q) + swizzled(thread / 8, thread % 8);
#pragma unroll
  for (int i = 0; i < kHeads; i += kTogether) {
    const bool there = head + i < a.padded;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      copy16(to + column * s.kHeadColumn + i * kRowBytes, there ? q + i * (kWidth / kVector) + column * 8 : a.q, there);
    }
  }
}

// One key as a thread holds it: four neighbouring threads share a key, and take every fourth chunk of 16 bytes.
struct RawKey {
  static constexpr int kChunks = kStateBytes / 64;

  uint4 chunk[kChunks];
  uint2 scales{};
  bool there;
};

// Asks for the chunks of the columns that one warp group sums.
template <int kHalf>
__device__ inline void load_half(const AttentionArguments& a, const Place& place, int quarter, RawKey& key) {
  constexpr int kFrom = kHalf ? 4 : 0, kTo = kHalf ? RawKey::kChunks : 4;
#pragma unroll
  for (int i = kFrom; i < kTo; ++i) key.chunk[i] = {};
  if (place.slot < 0) return;
  const Pages& cache = a.keys[place.second].cache;
  int offset;
  const uint8_t* page = page_of(cache, place.slot, offset);
  const auto* state = reinterpret_cast<const uint4*>(page + offset * kStateBytes) + quarter;
#pragma unroll
  for (int i = kFrom; i < kTo; ++i) key.chunk[i] = __ldg(state + i * 4);
}
__device__ inline void load_scales(const AttentionArguments& a, const Place& place, RawKey& key) {
  key.there = place.slot >= 0;
  if (!key.there) return;  // zeroes have any scale
  const Pages& cache = a.keys[place.second].cache;
  int offset;
  const uint8_t* page = page_of(cache, place.slot, offset) + static_cast<int64_t>(cache.block_size) * kStateBytes;
  key.scales = __ldg(reinterpret_cast<const uint2*>(page + offset * kScaleBytes));
}

// Two E4M3 codes, bytes kFirst and kFirst + 1, as bf16 values over 2**120: the sign replicated over a byte above each
// code, then all moved to where bf16 has sign, exponent and mantissa. Subnormals come out right, too. NaN codes count
// as 480: a state that is NaN has NaN in its rotated dims as well.
template <int kFirst>
__device__ inline __nv_bfloat162 small_bf16(uint32_t codes) {
  uint32_t wide;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(wide) : "r"(codes), "n"(kFirst == 0 ? 0x9180 : 0xb3a2));
  const uint32_t pair = wide << 4 & 0x87f087f0u;
  return *reinterpret_cast<const __nv_bfloat162*>(&pair);
}
__device__ inline uint32_t bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
__device__ inline __nv_bfloat162 both_of(uint32_t exponent) {
  const uint32_t pair = exponent << 7 | exponent << 23;
  return *reinterpret_cast<const __nv_bfloat162*>(&pair);
}

// Scale bytes up to this one times 2**120 are bf16 numbers; what is above is multiplied once more.
constexpr uint32_t kLargestAtOnce = 254 - 120;

// Four codes times their scale.
template <bool kTwice>
__device__ inline uint2 dequantised(uint32_t codes, __nv_bfloat162 by, __nv_bfloat162 rest) {
  __nv_bfloat162 a = __hmul2(small_bf16<0>(codes), by), b = __hmul2(small_bf16<2>(codes), by);
  if constexpr (kTwice) a = __hmul2(a, rest), b = __hmul2(b, rest);
  return {bits_of(a), bits_of(b)};
}

template <int kHalf, bool kTwice>
__device__ inline void store_codes(uint8_t* keys, int at, int quarter, const RawKey& key) {
#pragma unroll
  for (int i = kHalf ? 4 : 0; i < (kHalf ? kNope / 64 : 4); ++i) {
    // Four chunks of codes are one block of 64, one column.
    const uint4 codes = key.chunk[i];
    const uint32_t scale = (i < 4 ? key.scales.x >> (8 * i) : key.scales.y >> (8 * (i - 4))) & 0xffu;
    const uint32_t now = kTwice ? min(scale, kLargestAtOnce) : scale;
    const __nv_bfloat162 by = both_of(now + 120), rest = both_of(scale - now + 127);
    const uint2 a = dequantised<kTwice>(codes.x, by, rest), b = dequantised<kTwice>(codes.y, by, rest);
    const uint2 c = dequantised<kTwice>(codes.z, by, rest), d = dequantised<kTwice>(codes.w, by, rest);
    uint8_t* column = keys + i * Shared::kKeyColumn;
    *reinterpret_cast<uint4*>(column + swizzled(at, quarter * 2)) = {a.x, a.y, b.x, b.y};
    *reinterpret_cast<uint4*>(column + swizzled(at, quarter * 2 + 1)) = {c.x, c.y, d.x, d.y};
  }
}

template <int kHalf>
__device__ inline void store_half(Shared& s, int stage, int at, int quarter, const RawKey& key) {
  uint8_t* keys = s.keys[stage];
  const bool twice = (__vcmpgtu4(key.scales.x, kLargestAtOnce * 0x01010101u) |
                      __vcmpgtu4(key.scales.y & 0xffffffu, kLargestAtOnce * 0x01010101u)) != 0;
  if (twice) {
    store_codes<kHalf, true>(keys, at, quarter, key);
  } else {
    store_codes<kHalf, false>(keys, at, quarter, key);
  }
  if constexpr (kHalf == 0) return;
  uint8_t* column = keys + (kColumns - 1) * Shared::kKeyColumn;
  *reinterpret_cast<uint4*>(column + swizzled(at, quarter)) = key.chunk[7];
  *reinterpret_cast<uint4*>(column + swizzled(at, quarter + 4)) = key.chunk[8];
}

// Counts what was fetched, and waits until there is place for more.
struct Filling {
  uint32_t tiles = 0, rows = 0;

  __device__ int stage() const { return static_cast<int>(tiles % kStages); }
  __device__ void wait_for_place(Shared& s, int half) const {
    if (tiles >= kStages) wait(s.emptied[stage()][half], tiles / kStages - 1);
  }
  __device__ void wait_for_q(Shared& s) {
    if (rows++ > 0) wait(s.q_emptied, rows - 2);
  }
};

constexpr int kKeysTogether = kProducers / 4, kOwnKeys = kTile / kKeysTogether;

// Stores a tile and asks for the next one. The tile that begins a row waits for the row's q.
template <int kStage>
__device__ inline void fill(const AttentionArguments& a, Shared& s, const Filling& filling, RawKey (&raw)[kOwnKeys],
                            const Place (&place)[kOwnKeys], bool begins) {
  const int thread = threadIdx.x - kConsumers, quarter = thread % 4, key = thread / 4;
  filling.wait_for_place(s, kStage);
#pragma unroll
  for (int i = 0; i < kOwnKeys; ++i) {
    store_half<kStage>(s, kStage, i * kKeysTogether + key, quarter, raw[i]);
    load_half<kStage>(a, place[i], quarter, raw[i]);
    if (quarter == 0) s.there[kStage][i * kKeysTogether + key] = raw[i].there;
  }
  if (begins) asm volatile("cp.async.wait_all;" ::: "memory");
  arrive(s.filled[kStage][0]);
  filling.wait_for_place(s, 1 - kStage);
#pragma unroll
  for (int i = 0; i < kOwnKeys; ++i) {
    store_half<1 - kStage>(s, kStage, i * kKeysTogether + key, quarter, raw[i]);
    load_half<1 - kStage>(a, place[i], quarter, raw[i]);
    load_scales(a, place[i], raw[i]);
  }
  arrive(s.filled[kStage][1]);
}

template <int kParts>
__device__ inline void produce_quantised(const AttentionArguments& a, Shared& s) {
  const int thread = threadIdx.x - kConsumers, quarter = thread % 4, key = thread / 4;
  Filling filling;
  RawKey raw[kOwnKeys];
  Place place[kOwnKeys];
  Tiles tiles(a);  // the tile whose places are read
  const auto find = [&] {
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) place[i] = tiles.place(i * kKeysTogether + key);
  };
  find();
#pragma unroll
  for (int i = 0; i < kOwnKeys; ++i) {
    load_half<0>(a, place[i], quarter, raw[i]);
    load_half<1>(a, place[i], quarter, raw[i]);
    load_scales(a, place[i], raw[i]);
  }
  bool now = tiles.valid();  // whether there is the tile whose bytes are here
  Items begun = tiles.begun();
  if (now) tiles.forward();
  find();
  while (now) {
    const bool begins = begun.valid(a);
    if (begins) {
      filling.wait_for_q(s);
      copy_q(a, s, begun);
    }
    if (filling.stage() == 0) {
      fill<0>(a, s, filling, raw, place, begins);
    } else {
      fill<1>(a, s, filling, raw, place, begins);
    }
    ++filling.tiles;
    now = tiles.valid();
    begun = tiles.begun();
    if (now) tiles.forward();
    find();
  }
  vacate_q<kParts>(s);
}

// A warp copies every so many keys of a tile; its first lanes hold their slots.
template <int kParts>
__device__ inline void produce_plain(const AttentionArguments& a, Shared& s) {
  constexpr int kWarps = kProducers / 32;
  static_assert(kWidth / kVector == 2 * 32);
  const int warp = (threadIdx.x - kConsumers) / 32, lane = threadIdx.x % 32;
  Filling filling;
  Tiles tiles(a);
  const auto find = [&] { return lane < kTile / kWarps ? tiles.place(lane * kWarps + warp) : Place{-1, false}; };
  Place own = find();
  while (tiles.valid()) {
    if (const Items begun = tiles.begun(); begun.valid(a)) {
      filling.wait_for_q(s);
      copy_q(a, s, begun);
    }
    tiles.forward();
    const Place next = find();
    const int stage = filling.stage();
    const uint32_t keys = shared_address(s.keys[stage]) + lane / 8 * Shared::kKeyColumn;
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int half = turn ^ stage;
      filling.wait_for_place(s, half);
#pragma unroll
      for (int i = 0; i < kTile / kWarps; ++i) {
        const int at = i * kWarps + warp;
        const int32_t slot = __shfl_sync(kWholeWarp, own.slot, i);
        const bool there = slot >= 0;
        const Pages& cache = a.keys[__shfl_sync(kWholeWarp, own.second, i)].cache;
        int offset;
        const uint8_t* page = page_of(cache, max(slot, 0), offset);
        const uint8_t* chunk = page + (static_cast<int64_t>(offset) * 2 + half) * kWidth + lane * 16;
        copy16(keys + half * (kColumns / 2) * Shared::kKeyColumn + swizzled(at, lane % 8),
               there ? static_cast<const void*>(chunk) : a.q, there);
        if (turn == 0 && lane == 0) s.there[stage][at] = there;
      }
      arrive_with_copies(s.filled[stage][turn]);
      arrive(s.filled[stage][turn]);  // for what says which keys are there
    }
    ++filling.tiles;
    own = next;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  vacate_q<kParts>(s);
}

}  // namespace dsv4
