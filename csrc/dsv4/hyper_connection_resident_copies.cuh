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
  static constexpr int kBefore = 1;                          // tiles before fn

  const Arguments& a;
  Memory& m;
  const Share& share;

  __device__ void copy_weights_in() const {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      arrive_and_expect(m.weights[j], kPartBytes);
      copy_box(shared_place(m.streams[kFree]) + j * kPartBytes, a.weights, 0, share.rank * (kColumns / 32), j,
               m.weights[j]);
    }
  }
  // Of the last tile, tokens that are not there are zeros.
  __device__ void copy_tile(int n, uint32_t slot, uint32_t layer_slot) const {
    const int token = share.first + n * kTile, tokens = share.tokens(n), group = share.rank * kGroups;
    constexpr int kCopied = kStreams * kLayerBytes;
    uint64_t& there = m.there[slot];
    arrive_and_expect(there, kMixing ? kCopied + kLayerBytes + tokens * (1 + kStreams) * 16 : kCopied);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      copy_box(shared_place(m.streams[slot]) + j * kStreamBytes, a.streams, j, token, group, there);
    }
    if constexpr (kMixing) {
      copy_box(shared_place(m.layer[layer_slot]), a.layer, token, group, there);
      copy_bytes(m.post[layer_slot], a.mix.post + token, tokens * 16, there);
      copy_bytes(m.comb[layer_slot], a.mix.comb + token * kStreams, tokens * kStreams * 16, there);
    }
  }
  __device__ void copy_tile_out(int n, uint32_t slot) const {
    before_copies();
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      copy_box_out(a.mixed, shared_place(m.streams[slot]) + j * kStreamBytes, j, share.first + n * kTile,
                   share.rank * kGroups);
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
      if constexpr (kMixing) wait_for_reads<kSlots - kAhead>();
    }
  }
  // As a tile is mixed it goes out, and the one that takes its output's place comes in.
  __device__ void run() const {
    uint32_t slot = 0, round = 0, mixed = 0, parity = 0, layer_slot = 0;
    before_copies();
#pragma unroll 1
    for (int n = 0; n < share.tiles + (kMixing ? kAhead : 0); ++n) {
      if (n == kBefore) copy_weights_in();
      if (kMixing && n >= kAhead) {
        wait(m.mixed[mixed], parity);
        copy_tile_out(n - kAhead, mixed);
        if (++mixed == kSlots) mixed = 0, parity ^= 1;
      }
      if (n >= share.tiles) continue;
      wait_for_place(slot, round);
      before_copies();
      copy_tile(n, slot, layer_slot);
      if (++layer_slot == kLayers) layer_slot = 0;
      if (++slot == kSlots) slot = 0, ++round;
    }
    if (!kMixing && share.tiles <= kBefore) copy_weights_in();
    if constexpr (kMixing) wait_for_reads<0>();
  }
};

}  // namespace dsv4::resident
