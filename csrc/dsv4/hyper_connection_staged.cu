// The streams of many tokens mixed, multiplied, collapsed and normed in one launch, as hyper_connection_cluster.cu does
// for few: there the latency of a tile counts, here what moves meanwhile.
//
// A cluster of sixteen blocks takes tiles of 64 tokens; a block has 256 columns of all their streams, in stages of 64,
// and its part of fn in shared memory as two bf16 terms. Copies of two stages are under way while eight warps mix one,
// put it back in place, rounded, for the tensor cores, and store it. Four warps multiply it with fn. A tile's values go
// to the blocks that own its tokens once, its weights and factors come back, and five stages later the mixing warps
// read back what they have stored, from the L2 cache, and collapse it: nothing waits for the exchange.
//
// What leaves no trace in that cache is what is read once: it comes with a policy of its own.
#include "hyper_connection_launch.cuh"
#include "hyper_connection_staged_answers.cuh"
#include "hyper_connection_staged_products.cuh"
#include "hyper_connection_staged_work.cuh"

namespace dsv4 {
namespace staged {
namespace {

// A column of the norm's weights for each mixing thread.
[[maybe_unused]] __device__ float norm_weight(const CollapseArguments& c, int rank) {
  static_assert(32 * kMixers == kColumns);
  const int column = rank * kColumns + threadIdx.x;
  return c.weight_is_bf16 ? low(static_cast<const uint16_t*>(c.norm_weight)[column])
                          : static_cast<const float*>(c.norm_weight)[column];
}

template <Hyper kHyper>
__global__ void __launch_bounds__(kThreads, 1) staged_kernel(const __grid_constant__ Arguments a) {
  after_predecessor();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& m = *reinterpret_cast<Memory*>(bytes);
  const int warp = threadIdx.x / 32;
  const Share share(a);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : m.mixed) make_barrier(barrier, kMixers);
    for (uint64_t& barrier : m.multiplied) make_barrier(barrier, kMultipliers);
    make_barrier(m.sums, 1);
    make_barrier(m.answers, 1);
    publish_barriers();
  }
  __syncthreads();
  arrive_at_cluster();
  if (warp < kMixers) {
    more_registers<192>();
    Work<kHyper> work{a, m, share};
    static_assert(kAhead == 2);
    work.begin(0);
    const float norm = norm_weight(a.collapse, share.rank);
    meet<kThreads>(kFetched);  // fn's copies come before the next stage's
    work.begin(1);
    m.norm[threadIdx.x] = norm;
    meet<32 * kMixers>(kNormed);
    wait_for_cluster();
    work.run();
  } else {
    fewer_registers<64>();
    const Weights weights{m};
    weights.fetch(a.mix.fn + share.rank * kColumns);
    pass<kThreads>(kFetched);
    weights.make();
    meet<32 * (kMultipliers + kOwners)>(kMade);
    wait_for_cluster();
    if (warp < kMixers + kMultipliers) {
      Multiplication{m, share}.run();
    } else {
      Answers{a, m, share}.run();
    }
  }
#endif
}

template <Hyper kHyper>
bool launched(const Call& call, Arguments& a) {
  const int most = most_clusters<staged_kernel<kHyper>>(kThreads, sizeof(Memory));
  if (most == 0) return false;
  const int turns = ceil_div(a.mix.tokens, most * kTile);
  a.rows = ceil_div(a.mix.tokens, most * turns);
  a.tiles = ceil_div(a.mix.tokens, a.rows);
  launch_clusters<staged_kernel<kHyper>>(call, min(most, a.tiles), kThreads, sizeof(Memory), a);
  return true;
}

// Tokens from which it is the faster kernel, as measured on an H200.
constexpr int kFrom = 256;

// What createpolicy gives for lines that are to go first.
constexpr uint64_t kEvictFirst = 0x12f0000000000000;

}  // namespace
}  // namespace staged

bool launch_in_stages(const Call& call, const MixArguments& mix, const CollapseArguments& collapse, Hyper hyper) {
  if (mix.hidden != kHidden || mix.tokens < staged::kFrom) return false;
  staged::Arguments a{mix, collapse, 0, 0, staged::kEvictFirst};
  switch (hyper) {
    case Hyper::post_pre:
      return staged::launched<Hyper::post_pre>(call, a);
    case Hyper::pre:
      return staged::launched<Hyper::pre>(call, a);
    default:
      return false;
  }
}

}  // namespace dsv4
