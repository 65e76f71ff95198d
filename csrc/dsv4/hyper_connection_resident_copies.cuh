// A thread that has the tiles copied: the streams of eight tokens are one box of a tensor, the block's output another.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"

namespace dsv4::resident {

template <Hyper kHyper>
struct Copies {
  static constexpr bool kMixing = kHyper == Hyper::post_pre;

  const Arguments& a;
  Memory& m;
  const Share& share;

  // Of the last tile, tokens of the next cluster come, too: nobody asks for them.
  __device__ void copy_tile(int n, uint32_t slot, uint32_t layer_slot) const {
    const int token = share.first + n * kTile, tokens = share.tokens(n), group = share.rank * kGroups;
    uint64_t& there = m.there[slot];
    before_copies();
    arrive_and_expect(there, kMixing ? kSlotBytes + kLayerBytes + tokens * (1 + kStreams) * 16 : kSlotBytes);
    copy_streams(shared_place(m.streams[slot]), a.streams, token, group, there);
    if constexpr (kMixing) {
      copy_layer(shared_place(m.layer[layer_slot]), a.layer, token, group, there);
      copy_bytes(m.post[layer_slot], a.mix.post + token, tokens * 16, there);
      copy_bytes(m.comb[layer_slot], a.mix.comb + token * kStreams, tokens * kStreams * 16, there);
    }
  }
  __device__ void run() const {
    constexpr int kBoth = 32 * (1 + kMultipliers);
    meet<kBoth>(kRequested);  // fn comes first: a tile is multiplied by all of it
    uint32_t slot = 0, round = 0, layer_slot = 0, old = 0, old_round = 0;
#pragma unroll 1
    for (int n = 0; n < share.tiles; ++n) {
      if (n == kFree) meet<kBoth>(kTaken);
      if (round > 0) wait(m.left[slot], (round - 1) & 1);
      if (kMixing && n >= kLayers) {
        wait(m.mixed[old], old_round & 1);
        if (++old == kSlots) old = 0, ++old_round;
      }
      if (threadIdx.x == 0) copy_tile(n, slot, layer_slot);
      __syncwarp();
      if (++slot == kSlots) slot = 0, ++round;
      if (++layer_slot == kLayers) layer_slot = 0;
    }
    if (share.tiles <= kFree) meet<kBoth>(kTaken);
    wait_for_cluster();
  }
};

}  // namespace dsv4::resident
