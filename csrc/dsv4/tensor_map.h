// How the copying unit of sm_90 is told of a tensor: the driver encodes it.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

namespace dsv4 {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function; nullptr where it has none. Nothing is linked for it.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (code != cudaSuccess) cudaGetLastError();  // the answer is no
    return code == cudaSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
  }();
  return found;
}

// Boxes whose rows are 128 bytes, their chunks of sixteen permuted by the row's last three bits. Strides are in bytes,
// of all dimensions but the first.
template <int kDimensions>
bool describe(CUtensorMap& map, CUtensorMapDataType type, const void* at, const cuuint64_t (&sizes)[kDimensions],
              const cuuint64_t (&strides)[kDimensions - 1], const cuuint32_t (&box)[kDimensions]) {
  const EncodeTiled encode = encode_tiled();
  cuuint32_t steps[kDimensions];
  for (cuuint32_t& step : steps) step = 1;
  return encode != nullptr &&
         encode(&map, type, kDimensions, const_cast<void*>(at), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace dsv4
