// Where the states of a cache lie; see dsv4/cache/pages.py.
#pragma once
#include <cstdint>

#include "divisor.h"
#include "reader.h"

namespace dsv4 {

enum Format : int { kPlain = 0, kFp8DsMla = 1, kIndexerFp8 = 2, kIndexerFp4 = 3 };

constexpr int kNope = 448, kRope = 64, kWidth = 512;
constexpr int kStateBytes = kNope + 2 * kRope, kScaleBytes = 8;

// Pages of any stride; a slot numbers the states.
struct Pages {
  uint8_t* base;
  int64_t stride;  // bytes from one page to the next
  int block_size;
  bool vectors;   // whether every page starts at a multiple of 16 bytes
  Divisor pages;  // slots to pages
};

// Checks a cache against its format and number of states a page. `row_bytes` are those of a state in all regions.
inline Pages pages(const Reader& reader, const char* name, const Operand& cache, int64_t block_size, int64_t format,
                   int64_t row_bytes) {
  reader.require(block_size > 0 && block_size < (1 << 20), "block_size", "is " + std::to_string(block_size),
                 "pass the states of a page");
  const int item = format == kPlain ? 2 : 1;
  const DType wanted = format == kPlain ? DType::bf16 : DType::u8;
  reader.require(cache.dtype == wanted, name, "has another dtype",
                 format == kPlain ? "plain caches are bfloat16" : "pages are uint8");
  reader.require(cache.dims == (format == kPlain ? 3 : 2), name, "has another number of dims",
                 format == kPlain ? "pass [blocks, block size, width]" : "pass [blocks, bytes]");
  int64_t held = cache.size[1] * item;
  if (format == kPlain) {
    reader.require(cache.size[1] == block_size, name, "has another block size", "pass its block size");
    reader.require(cache.stride[1] == cache.size[2], name, "has strided rows", "only the page stride is free");
    held *= cache.size[2];
  }
  reader.require(cache.stride[cache.dims - 1] == 1, name, "is strided within a page", "only the page stride is free");
  reader.require(held >= block_size * row_bytes, name, "has pages too small for its states",
                 "allocate with dsv4.cache.pages");
  reader.require(cache.size[0] * block_size <= std::numeric_limits<int32_t>::max(), name, "has more than 2**31 states",
                 "split it");
  const auto states = static_cast<uint32_t>(block_size);
  Pages found{cache.as<uint8_t>(), cache.stride[0] * item, static_cast<int>(block_size), false, Divisor(states)};
  found.vectors = (reinterpret_cast<uintptr_t>(found.base) | static_cast<uint64_t>(found.stride)) % 16 == 0;
  return found;
}

__device__ inline uint8_t* page_of(const Pages& pages, int64_t slot, int& offset) {
  const auto state = static_cast<uint32_t>(slot);
  const uint32_t page = pages.pages.quotient(state);
  offset = static_cast<int>(state - page * pages.block_size);
  return pages.base + page * pages.stride;
}

// Stores kBytes of registers; pages of odd strides take them byte by byte.
template <int kBytes>
__device__ inline void store_bytes(uint8_t* to, const void* from, bool vectors) {
  if (vectors) {
    if constexpr (kBytes == 16) *reinterpret_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    if constexpr (kBytes == 8) *reinterpret_cast<uint2*>(to) = *static_cast<const uint2*>(from);
    if constexpr (kBytes == 2) *reinterpret_cast<uint16_t*>(to) = *static_cast<const uint16_t*>(from);
    if constexpr (kBytes == 4) *reinterpret_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) to[i] = static_cast<const uint8_t*>(from)[i];
  }
}

}  // namespace dsv4
