// Which gathered keys each prefill row attends to: its compressed states, then its window.
//
// Floor: the chosen states read, the list written, 4 bytes each. A warp takes a row.
#include "launch.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

struct CombineIndicesArguments {
  const int64_t* positions;         // [rows]
  const int32_t* group;             // [rows]
  const int32_t* compressed_start;  // [groups]
  const int32_t* window_start;      // [groups]
  const int32_t* window_first;      // [groups]
  const int32_t* chosen;            // [rows, most], ascending, then -1; or none: all
  int32_t* indices;                 // [rows, listed]
  int32_t* lens;                    // [rows]
  int rows, most, listed, ratio, window;
};

__global__ void __launch_bounds__(kThreads) combine_indices_kernel(const __grid_constant__ CombineIndicesArguments a) {
  after_predecessor();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= a.rows) return;
  const int context = static_cast<int>(a.positions[row]) + 1, owner = a.group[row];
  const int32_t* chosen = a.chosen ? a.chosen + static_cast<int64_t>(row) * a.most : nullptr;
  int compressed = a.ratio ? context / a.ratio : 0;
  if (chosen) {
    compressed = 0;
    for (int k = lane; k < a.most; k += 32) compressed += chosen[k] >= 0;
    compressed = __reduce_add_sync(0xffffffffu, compressed);
  }
  const int seen = min(context, a.window), used = compressed + seen;
  const int start = a.compressed_start[owner];
  const int oldest = context - seen - a.window_first[owner] + a.window_start[owner];
  int32_t* to = a.indices + static_cast<int64_t>(row) * a.listed;
  for (int k = lane; k < a.listed; k += 32) {
    to[k] = k >= used ? -1 : k >= compressed ? oldest + k - compressed : start + (chosen ? chosen[k] : k);
  }
  if (lane == 0) a.lens[row] = used;
}

}  // namespace

void combine_indices(const Call& call) {
  Reader r(call);
  int64_t rows = kUnbound, groups = kUnbound, most = kUnbound, listed = kUnbound;
  CombineIndicesArguments a{};
  a.positions = r.in("positions", {DType::i64}, {&rows}, 8).as<const int64_t>();
  a.group = r.in("group", {DType::i32}, {rows}, 4).as<const int32_t>();
  a.compressed_start = r.in("compressed_start", {DType::i32}, {&groups}, 4).as<const int32_t>();
  a.window_start = r.in("window_start", {DType::i32}, {groups}, 4).as<const int32_t>();
  a.window_first = r.in("window_first", {DType::i32}, {groups}, 4).as<const int32_t>();
  const Operand& chosen = r.maybe("chosen", {DType::i32}, {rows, &most}, 4);
  const int64_t ratio = r.integer(), window = r.integer();
  r.require(ratio >= 0 && ratio <= INT32_MAX, "ratio", "is " + std::to_string(ratio), "pass a layer's, 0 without one");
  r.require(window >= 0 && window <= INT32_MAX, "window", "is " + std::to_string(window), "pass a number of tokens");
  a.indices = r.out("indices", {DType::i32}, {rows, &listed}, 4).as<int32_t>();
  a.lens = r.out("lens", {DType::i32}, {rows}, 4).as<int32_t>();
  r.done();
  if (rows == 0) return;
  a.chosen = chosen.given ? chosen.as<const int32_t>() : nullptr;
  a.rows = static_cast<int>(rows);
  a.most = chosen.given ? static_cast<int>(most) : 0;
  a.listed = static_cast<int>(listed);
  a.ratio = static_cast<int>(ratio);
  a.window = static_cast<int>(window);
  launch(call, combine_indices_kernel, ceil_div(rows, kWarps), kThreads, a);
}

}  // namespace dsv4
