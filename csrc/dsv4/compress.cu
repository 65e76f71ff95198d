// States of groups of 4 pooled, normed, rotated, quantised and inserted in one kernel.
//
// Floor: every state is read once; what is inserted is small. At thousands of rows the rest is blocks (each takes a
// nanosecond to begin) and instructions, below that the chain of dependent reads: slots, look-up of a block, states. So
// lanes look up all rows of a window before it is known which tokens have a slot, and all of a thread's reads are under
// way before it uses the first.
#include "compressed_row.cuh"

namespace dsv4 {
namespace {

struct CompressArguments {
  States states;
  Store store;
  Rows rows;
};

// C4: eight rows, of the group before (first half of the columns) and of the group itself (second half).
template <int kRowWidth>
__global__ void __launch_bounds__(kMostThreads, kResident)
    compress_kernel(const __grid_constant__ CompressArguments a) {
  constexpr int kGroup = 4, kWindow = 8, kQuads = kRowWidth / kQuad;
  __shared__ float parts[4];
  fetch_ahead(a.rows, unit<kRowWidth>(), row_thread<kRowWidth>());
  after_predecessor();
  const unsigned thread = row_thread<kRowWidth>(), lane = threadIdx.x % 32;
  // Lanes look up a window's row each, for all tokens of the chunk together.
  const int of_chunk = lane / kWindow, token = unit<kRowWidth>() * a.rows.chunk + of_chunk;
  int slot = -1, last = 0, request = 0;
  if (of_chunk < a.rows.chunk && token < a.rows.tokens) {
    slot = static_cast<int>(a.rows.slots[token]);
    last = static_cast<int>(a.rows.positions[token]);
    request = a.rows.request[token];
  }
  __syncwarp();  // all three are on their way before one is used
  const int row = max(static_cast<int>(lane % kWindow), rows_before(last, kWindow));
  const bool exists = slot >= 0;
  const uint32_t offset = state_offset(a.states, exists ? request : 0, exists ? last - (kWindow - 1 - row) : 0);
  constexpr uint32_t kFirsts = 0x01010101;  // a lane of each token
  for (uint32_t left = __ballot_sync(kWholeWarp, exists) & kFirsts; left; left &= left - 1) {
    const int first = __ffs(left) - 1;
    const int own_slot = __shfl_sync(kWholeWarp, slot, first), own_last = __shfl_sync(kWholeWarp, last, first);
    const int before = rows_before(own_last, kWindow);
    const Factors factors = load_factors<kRowWidth>(a.store, own_last);
    if (kRowWidth == 512) __syncthreads();  // whoever still reads the parts of the row before
    float4 kv[kWindow], score[kWindow];
    const auto load = [&](int r) {
      const uint32_t at = __shfl_sync(kWholeWarp, offset, first + r) + (r < kGroup ? 0 : kQuads) + thread;
      kv[r] = a.states.base[at];
      score[r] = a.states.base[at + 2 * kQuads];
    };
    if (before == 0) {
#pragma unroll
      for (int r = 0; r < kWindow; ++r) load(r);
    } else {
#pragma unroll
      for (int r = 0; r < kWindow; ++r) {
        kv[r] = absent(false), score[r] = absent(true);
        if (r >= before) load(r);
      }
    }
    float v[kQuad];
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      float x[kWindow], y[kWindow];
#pragma unroll
      for (int r = 0; r < kWindow; ++r) x[r] = channel(kv[r], c), y[r] = channel(score[r], c);
      v[c] = value_of(pool<kWindow>(x, y));
    }
    norm_turn_insert<kRowWidth>(a.store, factors, own_slot, v, parts);
  }
}

}  // namespace

void compress(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, positions = kUnbound;
  StoreOperands given{};
  CompressArguments a{};
  a.states = read_states(r, a.rows, tokens);
  a.rows.slots = r.in("slots", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  given.norm_weight = &r.in("norm_weight", {DType::f32, DType::bf16}, {&given.width});
  given.cos_sin = &r.in("cos_sin", {DType::f32}, {&positions, kRope});
  given.cache = &r.cache("cache");
  const int ratio = static_cast<int>(r.integer());
  const bool overlap = r.integer() != 0;
  const float eps = r.real();
  const int64_t block_size = r.integer(), format = r.integer();
  r.require(ratio == 4 && overlap, "ratio", "is " + std::to_string(ratio),
            "pool_states and store_compressed take other groups");
  r.require(a.states.width == 4 * given.width, "state", "has another width than norm_weight",
            "pass kv and score of both halves");
  a.store = make_store(r, given, ratio, eps, block_size, format);
  r.done();
  if (tokens == 0 || a.states.table == nullptr) return;
  a.rows.tokens = static_cast<int>(tokens);
  a.rows.chunk = chunk_for(tokens, ratio);
  launch_rows(call, a, given.width, compress_kernel<512>, compress_kernel<128>);
}

}  // namespace dsv4
