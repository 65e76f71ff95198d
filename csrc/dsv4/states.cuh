// Reading states of the two formats that attention takes: fp8_ds_mla pages, and plain bf16 rows.
#pragma once
#include "numeric.cuh"
#include "pages.cuh"

namespace dsv4 {

// 2**(byte - 127); byte 0 is a subnormal.
__device__ inline float ue8m0(uint32_t byte) { return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23); }

__device__ inline float2 floats_of_e4m3x2(uint32_t codes) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return __half22float2(*reinterpret_cast<const __half2*>(&raw));
}
// Four codes times a scale, as bf16.
__device__ inline uint2 bf16_of_e4m3x4(uint32_t codes, float scale) {
  const float2 a = floats_of_e4m3x2(codes & 0xffffu), b = floats_of_e4m3x2(codes >> 16);
  return {pack_bf16(a.x * scale, a.y * scale), pack_bf16(b.x * scale, b.y * scale)};
}

}  // namespace dsv4
