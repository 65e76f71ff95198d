// A pooled row normed, rotated, quantised and inserted by the threads that hold it.
#pragma once
#include <algorithm>

#include "compressor.cuh"
#include "ops.h"

namespace dsv4 {

// Where rows go, and by what they are multiplied.
struct Store {
  const void* norm_weight;
  const float* cos_sin;  // [*, 64]
  Pages cache;
  float eps;
  Divisor groups;  // positions to groups
  bool weight_is_bf16;
};

// A row's threads hold four neighbouring channels each.
template <int kRowWidth>
constexpr int kRowThreads = kRowWidth / kQuad;
constexpr int kMostThreads = 128;  // of a block: those of a wide row, or of up to four narrow ones side by side

template <int kRowWidth>
__device__ int row_thread() {
  return threadIdx.x % kRowThreads<kRowWidth>;
}
template <int kRowWidth>
__device__ int unit() {
  return kRowWidth == 512 ? blockIdx.x : blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

__device__ inline uint32_t codes_of(const float (&v)[kQuad], int power) {
  const float by = power_of_two(-power);
  return e4m3x2(v[0] * by, v[1] * by) | e4m3x2(v[2] * by, v[3] * by) << 16;
}

// Four bf16 values over 2**power, as FP4: the first in the last bits.
__device__ inline uint16_t fp4_codes_of(uint2 v, int power) {
  const uint32_t by = static_cast<uint32_t>(kUE8M0Bias - power) << 7, pair = by | by << 16;
  const __nv_bfloat162 scale = *reinterpret_cast<const __nv_bfloat162*>(&pair);
  const uint32_t x = e2m1x2(v.x, scale), y = e2m1x2(v.y, scale);
  const uint32_t even = __byte_perm(x, y, 0x40) & 0x0707, odd = __byte_perm(x, y, 0x62) & 0x0707;
  const uint32_t even_sign = __byte_perm(v.x, v.y, 0x51), odd_sign = __byte_perm(v.x, v.y, 0x73);
  return static_cast<uint16_t>(even | odd << 4 | (even_sign >> 4 & 0x0808) | (odd_sign & 0x8080));
}

// Sum over a row. `parts` has room for the warps of a wide one; whoever reads them still has passed a barrier before.
template <int kRowWidth>
__device__ float row_sum(float v, float* parts) {
  v = group_sum<32>(v);
  if constexpr (kRowWidth == 128) return v;
  parts[threadIdx.x / 32] = v;
  __syncthreads();
  return parts[0] + parts[1] + parts[2] + parts[3];
}

// The largest size in a thread's block of quantisation. Sizes are ordered as their bits are.
template <int kRowWidth, Format kFormat>
__device__ float block_max(float size) {
  if constexpr (kRowWidth == 512) return group_max<16>(size);
  if constexpr (kFormat == kIndexerFp4) return group_max<8>(size);
  return __uint_as_float(__reduce_max_sync(kWholeWarp, __float_as_uint(size)));
}

// Where a row goes.
struct Place {
  uint8_t* page;
  int offset;
};
__device__ inline Place place_of(const Store& s, int slot) {
  Place place;
  place.page = page_of(s.cache, slot, place.offset);
  return place;
}

// Quantises a row's values and stores them; `most` is the largest size of the thread's block.
template <int kRowWidth, Format kFormat>
__device__ void insert(const Store& s, const Place& to, float (&v)[kQuad], float most) {
  const int thread = row_thread<kRowWidth>(), offset = to.offset;
  const bool vectors = s.cache.vectors;
  const uint2 rounded = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
  v[0] = low(rounded.x), v[1] = high(rounded.x), v[2] = low(rounded.y), v[3] = high(rounded.y);
  most = low(pack_bf16(most, 0));
  if constexpr (kFormat == kPlain) {
    store_bytes<8>(to.page + (static_cast<int64_t>(offset) * kRowWidth + thread * kQuad) * 2, &rounded, vectors);
  } else if constexpr (kFormat == kFp8DsMla) {
    uint8_t* row = to.page + offset * kStateBytes;
    uint8_t* scales = to.page + static_cast<int64_t>(s.cache.block_size) * kStateBytes + offset * kScaleBytes;
    const int power = fp8_power<Floor::scale>(most);
    const bool rope = thread * kQuad >= kNope;
    if (rope) {
      store_bytes<8>(row + kNope + (thread * kQuad - kNope) * 2, &rounded, vectors);
    } else {
      const uint32_t codes = codes_of(v, power);
      store_bytes<4>(row + thread * kQuad, &codes, vectors);
    }
    if (thread % 16 == 0) scales[thread / 16] = rope ? 0 : static_cast<uint8_t>(power + kUE8M0Bias);
  } else if constexpr (kFormat == kIndexerFp8) {
    const int power = fp8_power(most);
    const uint32_t codes = codes_of(v, power);
    store_bytes<4>(to.page + offset * kRowWidth + thread * kQuad, &codes, vectors);
    const float scale = power_of_two(power);
    if (thread == 0) store_bytes<4>(to.page + s.cache.block_size * kRowWidth + offset * 4, &scale, vectors);
  } else {
    const int power = fp4_power(most);
    const uint16_t codes = fp4_codes_of(rounded, power);
    store_bytes<2>(to.page + offset * (kRowWidth / 2) + thread * 2, &codes, vectors);
    uint8_t* scales = to.page + s.cache.block_size * (kRowWidth / 2) + offset * (kRowWidth / 32);
    if (thread % 8 == 0) scales[thread / 8] = static_cast<uint8_t>(power + kUE8M0Bias);
  }
}

// What a thread multiplies its channels by. Loaded before the states, whose latency then hides its own; so nothing is
// done with it yet.
struct Factors {
  uint4 raw;  // float32 weights, or bf16 ones in the first two words
  float2 cos, sin;

  __device__ float4 weights(bool is_bf16) const {
    if (is_bf16) return {low(raw.x), high(raw.x), low(raw.y), high(raw.y)};
    return *reinterpret_cast<const float4*>(&raw);
  }
};

template <int kRowWidth>
__device__ int first_pair() {
  return (row_thread<kRowWidth>() * kQuad - (kRowWidth - kRope)) / 2;  // negative: not rotated
}

template <int kRowWidth>
__device__ Factors load_factors(const Store& s, uint32_t position) {
  Factors f{};
  if (s.weight_is_bf16) {
    const uint2 raw = static_cast<const uint2*>(s.norm_weight)[row_thread<kRowWidth>()];
    f.raw.x = raw.x, f.raw.y = raw.y;
  } else {
    f.raw = static_cast<const uint4*>(s.norm_weight)[row_thread<kRowWidth>()];
  }
  int pair = first_pair<kRowWidth>();
  if constexpr (kRowWidth == 128) pair = max(0, pair);  // a warp is turned in part: its threads do as one
  if (kRowWidth == 128 || pair >= 0) {
    const float* row = s.cos_sin + static_cast<int64_t>(s.groups.quotient(position)) * s.groups.by * kRope + pair;
    f.cos = *reinterpret_cast<const float2*>(row);
    f.sin = *reinterpret_cast<const float2*>(row + kRope / 2);
  }
  __syncwarp();  // or the compiler puts these reads off until they are used
  return f;
}

// A row is weighted and rotated first, so that the norm's sum and the largest sizes are found side by side: what is
// largest stays so when all are multiplied by one number and rounded.
template <int kRowWidth, Format kFormat>
__device__ void norm_turn_insert(const Store& s, const Factors& f, const Place& to, float (&v)[kQuad], float* parts) {
  const float squares = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
  const float4 weight = f.weights(s.weight_is_bf16);
  v[0] *= weight.x, v[1] *= weight.y, v[2] *= weight.z, v[3] *= weight.w;
  if (first_pair<kRowWidth>() >= 0) {
    rotate_pair(v[0], v[1], f.cos.x, f.sin.x);
    rotate_pair(v[2], v[3], f.cos.y, f.sin.y);
  }
  const float own = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
  const float most = block_max<kRowWidth, kFormat>(own);
  const float by = rsqrtf(row_sum<kRowWidth>(squares, parts) * (1.0f / kRowWidth) + s.eps);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) v[i] *= by;
  insert<kRowWidth, kFormat>(s, to, v, most * by);
}

struct StoreOperands {
  const Operand *norm_weight, *cos_sin, *cache;
  int64_t width = kUnbound;
};

inline Store make_store(Reader& r, const StoreOperands& given, int ratio, float eps, int64_t block_size,
                        int64_t format) {
  r.require(given.width == 512 || given.width == 128, "norm_weight", "has " + std::to_string(given.width) + " values",
            "rows are 512 or 128 wide");
  const bool known =
      format == kPlain || (given.width == 512 ? format == kFp8DsMla : format == kIndexerFp8 || format == kIndexerFp4);
  r.require(known, "format", "is " + std::to_string(format), "pass one that holds rows of this width");
  r.require(ratio > 0, "ratio", "is " + std::to_string(ratio), "pass the tokens of a group");
  const int64_t bytes[] = {2 * given.width, kStateBytes + kScaleBytes, 128 + 4, 64 + 4};
  return {given.norm_weight->address,
          given.cos_sin->as<const float>(),
          pages(r, "cache", *given.cache, block_size, format, bytes[format]),
          eps,
          Divisor(static_cast<uint32_t>(ratio)),
          given.norm_weight->dtype == DType::bf16};
}

// Blocks of a wide row, or of as many narrow ones as leave about kBlocks. `Kernels` has one for each width and format.
template <class Kernels, class Arguments>
void launch_rows(const Call& call, const Arguments& a, int64_t width, int64_t format) {
  constexpr int kBlocks = 256;
  const int units = ceil_div(a.rows.tokens, a.rows.chunk);
  if (width == 512) {
    const auto kernel = format == kPlain ? Kernels::template of<512, kPlain> : Kernels::template of<512, kFp8DsMla>;
    return launch(call, kernel, units, kMostThreads, a);
  }
  const int side = std::clamp(units / kBlocks, 1, kMostThreads / 32);
  const auto kernel = format == kPlain        ? Kernels::template of<128, kPlain>
                      : format == kIndexerFp8 ? Kernels::template of<128, kIndexerFp8>
                                              : Kernels::template of<128, kIndexerFp4>;
  launch(call, kernel, ceil_div(units, side), 32 * side, a);
}

}  // namespace dsv4
