// Hyper-connections between two blocks: the streams mixed with a block's output, and what the next block reads of them.
//
// At hidden size 4096 on sm_90 one launch does all (hyper_connection_{resident,cluster}.cu; with more than 2,048
// tokens a cluster, one for each part of them). Elsewhere it is two, of which here: floor at hidden size H: residual
// and y read, mixed streams and layer_in written: 20 H bytes a token. The 24 mixing weights of a token need all of its
// streams. The first kernel mixes and multiplies: a block takes 256 columns of all four streams of some tokens, its
// part of fn in shared memory as two bf16 terms (16 bits of mantissa), the streams it has just rounded to bf16 as the
// other operand, exactly. Partial sums go to the rows that layer_in will have. The second adds them up, makes the
// weights, and reads the mixed streams again, from the L2 cache while they fit: 8 H bytes more. The head is the same
// with four sums, and its norm that of the sum before it is rounded.
#include "hyper_connection.cuh"
#include "launch.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kPartial = kSums + 1;  // and the sum of squares
constexpr int kWarps = 8;
constexpr int kWarpColumns = 32;  // eight a lane of four
constexpr int kColumns = kWarps * kWarpColumns;

// One warp's share of fn, in the order of the B operand: for each tile of eight sums and each stream, the two terms of
// 16 values.
struct __align__(16) Operands {
  uint4 term[kSumTiles][kStreams][2][kWarps][32];
};

__device__ void load_operands(const MixArguments& a, Operands& b, int first_column) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
#pragma unroll
  for (int tile = 0; tile < kSumTiles; ++tile) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      const int sum = tile * 8 + group;
      const float* row = a.fn + (static_cast<int64_t>(sum) * kStreams + stream) * a.hidden;
      Eight v{}, high_term, low_term;
      if (sum < a.sums) v = load_weights(row, false, first_column + warp * kWarpColumns + quarter * kVector);
#pragma unroll
      for (int i = 0; i < kVector; ++i) split(v.x[i], high_term.x[i], low_term.x[i]);
      b.term[tile][stream][0][warp][lane] = pack(high_term);
      b.term[tile][stream][1][warp][lane] = pack(low_term);
    }
  }
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
    for (int i = 0; i < kStreams; ++i) comb[i] = a.comb[static_cast<int64_t>(token) * kStreams + i];
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
  const bool head = a.comb == nullptr;
  const float scale = a.scale[head || lane < 4 ? 0 : lane < 8 ? 1 : 2];
  const float mix = lane < (head ? kStreams : kSums) ? sum * by * scale + a.base[lane] : 0.0f;
  const float gate = 1.0f / (1.0f + __expf(-mix));
  if (lane < 4) pre[lane] = gate + a.hc_eps;
  if (head) return;
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

// Whether clusters' kernels may make combs. They make them of factors for rows and columns, which without an eps, or in
// many iterations, may grow until they are no floats; and with a large one four divisors' product is none.
bool of_factors(const CollapseArguments& c) {
  constexpr float kLeastEps = 1e-16f, kMostEps = 1;
  constexpr int kMostIterations = 100;
  return c.hc_eps >= kLeastEps && c.hc_eps <= kMostEps && c.iterations <= kMostIterations;
}

template <Hyper kHyper>
void launch_whole(const Call& call, MixArguments& m, CollapseArguments& c) {
  constexpr bool kMixing = kHyper == Hyper::post_pre;
  if (kHyper == Hyper::head || of_factors(c)) {
    if (launch_resident(call, m, c, kHyper) || launch_in_clusters(call, m, c, kHyper)) return;
  }
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

// fn, base, scale, norm_weight, eps, hc_eps: what three ops have.
template <Hyper kHyper>
void read_mixing(Reader& r, MixArguments& m, CollapseArguments& c, int64_t hidden) {
  constexpr bool kHead = kHyper == Hyper::head;
  r.require(hidden % kColumns == 0 && hidden <= 4 * kThreads * kVector, "residual",
            "has hidden size " + std::to_string(hidden), "pass a multiple of 256 up to 8192");
  m.sums = kSumsOf<kHyper>;
  m.fn = r.in("fn", {DType::f32}, {m.sums, kStreams * hidden}).as<const float>();
  c.base = r.in("base", {DType::f32}, {m.sums}, 4).as<const float>();
  c.scale = r.in("scale", {DType::f32}, {kHead ? 1 : 3}, 4).as<const float>();
  const Operand& weight = r.in("norm_weight", {DType::f32, DType::bf16}, {hidden});
  c.norm_weight = weight.address;
  c.weight_is_bf16 = weight.dtype == DType::bf16;
  c.eps = r.real();
  c.hc_eps = r.real();
  if (!kHead) c.iterations = static_cast<int>(r.integer());
  m.hidden = c.hidden = static_cast<int>(hidden);
}

void read_outs(Reader& r, CollapseArguments& c, int64_t tokens, int64_t hidden) {
  c.layer_in = r.out("layer_in", {DType::bf16}, {tokens, hidden}).as<uint4>();
  c.post = r.out("post", {DType::f32}, {tokens, kStreams}, 4).as<float>();
  c.comb = r.out("comb", {DType::f32}, {tokens, kStreams, kStreams}).as<float>();
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

// Streams that stay as they are.
int64_t read_residual(Reader& r, MixArguments& m, CollapseArguments& c, int64_t& tokens) {
  int64_t hidden = kUnbound;
  m.residual = c.mixed = r.in("residual", {DType::bf16}, {&tokens, kStreams, &hidden}).as<const uint4>();
  m.tokens = static_cast<int>(tokens);
  return hidden;
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
  read_mixing<Hyper::post_pre>(r, m, c, hidden);
  m.mixed = r.out("mixed", {DType::bf16}, {tokens, kStreams, hidden}).as<uint4>();
  c.mixed = m.mixed;
  read_outs(r, c, tokens, hidden);
  r.done();
  if (tokens == 0) return;
  launch_whole<Hyper::post_pre>(call, m, c);
}

void mhc_pre(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound;
  MixArguments m{};
  CollapseArguments c{};
  const int64_t hidden = read_residual(r, m, c, tokens);
  read_mixing<Hyper::pre>(r, m, c, hidden);
  read_outs(r, c, tokens, hidden);
  r.done();
  if (tokens == 0) return;
  launch_whole<Hyper::pre>(call, m, c);
}

void hc_head(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound;
  MixArguments m{};
  CollapseArguments c{};
  const int64_t hidden = read_residual(r, m, c, tokens);
  read_mixing<Hyper::head>(r, m, c, hidden);
  c.layer_in = r.out("hidden", {DType::bf16}, {tokens, hidden}).as<uint4>();
  r.done();
  if (tokens == 0) return;
  launch_whole<Hyper::head>(call, m, c);
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
