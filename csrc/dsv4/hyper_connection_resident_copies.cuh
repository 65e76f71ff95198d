// A thread that has tiles copied: in when there is a place, out when they are mixed. fn comes behind the first, which
// is mixed meanwhile; none is multiplied without all of fn.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"

namespace dsv4::resident {

template <Hyper kHyper>
struct Copies {
  static constexpr bool kMixing = kHyper == Hyper::post_pre;
  static constexpr int kAhead = kMixing ? kLayers : kSlots;  // of the tile that is mixed

  const Arguments& a;
  Memory& m;
  const Share& share;

  __device__ void fetch_descriptions() const {
    fetch_description(a.streams);
    fetch_description(a.weights);
    if constexpr (kMixing) fetch_description(a.layer), fetch_description(a.mixed);
  }
  __device__ void copy_weights_in(bool real) const {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      if (real) arrive_and_expect(m.weights[j], kPartBytes);
      copy_box(shared_place(m.streams[kFree]) + j * kPartBytes, a.weights, 0, share.rank * (kColumns / 32), j,
               m.weights[j], real);
    }
  }
  // Of the last tile, tokens that are not there are zeros.
  __device__ void copy_tile(int n, uint32_t slot, uint32_t layer_slot, bool real) const {
    const int token = share.token(n), tokens = share.tokens(n), group = share.rank * kGroups;
    constexpr int kCopied = kStreams * kLayerBytes;
    uint64_t& there = m.there[slot];
    if (real) arrive_and_expect(there, kMixing ? kCopied + kLayerBytes + tokens * (1 + kStreams) * 16 : kCopied);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      copy_box(shared_place(m.streams[slot]) + j * kStreamBytes, a.streams, j, token, group, there, real);
    }
    if constexpr (kMixing) {
      copy_box(shared_place(m.layer[layer_slot]), a.layer, token, group, there, real);
      copy_bytes(m.post[layer_slot], a.mix.post + token, tokens * 16, there, real);
      copy_bytes(m.comb[layer_slot], a.mix.comb + token * kStreams, tokens * kStreams * 16, there, real);
    }
  }
  __device__ void copy_tile_out(int n, uint32_t slot) const {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      copy_box_out(a.mixed, shared_place(m.streams[slot]) + j * kStreamBytes, j, share.token(n), share.rank * kGroups);
    }
    commit_copies();
  }
  // Until a place is free: of fn, then of the tile before.
  __device__ void wait_for_place(uint32_t slot, uint32_t round) const {
    if (round == 0) {
      if (slot < kFree) return;
      wait(m.taken[min(kStreams - 1, ((slot - kFree + 1) * kSlotBytes - 1) / kPartBytes)], 0);
    } else {
      wait(m.left[slot], (round - 1) & 1);
      if constexpr (kMixing) wait_for_reads<kSlots - kAhead - 1>();
    }
  }
  // As a tile is mixed the one that takes its output's place comes in, and it goes out. The first time round nothing is
  // real: the copies' code and arguments are there when the predecessor is over.
  __device__ void run() const {
    uint32_t slot = 0, round = 0, mixed = 0, parity = 0, layer_slot = 0;
    fetch_descriptions();
#pragma unroll 1
    for (int n = -1; n < share.tiles + (kMixing ? kAhead : 0); ++n) {
      const bool real = n >= 0;
      if (kMixing && n >= kAhead) wait(m.mixed[mixed], parity);
      if (n < share.tiles) {
        if (real) wait_for_place(slot, round);
        before_copies();
        copy_tile(n, slot, layer_slot, real);
      }
      if (n <= 0) copy_weights_in(real);
      if (!real) {
        await_predecessor();
        continue;
      }
      if (n < share.tiles) {
        if (++layer_slot == kLayers) layer_slot = 0;
        if (++slot == kSlots) slot = 0, ++round;
      }
      if (kMixing && n >= kAhead) {
        before_copies();
        copy_tile_out(n - kAhead, mixed);
        if (++mixed == kSlots) mixed = 0, parity ^= 1;
      }
    }
    if constexpr (kMixing) wait_for_reads<0>();
  }
};

}  // namespace dsv4::resident
