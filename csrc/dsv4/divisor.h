// Division of 31-bit integers by a number that the host knows: a multiplication and a shift.
#pragma once
#include <cstdint>

namespace dsv4 {

struct Divisor {
  uint32_t by = 1, magic = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) : by(d) {
    while ((1ull << shift) < d) ++shift;
    magic = static_cast<uint32_t>((((1ull << shift) - d) << 32) / d + 1);
  }
#ifdef __CUDACC__
  __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
#endif
};

}  // namespace dsv4
