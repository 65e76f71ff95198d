// Logits of the sparse indexer: a weighted sum over heads of relu(q . key), keys read from their pages.
//
// Floor: 16384 flop a row and key; a key's 132 (FP8) or 68 (FP4) bytes once a request. A warp keeps one row's queries
// in registers as the B operand of m16n8k16 and streams keys, 16 at a time, from memory straight into the A operand:
// the sum over k may run in any order as long as both operands agree on it, so each lane takes 32 neighbouring values
// of a key. FP8 multiplies as f16, FP4 (by look-up) as bf16: both hold every product's factors exactly.
#include "launch.cuh"
#include "numeric.cuh"
#include "ops.h"
#include "pages.cuh"

namespace dsv4 {
namespace {

constexpr int kWarps = 4;
constexpr int kTile = 16;  // keys of a step
constexpr int kDims = 128;
constexpr int kHeadTiles = 8;  // of eight heads each
constexpr int kSteps = kDims / 16;

struct LogitsArguments {
  const uint8_t* q;         // [tokens, heads, 128 or 64] codes
  const uint8_t* q_scales;  // [tokens, heads, 4], FP4
  const float* weights;     // [tokens, heads]
  Pages cache;
  const int32_t* table;
  int64_t table_stride;
  const int32_t* request;
  const int32_t* counts;
  float* logits;  // [tokens, width]
  int tokens, heads, width;
};

// Operands of one lane for one row: its 32 values as pairs, in the order of the steps.
struct Row {
  uint32_t pair[2 * kSteps];
};

__device__ uint4 load16(const uint8_t* from, bool vectors) {
  if (vectors) return *reinterpret_cast<const uint4*>(from);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i % 4));
  return {words[0], words[1], words[2], words[3]};
}

__device__ uint32_t f16x2_of_e4m3x2(uint32_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// A lane's part of a row as it lies in memory.
struct Raw {
  uint4 codes[2];  // FP4 has one
  uint32_t scale;  // FP4: the block's byte
  float factor;    // FP8: of the key's logit
};

__device__ Row row_of_fp8(const uint4 (&raw)[2]) {
  const uint32_t words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
  Row row;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    row.pair[2 * i] = f16x2_of_e4m3x2(words[i] & 0xffffu);
    row.pair[2 * i + 1] = f16x2_of_e4m3x2(words[i] >> 16);
  }
  return row;
}

// Two E2M1 codes of a byte as bf16. Code bits in the place of bf16's lowest exponent bits and first mantissa bit are
// off by 2**126, subnormals included.
__device__ __nv_bfloat162 bf16x2_of_e2m1x2(uint32_t byte) {
  const uint32_t codes = (byte & 0xfu) | (byte & 0xf0u) << 12;
  const uint32_t bits = (codes & 0x00070007u) << 6 | (codes & 0x00080008u) << 12;
  const uint32_t by = 0x7e807e80u;  // 2**126, twice
  return __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), *reinterpret_cast<const __nv_bfloat162*>(&by));
}

__device__ Row row_of_fp4(uint4 raw, uint32_t scale) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  // A lane's 32 values are one block: one scale. Byte 0 is 2**-127, a subnormal.
  const uint32_t one = scale == 0 ? 0x40u : scale << 7, twice = one | one << 16;
  const __nv_bfloat162 by = *reinterpret_cast<const __nv_bfloat162*>(&twice);
  Row row;
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
    const __nv_bfloat162 pair = __hmul2(bf16x2_of_e2m1x2(words[i / 4] >> (8 * (i % 4)) & 0xffu), by);
    row.pair[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return row;
}

template <bool kFp4>
__device__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kFp4) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <bool kFp4>
__device__ Raw load_key(const LogitsArguments& a, const int32_t* table, int key, int quarter) {
  const int block_size = a.cache.block_size, block = a.cache.pages.quotient(key), offset = key - block * block_size;
  const uint8_t* page = a.cache.base + table[block] * a.cache.stride;
  const bool vectors = a.cache.vectors;
  Raw raw{};
  if constexpr (kFp4) {
    raw.codes[0] = load16(page + offset * (kDims / 2) + quarter * 16, vectors);
    raw.scale = page[block_size * (kDims / 2) + offset * (kDims / 32) + quarter];
  } else {
    const uint8_t* row = page + offset * kDims + quarter * 32;
    raw.codes[0] = load16(row, vectors);
    raw.codes[1] = load16(row + 16, vectors);
    const uint8_t* scale = page + block_size * kDims + offset * 4;
    if (vectors) {
      raw.factor = *reinterpret_cast<const float*>(scale);
    } else {
      raw.factor = __uint_as_float(scale[0] | scale[1] << 8 | scale[2] << 16 | static_cast<uint32_t>(scale[3]) << 24);
    }
  }
  return raw;
}

template <bool kFp4>
__device__ Row row_of(const Raw& raw) {
  if constexpr (kFp4)
    return row_of_fp4(raw.codes[0], raw.scale);
  else
    return row_of_fp8(raw.codes);
}

// Queries of a head as keys lie: a lane's part of the row.
template <bool kFp4>
__device__ Row load_query(const LogitsArguments& a, int64_t row, int quarter) {
  Raw raw{};
  if constexpr (kFp4) {
    raw.codes[0] = load16(a.q + row * (kDims / 2) + quarter * 16, true);
    raw.scale = a.q_scales[row * 4 + quarter];
  } else {
    raw.codes[0] = load16(a.q + row * kDims + quarter * 32, true);
    raw.codes[1] = load16(a.q + row * kDims + quarter * 32 + 16, true);
  }
  return row_of<kFp4>(raw);
}

template <bool kFp4>
__global__ void __launch_bounds__(32 * kWarps, 2) logits_kernel(const __grid_constant__ LogitsArguments a) {
  after_predecessor();
  const int token = blockIdx.x, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int count = min(a.counts[token], a.width), request = a.request[token];
  float* logits = a.logits + static_cast<int64_t>(token) * a.width;
  // The columns behind the candidates, shared out among all threads of the row.
  for (int i = count + blockIdx.y * blockDim.x + threadIdx.x; i < a.width; i += gridDim.y * blockDim.x)
    logits[i] = -INFINITY;

  const int first = blockIdx.y * kWarps + threadIdx.x / 32, step = gridDim.y * kWarps;
  if (first * kTile >= count) return;
  Row q[kHeadTiles];
  float weight[kHeadTiles][2];
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
    const int head = tile * 8 + group;
    const int64_t row = static_cast<int64_t>(token) * a.heads + head;
    q[tile] = head < a.heads ? load_query<kFp4>(a, row, quarter) : Row{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = tile * 8 + quarter * 2 + i;
      weight[tile][i] = column < a.heads ? a.weights[static_cast<int64_t>(token) * a.heads + column] : 0.0f;
    }
  }
  // Keys behind the last are the last again; their logits are not stored. The next tile's bytes arrive meanwhile.
  const int32_t* table = a.table + request * a.table_stride;
  const auto load = [&](int tile, int half) {
    return load_key<kFp4>(a, table, min(tile * kTile + half * 8 + group, count - 1), quarter);
  };
  Raw next[2] = {load(first, 0), load(first, 1)};
  for (int tile = first; tile * kTile < count; tile += step) {
    const Row upper = row_of<kFp4>(next[0]), lower = row_of<kFp4>(next[1]);
    const float factor[2] = {next[0].factor, next[1].factor};
    next[0] = load(tile + step, 0);
    next[1] = load(tile + step, 1);
    float logit[2] = {};
#pragma unroll
    for (int heads = 0; heads < kHeadTiles; ++heads) {
      float sum[4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint32_t keys[4] = {upper.pair[2 * i], lower.pair[2 * i], upper.pair[2 * i + 1], lower.pair[2 * i + 1]};
        multiply<kFp4>(sum, keys, q[heads].pair[2 * i], q[heads].pair[2 * i + 1]);
      }
      // A comparison keeps NaN, which fmaxf would not.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float kept = sum[i] < 0 ? 0.0f : sum[i];
        logit[i / 2] = fmaf(weight[heads][i % 2], kept, logit[i / 2]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float whole = group_sum<4>(logit[i]) * (kFp4 ? 1.0f : factor[i]);
      const int column = tile * kTile + 8 * i + group;
      if (quarter == i && column < count) logits[column] = whole;
    }
  }
}

// Blocks that share a row: enough to fill the device, each with some tiles for every warp.
constexpr int kTilesOfABlock = 4 * kWarps;
constexpr int kBlocksWanted = 528;

}  // namespace

void indexer_logits(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, heads = kUnbound, codes = kUnbound, width = kUnbound, requests = kUnbound,
          listed = kUnbound;
  LogitsArguments a{};
  const Operand& q = r.in("q", {DType::e4m3, DType::u8}, {&tokens, &heads, &codes});
  const bool fp4 = q.dtype == DType::u8;
  const Operand& q_scales = r.maybe("q_scales", {DType::u8}, {&tokens, &heads, kDims / 32}, 1);
  a.weights = r.in("weights", {DType::f32}, {&tokens, &heads}, 4).as<const float>();
  const Operand& cache = r.cache("cache");
  const Operand& table = r.strided("table", {DType::i32}, {&requests, &listed}, 4);
  a.request = r.in("request", {DType::i32}, {&tokens}, 4).as<const int32_t>();
  a.counts = r.in("counts", {DType::i32}, {&tokens}, 4).as<const int32_t>();
  a.logits = r.out("logits", {DType::f32}, {&tokens, &width}, 4).as<float>();
  const int64_t block_size = r.integer(), format = r.integer();
  r.require(format == (fp4 ? kIndexerFp4 : kIndexerFp8), "format", "is " + std::to_string(format),
            "pass the one of the queries");
  r.require(codes == (fp4 ? kDims / 2 : kDims), "q", "has another width", "heads are 128 wide");
  r.require(fp4 == q_scales.given, "q_scales", "do not fit q", "pass them with E2M1 queries only");
  r.require(heads <= kHeadTiles * 8, "q", "has " + std::to_string(heads) + " heads", "pass at most 64");
  a.cache = pages(r, "cache", cache, block_size, format, fp4 ? 68 : 132);
  r.done();
  if (tokens == 0 || width == 0) return;
  a.q = q.as<const uint8_t>();
  a.q_scales = q_scales.as<const uint8_t>();
  a.table = table.as<const int32_t>();
  a.table_stride = table.stride[0];
  a.tokens = static_cast<int>(tokens);
  a.heads = static_cast<int>(heads);
  a.width = static_cast<int>(width);
  const int most = ceil_div(width, kTile * kTilesOfABlock), wanted = ceil_div(kBlocksWanted, tokens);
  const dim3 grid(a.tokens, most < wanted ? most : wanted);
  if (fp4) {
    launch(call, logits_kernel<true>, grid, 32 * kWarps, a);
  } else {
    launch(call, logits_kernel<false>, grid, 32 * kWarps, a);
  }
}

}  // namespace dsv4
