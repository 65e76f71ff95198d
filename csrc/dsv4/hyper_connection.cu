// Hyper-connections between two blocks: the streams mixed with a block's output, and what the next block reads of them.
//
// Floor at hidden size H: residual and y read, mixed streams and layer_in written: 20 H bytes a token. The 24 mixing
// weights of a token need all of its streams, so there are two kernels. The first mixes and multiplies: a block takes
// 256 columns of all four streams of some tokens, its part of fn in shared memory as two bf16 terms (16 bits of
// mantissa), the streams it has just rounded to bf16 as the other operand, exactly. Partial sums go to the rows that
// layer_in will have. The second adds them up, makes the weights, and reads the mixed streams again, from the L2 cache
// while they fit: 8 H bytes more.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kStreams = 4;
constexpr int kSums = (2 + kStreams) * kStreams;  // 24: pre, post, comb row by row
constexpr int kPartial = kSums + 1;               // and the sum of squares
constexpr int kWarps = 8;
constexpr int kWarpColumns = 32;  // eight a lane of four
constexpr int kColumns = kWarps * kWarpColumns;
constexpr int kTokens = 16;  // of a step: the rows of m16n8k16
constexpr int kSumTiles = kSums / 8;

struct MixArguments {
  const uint4* residual;  // [tokens, 4, H] bf16
  const float4* post;     // [tokens, 4]
  const float4* comb;     // [tokens, 4, 4]
  const uint4* y;         // [tokens, H] bf16
  const float* fn;        // [24, 4 H]
  uint4* mixed;           // [tokens, 4, H] bf16
  uint8_t* partial;       // rows of layer_in: [H / 256, 25] float32 each
  int tokens, hidden, steps;
};

// One warp's share of fn, in the order of the B operand: for each tile of eight sums and each stream, the two terms of
// 16 values.
struct __align__(16) Operands {
  uint4 term[kSumTiles][kStreams][2][kWarps][32];
};

__device__ void split(float v, float& first, float& second) {
  first = __bfloat162float(__float2bfloat16_rn(v));
  second = v - first;
}

__device__ void load_operands(const MixArguments& a, Operands& b, int first_column) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
#pragma unroll
  for (int tile = 0; tile < kSumTiles; ++tile) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      const float* row = a.fn + (static_cast<int64_t>(tile * 8 + group) * kStreams + stream) * a.hidden;
      const Eight v = load_weights(row, false, first_column + warp * kWarpColumns + quarter * kVector);
      Eight high_term, low_term;
#pragma unroll
      for (int i = 0; i < kVector; ++i) split(v.x[i], high_term.x[i], low_term.x[i]);
      b.term[tile][stream][0][warp][lane] = pack(high_term);
      b.term[tile][stream][1][warp][lane] = pack(low_term);
    }
  }
}

__device__ void multiply(float (&s)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The four streams of one token at eight columns, mixed and rounded; or as they are.
template <bool kMixing>
__device__ void streams_of(const MixArguments& a, int token, int64_t column, uint4 (&streams)[kStreams]) {
  const int64_t vectors = a.hidden / kVector, at = column / kVector;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) streams[i] = uint4{};
  if (token >= a.tokens) return;
  const uint4* residual = a.residual + static_cast<int64_t>(token) * kStreams * vectors + at;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) streams[i] = residual[i * vectors];
  if constexpr (kMixing) {
    const Eight y = unpack(a.y[static_cast<int64_t>(token) * vectors + at]);
    const float4 post = a.post[token];
    float4 comb[kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) comb[i] = a.comb[token * kStreams + i];
    Eight from[kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) from[i] = unpack(streams[i]);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float by = j == 0 ? post.x : j == 1 ? post.y : j == 2 ? post.z : post.w;
      Eight sum;
#pragma unroll
      for (int v = 0; v < kVector; ++v) sum.x[v] = by * y.x[v];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        const float weight = j == 0 ? comb[i].x : j == 1 ? comb[i].y : j == 2 ? comb[i].z : comb[i].w;
#pragma unroll
        for (int v = 0; v < kVector; ++v) sum.x[v] = fmaf(weight, from[i].x[v], sum.x[v]);
      }
      streams[j] = pack(sum);
      a.mixed[(static_cast<int64_t>(token) * kStreams + j) * vectors + at] = streams[j];
    }
  }
}

template <bool kMixing>
__global__ void __launch_bounds__(32 * kWarps, 2) mix_kernel(const __grid_constant__ MixArguments a) {
  after_predecessor();
  extern __shared__ uint4 memory[];
  Operands& b = *reinterpret_cast<Operands*>(memory);
  __shared__ float part[kWarps][kTokens][kPartial];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int first_column = blockIdx.x * kColumns;
  const int64_t column = first_column + warp * kWarpColumns + quarter * kVector;
  load_operands(a, b, first_column);
  __syncwarp();  // a warp reads its own share
  for (int step = 0; step < a.steps; ++step) {
    const int token = (blockIdx.y * a.steps + step) * kTokens + group;
    if (token - group >= a.tokens) break;
    uint4 upper[kStreams], lower[kStreams];
    streams_of<kMixing>(a, token, column, upper);
    streams_of<kMixing>(a, token + 8, column, lower);
    float sums[kSumTiles][4] = {}, squares[2] = {};
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint4 u = upper[stream], l = lower[stream];
      squares[0] += sum_of_squares(unpack(u));
      squares[1] += sum_of_squares(unpack(l));
#pragma unroll
      for (int tile = 0; tile < kSumTiles; ++tile) {
#pragma unroll
        for (int term = 0; term < 2; ++term) {
          const uint4 f = b.term[tile][stream][term][warp][lane];
          multiply(sums[tile], u.x, l.x, u.y, l.y, f.x, f.y);
          multiply(sums[tile], u.z, l.z, u.w, l.w, f.z, f.w);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = part[warp][group + half * 8];
#pragma unroll
      for (int tile = 0; tile < kSumTiles; ++tile) {
        row[tile * 8 + quarter * 2] = sums[tile][half * 2];
        row[tile * 8 + quarter * 2 + 1] = sums[tile][half * 2 + 1];
      }
      const float square = group_sum<4>(squares[half]);
      if (quarter == 0) row[kSums] = square;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTokens * kPartial; i += 32 * kWarps) {
      const int of_step = i / kPartial, which = i - of_step * kPartial, own = token - group + of_step;
      if (own >= a.tokens) break;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += part[w][of_step][which];
      auto* to = reinterpret_cast<float*>(a.partial + static_cast<int64_t>(own) * a.hidden * 2);
      to[blockIdx.x * kPartial + which] = sum;
    }
    __syncthreads();
  }
}

struct CollapseArguments {
  const uint4* mixed;  // [tokens, 4, H] bf16
  const float* base;   // [24]
  const float* scale;  // [3]
  const void* norm_weight;
  uint4* layer_in;  // [tokens, H] bf16; partial sums until they are read
  float* post;      // [tokens, 4]
  float* comb;      // [tokens, 4, 4]
  float eps, hc_eps;
  int hidden, parts, iterations;
  bool weight_is_bf16;
};

constexpr int kThreads = 256;

// A warp makes a token's weights; lanes 0 to 15 hold comb, row by row.
__device__ void make_weights(const CollapseArguments& a, int token, float* pre) {
  const int lane = threadIdx.x;
  const auto* partial = reinterpret_cast<const float*>(a.layer_in + static_cast<int64_t>(token) * a.hidden / kVector);
  float sum = 0;
  if (lane < kPartial) {
    for (int i = 0; i < a.parts; ++i) sum += partial[i * kPartial + lane];
  }
  const float squares = __shfl_sync(kWholeWarp, sum, kSums);
  const float by = rsqrtf(squares / (static_cast<float>(kStreams) * a.hidden) + a.eps);
  const float scale = lane < 4 ? a.scale[0] : lane < 8 ? a.scale[1] : a.scale[2];
  const float mix = lane < kSums ? sum * by * scale + a.base[lane] : 0.0f;
  const float gate = 1.0f / (1.0f + __expf(-mix));
  if (lane < 4) pre[lane] = gate + a.hc_eps;
  if (lane >= 4 && lane < 8) a.post[token * kStreams + lane - 4] = 2.0f * gate;
  float v = __shfl_sync(kWholeWarp, mix, lane % 16 + 8);
  v = __expf(v - group_max<4>(v));
  v = v / group_sum<4>(v) + a.hc_eps;
  const auto column_sum = [](float x) {
    x += __shfl_xor_sync(kWholeWarp, x, 4);
    return x + __shfl_xor_sync(kWholeWarp, x, 8);
  };
  v = __fdividef(v, column_sum(v) + a.hc_eps);
  for (int i = 1; i < a.iterations; ++i) {
    v = __fdividef(v, group_sum<4>(v) + a.hc_eps);
    v = __fdividef(v, column_sum(v) + a.hc_eps);
  }
  if (lane < 16) a.comb[token * 16 + lane] = v;
}

template <int kMost>
__global__ void __launch_bounds__(kThreads) collapse_kernel(const __grid_constant__ CollapseArguments a) {
  after_predecessor();
  __shared__ float pre[kStreams], part[kThreads / 32];
  const int token = blockIdx.x, vectors = a.hidden / kVector;
  const uint4* mixed = a.mixed + static_cast<int64_t>(token) * kStreams * vectors;
  uint4 raw[kMost][kStreams];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (at >= vectors) break;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) raw[i][j] = mixed[j * vectors + at];
  }
  if (threadIdx.x < 32) make_weights(a, token, pre);
  __syncthreads();
  Eight total[kMost];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (threadIdx.x + i * kThreads >= vectors) break;
    total[i] = Eight{};
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const Eight own = unpack(raw[i][j]);
#pragma unroll
      for (int v = 0; v < kVector; ++v) total[i].x[v] = fmaf(pre[j], own.x[v], total[i].x[v]);
    }
    squares += sum_of_squares(total[i]);
  }
  squares = group_sum<32>(squares);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) squares += part[i];
  const float by = rsqrtf(squares / a.hidden + a.eps);
  uint4* layer_in = a.layer_in + static_cast<int64_t>(token) * vectors;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (at >= vectors) break;
    Eight v = rounded_to_bf16(total[i]);
    const Eight weight = load_weights(a.norm_weight, a.weight_is_bf16, at * kVector);
#pragma unroll
    for (int j = 0; j < kVector; ++j) v.x[j] = v.x[j] * by * weight.x[j];
    layer_in[at] = pack(v);
  }
}

// Tokens of a block: enough that its part of fn is read seldom, few enough that all multiprocessors have some.
int steps_for(int tokens, int parts) {
  constexpr int kBlocksWanted = 264, kMostSteps = 8;
  const int steps = ceil_div(static_cast<int64_t>(ceil_div(tokens, kTokens)) * parts, kBlocksWanted);
  return steps < kMostSteps ? steps : kMostSteps;
}

template <bool kMixing>
void launch_both(const Call& call, MixArguments& m, CollapseArguments& c) {
  c.parts = m.hidden / kColumns;
  m.partial = reinterpret_cast<uint8_t*>(c.layer_in);
  m.steps = steps_for(m.tokens, c.parts);
  allow_shared<mix_kernel<kMixing>>(sizeof(Operands));
  const dim3 grid(c.parts, ceil_div(m.tokens, m.steps * kTokens));
  launch(call, mix_kernel<kMixing>, grid, 32 * kWarps, m, sizeof(Operands));
  if (m.hidden <= 2 * kThreads * kVector) {
    launch(call, collapse_kernel<2>, m.tokens, kThreads, c);
  } else {
    launch(call, collapse_kernel<4>, m.tokens, kThreads, c);
  }
}

// fn, base, scale, norm_weight, eps, hc_eps, iterations: what both ops have.
void read_mixing(Reader& r, MixArguments& m, CollapseArguments& c, int64_t hidden) {
  r.require(hidden % kColumns == 0 && hidden <= 4 * kThreads * kVector, "residual",
            "has hidden size " + std::to_string(hidden), "pass a multiple of 256 up to 8192");
  m.fn = r.in("fn", {DType::f32}, {kSums, kStreams * hidden}).as<const float>();
  c.base = r.in("base", {DType::f32}, {kSums}, 4).as<const float>();
  c.scale = r.in("scale", {DType::f32}, {3}, 4).as<const float>();
  const Operand& weight = r.in("norm_weight", {DType::f32, DType::bf16}, {hidden});
  c.norm_weight = weight.address;
  c.weight_is_bf16 = weight.dtype == DType::bf16;
  c.eps = r.real();
  c.hc_eps = r.real();
  c.iterations = static_cast<int>(r.integer());
  m.hidden = c.hidden = static_cast<int>(hidden);
}

void read_outs(Reader& r, CollapseArguments& c, int64_t tokens, int64_t hidden) {
  c.layer_in = r.out("layer_in", {DType::bf16}, {tokens, hidden}).as<uint4>();
  c.post = r.out("post", {DType::f32}, {tokens, kStreams}, 4).as<float>();
  c.comb = r.out("comb", {DType::f32}, {tokens, kStreams, kStreams}, 4).as<float>();
}

constexpr int kPostThreads = 256;

__global__ void __launch_bounds__(kPostThreads) post_kernel(const __grid_constant__ MixArguments a) {
  after_predecessor();
  const int64_t vectors = a.hidden / kVector, at = static_cast<int64_t>(blockIdx.x) * kPostThreads + threadIdx.x;
  const int64_t token = at / vectors;
  if (token >= a.tokens) return;
  uint4 streams[kStreams];
  streams_of<true>(a, static_cast<int>(token), (at - token * vectors) * kVector, streams);
}

int64_t read_streams(Reader& r, MixArguments& m, int64_t& tokens) {
  int64_t hidden = kUnbound;
  m.residual = r.in("residual", {DType::bf16}, {&tokens, kStreams, &hidden}).as<const uint4>();
  m.post = r.in("post", {DType::f32}, {tokens, kStreams}).as<const float4>();
  m.comb = r.in("comb", {DType::f32}, {tokens, kStreams, kStreams}).as<const float4>();
  m.y = r.in("y", {DType::bf16}, {tokens, hidden}).as<const uint4>();
  m.tokens = static_cast<int>(tokens);
  return hidden;
}

}  // namespace

void mhc_post_pre(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound;
  MixArguments m{};
  CollapseArguments c{};
  const int64_t hidden = read_streams(r, m, tokens);
  read_mixing(r, m, c, hidden);
  m.mixed = r.out("mixed", {DType::bf16}, {tokens, kStreams, hidden}).as<uint4>();
  c.mixed = m.mixed;
  read_outs(r, c, tokens, hidden);
  r.done();
  if (tokens == 0) return;
  launch_both<true>(call, m, c);
}

void mhc_pre(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, hidden = kUnbound;
  MixArguments m{};
  CollapseArguments c{};
  m.residual = r.in("residual", {DType::bf16}, {&tokens, kStreams, &hidden}).as<const uint4>();
  c.mixed = m.residual;
  read_mixing(r, m, c, hidden);
  read_outs(r, c, tokens, hidden);
  r.done();
  if (tokens == 0) return;
  m.tokens = static_cast<int>(tokens);
  launch_both<false>(call, m, c);
}

void mhc_post(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound;
  MixArguments m{};
  const int64_t hidden = read_streams(r, m, tokens);
  r.require(hidden % kVector == 0, "residual", "has hidden size " + std::to_string(hidden), "pass a multiple of 8");
  m.mixed = r.out("mixed", {DType::bf16}, {tokens, kStreams, hidden}).as<uint4>();
  r.done();
  if (tokens == 0) return;
  m.hidden = static_cast<int>(hidden);
  launch(call, post_kernel, ceil_div(tokens * (hidden / kVector), kPostThreads), kPostThreads, m);
}

}  // namespace dsv4
