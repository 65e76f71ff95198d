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

// ceil(log2(scale)) of a positive, normal scale.
__device__ inline int ceil_log2(float scale) {
  const uint32_t bits = __float_as_uint(scale);
  return static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0);
}
// 2**power, subnormal powers included.
__device__ inline float power_of_two(int power) {
  return power < -126 ? __uint_as_float(1u << (power + 149)) : __uint_as_float(static_cast<uint32_t>(power + 127) << 23);
}

// Which floor keeps the scale of a block of zeros finite; see dsv4/cache/quantise.py.
enum class Floor { absmax, scale };

template <Floor kFloor = Floor::absmax>
__device__ inline int fp8_power(float absmax, float floor = 1e-4f) {
  if (kFloor == Floor::absmax) return ceil_log2(__fdiv_rn(fmaxf(absmax, floor), kE4M3Max));
  return ceil_log2(fmaxf(__fdiv_rn(absmax, kE4M3Max), floor));
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

constexpr float kE2M1Max = 6.0f;

__device__ inline int fp4_power(float absmax) {
  const int power = ceil_log2(__fdiv_rn(fmaxf(absmax, kE2M1Max * 0x1p-126f), kE2M1Max));
  return max(-127, min(127, power));
}
// The code of a value already divided by its scale: midpoints go to the even code, the sign survives for zero.
__device__ inline uint32_t e2m1(float value) {
  const float size = fabsf(value);
  const uint32_t code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                        (size >= 3.5f) + (size > 5.0f);
  return code | (__float_as_uint(value) >> 31 << 3);
}
__device__ inline uint32_t to_e2m1(const Eight& v, int power) {
  const float by = power_of_two(-power);
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) packed |= e2m1(v.x[i] * by) << (4 * i);
  return packed;
}

}  // namespace dsv4
