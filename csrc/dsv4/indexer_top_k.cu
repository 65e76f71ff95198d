// The highest logits of each row, in ascending order of their indices, ties to the lower one; and where they lie.
//
// Floor: the row's logits read once, its indices written once. A block takes a row: three radix passes find the least
// value chosen and how many of those that tie with it, a last pass collects. Rows of at most k candidates take them
// all, unread.
#include "launch.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr uint32_t kWholeWarp = 0xffffffffu;
constexpr int kThreads = 512;
constexpr int kBits = 11, kBins = 1 << kBits;
constexpr int kBinsOfAThread = kBins / kThreads;
constexpr int kItems = 4;  // neighbouring logits of a thread

struct TopKArguments {
  const float* logits;  // [rows, width]
  const int32_t* counts;
  int32_t* indices;  // [rows, k]
  int width, k;
};

// Integers in the order of the floats; -0 ties with 0.
__device__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Sum over the threads before this one, and over all.
__device__ uint32_t scan(uint32_t own, uint32_t& total, uint32_t* warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(kWholeWarp, sum, step);
    if (lane >= step) sum += below;
  }
  __syncthreads();  // whoever still reads the scan before
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) before += warps[i];
    total += warps[i];
  }
  return before + sum - own;
}

// What the radix passes know of the least value chosen.
struct Least {
  uint32_t prefix;  // its leading bits
  int left;         // how many are still to be chosen among those that share them
};

// One pass: among the values that share the prefix, finds the bin of the next bits that holds the last one chosen.
__device__ void narrow(const float* row, int count, int shift, int bits, Least& least, uint32_t* bins, uint32_t* warps,
                       Least* found) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
  __syncthreads();
  const uint32_t mask = (1u << bits) - 1;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t key = ordered(row[i]);
    // The first pass has no prefix: a shift by 32 is none.
    if (shift + bits == 32 || key >> (shift + bits) == least.prefix) atomicAdd(&bins[key >> shift & mask], 1u);
  }
  __syncthreads();
  // Thread 0 takes the highest bins.
  uint32_t own[kBinsOfAThread], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kBinsOfAThread; ++i) sum += own[i] = bins[kBins - 1 - (threadIdx.x * kBinsOfAThread + i)];
  uint32_t above = scan(sum, total, warps);
  const uint32_t left = least.left;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBinsOfAThread; ++i) {
    if (above < left && above + own[i] >= left) {
      const uint32_t bin = kBins - 1 - (threadIdx.x * kBinsOfAThread + i);
      *found = {least.prefix << bits | bin, static_cast<int>(left - above)};
    }
    above += own[i];
  }
  __syncthreads();
  least = *found;
}

__global__ void __launch_bounds__(kThreads) top_k_kernel(const __grid_constant__ TopKArguments a) {
  __shared__ uint32_t bins[kBins], warps[kThreads / 32];
  __shared__ Least found;
  after_predecessor();
  const int count = min(a.counts[blockIdx.x], a.width);
  const float* row = a.logits + static_cast<int64_t>(blockIdx.x) * a.width;
  int32_t* out = a.indices + static_cast<int64_t>(blockIdx.x) * a.k;
  if (count <= a.k) {
    for (int i = threadIdx.x; i < a.k; i += kThreads) out[i] = i < count ? i : -1;
    return;
  }
  Least least{0, a.k};
  narrow(row, count, 21, 11, least, bins, warps, &found);
  narrow(row, count, 10, 11, least, bins, warps, &found);
  narrow(row, count, 0, 10, least, bins, warps, &found);
  // Values above the least are all chosen; of those that tie with it, the first `left`.
  uint32_t higher_before = 0, tied_before = 0;
  const uint32_t left = least.left;
  for (int start = 0; start < count; start += kThreads * kItems) {
    const int first = start + threadIdx.x * kItems;
    uint32_t higher = 0, tied = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i >= count) break;
      const uint32_t key = ordered(row[first + i]);
      higher |= static_cast<uint32_t>(key > least.prefix) << i;
      tied |= static_cast<uint32_t>(key == least.prefix) << i;
    }
    // Both counts in one scan; a step's are below 2**16.
    uint32_t total;
    const uint32_t before = scan(__popc(higher) << 16 | __popc(tied), total, warps);
    uint32_t above = higher_before + (before >> 16), equal = tied_before + (before & 0xffffu);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool is_higher = higher >> i & 1, is_tied = tied >> i & 1;
      if (is_higher || (is_tied && equal < left)) out[above + min(equal, left)] = first + i;
      above += is_higher;
      equal += is_tied;
    }
    higher_before += total >> 16;
    tied_before += total & 0xffffu;
  }
}

struct GlobalArguments {
  const int32_t* indices;  // [rows, k]
  const int32_t* request;
  const int32_t* table;
  int64_t table_stride;
  const uint8_t* valid;  // bool
  int32_t* slots;        // [rows, k]
  int32_t* lens;
  int k, block_size;
};

constexpr int kGlobalThreads = 128;

__global__ void __launch_bounds__(kGlobalThreads) global_kernel(const __grid_constant__ GlobalArguments a) {
  after_predecessor();
  const int row = blockIdx.x;
  const int32_t* table = a.table + a.request[row] * a.table_stride;
  const int32_t* indices = a.indices + static_cast<int64_t>(row) * a.k;
  int32_t* slots = a.slots + static_cast<int64_t>(row) * a.k;
  int chosen = 0;
  for (int start = 0; start < a.k; start += kGlobalThreads) {
    const int i = start + threadIdx.x;
    const int32_t index = i < a.k ? indices[i] : -1;
    if (index >= 0) {
      const int block = index / a.block_size;
      slots[i] = table[block] * a.block_size + (index - block * a.block_size);
    } else if (i < a.k) {
      slots[i] = -1;
    }
    chosen += __syncthreads_count(index >= 0);
  }
  if (threadIdx.x == 0) a.lens[row] = a.valid[row] ? chosen : 0;
}

}  // namespace

void indexer_top_k(const Call& call) {
  Reader r(call);
  int64_t rows = kUnbound, width = kUnbound, k = kUnbound;
  TopKArguments a{};
  a.logits = r.in("logits", {DType::f32}, {&rows, &width}, 4).as<const float>();
  a.counts = r.in("counts", {DType::i32}, {&rows}, 4).as<const int32_t>();
  a.indices = r.out("indices", {DType::i32}, {&rows, &k}, 4).as<int32_t>();
  r.done();
  if (rows == 0 || k == 0) return;
  a.width = static_cast<int>(width);
  a.k = static_cast<int>(k);
  launch(call, top_k_kernel, static_cast<int>(rows), kThreads, a);
}

void global_top_k(const Call& call) {
  Reader r(call);
  int64_t rows = kUnbound, k = kUnbound, requests = kUnbound, listed = kUnbound;
  GlobalArguments a{};
  a.indices = r.in("indices", {DType::i32}, {&rows, &k}, 4).as<const int32_t>();
  a.request = r.in("request", {DType::i32}, {&rows}, 4).as<const int32_t>();
  const Operand& table = r.strided("table", {DType::i32}, {&requests, &listed}, 4);
  a.valid = r.in("valid", {DType::boolean}, {&rows}, 1).as<const uint8_t>();
  a.slots = r.out("slots", {DType::i32}, {&rows, &k}, 4).as<int32_t>();
  a.lens = r.out("lens", {DType::i32}, {&rows}, 4).as<int32_t>();
  a.block_size = static_cast<int>(r.integer());
  r.require(a.block_size > 0, "block_size", "is " + std::to_string(a.block_size), "pass the states of a page");
  r.done();
  if (rows == 0) return;
  a.table = table.as<const int32_t>();
  a.table_stride = table.stride[0];
  a.k = static_cast<int>(k);
  launch(call, global_kernel, static_cast<int>(rows), kGlobalThreads, a);
}

}  // namespace dsv4
