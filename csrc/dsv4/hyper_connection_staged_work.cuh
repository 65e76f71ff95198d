// What a mixing warp does with a stage: it mixes its tokens' streams in shared memory, stores them, multiplies them
// with each other, and collapses what it has stored some stages ago.
#pragma once
#include <type_traits>

#include "hyper_connection_staged_arithmetic.cuh"

namespace dsv4::staged {

// Eight lanes have a token's 64 columns of a stage; a lane has two tokens. It copies in what it will mix, and reads
// back what it has stored: only the tensor cores see what others have written.
template <Hyper kHyper>
struct Work {
  static constexpr bool kMixing = kHyper == Hyper::post_pre;
  static constexpr uint32_t kLayerBytes = kHidden * 2, kTokenBytes = kStreams * kLayerBytes;
  static constexpr uint32_t kSlotBytes = kStreams * kColumnBytes;
  static constexpr int kRows = 4 * kMixers, kOwn = kTile / kRows, kOwnBytes = kRows * kRowBytes;  // between the two
  static constexpr int kNone = 1 << 30;

  // The lane's tokens of a tile; from the limit on there are none.
  struct Tokens {
    int of[kOwn];
    __device__ void advance(int by) {
#pragma unroll
      for (int& token : of) token += by;
    }
  };
  struct Stored {
    uint4 streams[kOwn][kStreams];
  };

  const Arguments& a;
  Memory& m;
  const Share& share;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 8, chunk = lane % 8;
  const uint32_t column = share.rank * kColumns * 2 + chunk * 16;  // in bytes, of a tile's first stage
  const int stages = share.tiles * kStages, stride = share.step * share.rows;
  const uint32_t place = shared_place(m.streams) + swizzled(row, chunk);
  const uint32_t layer_place = shared_place(m.layer) + row * kRowBytes + chunk * 16;
  float4 mixing[kOwn][1 + kStreams];
  Squares squares[kOwn];

  __device__ Tokens tokens(int tile) const {
    Tokens t;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int own = row + k * kRows;
      t.of[k] = own < share.rows ? share.first(tile) + own : kNone;
    }
    return t;
  }
  template <class T>
  __device__ auto at(T* of, int token, uint32_t offset, uint32_t bytes) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const uint8_t, uint8_t>;
    return reinterpret_cast<Byte*>(of) + (static_cast<uint64_t>(static_cast<uint32_t>(token)) * bytes + offset);
  }

  // A stage's columns, to where they will be mixed; zeros where there is no token.
  __device__ void fetch(const Tokens& tokens, uint32_t offset, uint32_t slot_place, uint32_t layer_slot_place) const {
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const bool there = tokens.of[k] < share.limit;
      const int token = there ? tokens.of[k] : 0;
      const uint32_t bytes = there ? 16 : 0, to = slot_place + k * kOwnBytes;
      const uint8_t* from = at(a.mix.residual, token, offset, kTokenBytes);
      copy_once(to, from, bytes, a.once);
      copy_once<kColumnBytes, kLayerBytes>(to, from, bytes, a.once);
      copy_once<2 * kColumnBytes, 2 * kLayerBytes>(to, from, bytes, a.once);
      copy_once<3 * kColumnBytes, 3 * kLayerBytes>(to, from, bytes, a.once);
      if constexpr (kMixing) {
        copy_once(layer_slot_place + k * kOwnBytes, at(a.mix.y, token, offset, kLayerBytes), bytes, a.once);
      }
    }
  }
  // Post and the rows of comb of the warp's tokens: lanes share them.
  __device__ void fetch_mixing(int tile) const {
    constexpr int kEach = 1 + kStreams;
    if (tile >= share.tiles || lane >= 4 * kEach) return;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int which = lane % kEach, own = threadIdx.x / 32 * 4 + lane / kEach + k * kRows;
      if (own >= share.count(tile)) continue;
      const int token = share.first(tile) + own;
      copy_in(&m.mixing[own][which], which == 0 ? a.mix.post + token : a.mix.comb + token * kStreams + which - 1);
    }
  }
  __device__ void take_mixing(int tile) {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
#pragma unroll
      for (int i = 0; i <= kStreams; ++i) mixing[k][i] = m.mixing[row + k * kRows][i];
    }
    __syncwarp();
    fetch_mixing(tile + 1);
  }

  __device__ void mix(const Tokens& tokens, uint32_t offset, uint32_t slot, uint32_t layer_slot) {
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const uint32_t own = place + slot * kSlotBytes + k * kOwnBytes;
      uint4 streams[kStreams];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) streams[j] = load_shared(own + j * kColumnBytes);
      if constexpr (kMixing) {
        const uint4 layer = load_shared(layer_place + layer_slot * kColumnBytes + k * kOwnBytes);
        uint4 mixed[kStreams];
        staged::mix(streams, layer, mixing[k], mixed);
#pragma unroll
        for (int j = 0; j < kStreams; ++j) store_shared(own + j * kColumnBytes, mixed[j]);
        squares[k].add(mixed);
        if (tokens.of[k] >= share.limit) continue;
        uint8_t* to = at(a.mix.mixed, tokens.of[k], offset, kTokenBytes);
#pragma unroll
        for (int j = 0; j < kStreams; ++j) store(to + j * kLayerBytes, mixed[j]);
      } else {
        squares[k].add(streams);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(m.mixed[slot]);
  }
  __device__ void send_squares() {
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int own = row + k * kRows;
      squares[k].send_to(place_of(m, share, own) + kSums * 4, place_at(&m.sums, own / kOwned), lane);
      squares[k] = Squares{};
    }
  }

  __device__ void load(const Tokens& tokens, uint32_t offset, Stored& to) const {
    const uint4* mixed = kMixing ? a.mix.mixed : a.mix.residual;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const uint8_t* from = at(mixed, tokens.of[k] < share.limit ? tokens.of[k] : 0, offset, kTokenBytes);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) to.streams[k][j] = load_again(from + j * kLayerBytes);
    }
  }
  __device__ void collapse(uint32_t tile, const Tokens& tokens, uint32_t offset, const Stored& stored) const {
    const Eight norm = load_weights(m.norm, false, offset % (kColumns * 2) / 2);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int own = row + k * kRows;
      const uint4 v = staged::collapse(stored.streams[k], m.weights[tile % 2][own], m.factor[tile % 2][own], norm);
      if (tokens.of[k] < share.limit) store(at(a.collapse.layer_in, tokens.of[k], offset, kLayerBytes), v);
    }
  }

  // A stage before any is mixed.
  __device__ void begin(int n) const {
    if (kMixing && n == 0) fetch_mixing(0);
    fetch(tokens(0), column + n * kRowBytes, place + n * kSlotBytes, layer_place + n * kColumnBytes);
    commit_copies();
  }

  // Stage n is mixed, one of kAhead later fetched to the slot of the one before, one of kLag earlier collapsed.
  template <bool kCollapsing>
  __device__ void steps(int begin, int end) {
    // Where the next one goes is a lane's own to ptxas, too: see `copy_once`.
    const uint32_t last_place = place + (kSlots - 1) * kSlotBytes;
    uint32_t to = place + (begin + kAhead) % kSlots * kSlotBytes, layer_to = layer_place + begin % 2 * kColumnBytes;
    uint32_t slot = begin % kSlots, round = begin / kSlots;
    Tokens own = tokens(begin / kStages), next = tokens((begin + kAhead) / kStages), behind = tokens(0);
#pragma unroll 1
    for (int n = begin; n < end; ++n) {
      const uint32_t stage = n % kStages, next_stage = (n + kAhead) % kStages;
      wait_for_copies_but<kAhead - 1>();
      if (kMixing && stage == 0) take_mixing(n / kStages);
      mix(own, column + stage * kRowBytes, slot, n % 2);
      if (stage == kStages - 1) send_squares();
      const uint32_t old_stage = (n - kLag) % kStages, old_tile = (n - kLag) / kStages;
      Stored stored;
      if constexpr (kCollapsing) load(behind, column + old_stage * kRowBytes, stored);
      const uint32_t last = slot == 0 ? kSlots - 1 : slot - 1;
      if (n > 0) wait(m.multiplied[last], (slot == 0 ? round - 1 : round) & 1);
      if (n + kAhead < stages) fetch(next, column + next_stage * kRowBytes, to, layer_to);
      commit_copies();
      if constexpr (kCollapsing) {
        if (old_stage == 0) wait(m.answers, old_tile & 1);
        collapse(old_tile, behind, column + old_stage * kRowBytes, stored);
        if (old_stage == kStages - 1) behind.advance(stride);
      }
      if (stage == kStages - 1) own.advance(stride);
      if (next_stage == kStages - 1) next.advance(stride);
      if (++slot == kSlots) slot = 0, ++round;
      to = to == last_place ? place : to + kSlotBytes;
      layer_to = layer_to == layer_place ? layer_place + kColumnBytes : layer_place;
    }
  }
  // The stages from n on, four at a time: nothing else hides their loads.
  __device__ void collapse_last(int n) const {
    Tokens behind = tokens(n / kStages);
    int count = (stages - n) % kStages;
    if (count == 0) count = kStages;
#pragma unroll 1
    for (; n < stages; n += count, count = kStages) {
      Stored stored[kStages];
      Tokens own[kStages];
#pragma unroll
      for (int k = 0; k < kStages; ++k) {
        own[k] = behind;
        if (k >= count) continue;
        load(behind, column + (n + k) % kStages * kRowBytes, stored[k]);
        if ((n + k) % kStages == kStages - 1) behind.advance(stride);
      }
#pragma unroll
      for (int k = 0; k < kStages; ++k) {
        if (k >= count) break;
        const uint32_t stage = (n + k) % kStages, tile = (n + k) / kStages;
        if (stage == 0) wait(m.answers, tile & 1);
        collapse(tile, own[k], column + stage * kRowBytes, stored[k]);
      }
    }
  }
  __device__ void run() {
    const int alone = min(kLag, stages);
    steps<false>(0, alone);
    steps<true>(kLag, stages);
    collapse_last(stages - alone);
  }
};

}  // namespace dsv4::staged
