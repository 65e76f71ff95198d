// States of groups of 4 pooled, normed, rotated, quantised and inserted in one kernel.
//
// Floor: every state is read once; what is inserted is small. At thousands of rows the rest is instructions and how
// evenly the rows lie, below that the chain of dependent reads: slots, look-up of a block, states. So lanes look up
// all rows of a window before it is known which tokens have a slot, and all of a thread's reads are under way before
// it uses the first. Only then may the next kernel's blocks come: one grid waits at a time, and lies as evenly as this
// one. (Let in before the wait, several grids pile up, and the later ones' blocks go where others happen to end: some
// multiprocessors get twice as many as they should.)
#include "compressed_row.cuh"

namespace dsv4 {
namespace {

struct CompressArguments {
  States states;
  Store store;
  Rows rows;
};

constexpr int kGroup = 4, kWindow = 8;

// A quad of channels pooled over a window, of which the first `before` rows are not there.
__device__ inline void pool_quad(float4 (&kv)[kWindow], float4 (&score)[kWindow], int before, float (&v)[kQuad]) {
  if (before > 0) {
#pragma unroll
    for (int r = 0; r < kWindow; ++r)
      if (r < before) kv[r] = absent(false), score[r] = absent(true);
  }
#pragma unroll
  for (int c = 0; c < kQuad; ++c) {
    float x[kWindow], y[kWindow];
#pragma unroll
    for (int r = 0; r < kWindow; ++r) x[r] = channel(kv[r], c), y[r] = channel(score[r], c);
    v[c] = value_of(pool(x, y));
  }
}

// C4: eight rows, of the group before (first half of the columns) and of the group itself (second half).
template <int kRowWidth, Format kFormat>
__global__ void __launch_bounds__(kMostThreads, kResident)
    compress_kernel(const __grid_constant__ CompressArguments a) {
  constexpr int kQuads = kRowWidth / kQuad;
  __shared__ float parts[4];
  fetch_ahead(a.rows, unit<kRowWidth>(), row_thread<kRowWidth>());
  await_predecessor();
  // Lanes look up a window's row each, for all tokens of the chunk together.
  const int lane = threadIdx.x % 32;
  const Told told = look_up(a.rows, unit<kRowWidth>(), lane / kWindow);
  __syncwarp();  // all three are on their way before one is used
  const int row = max(lane % kWindow, rows_before(told.position, kWindow));
  const bool exists = told.slot >= 0;
  const uint32_t at = exists ? told.position - (kWindow - 1 - row) : 0;
  const int block = block_of(a.states, exists ? told.request : 0, at);
  constexpr uint32_t kFirsts = 0x01010101;  // a lane of each token
  uint32_t left = __ballot_sync(kWholeWarp, exists) & kFirsts;
  const auto compress_next = [&] {
    const int first = __ffs(left) - 1;
    left &= left - 1;
    const int slot = __shfl_sync(kWholeWarp, told.slot, first), last = __shfl_sync(kWholeWarp, told.position, first);
    const Factors factors = load_factors<kRowWidth>(a.store, last);
    const uint32_t offset = row_offset(a.states, block, at);
    float4 kv[kWindow], score[kWindow];
#pragma unroll
    for (int r = 0; r < kWindow; ++r) {
      const float4* from = a.states.base + (__shfl_sync(kWholeWarp, offset, first + r) + row_thread<kRowWidth>());
      kv[r] = from[r < kGroup ? 0 : kQuads];
      score[r] = from[(r < kGroup ? 0 : kQuads) + 2 * kQuads];
    }
    let_successor();
    float v[kQuad];
    pool_quad(kv, score, rows_before(last, kWindow), v);
    norm_turn_insert<kRowWidth, kFormat>(a.store, factors, place_of(a.store, slot), v, parts);
  };
  if (left == 0) return;
  compress_next();  // apart from the loop, so that its factors are looked up beside its blocks
#pragma unroll 1
  while (left) {
    if (kRowWidth == 512) __syncthreads();  // whoever still reads the parts of the row before
    compress_next();
  }
}

struct CompressKernels {
  template <int kRowWidth, Format kFormat>
  static constexpr auto of = compress_kernel<kRowWidth, kFormat>;
};

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
  launch_rows<CompressKernels>(call, a, given.width, format);
}

}  // namespace dsv4
