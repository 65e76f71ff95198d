// The streams mixed, multiplied, collapsed and normed in one launch: each is read once and written once. From sixteen
// tokens on hyper_connection_resident.cu does it, but for the head.
//
// Floor at hidden size 4096: residual and y read, mixed streams and layer_in written: 80 KB a token. A cluster of
// sixteen blocks takes tiles of up to sixteen tokens; a block has 256 columns of all their streams, and its part of fn
// in shared memory, as two bf16 terms in the order of the tensor cores' operands. Streams stay in registers: a lane has
// eight columns of them from their arrival until they are collapsed.
//
// What the weights of a token need of all columns goes through the cluster: a block sends, for each token, its part of
// the 24 sums and of the products of the streams with each other to the block that owns the token (the one with its
// number); that one sends back the four weights of the sum and the factor of its norm, which follows from the products:
// |sum_i w_i R_i|^2 = sum_ij w_i w_j R_i.R_j.
//
// Two teams of eight warps, thirty-two columns each, have tiles of their own: while the sums of one travel, the other
// mixes and multiplies. Two more warps own tokens, one for each team, and fetch later tiles to the L2 cache.
#include "hyper_connection_columns.cuh"
#include "hyper_connection_launch.cuh"
#include "hyper_connection_owner.cuh"
#include "tensor_core.cuh"

namespace dsv4 {
namespace {

// A warp for each team's tokens, and two that have nothing to do: registers are moved by fours of warps.
constexpr int kWorkers = kTeams * kWarps, kThreads = 32 * (kWorkers + 4);

template <Hyper kHyper>
__global__ void __launch_bounds__(kThreads, 1) cluster_kernel(const __grid_constant__ ClusterArguments a) {
  after_predecessor();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& m = *reinterpret_cast<Memory<kHyper>*>(bytes);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (Team& team : m.team) {
      make_barrier(team.sums, 1);
      make_barrier(team.answers, 1);
    }
    publish_barriers();
  }
  __syncthreads();
  arrive_at_cluster();
  if (warp < kWorkers) {
    more_registers<104>();
    Columns<kHyper>{a, m}.work();
  } else {
    fewer_registers<64>();
    if (warp < kWorkers + kTeams) {
      const int which = warp - kWorkers;
      own_tokens<kHyper>(a, m.team[which], Share(a, which));
    } else {
      wait_for_cluster();
    }
  }
#endif
}

// -- launches ----------------------------------------------------------------------------------------------

// Tokens of a tile. Few are shared out to as many clusters, then teams, as there are (half an operand is enough for a
// cluster), in as few turns as there can be; of many turns each is whole.
int rows_for(int tokens, int clusters) {
  if (tokens <= clusters * kEight) return max(kEight / 2, ceil_div(tokens, clusters));
  const int teams = clusters * kTeams, turns = ceil_div(tokens, teams * kTile);
  return turns > 2 ? kTile : ceil_div(tokens, turns * teams);
}

template <Hyper kHyper>
bool launched(const Call& call, ClusterArguments& a) {
  constexpr size_t kShared = sizeof(Memory<kHyper>);
  const int most = most_clusters<cluster_kernel<kHyper>>(kThreads, kShared);
  if (most == 0) return false;
  a.rows = rows_for(a.mix.tokens, most);
  a.tiles = ceil_div(a.mix.tokens, a.rows);
  launch_clusters<cluster_kernel<kHyper>>(call, min(most, a.tiles), kThreads, kShared, a);
  return true;
}

}  // namespace

bool launch_in_clusters(const Call& call, const MixArguments& mix, const CollapseArguments& collapse, Hyper hyper) {
  if (mix.hidden != kHidden) return false;
  ClusterArguments a{mix, collapse, 0, 0};
  switch (hyper) {
    case Hyper::post_pre:
      return launched<Hyper::post_pre>(call, a);
    case Hyper::pre:
      return launched<Hyper::pre>(call, a);
    default:
      return launched<Hyper::head>(call, a);
  }
}

}  // namespace dsv4
