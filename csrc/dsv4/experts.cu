// The experts of a layer: routing, the clamped SwiGLU, a few rows through the routed experts, and their weighted sum.
//
// Floor of a decode step: each chosen expert's weights read once. A block of `up_kernel` takes some columns of one
// expert for all rows that chose it; a warp of `down_kernel` takes one column of the output and walks the chosen
// experts in order. More rows are a grouped GEMM's, which is PyTorch's: see dsv4/ops/experts.py.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "reader.h"

namespace dsv4 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMostSlots = 64;  // rows times experts of a row
constexpr int kChunk = 4;       // rows multiplied with a row of weights while it is in registers
constexpr int kMostExperts = 1024;

// -- routing -----------------------------------------------------------------------------------------------

struct RouteArguments {
  const float* logits;  // [tokens, experts]
  const float* bias;    // [experts], or none
  const void* table;    // [*, chosen] int32 or int64, or none
  const int64_t* ids;   // [tokens]
  int* to;              // [tokens, chosen]
  float* weights;       // [tokens, chosen]
  float factor;
  int tokens, experts, chosen;
  bool table_is_wide;
};

__device__ float score_of(float logit) { return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit))); }

// Grows with the value, then falls with the index; NaN is above all. 0 is below every candidate.
__device__ uint64_t rank_of(float value, int index) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t ordered = isnan(value) ? 0xffffffffu : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - index);
}

// A warp a token; lane l holds experts l, l + 32, ...
template <int kMost>
__global__ void __launch_bounds__(kThreads) route_kernel(const __grid_constant__ RouteArguments a) {
  after_predecessor();
  const int token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= a.tokens) return;
  const float* logits = a.logits + static_cast<int64_t>(token) * a.experts;
  uint64_t rank[kMost];
  if (!a.table) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int expert = lane + 32 * i;
      rank[i] = expert < a.experts ? rank_of(score_of(logits[expert]) + (a.bias ? a.bias[expert] : 0.0f), expert) : 0;
    }
  }
  int mine = 0;  // lane k's, of the k-th choice
  for (int k = 0; k < a.chosen; ++k) {
    int expert;
    if (a.table) {
      const int64_t at = a.ids[token] * a.chosen + k;
      expert = a.table_is_wide ? static_cast<int>(static_cast<const int64_t*>(a.table)[at])
                               : static_cast<const int*>(a.table)[at];
    } else {
      uint64_t best = 0;
#pragma unroll
      for (int i = 0; i < kMost; ++i) best = max(best, rank[i]);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) best = max(best, __shfl_xor_sync(kWholeWarp, best, step));
#pragma unroll
      for (int i = 0; i < kMost; ++i) rank[i] = rank[i] == best ? 0 : rank[i];
      expert = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    }
    if (lane == k) mine = expert;
  }
  const float picked = lane < a.chosen ? score_of(logits[mine]) : 0.0f;
  const float total = group_sum<32>(picked);
  if (lane >= a.chosen) return;
  const int64_t at = static_cast<int64_t>(token) * a.chosen + lane;
  a.to[at] = mine;
  a.weights[at] = picked * a.factor / (total == 0.0f ? 1.0f : total);
}

// -- SwiGLU ------------------------------------------------------------------------------------------------

// Comparisons, not fminf: a NaN stays one.
__device__ float gated(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + __expf(-gate)) * up;
}

struct SwigluArguments {
  const uint4* gate_up;  // [tokens, 2 inner] bf16
  uint4* act;            // [tokens, inner] bf16
  int64_t count;         // of vectors in act
  float limit;
  int vectors;  // of a row of act
};

__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ SwigluArguments a) {
  after_predecessor();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= a.count) return;
  const uint4* from = a.gate_up + at / a.vectors * 2 * a.vectors + at % a.vectors;
  const Eight gate = unpack(from[0]), up = unpack(from[a.vectors]);
  Eight found;
#pragma unroll
  for (int i = 0; i < kVector; ++i) found.x[i] = gated(gate.x[i], up.x[i], a.limit);
  a.act[at] = pack(found);
}

// -- a few rows --------------------------------------------------------------------------------------------

struct FewArguments {
  const uint4* x;        // [rows, hidden] bf16
  const int* experts;    // [rows, chosen]; below 0: another rank's
  const float* weights;  // [rows, chosen]
  const uint4* w13;      // [experts, 2 inner, hidden] bf16
  const uint4* w2;       // [experts, hidden, inner] bf16
  uint4* act;            // [rows * chosen, inner] bf16, in the order of the lists
  uint16_t* y;           // [rows, hidden] bf16
  float limit;
  int rows, chosen, slots, hidden, inner;
};

__device__ float dot(const Eight& a, const Eight& b, float sum) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum = fmaf(a.x[i], b.x[i], sum);
  return sum;
}

__device__ float as_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

// Slots by expert, those of an expert in their own order; the block's threads take part.
__device__ void sort_slots(const FewArguments& a, int* expert, int* order) {
  const int slot = threadIdx.x;
  if (slot < a.slots) expert[slot] = a.experts[slot];
  __syncthreads();
  if (slot < a.slots) {
    int place = 0;
    for (int i = 0; i < a.slots; ++i) place += expert[i] < expert[slot] || (expert[i] == expert[slot] && i < slot);
    order[place] = slot;
  }
  __syncthreads();
}

// A warp makes one column of the activation for every row of an expert. blockIdx.y: a place among the sorted slots,
// whose block works if it is its expert's first.
__global__ void __launch_bounds__(kThreads) up_kernel(const __grid_constant__ FewArguments a) {
  __shared__ int expert[kMostSlots], order[kMostSlots];
  after_predecessor();
  sort_slots(a, expert, order);
  const int first = blockIdx.y, own = expert[order[first]];
  if (own < 0 || (first > 0 && expert[order[first - 1]] == own)) return;
  int last = first + 1;
  while (last < a.slots && expert[order[last]] == own) ++last;
  const int column = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (column >= a.inner) return;
  const int vectors = a.hidden / kVector;
  const uint4* gate_row = a.w13 + (static_cast<int64_t>(own) * 2 * a.inner + column) * vectors;
  const uint4* up_row = gate_row + static_cast<int64_t>(a.inner) * vectors;
  auto* act = reinterpret_cast<__nv_bfloat16*>(a.act);
  for (int begin = first; begin < last; begin += kChunk) {
    const uint4* x[kChunk];
#pragma unroll
    for (int s = 0; s < kChunk; ++s)
      x[s] = a.x + static_cast<int64_t>(order[min(begin + s, last - 1)] / a.chosen) * vectors;
    float gate[kChunk] = {}, up[kChunk] = {};
#pragma unroll 4
    for (int v = lane; v < vectors; v += 32) {
      const Eight g = unpack(gate_row[v]), u = unpack(up_row[v]);
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        if (begin + s < last) {
          const Eight own_x = unpack(x[s][v]);
          gate[s] = dot(g, own_x, gate[s]);
          up[s] = dot(u, own_x, up[s]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kChunk; ++s) {
      const float g = as_bf16(group_sum<32>(gate[s])), u = as_bf16(group_sum<32>(up[s]));
      if (lane == 0 && begin + s < last) {
        act[static_cast<int64_t>(order[begin + s]) * a.inner + column] = __float2bfloat16_rn(gated(g, u, a.limit));
      }
    }
  }
}

// A warp makes one column of the output for every row: what each slot gives, then the sum in the order of the lists.
__global__ void __launch_bounds__(kThreads) down_kernel(const __grid_constant__ FewArguments a) {
  __shared__ int expert[kMostSlots], order[kMostSlots];
  __shared__ float given[kWarps][kMostSlots];
  after_predecessor();
  sort_slots(a, expert, order);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = blockIdx.x * kWarps + warp;
  if (column >= a.hidden) return;
  const int vectors = a.inner / kVector;
  int last = 0;
  for (int first = 0; first < a.slots; first = last) {
    const int own = expert[order[first]];
    for (last = first + 1; last < a.slots && expert[order[last]] == own;) ++last;
    if (own < 0) continue;
    const uint4* row = a.w2 + (static_cast<int64_t>(own) * a.hidden + column) * vectors;
    for (int begin = first; begin < last; begin += kChunk) {
      const uint4* act[kChunk];
#pragma unroll
      for (int s = 0; s < kChunk; ++s) act[s] = a.act + static_cast<int64_t>(order[min(begin + s, last - 1)]) * vectors;
      float sum[kChunk] = {};
#pragma unroll 4
      for (int v = lane; v < vectors; v += 32) {
        const Eight w = unpack(row[v]);
#pragma unroll
        for (int s = 0; s < kChunk; ++s) {
          if (begin + s < last) sum[s] = dot(w, unpack(act[s][v]), sum[s]);
        }
      }
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        const float whole = group_sum<32>(sum[s]);
        if (lane == 0 && begin + s < last) given[warp][order[begin + s]] = as_bf16(whole);
      }
    }
  }
  __syncwarp();
  for (int row = lane; row < a.rows; row += 32) {
    float sum = 0;
    for (int k = 0; k < a.chosen; ++k) {
      const int slot = row * a.chosen + k;
      if (expert[slot] >= 0) sum = __fadd_rn(sum, __fmul_rn(given[warp][slot], a.weights[slot]));
    }
    reinterpret_cast<__nv_bfloat16*>(a.y)[static_cast<int64_t>(row) * a.hidden + column] = __float2bfloat16_rn(sum);
  }
}

// -- the sum of many rows ----------------------------------------------------------------------------------

struct CombineArguments {
  const uint4* down;      // [rows * chosen, hidden] bf16
  const int64_t* places;  // [rows * chosen]: where in down
  const int* experts;     // [rows, chosen]
  const float* weights;   // [rows, chosen]
  uint4* y;               // [rows, hidden] bf16
  int chosen, vectors;
};

__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineArguments a) {
  after_predecessor();
  const int row = blockIdx.x;
  for (int v = threadIdx.x; v < a.vectors; v += kThreads) {
    Eight sum{};
    for (int k = 0; k < a.chosen; ++k) {
      const int64_t slot = static_cast<int64_t>(row) * a.chosen + k;
      if (a.experts[slot] < 0) continue;
      const Eight one = unpack(a.down[a.places[slot] * a.vectors + v]);
      const float by = a.weights[slot];
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum.x[i] = __fadd_rn(sum.x[i], __fmul_rn(one.x[i], by));
    }
    a.y[static_cast<int64_t>(row) * a.vectors + v] = pack(sum);
  }
}

void check_width(const Reader& r, const char* name, int64_t width) {
  r.require(width % kVector == 0, name, "has " + std::to_string(width) + " columns", "pass a multiple of 8");
}

}  // namespace

void route(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, experts = kUnbound, chosen = kUnbound, vocabulary = kUnbound;
  RouteArguments a{};
  a.logits = r.in("logits", {DType::f32}, {&tokens, &experts}, 4).as<const float>();
  const Operand& bias = r.maybe("bias", {DType::f32}, {&experts}, 4);
  const Operand& table = r.maybe("table", {DType::i32, DType::i64}, {&vocabulary, &chosen}, 4);
  a.ids = r.in("tokens", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  a.factor = r.real();
  a.to = r.out("experts", {DType::i32}, {&tokens, &chosen}, 4).as<int>();
  a.weights = r.out("weights", {DType::f32}, {tokens, chosen}, 4).as<float>();
  r.require(chosen <= 32 && chosen <= experts, "experts", "has " + std::to_string(chosen) + " columns",
            "pass at most 32, and no more than there are experts");
  r.require(experts <= kMostExperts, "logits", "has " + std::to_string(experts) + " columns", "pass at most 1024");
  r.done();
  if (tokens == 0) return;
  a.bias = bias.given ? bias.as<const float>() : nullptr;
  a.table = table.given ? table.address : nullptr;
  a.table_is_wide = table.given && table.dtype == DType::i64;
  a.tokens = static_cast<int>(tokens);
  a.experts = static_cast<int>(experts);
  a.chosen = static_cast<int>(chosen);
  const int blocks = ceil_div(tokens, kWarps);
  if (experts <= 256) {
    launch(call, route_kernel<8>, blocks, kThreads, a);
  } else {
    launch(call, route_kernel<kMostExperts / 32>, blocks, kThreads, a);
  }
}

void swiglu(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, both = kUnbound;
  SwigluArguments a{};
  a.gate_up = r.in("gate_up", {DType::bf16}, {&tokens, &both}).as<const uint4>();
  a.limit = r.real();
  check_width(r, "gate_up", both / 2);
  a.act = r.out("act", {DType::bf16}, {tokens, both / 2}).as<uint4>();
  r.done();
  a.vectors = static_cast<int>(both / 2 / kVector);
  a.count = tokens * a.vectors;
  if (a.count == 0) return;
  launch(call, swiglu_kernel, ceil_div(a.count, kThreads), kThreads, a);
}

void routed_experts(const Call& call) {
  const Operand &x = call.tensor[0], &chosen_ones = call.tensor[1];
  // Anything else belongs to the grouped GEMM, or to the reference.
  if (x.dtype != DType::bf16 || chosen_ones.dims != 2 || chosen_ones.size[0] * chosen_ones.size[1] > kMostSlots)
    throw NotTaken();
  Reader r(call);
  int64_t rows = kUnbound, hidden = kUnbound, chosen = kUnbound, experts = kUnbound, both = kUnbound, inner = kUnbound;
  FewArguments a{};
  a.x = r.in("x", {DType::bf16}, {&rows, &hidden}).as<const uint4>();
  a.experts = r.in("experts", {DType::i32}, {&rows, &chosen}, 4).as<const int>();
  a.weights = r.in("weights", {DType::f32}, {rows, chosen}, 4).as<const float>();
  a.w13 = r.in("w13", {DType::bf16}, {&experts, &both, hidden}).as<const uint4>();
  a.w2 = r.in("w2", {DType::bf16}, {experts, hidden, &inner}).as<const uint4>();
  a.limit = r.real();
  r.require(rows == 0 || chosen > 0, "experts", "has 0 columns", "pass one or more experts a token");
  r.require(both == 2 * inner, "w13", "has " + std::to_string(both) + " rows an expert",
            "pass twice the columns of w2");
  check_width(r, "x", hidden);
  check_width(r, "w2", inner);
  a.y = r.out("y", {DType::bf16}, {rows, hidden}).as<uint16_t>();
  r.out("rows", {DType::bf16}, {rows * chosen, hidden});
  r.out("gate_up", {DType::bf16}, {rows * chosen, both});
  a.act = r.out("act", {DType::bf16}, {rows * chosen, inner}).as<uint4>();
  r.out("down", {DType::bf16}, {rows * chosen, hidden});
  r.done();
  a.rows = static_cast<int>(rows);
  a.chosen = static_cast<int>(chosen);
  a.slots = a.rows * a.chosen;
  a.hidden = static_cast<int>(hidden);
  a.inner = static_cast<int>(inner);
  if (a.slots == 0) return;
  launch(call, up_kernel, dim3(ceil_div(inner, kWarps), a.slots), kThreads, a);
  launch(call, down_kernel, ceil_div(hidden, kWarps), kThreads, a);
}

void combine_experts(const Call& call) {
  Reader r(call);
  int64_t slots = kUnbound, rows = kUnbound, hidden = kUnbound, chosen = kUnbound;
  CombineArguments a{};
  a.down = r.in("down", {DType::bf16}, {&slots, &hidden}).as<const uint4>();
  a.places = r.in("places", {DType::i64}, {slots}, 8).as<const int64_t>();
  a.experts = r.in("experts", {DType::i32}, {&rows, &chosen}, 4).as<const int>();
  a.weights = r.in("weights", {DType::f32}, {rows, chosen}, 4).as<const float>();
  a.y = r.out("y", {DType::bf16}, {rows, hidden}).as<uint4>();
  r.require(rows == 0 || chosen > 0, "experts", "has 0 columns", "pass one or more experts a token");
  r.require(rows * chosen == slots, "down", "has " + std::to_string(slots) + " rows",
            "pass one for each expert of a row");
  check_width(r, "down", hidden);
  r.done();
  if (slots == 0) return;
  a.chosen = static_cast<int>(chosen);
  a.vectors = static_cast<int>(hidden / kVector);
  launch(call, combine_kernel, static_cast<int>(rows), kThreads, a);
}

}  // namespace dsv4
