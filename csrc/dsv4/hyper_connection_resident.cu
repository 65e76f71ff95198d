// The streams of tokens mixed, multiplied, collapsed and normed in one launch, as hyper_connection_cluster.cu does for
// fewer than sixteen tokens and the head: there the latency of a tile counts, here what moves meanwhile.
//
// A cluster of sixteen blocks takes tiles of eight tokens; a block has 256 columns of all their streams. They stay in
// its shared memory from their copying until they are collapsed: nothing is read twice. Nine tiles are there at a
// time: four on their way (where no block's output is mixed in, all), the others mixed or with values that travel.
// Warps do one thing each, and wait for nothing but what they need next:
//
//   copies     a thread has tiles copied in when there is a place, and out when they are mixed;
//   mixing     eight warps, two tokens and half of the columns each, by tensor cores, and products of the streams with
//              each other;
//   products   eight warps, 32 columns each, fn in registers as operands of the tensor cores: of the streams with fn;
//   sums       two warps add up what the eight have found, and send each token's to the block that owns it;
//   answers    a warp sends back its weights and its norm's factor;
//   rows       eight warps, a token each, collapse the streams when the answer is there.
//
// Floor at hidden size 4096: 80 KB a token, 40 KB without mixing, of DRAM and of the L2 cache alike. With many tokens
// that is what bounds it; fewer pay for fn, which every cluster reads, and for the last tile's way through all of the
// above.
#include "hyper_connection_launch.cuh"
#include "hyper_connection_resident_answers.cuh"
#include "hyper_connection_resident_copies.cuh"
#include "hyper_connection_resident_mixing.cuh"
#include "hyper_connection_resident_products.cuh"
#include "hyper_connection_resident_rows.cuh"
#include "hyper_connection_resident_sums.cuh"
#include "tensor_core.cuh"
#include "tensor_map.h"

namespace dsv4 {
namespace resident {
namespace {

// Registers of a thread. Warps give away and take of what the block starts with.
constexpr int kFirstRegisters = 40, kMultiplierRegisters = 128, kMixerRegisters = 64, kRowRegisters = 40;
constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;
static_assert(kFirst * kFirstRegisters + kMultipliers * kMultiplierRegisters + kMixers * kMixerRegisters +
                  kRows * kRowRegisters <= kThreads / 32 * kStartRegisters);

[[maybe_unused]] __device__ void make_barriers(Memory& m) {
  for (uint64_t& barrier : m.there) make_barrier(barrier, 1);
  for (uint64_t& barrier : m.mixed) make_barrier(barrier, kMixers);
  for (uint64_t& barrier : m.answers) make_barrier(barrier, 1);
  for (uint64_t& barrier : m.left) make_barrier(barrier, kRows);
  for (uint64_t& barrier : m.full) make_barrier(barrier, kMultipliers);
  for (uint64_t& barrier : m.empty) make_barrier(barrier, kAdders);
  for (uint64_t& barrier : m.sums) make_barrier(barrier, 1);
  make_barrier(m.answered, 1);
  for (uint64_t& barrier : m.weights) make_barrier(barrier, 1);
  for (uint64_t& barrier : m.taken) make_barrier(barrier, kMultipliers);
  publish_barriers();
  for (uint64_t& barrier : m.sums) arrive_and_expect(barrier, kBlocks * kSentBytes);
}

// A cluster's part of fn's rows to the L2 cache, for all: each reads all rows, and they would wait for the same ones.
[[maybe_unused]] __device__ void fetch_weights(const Arguments& a, int rank) {
  const int lane = threadIdx.x % 32, clusters = gridDim.x / kBlocks, which = blockIdx.x / kBlocks;
  for (int i = which + lane * clusters; i < kSums * kStreams; i += 32 * clusters) {
    fetch_ahead(a.mix.fn + i * kHidden + rank * kColumns, kColumns * 4);
  }
}

template <Hyper kHyper>
__global__ void __launch_bounds__(kThreads, 1) resident_kernel(const __grid_constant__ Arguments a) {
  let_successor();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& m = *reinterpret_cast<Memory*>(bytes);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) make_barriers(m);
  __syncwarp();
  arrive_with_barriers();
  // What touches no memory but the block's own comes before the wait.
  if (warp < kFirst) {
    fewer_registers<kFirstRegisters>();
    const Share share(a);
    if (warp == 0) {
      if (is_elected()) Copies<kHyper>{a, m, share}.run();
      __syncwarp();
      await_predecessor();
      wait_for_cluster();
    } else {
      await_predecessor();
      if (warp > kAdders) fetch_weights(a, share.rank);
      wait_for_cluster();
      if (warp <= kAdders) {
        Sums{m, share}.run();
      } else {
        Answers{a, m, share}.run();
      }
    }
  } else if (warp < kFirst + kMultipliers) {
    more_registers<kMultiplierRegisters>();
    Multiplication products(m);
    await_predecessor();
    wait_for_cluster();
    products.take();
    products.run(Share(a).tiles);
    make_combs(a, m, products.warp * 32 + products.lane);
  } else if (warp < kFirst + kMultipliers + kMixers) {
    fewer_registers<kMixerRegisters>();
    const Mixing<kHyper> mixing(a, m, Share(a));
    await_predecessor();
    wait_for_cluster();
    mixing.run();
  } else {
    fewer_registers<kRowRegisters>();
    const Share share(a);
    Rows rows(a, m, share);
    await_predecessor();
    rows.take_norm(a.collapse, share.rank);
    wait_for_cluster();
    rows.run();
  }
#else
  await_predecessor();
#endif
}

// Streams come and go at few addresses; fn is another for each sublayer of a model.
struct DescribedBoxes {
  Described<64> streams, layers;
  Described<256> weights;

  static DescribedBoxes& of_this_thread() {
    static thread_local DescribedBoxes found;
    return found;
  }
};

// Boxes of a block's columns of eight tokens: of all streams, before and after, and of the block's output; and of all
// sums' weights of a stream.
template <Hyper kHyper>
bool describe_boxes(Arguments& a) {
  constexpr auto kBf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kFloat = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  constexpr cuuint64_t kBytes = kHidden * 2, kBoth = kStreams * kHidden * 4, kWords = kRow / 4, kAll = kBytes / kRow;
  DescribedBoxes& before = DescribedBoxes::of_this_thread();
  const cuuint64_t tokens = a.mix.tokens;
  const auto streams = [&](CUtensorMap& map, const void* at) {
    return before.streams.find(map, at, a.mix.tokens, [&](CUtensorMap& made) {
      return describe<4>(made, kBf16, at, {kRow / 2, kStreams, tokens, kAll}, {kBytes, kStreams * kBytes, kRow},
                         {kRow / 2, 1, kTile, kGroups});
    });
  };
  const auto weights = [&](CUtensorMap& made) {
    return describe<4>(made, kFloat, a.mix.fn, {kWords, kSums, 2 * kAll, kStreams}, {kBoth, kRow, kHidden * 4},
                       {kWords, kSums, kColumns / kWords, 1});
  };
  const auto layer = [&](CUtensorMap& made) {
    return describe<3>(made, kBf16, a.mix.y, {kRow / 2, tokens, kAll}, {kBytes, kRow}, {kRow / 2, kTile, kGroups});
  };
  return streams(a.streams, a.mix.residual) && before.weights.find(a.weights, a.mix.fn, kSums, weights) &&
         (kHyper != Hyper::post_pre ||
          (streams(a.mixed, a.mix.mixed) && before.layers.find(a.layer, a.mix.y, a.mix.tokens, layer)));
}

template <Hyper kHyper>
bool launched(const Call& call, const Arguments& a) {
  const int most = most_clusters<resident_kernel<kHyper>>(kThreads, sizeof(Memory));
  if (most == 0) return false;
  const int limit = most * kBlocks * kMostOwn, tokens = a.mix.tokens;
  for (int first = 0; first < tokens; first += limit) {
    Arguments part = a.from(first, min(limit, tokens - first), most);
    if (!describe_boxes<kHyper>(part)) return false;  // whoever takes over does all tokens anew
    launch_clusters<resident_kernel<kHyper>>(call, part.clusters, kThreads, sizeof(Memory), part);
  }
  return true;
}

// Tokens from which it is the faster kernel, as measured on an H200.
constexpr int kFrom = 16;

}  // namespace
}  // namespace resident

bool launch_resident(const Call& call, const MixArguments& mix, const CollapseArguments& collapse, Hyper hyper) {
  if (mix.hidden != kHidden || mix.tokens < resident::kFrom) return false;
  const resident::Arguments a{mix, collapse, {}, {}, {}, {}, 0, 0, 0};
  switch (hyper) {
    case Hyper::post_pre:
      return resident::launched<Hyper::post_pre>(call, a);
    case Hyper::pre:
      return resident::launched<Hyper::pre>(call, a);
    default:
      return false;
  }
}

}  // namespace dsv4
