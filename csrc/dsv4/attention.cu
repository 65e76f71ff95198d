// Sparse attention with a sink: every head of a row attends to the same listed keys, and a key is its value, too.
//
// Floor of decode with 640 keys and 64 heads: 374 KB of pages, 64 KB of q and 64 KB of o a row, against 84 Mflop:
// at 4.3 TB/s and 790 Tflop/s 0.117 us against 0.106. A block takes 64 heads of a row, so that a key is read and
// dequantised once for all of them, and streams tiles of keys, which eight warps fetch (attention_keys.cuh) while two
// groups of four multiply in turns (attention_tiles.cuh). Blocks stay for one row after the other, and fetch the next
// row's keys while they finish the last one's. Where rows alone leave multiprocessors idle, blocks share the keys of a
// row and merge what they found (attention_cluster.cuh).
#include <algorithm>

#include "attention_cluster.cuh"
#include "attention_keys.cuh"
#include "ops.h"

namespace dsv4 {
namespace {

// Warps that fetch need fewer registers than those that multiply: of 128 each they make 64 and 192.
constexpr int kProducerRegisters = 64, kConsumerRegisters = 192;

#if __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

template <int kParts>
__device__ void consume(const AttentionArguments& a, Shared& s) {
  const int group = warp_group();
  const Operands at(s, group);
  uint32_t before = 0;
  int turn = 0;
  Items items;
  Lens lens = lens_of(a, items);
  while (items.valid(a)) {
    const Range range = range_of(a, lens.keys(a));
    const int row = items.row(a), first_head = items.first_head(a);
    items.forward();
    lens = lens_of(a, items);  // read while this row's tiles are multiplied
    const Sinks sinks(a, first_head);
    Running run;
    attend<kParts>(a, s, run, at, group, before, range.last - range.first);
    before += range.last - range.first;
    if constexpr (kParts > 1) {
#if __CUDA_ARCH__ >= 900
      merge_in_cluster<kParts>(a, s, run, sinks, row, first_head, group);
#endif
      return;  // a cluster has one row
    }
    add_weights(s, run, group, turn);
    turn ^= 1;
    if (a.in_partial) {
      store_part(a, run, row, first_head, group);
    } else {
      store(a, run, sinks, row, first_head, group);
    }
  }
}

// kParts: blocks that share a row as a cluster.
template <bool kQuantised, int kParts>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionArguments a) {
  if constexpr (kParts > 1 && !kClusters) return;  // never launched there
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      // Copies arrive by thread, and what warps store themselves by warp.
      for (auto& half : s.filled[stage]) begin_barrier(half, kProducers / 32 + (kQuantised ? 0 : kProducers));
      for (auto& half : s.emptied[stage]) begin_barrier(half, kGroupThreads / 32);
    }
    begin_barrier(s.q_emptied, kConsumers / 32);
#if __CUDA_ARCH__ >= 900
    if constexpr (kParts > 1) begin_cluster<kParts>(s);
#endif
  }
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if constexpr (kParts > 1) cluster_arrive();
#endif
  if (threadIdx.x >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    after_predecessor();  // only here: what comes before touches no memory but the block's own
    if constexpr (kQuantised)
      produce_quantised<kParts>(a, s);
    else
      produce_plain<kParts>(a, s);
  } else {
    more_registers<kConsumerRegisters>();
    after_predecessor();
    consume<kParts>(a, s);
  }
}

// Threads of a block, by the code that the current device runs.
template <bool kQuantised>
int threads() {
  static int known[kDevices] = {};  // 0 not asked yet; writers agree
  const int device = current_device();
  if (device < kDevices && known[device]) return known[device];
  cudaFuncAttributes found{};
  cudaFuncGetAttributes(&found, attention_kernel<kQuantised, 1>);
  const int count = found.maxThreadsPerBlock == kWgmmaThreads ? kWgmmaThreads : kMmaThreads;
  if (device < kDevices) known[device] = count;
  return count;
}

// Blocks that share a row: as many as there is work and place for, a power of two. Large clusters do not fill a device:
// on an H200, 16 of eight blocks took twice as long as one, and 32 of four longer than 64 of two.
int parts_of(int items, int listed) {
  if (!is_hopper()) return 1;
  const int tiles = ceil_div(listed, kWgmmaTile), all = multiprocessors();
  const auto fits = [&](int parts) { return parts <= tiles && items * parts <= (parts > 2 ? all * 3 / 4 : all); };
  int parts = 1;
  while (parts < kColumns && fits(parts * 2)) parts *= 2;
  return parts;
}

template <bool kQuantised, int kParts>
void launch_blocks(const Call& call, const AttentionArguments& a, int items) {
  const int block = threads<kQuantised>();
  const int shared = block == kWgmmaThreads ? sizeof(SharedOf<kWgmmaTile>) : sizeof(SharedOf<kMmaTile>);
  const int parts = static_cast<int>(a.parts.by);
  allow_shared<attention_kernel<kQuantised, kParts>>(shared);
  const dim3 grid(parts > 1 ? items : std::min(items, multiprocessors()), parts);
  launch(call, attention_kernel<kQuantised, kParts>, grid, block, a, shared, kParts);
}

template <bool kQuantised>
void launch_attention(const Call& call, AttentionArguments& a, int64_t rows, int64_t splits) {
  const int groups = ceil_div(a.padded, kHeads), items = static_cast<int>(rows) * groups;
  const int parts = splits > 0 ? static_cast<int>(splits) : parts_of(items, a.keys[0].listed + a.keys[1].listed);
  a.rows = static_cast<int>(rows);
  a.groups = Divisor(groups);
  a.parts = Divisor(parts);
  a.in_partial = splits > 0;
  switch (a.in_partial ? 1 : parts) {
    case 8: launch_blocks<kQuantised, 8>(call, a, items); break;
    case 4: launch_blocks<kQuantised, 4>(call, a, items); break;
    case 2: launch_blocks<kQuantised, 2>(call, a, items); break;
    default: launch_blocks<kQuantised, 1>(call, a, items);
  }
  if (a.in_partial) launch(call, merge_kernel, dim3(a.rows, a.padded), kMergeThreads, a);
}

float read_scale(Reader& r) {
  const float scale = r.real();
  r.require(scale > 0, "scale", "is " + std::to_string(scale),
            "pass a positive one: the largest product has the largest score");
  return scale * kLog2e;
}

constexpr uint32_t kAllRows = 1u << 30;  // gathered keys as one page

}  // namespace

void sparse_attention_decode(const Call& call) {
  Reader r(call);
  int64_t rows = kUnbound, padded = kUnbound, listed[2] = {kUnbound, kUnbound}, splits = kUnbound;
  AttentionArguments a{};
  Keys &extra = a.keys[0], &window = a.keys[1];
  a.q = r.in("q", {DType::bf16}, {&rows, &padded, kWidth}).as<const uint4>();
  const Operand& window_cache = r.cache("window_cache");
  window.slots = r.in("window_slots", {DType::i32}, {&rows, &listed[1]}, 4).as<const int32_t>();
  window.lens = r.in("window_lens", {DType::i32}, {&rows}, 4).as<const int32_t>();
  const Operand& extra_cache = r.cache_or_none("extra_cache");
  const Operand& extra_slots = r.maybe("extra_slots", {DType::i32}, {&rows, &listed[0]}, 4);
  const Operand& extra_lens = r.maybe("extra_lens", {DType::i32}, {&rows}, 4);
  a.sink = r.in("sink", {DType::f32}, {&padded}, 4).as<const float>();
  a.o = r.out("o", {DType::bf16}, {&rows, &padded, kWidth}).as<uint4>();
  a.partial = r.out("partial", {DType::f32}, {&rows, &splits, &padded, kPartial}, 8).as<float>();
  r.require(splits <= kMostSplits, "partial", "has " + std::to_string(splits) + " parts", "pass at most 32");
  a.scale = read_scale(r);
  const int64_t rope = r.integer(), window_block = r.integer(), extra_block = r.integer(), format = r.integer();
  r.require(rope == kRope, "rope", "is " + std::to_string(rope), "states have 64 rotated dims");
  r.require(format == kPlain || format == kFp8DsMla, "format", "is " + std::to_string(format),
            "pass PLAIN or FP8_DS_MLA");
  const bool has_extra = extra_cache.given;
  r.require(has_extra == extra_slots.given && has_extra == extra_lens.given, "extra_cache",
            "comes without its slots and lens, or they without it", "pass all three or none");
  const int64_t state = format == kPlain ? 2 * kWidth : kStateBytes + kScaleBytes;
  window.cache = pages(r, "window_cache", window_cache, window_block, format, state);
  r.require(window.cache.vectors, "window_cache", "has pages that are not aligned", "align them to 16 bytes");
  if (has_extra) {
    extra.cache = pages(r, "extra_cache", extra_cache, extra_block, format, state);
    r.require(extra.cache.vectors, "extra_cache", "has pages that are not aligned", "align them to 16 bytes");
    extra.slots = extra_slots.as<const int32_t>();
    extra.lens = extra_lens.as<const int32_t>();
    extra.listed = static_cast<int>(listed[0]);
  }
  window.listed = static_cast<int>(listed[1]);
  r.done();
  if (rows == 0 || padded == 0) return;
  a.padded = static_cast<int>(padded);
  if (format == kPlain) {
    launch_attention<false>(call, a, rows, splits);
  } else {
    launch_attention<true>(call, a, rows, splits);
  }
}

void sparse_attention_prefill(const Call& call) {
  Reader r(call);
  int64_t rows = kUnbound, padded = kUnbound, gathered = kUnbound, listed = kUnbound;
  AttentionArguments a{};
  a.q = r.in("q", {DType::bf16}, {&rows, &padded, kWidth}).as<const uint4>();
  const Operand& keys = r.in("keys", {DType::bf16}, {&gathered, kWidth});
  a.keys[1].slots = r.in("indices", {DType::i32}, {&rows, &listed}, 4).as<const int32_t>();
  a.keys[1].lens = r.in("lens", {DType::i32}, {&rows}, 4).as<const int32_t>();
  a.sink = r.in("sink", {DType::f32}, {&padded}, 4).as<const float>();
  a.o = r.out("o", {DType::bf16}, {&rows, &padded, kWidth}).as<uint4>();
  a.scale = read_scale(r);
  r.done();
  if (rows == 0 || padded == 0) return;
  a.keys[1].cache = {keys.as<uint8_t>(), 0, static_cast<int>(kAllRows), true, Divisor(kAllRows)};
  a.keys[1].listed = static_cast<int>(listed);
  a.padded = static_cast<int>(padded);
  launch_attention<false>(call, a, rows, 0);
}

}  // namespace dsv4
