// Pooled states normed, rotated, quantised and inserted; for groups of 4 in one kernel with their pooling.
//
// Floor: every state is read once; what is inserted is small. Rows without a slot are told apart by one vote over a
// chunk of rows, so that blocks are not spent on them.
#include "compressor.cuh"
#include "ops.h"

namespace dsv4 {
namespace {

struct Store {
  const void* norm_weight;
  const float* cos_sin;  // [*, 64]
  Pages cache;
  float eps;
  int format;
  Divisor groups;  // positions to groups
  bool weight_is_bf16;
};

__device__ void load_four(const void* weights, bool is_bf16, int at, float (&w)[kChannels]) {
  if (is_bf16) {
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(weights) + at);
    w[0] = low(raw.x), w[1] = high(raw.x), w[2] = low(raw.y), w[3] = high(raw.y);
  } else {
    const float4 raw = *reinterpret_cast<const float4*>(static_cast<const float*>(weights) + at);
    w[0] = raw.x, w[1] = raw.y, w[2] = raw.z, w[3] = raw.w;
  }
}

__device__ uint32_t codes_of(const float (&v)[kChannels], int power) {
  const float by = power_of_two(-power);
  return e4m3x2(v[0] * by, v[1] * by) | e4m3x2(v[2] * by, v[3] * by) << 16;
}

// The kWidth / 4 threads of a row hold four channels each.
template <int kRowWidth>
__device__ void insert(const Store& s, int64_t slot, int thread, float (&v)[kChannels]) {
  int offset;
  uint8_t* page = page_of(s.cache, slot, offset);
  const bool vectors = s.cache.vectors;
  const uint2 rounded = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
  v[0] = low(rounded.x), v[1] = high(rounded.x), v[2] = low(rounded.y), v[3] = high(rounded.y);
  const float own = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
  if (s.format == kPlain) {
    store_bytes<8>(page + (static_cast<int64_t>(offset) * kRowWidth + thread * kChannels) * 2, &rounded, vectors);
  } else if constexpr (kRowWidth == 512) {
    uint8_t* row = page + offset * kStateBytes;
    uint8_t* scales = page + static_cast<int64_t>(s.cache.block_size) * kStateBytes + offset * kScaleBytes;
    const int power = fp8_power<Floor::scale>(group_max<16>(own));
    const bool rope = thread * kChannels >= kNope;
    if (rope) {
      store_bytes<8>(row + kNope + (thread * kChannels - kNope) * 2, &rounded, vectors);
    } else {
      const uint32_t codes = codes_of(v, power);
      store_bytes<4>(row + thread * kChannels, &codes, vectors);
    }
    if (thread % 16 == 0) scales[thread / 16] = rope ? 0 : static_cast<uint8_t>(power + kUE8M0Bias);
  } else if (s.format == kIndexerFp8) {
    const int power = fp8_power(group_max<32>(own));
    const uint32_t codes = codes_of(v, power);
    store_bytes<4>(page + offset * kRowWidth + thread * kChannels, &codes, vectors);
    const float scale = power_of_two(power);
    if (thread == 0) store_bytes<4>(page + s.cache.block_size * kRowWidth + offset * 4, &scale, vectors);
  } else {
    const int power = fp4_power(group_max<8>(own));
    const float by = power_of_two(-power);
    uint8_t* to = page + offset * (kRowWidth / 2) + thread * 2;
    to[0] = static_cast<uint8_t>(e2m1(v[0] * by) | e2m1(v[1] * by) << 4);
    to[1] = static_cast<uint8_t>(e2m1(v[2] * by) | e2m1(v[3] * by) << 4);
    uint8_t* scales = page + s.cache.block_size * (kRowWidth / 2) + offset * (kRowWidth / 32);
    if (thread % 8 == 0) scales[thread / 8] = static_cast<uint8_t>(power + kUE8M0Bias);
  }
}

// Sum over the kRowWidth / 4 threads of a row. `part` has room for a block's warps.
template <int kRowWidth>
__device__ float row_sum(float v, float* part) {
  v = group_sum<32>(v);
  if constexpr (kRowWidth == 128) return v;
  __syncthreads();  // whoever still reads the row before
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kRowWidth / 128; ++i) sum += part[i];
  return sum;
}

// What a thread multiplies its channels by. Loaded before the states, whose latency then hides its own.
struct Factors {
  float weight[kChannels];
  float2 cos, sin;
};

template <int kRowWidth>
__device__ int first_pair(int thread) {
  return (thread * kChannels - (kRowWidth - kRope)) / 2;  // negative: not rotated
}

template <int kRowWidth>
__device__ Factors load_factors(const Store& s, int64_t position, int thread) {
  Factors f{};
  load_four(s.norm_weight, s.weight_is_bf16, thread * kChannels, f.weight);
  const int pair = first_pair<kRowWidth>(thread);
  if (pair >= 0) {
    const auto first = static_cast<int64_t>(s.groups.quotient(static_cast<uint32_t>(position))) * s.groups.by;
    const float* row = s.cos_sin + first * kRope;
    f.cos = *reinterpret_cast<const float2*>(row + pair);
    f.sin = *reinterpret_cast<const float2*>(row + kRope / 2 + pair);
  }
  return f;
}

template <int kRowWidth>
__device__ void norm_turn_insert(const Store& s, const Factors& f, int64_t slot, int thread, float (&v)[kChannels],
                                 float* part) {
  const float squares = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
  const float by = rsqrtf(row_sum<kRowWidth>(squares, part) * (1.0f / kRowWidth) + s.eps);
#pragma unroll
  for (int i = 0; i < kChannels; ++i) v[i] = v[i] * by * f.weight[i];
  if (first_pair<kRowWidth>(thread) >= 0) {
    rotate_pair(v[0], v[1], f.cos.x, f.sin.x);
    rotate_pair(v[2], v[3], f.cos.y, f.sin.y);
  }
  insert<kRowWidth>(s, slot, thread, v);
}

constexpr int kThreads = 128;

struct CompressArguments {
  States states;
  Store store;
  Rows rows;
};

// C4: eight rows, of the group before (first half of the columns) and of the group itself (second half).
template <int kRowWidth>
__global__ void __launch_bounds__(kThreads) compress_kernel(const __grid_constant__ CompressArguments a) {
  constexpr int kGroup = 4, kWindow = 8, kRowThreads = kRowWidth / kChannels;
  __shared__ float part[kThreads / 32];
  after_predecessor();
  const int unit = blockIdx.x * (kThreads / kRowThreads) + threadIdx.x / kRowThreads,
            thread = threadIdx.x % kRowThreads;
  for_each_slot(a.rows, unit, [&](int, int64_t slot, int64_t last, int request) {
    const Factors factors = load_factors<kRowWidth>(a.store, last, thread);
    float4 kv[kWindow], score[kWindow];
#pragma unroll
    for (int r = 0; r < kWindow; ++r) {
      const int column = (r < kGroup ? 0 : kRowWidth) + thread * kChannels;
      load_row(a.states, request, last - (kWindow - 1) + r, column, kv[r], score[r]);
    }
    Pooled p = nothing_pooled();
    pool<kWindow>(p, kv, score);
    float v[kChannels];
#pragma unroll
    for (int i = 0; i < kChannels; ++i) v[i] = p.sum[i] / p.weight[i];
    norm_turn_insert<kRowWidth>(a.store, factors, slot, thread, v, part);
  });
}

struct StoreArguments {
  const float4* pooled;  // [tokens, width]
  Store store;
  Rows rows;
};

template <int kRowWidth>
__global__ void __launch_bounds__(kThreads) store_kernel(const __grid_constant__ StoreArguments a) {
  constexpr int kRowThreads = kRowWidth / kChannels;
  __shared__ float part[kThreads / 32];
  after_predecessor();
  const int unit = blockIdx.x * (kThreads / kRowThreads) + threadIdx.x / kRowThreads,
            thread = threadIdx.x % kRowThreads;
  for_each_slot(a.rows, unit, [&](int token, int64_t slot, int64_t position, int) {
    const Factors factors = load_factors<kRowWidth>(a.store, position, thread);
    const float4 row = a.pooled[static_cast<int64_t>(token) * kRowThreads + thread];
    float v[kChannels] = {row.x, row.y, row.z, row.w};
    norm_turn_insert<kRowWidth>(a.store, factors, slot, thread, v, part);
  });
}

struct StoreOperands {
  const Operand *norm_weight, *cos_sin, *cache;
  int64_t width = kUnbound;
};

Store make_store(Reader& r, const StoreOperands& given, int ratio, float eps, int64_t block_size, int64_t format) {
  r.require(given.width == 512 || given.width == 128, "norm_weight", "has " + std::to_string(given.width) + " values",
            "rows are 512 or 128 wide");
  const bool known =
      format == kPlain || (given.width == 512 ? format == kFp8DsMla : format == kIndexerFp8 || format == kIndexerFp4);
  r.require(known, "format", "is " + std::to_string(format), "pass one that holds rows of this width");
  r.require(ratio > 0, "ratio", "is " + std::to_string(ratio), "pass the tokens of a group");
  const int64_t bytes[] = {2 * given.width, kStateBytes + kScaleBytes, 128 + 4, 64 + 4};
  return {given.norm_weight->address,
          given.cos_sin->as<const float>(),
          pages(r, "cache", *given.cache, block_size, format, bytes[format]),
          eps,
          static_cast<int>(format),
          Divisor(static_cast<uint32_t>(ratio)),
          given.norm_weight->dtype == DType::bf16};
}

template <class Arguments, class Wide, class Narrow>
void launch_rows(const Call& call, const Arguments& a, int64_t width, Wide wide, Narrow narrow) {
  const int row_threads = static_cast<int>(width) / kChannels;
  const int blocks = ceil_div(a.rows.tokens, static_cast<int64_t>(a.rows.chunk) * (kThreads / row_threads));
  launch(call, width == 512 ? wide : narrow, blocks, kThreads, a);
}

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
  launch_rows(call, a, given.width, store_kernel<512>, store_kernel<128>);
}

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
  if (tokens == 0) return;
  a.rows.tokens = static_cast<int>(tokens);
  a.rows.chunk = chunk_for(tokens, ratio);
  launch_rows(call, a, given.width, compress_kernel<512>, compress_kernel<128>);
}

}  // namespace dsv4
