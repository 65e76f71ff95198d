// Sparse attention with a sink: every head of a row attends to the same listed keys, and a key is its value, too.
//
// Floor of decode with 640 keys and 64 heads: 374 KB of pages, 64 KB of q and 64 KB of o a row, against 84 Mflop:
// at 4.2 TB/s and 800 Tflop/s 0.12 us against 0.11. A block takes 64 heads of a row, so that a key is read and
// dequantised once for all of them, and streams tiles of keys, which some warps fetch (attention_keys.cuh) while eight
// multiply. Those are two groups of four: each scores one half of a tile's keys, and each sums one half of the dims
// over all of them. Where rows alone leave multiprocessors idle, a row's keys are split among blocks, and a second
// kernel merges the parts.
#include <cstddef>

#include "attention_keys.cuh"
#include "ops.h"

namespace dsv4 {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kPartial = kWidth + 2;

// What a consumer keeps of its two heads (lane / 4, and 8 further) through the tiles.
struct Running {
  float largest[2] = {-INFINITY, -INFINITY};  // the same in both warp groups
  float weight[2] = {0, 0};                   // of this thread's keys
  float sum[kColumns / 2][32] = {};           // of this warp group's dims
};

__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same for all threads of a warp, and known to be: descriptors of tensor cores live in uniform registers.
__device__ int warp_group() { return __shfl_sync(kWholeWarp, threadIdx.x / 128, 0); }

// Weights may be so much larger than 1, to base 2, before the sums are brought to a new largest score.
constexpr float kSlack = 8;

template <int kTile>
__device__ void attend_tile(const AttentionArguments& a, Shared<kTile>& s, Running& run, int stage) {
  constexpr int kOwn = kTile / 2;  // keys of a warp group
  const int group = warp_group(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int head = warp * 16 + lane / 4;
  const uint32_t base = __shfl_sync(kWholeWarp, shared_address(&s), 0);
  const uint32_t q = base + offsetof(Shared<kTile>, q), weights = base + offsetof(Shared<kTile>, weights);
  const uint32_t keys = base + offsetof(Shared<kTile>, keys) + stage * kColumns * s.kKeyColumn;
  float score[kOwn / 2] = {};
  begin_products();
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
    add_products_of_rows<kOwn>(score, q + column * s.kHeadColumn, keys + column * s.kKeyColumn, group * kOwn);
  }
  end_products();

#pragma unroll
  for (int tile = 0; tile < kOwn / 8; ++tile) {
    // Two neighbouring keys' flags at once.
    const uint16_t there = *reinterpret_cast<const uint16_t*>(s.there[stage] + group * kOwn + tile * 8 + lane % 4 * 2);
    if (there == 0x0101) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(there >> (8 * (i % 2)) & 1)) score[tile * 4 + i] = -INFINITY;
    }
  }
  float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], score[i]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    most[half] = group_max<4>(most[half]);
    if (lane % 4 == 0) s.largest[group][head + half * 8] = most[half];
  }
  sync(kConsumersOnly, kConsumers);
  float kept[2] = {1, 1}, shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float now = fmaxf(s.largest[0][head + half * 8], s.largest[1][head + half * 8]) * a.scale;
    if (now > run.largest[half] + kSlack) {  // the first key's, too: -inf before it
      kept[half] = exp2_of(run.largest[half] - now);
      run.largest[half] = now;
      run.weight[half] *= kept[half];
    }
    shift[half] = run.largest[half] == -INFINITY ? 0.0f : run.largest[half];
  }
  uint8_t* row = s.weights + head * kRowBytes + lane % 4 * 4;  // and eight rows further: the same permutation
#pragma unroll
  for (int pair = 0; pair < kOwn / 4; ++pair) {
    const int half = pair % 2;
    const float first = exp2_of(fmaf(score[pair * 2], a.scale, -shift[half]));
    const float second = exp2_of(fmaf(score[pair * 2 + 1], a.scale, -shift[half]));
    run.weight[half] += first + second;
    const int chunk = (group * (kOwn / 8) + pair / 2) ^ (head & 7);
    *reinterpret_cast<uint32_t*>(row + half * 8 * kRowBytes + (chunk << 4)) = pack_bf16(first, second);
  }
  if (__any_sync(kWholeWarp, kept[0] != 1.0f || kept[1] != 1.0f)) {
#pragma unroll
    for (int column = 0; column < kColumns / 2; ++column) {
#pragma unroll
      for (int i = 0; i < 32; ++i) run.sum[column][i] *= kept[i / 2 % 2];
    }
  }
  publish();
  sync(kConsumersOnly, kConsumers);
  begin_products();
#pragma unroll
  for (int column = 0; column < kColumns / 2; ++column) {
    add_products_across_rows<kTile>(run.sum[column], weights, keys + (group * (kColumns / 2) + column) * s.kKeyColumn);
  }
  end_products();
}

// The whole weight of each head, from both warp groups.
template <int kTile>
__device__ void add_weights(Shared<kTile>& s, Running& run) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float own = group_sum<4>(run.weight[half]);
    if (lane % 4 == 0) s.weight[group][head + half * 8] = own;
  }
  sync(kConsumersOnly, kConsumers);
#pragma unroll
  for (int half = 0; half < 2; ++half) run.weight[half] = s.weight[0][head + half * 8] + s.weight[1][head + half * 8];
}

// Sums over their weights and the sink's, as bf16 through shared memory, so that whole rows are stored.
template <int kTile>
__device__ void store(const AttentionArguments& a, Shared<kTile>& s, const Running& run, int row, int first_head) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4;
  float by[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = first_head + head + half * 8;
    const float sink = own < a.padded ? a.sink[own] * kLog2e : -INFINITY;
    // Without a key there is nothing to weigh.
    by[half] = run.weight[half] > 0 || run.weight[half] != run.weight[half]
                   ? 1.0f / (run.weight[half] + exp2f(sink - run.largest[half]))
                   : 0.0f;
  }
#pragma unroll
  for (int column = 0; column < kColumns / 2; ++column) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int half = i % 2;
      const uint32_t pair = pack_bf16(run.sum[column][2 * i] * by[half], run.sum[column][2 * i + 1] * by[half]);
      uint8_t* to = s.q + (group * (kColumns / 2) + column) * s.kHeadColumn + swizzled(head + half * 8, i / 2);
      *reinterpret_cast<uint32_t*>(to + lane % 4 * 4) = pair;
    }
  }
  sync(kConsumersOnly, kConsumers);
  uint4* o = a.o + (static_cast<int64_t>(row) * a.padded + first_head) * (kWidth / kVector);
  const int heads = min(kHeads, a.padded - first_head);
  for (int i = threadIdx.x; i < heads * (kWidth / kVector); i += kConsumers) {
    const int own = i / (kWidth / kVector), chunk = i % (kWidth / kVector);
    o[i] = *reinterpret_cast<const uint4*>(s.q + chunk / 8 * s.kHeadColumn + swizzled(own, chunk % 8));
  }
}

__device__ void store_part(const AttentionArguments& a, const Running& run, int64_t part, int first_head) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = first_head + head + half * 8;
    if (own >= a.padded) continue;
    float* to = a.partial + (part * a.padded + own) * kPartial;
#pragma unroll
    for (int column = 0; column < kColumns / 2; ++column) {
#pragma unroll
      for (int i = half; i < 16; i += 2) {
        const int dim = (group * (kColumns / 2) + column) * 64 + i / 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to + dim) = {run.sum[column][2 * i], run.sum[column][2 * i + 1]};
      }
    }
    if (group == 0 && lane % 4 == 0) *reinterpret_cast<float2*>(to + kWidth) = {run.largest[half], run.weight[half]};
  }
}

template <bool kQuantised, int kTile>
__device__ void consume(const AttentionArguments& a, Shared<kTile>& s, const Range& range) {
  const int first_head = blockIdx.y * kHeads, heads = min(kHeads, a.padded - first_head);
  const uint4* q = a.q + (static_cast<int64_t>(range.row) * a.padded + first_head) * (kWidth / kVector);
  for (int i = threadIdx.x; i < kHeads * (kWidth / kVector); i += kConsumers) {
    const int head = i / (kWidth / kVector), chunk = i % (kWidth / kVector);
    const bool there = head < heads;
    copy16(shared_address(s.q) + chunk / 8 * s.kHeadColumn + swizzled(head, chunk % 8), there ? q + i : a.q, there);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  publish();
  sync(kConsumersOnly, kConsumers);
  Running run;
  for (int tile = range.first; tile < range.last; ++tile) {
    const int stage = (tile - range.first) % kStages;
    sync(kFilled + stage, kThreads<kQuantised>);
    attend_tile<kTile>(a, s, run, stage);
    if (tile + kStages < range.last) arrive(kEmptied + stage, kThreads<kQuantised>);
  }
  add_weights<kTile>(s, run);
  if (a.splits) {
    store_part(a, run, static_cast<int64_t>(range.row) * a.splits + blockIdx.z, first_head);
  } else {
    store<kTile>(a, s, run, range.row, first_head);
  }
}

template <bool kQuantised, int kTile>
__global__ void __launch_bounds__(kThreads<kQuantised>, 1)
    attention_kernel(const __grid_constant__ AttentionArguments a) {
  after_predecessor();
  extern __shared__ uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kTile>*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t{1023});
  Range range{};
  range.row = blockIdx.x;
  range.first_count = a.keys[0].lens ? min(a.keys[0].lens[range.row], a.keys[0].listed) : 0;
  range.count = range.first_count + (a.keys[1].lens ? min(a.keys[1].lens[range.row], a.keys[1].listed) : 0);
  const int tiles = (range.count + kTile - 1) / kTile, each = (tiles + max(1, a.splits) - 1) / max(1, a.splits);
  range.first = blockIdx.z * each;
  range.last = min(tiles, range.first + each);
  if (threadIdx.x >= kConsumers) {
    // 384 threads start with 168 registers, 512 with 128; consumers get 192.
    fewer_registers<kQuantised ? 120 : 64>();
    if (range.first >= range.last) return;
    if constexpr (kQuantised)
      produce_quantised<kTile>(a, s, range);
    else
      produce_plain<kTile>(a, s, range);
  } else {
    more_registers();
    consume<kQuantised, kTile>(a, s, range);
  }
}

constexpr int kMergeThreads = 128;

constexpr int kMostSplits = 32;

// Merges the parts of one head of a row, always in the same order. A lane knows the part of its number.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ AttentionArguments a) {
  after_predecessor();
  const int row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(a.padded) * kPartial;
  const float* parts = a.partial + (static_cast<int64_t>(row) * a.splits * a.padded + head) * kPartial;
  float2 own{-INFINITY, 0};
  if (lane < a.splits) own = *reinterpret_cast<const float2*>(parts + lane * step + kWidth);
  const float largest = group_max<32>(own.x);
  const float kept = own.y == 0 ? 0.0f : exp2f(own.x - largest);  // a part without keys weighs nothing
  const float weight = group_sum<32>(own.y * kept);
  float sum[4] = {};
#pragma unroll 4
  for (int i = 0; i < a.splits; ++i) {
    const float by = __shfl_sync(kWholeWarp, kept, i);
    if (by == 0) continue;  // nothing was written there
    const float2 a0 = *reinterpret_cast<const float2*>(parts + i * step + threadIdx.x * 4);
    const float2 a1 = *reinterpret_cast<const float2*>(parts + i * step + threadIdx.x * 4 + 2);
    sum[0] = fmaf(a0.x, by, sum[0]), sum[1] = fmaf(a0.y, by, sum[1]);
    sum[2] = fmaf(a1.x, by, sum[2]), sum[3] = fmaf(a1.y, by, sum[3]);
  }
  const float by = weight == 0 ? 0.0f : 1.0f / (weight + exp2f(a.sink[head] * kLog2e - largest));
  uint2* o = reinterpret_cast<uint2*>(a.o + (static_cast<int64_t>(row) * a.padded + head) * (kWidth / kVector));
  o[threadIdx.x] = {pack_bf16(sum[0] * by, sum[1] * by), pack_bf16(sum[2] * by, sum[3] * by)};
}

template <bool kQuantised, int kTile>
void launch_tiles(const Call& call, const AttentionArguments& a, int rows) {
  constexpr int kSharedBytes = sizeof(Shared<kTile>) + 1024;  // and room to align it
  allow_shared<attention_kernel<kQuantised, kTile>>(kSharedBytes);
  const dim3 grid(rows, ceil_div(a.padded, kHeads), a.splits ? a.splits : 1);
  launch(call, attention_kernel<kQuantised, kTile>, grid, kThreads<kQuantised>, a, kSharedBytes);
}

template <bool kQuantised>
void launch_attention(const Call& call, const AttentionArguments& a, int rows) {
  // Before sm_90 shared memory holds tiles of 32 keys only.
  if (is_hopper())
    launch_tiles<kQuantised, 64>(call, a, rows);
  else
    launch_tiles<kQuantised, 32>(call, a, rows);
  if (a.splits) launch(call, merge_kernel, dim3(rows, a.padded), kMergeThreads, a);
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
  a.splits = static_cast<int>(splits);
  a.format = static_cast<int>(format);
  if (format == kPlain) {
    launch_attention<false>(call, a, static_cast<int>(rows));
  } else {
    launch_attention<true>(call, a, static_cast<int>(rows));
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
  a.format = kPlain;
  launch_attention<false>(call, a, static_cast<int>(rows));
}

}  // namespace dsv4
