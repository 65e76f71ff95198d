// Number formats and vector accesses that several kernels share. Rounding is that of the CPU references: no products
// fused into sums where bytes must match.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace dsv4 {

constexpr uint32_t kWholeWarp = 0xffffffffu;
constexpr int kVector = 8;  // bf16 values of a 16-byte access
constexpr float kE4M3Max = 448.0f;
constexpr int kUE8M0Bias = 127;

struct Eight {
  float x[kVector];
};

__device__ inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline Eight unpack(uint4 raw) {
  return {low(raw.x), high(raw.x), low(raw.y), high(raw.y), low(raw.z), high(raw.z), low(raw.w), high(raw.w)};
}
__device__ inline uint32_t pack_bf16(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline uint4 pack(const Eight& v) {
  return {pack_bf16(v.x[0], v.x[1]), pack_bf16(v.x[2], v.x[3]), pack_bf16(v.x[4], v.x[5]), pack_bf16(v.x[6], v.x[7])};
}
__device__ inline Eight rounded_to_bf16(const Eight& v) { return unpack(pack(v)); }

// Eight weights from `at` on, float32 or bfloat16.
__device__ inline Eight load_weights(const void* weights, bool is_bf16, int at) {
  if (is_bf16) return unpack(*reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(weights) + at));
  const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(weights) + at);
  const float4 a = from[0], b = from[1];
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Cosines and sines of four neighbouring pairs.
struct Turn {
  float4 cos, sin;
};

__device__ inline Turn load_turn(const float* row, int half, int pair) {
  return {*reinterpret_cast<const float4*>(row + pair), *reinterpret_cast<const float4*>(row + half + pair)};
}
__device__ inline void rotate_pair(float& even, float& odd, float cos, float sin) {
  const float e = even, o = odd;
  even = __fsub_rn(__fmul_rn(e, cos), __fmul_rn(o, sin));
  odd = __fadd_rn(__fmul_rn(e, sin), __fmul_rn(o, cos));
}
template <bool kInverse = false>
__device__ inline void rotate(Eight& v, const Turn& t) {
  const float sign = kInverse ? -1.0f : 1.0f;
  rotate_pair(v.x[0], v.x[1], t.cos.x, sign * t.sin.x);
  rotate_pair(v.x[2], v.x[3], t.cos.y, sign * t.sin.y);
  rotate_pair(v.x[4], v.x[5], t.cos.z, sign * t.sin.z);
  rotate_pair(v.x[6], v.x[7], t.cos.w, sign * t.sin.w);
}

// Sum or maximum over groups of kLanes neighbouring lanes; every lane gets it.
template <int kLanes>
__device__ inline float group_sum(float v) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) v += __shfl_xor_sync(kWholeWarp, v, step);
  return v;
}
template <int kLanes>
__device__ inline float group_max(float v) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) v = fmaxf(v, __shfl_xor_sync(kWholeWarp, v, step));
  return v;
}
__device__ inline float sum_of_squares(const Eight& v) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum = fmaf(v.x[i], v.x[i], sum);
  return sum;
}
__device__ inline float largest(const Eight& v) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) most = fmaxf(most, fabsf(v.x[i]));
  return most;
}

// 2**power for powers from -126 to 127.
__device__ inline float power_of_two(int power) { return __uint_as_float(static_cast<uint32_t>(power + 127) << 23); }

// Which floor keeps the scale of a block of zeros finite; see dsv4/cache/quantise.py.
enum class Floor { absmax, scale };

// Of eight bf16 values, the even ones and the odd ones.
__device__ inline __nv_bfloat162 largest_pair(uint4 v) {
  const auto size = [](uint32_t pair) { return __habs2(*reinterpret_cast<const __nv_bfloat162*>(&pair)); };
  return __hmax2(__hmax2(size(v.x), size(v.y)), __hmax2(size(v.z), size(v.w)));
}
__device__ inline float largest(uint4 v) {
  const __nv_bfloat162 most = largest_pair(v);
  return fmaxf(__low2float(most), __high2float(most));
}

// ceil(log2(absmax / 448)) of a normal absmax. 448 is 1.75 * 2**8, so the quotient passes a power of two where the
// mantissa passes 1.75; the correctly rounded quotient of the references passes it at the same values.
__device__ inline int power_over_448(float absmax) {
  return static_cast<int>((__float_as_uint(absmax) + 0x1fffffu) >> 23) - 127 - 8;
}
template <Floor kFloor = Floor::absmax>
__device__ inline int fp8_power(float absmax, float floor = 1e-4f) {
  if (kFloor == Floor::absmax) return power_over_448(fmaxf(absmax, floor));
  return max(power_over_448(absmax), -13);  // 2**-13 is the first power of two above a scale of 1e-4
}

__device__ inline uint32_t e4m3x2(float first, float second) {
  return __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, __NV_E4M3);
}
// Values over 2**power, saturated, to nearest even.
__device__ inline uint2 to_e4m3(const Eight& v, int power) {
  const float by = power_of_two(-power);
  return {e4m3x2(v.x[0] * by, v.x[1] * by) | e4m3x2(v.x[2] * by, v.x[3] * by) << 16,
          e4m3x2(v.x[4] * by, v.x[5] * by) | e4m3x2(v.x[6] * by, v.x[7] * by) << 16};
}

// ceil(log2(absmax / 6)), 6 being 1.5 * 2**2; the floor is 6 * 2**-126.
__device__ inline int fp4_power(float absmax) {
  const float kept = fmaxf(absmax, 6.0f * 0x1p-126f);
  return min(127, static_cast<int>((__float_as_uint(kept) + 0x3fffffu) >> 23) - 127 - 2);
}
// Two neighbouring bf16 values times `by`, a power of two: 128 and the code without its sign, in either half's last
// bits. With u = |value| * by, the code is the least of 2u, u + 2 and u / 2 + 4, each rounded to an even integer: steps
// of 0.5 up to 2, of 1 up to 4, of 2 beyond. From 128 to 256 the bf16 numbers are the integers, so sums round so.
__device__ inline uint32_t e2m1x2(uint32_t pair, __nv_bfloat162 by) {
  const auto both = [](float v) { return __float2bfloat162_rn(v); };
  const __nv_bfloat162 u = __hmul2(__habs2(*reinterpret_cast<const __nv_bfloat162*>(&pair)), by);
  const __nv_bfloat162 halves = __hfma2(u, both(2), both(128)), ones = __hadd2_rn(u, both(130));
  const __nv_bfloat162 twos = __hfma2(u, both(0.5f), both(132));
  const __nv_bfloat162 least = __hmin2(__hmin2(__hmin2(halves, ones), twos), both(135));  // 7 for what is above 6
  return *reinterpret_cast<const uint32_t*>(&least);
}
// Of four words, bytes `first` and `first` + 2: the former in `low`, the latter in `high`, word by word.
template <int kFirst>
__device__ inline void gather_bytes(const uint32_t (&w)[4], uint32_t& low, uint32_t& high) {
  constexpr uint32_t kPick = 0x6240 + 0x1111 * kFirst;
  const uint32_t front = __byte_perm(w[0], w[1], kPick), back = __byte_perm(w[2], w[3], kPick);
  low = __byte_perm(front, back, 0x5410);
  high = __byte_perm(front, back, 0x7632);
}
// Eight bf16 values times `by` as codes.
__device__ inline uint32_t to_e2m1(uint4 v, __nv_bfloat162 by) {
  const uint32_t values[4] = {v.x, v.y, v.z, v.w};
  const uint32_t sums[4] = {e2m1x2(v.x, by), e2m1x2(v.y, by), e2m1x2(v.z, by), e2m1x2(v.w, by)};
  uint32_t even, odd, even_sign, odd_sign;
  gather_bytes<0>(sums, even, odd);
  gather_bytes<1>(values, even_sign, odd_sign);
  return even | odd << 4 | (even_sign >> 4 & 0x08080808u) | (odd_sign & 0x80808080u);
}

}  // namespace dsv4
