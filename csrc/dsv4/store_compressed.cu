// Pooled states, read from a scratch, normed, rotated, quantised and inserted.
//
// Floor: a row of float32 read, a state written. Rows without a slot are told apart by one vote over a chunk of rows,
// so that blocks are not spent on them.
#include "compressed_row.cuh"

namespace dsv4 {
namespace {

struct StoreArguments {
  const float4* pooled;  // [tokens, width]
  Store store;
  Rows rows;
};

template <int kRowWidth, Format kFormat>
__global__ void __launch_bounds__(kMostThreads) store_kernel(const __grid_constant__ StoreArguments a) {
  __shared__ float parts[4];
  fetch_ahead(a.rows, unit<kRowWidth>(), row_thread<kRowWidth>());
  await_predecessor();
  for_each_slot(a.rows, unit<kRowWidth>(), [&](int token, int slot, int position, int) {
    const float4 row = a.pooled[static_cast<int64_t>(token) * kRowThreads<kRowWidth> + row_thread<kRowWidth>()];
    const Factors factors = load_factors<kRowWidth>(a.store, position);
    let_successor();  // once this kernel's reads are under way: see launch.cuh
    float v[kQuad] = {row.x, row.y, row.z, row.w};
    if (kRowWidth == 512) __syncthreads();  // whoever still reads the parts of the row before
    norm_turn_insert<kRowWidth, kFormat>(a.store, factors, place_of(a.store, slot), v, parts);
  });
}

struct StoreKernels {
  template <int kRowWidth, Format kFormat>
  static constexpr auto of = store_kernel<kRowWidth, kFormat>;
};

}  // namespace

void store_compressed(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, positions = kUnbound;
  StoreOperands given{};
  StoreArguments a{};
  a.pooled = r.in("pooled", {DType::f32}, {&tokens, &given.width}).as<const float4>();
  given.norm_weight = &r.in("norm_weight", {DType::f32, DType::bf16}, {&given.width});
  given.cos_sin = &r.in("cos_sin", {DType::f32}, {&positions, kRope});
  a.rows.positions = r.in("positions", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  a.rows.slots = r.in("slots", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  given.cache = &r.cache("cache");
  const int ratio = static_cast<int>(r.integer());
  const float eps = r.real();
  const int64_t block_size = r.integer(), format = r.integer();
  a.store = make_store(r, given, ratio, eps, block_size, format);
  r.done();
  if (tokens == 0) return;
  a.rows.tokens = static_cast<int>(tokens);
  a.rows.chunk = chunk_for(tokens, ratio);
  launch_rows<StoreKernels>(call, a, given.width, format);
}

}  // namespace dsv4
