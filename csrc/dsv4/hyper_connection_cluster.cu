// The streams mixed, multiplied, collapsed and normed in one launch: each is read once and written once.
//
// Floor at hidden size 4096: residual and y read, mixed streams and layer_in written: 80 KB a token. A cluster of
// sixteen blocks takes sixteen tokens at a time; a block has 256 columns of all their streams in shared memory from
// their arrival until they are collapsed, and its part of fn in registers for all of its tokens, as two bf16 terms.
// What the weights of a token need of all columns goes through the cluster: a block sends, for each token, its part of
// the 24 sums and of the products of the streams with each other to the block that owns the token (the one with its
// number); that one sends back the four weights of the sum and the factor of its norm, which follows from the products:
// |sum_i w_i R_i|^2 = sum_ij w_i w_j R_i.R_j.
//
// Sixteen warps mix and collapse, sixteen columns each, and copy, a token each; two more own tokens. Nobody waits for
// the whole block: the sums of a tile travel while the next ones are mixed, and a slot is filled anew as soon as all
// warps have told that they collapsed what was there.
#include "hyper_connection_owner.cuh"
#include "launch.cuh"

namespace dsv4 {
namespace {

constexpr int kThreads = 32 * (kWarps + kOwners);

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A warp's sixteen columns of a tile, of which a lane mixes and collapses four of two tokens; and the token with the
// warp's number, whose rows of the block it copies in and out, 512 bytes at a time.
template <Hyper kHyper>
struct Columns {
  const ClusterArguments& a;
  Memory& m;
  const Share& share;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = lane / 4, byte = warp * 32 + lane % 4 * 8;  // and eight rows more; of the block's 512 bytes
  const int own = row * kTokenStep + byte;                    // from a slot's start
  const uint32_t limit = a.mix.tokens;

  static constexpr bool kMixing = kHyper == Hyper::post_pre;
  static constexpr int64_t kLayerBytes = kHidden * 2, kTokenBytes = kStreams * kLayerBytes;

  // Of a row of hidden size, this block's part.
  __device__ uint8_t* of_rank(const void* of) const {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(of)) + share.rank * kPieceBytes;
  }
  // Where this cluster's tile i begins, and whether it has such a row.
  __device__ int first(int i) const { return (share.first + i * share.step) * a.rows; }
  __device__ bool has(int i, int of) const { return static_cast<uint32_t>(first(i) + of) < limit && of < a.rows; }
  __device__ uint8_t* slot(int i) const { return reinterpret_cast<uint8_t*>(&m.slot[i % kSlots]); }

  __device__ void load(int i) {
    if (i < share.tiles && has(i, warp)) {
      const int token = first(i) + warp;
      const uint8_t* from = of_rank(a.mix.residual) + token * kTokenBytes + lane * 16;
      uint8_t* to = slot(i) + warp * kTokenStep + lane * 16;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) copy_in(to + j * kStreamStep, from + j * kLayerBytes);
      if constexpr (kMixing) {
        Slot& whole = m.slot[i % kSlots];
        if (lane < kStreams) {
          copy_in(&whole.comb[warp][lane], a.mix.comb + token * kStreams + lane);
          fetch_ahead(of_rank(a.mix.y) + token * kLayerBytes + lane * 128);
        }
        if (lane == kStreams) copy_in(&whole.post[warp], a.mix.post + token);
      }
    }
    end_of_group();
  }
  __device__ void load_layer(int i, uint2 (&to)[2]) {
    if (!kMixing || i >= share.tiles) return;
    const uint8_t* from = of_rank(a.mix.y) + (first(i) + row) * kLayerBytes + byte;
    if (has(i, row)) to[0] = *reinterpret_cast<const uint2*>(from);
    if (has(i, row + 8)) to[1] = *reinterpret_cast<const uint2*>(from + 8 * kLayerBytes);
  }
  __device__ void store_streams(int i) {
    if (!kMixing || !has(i, warp)) return;
    uint8_t* to = of_rank(a.mix.mixed) + (first(i) + warp) * kTokenBytes + lane * 16;
    const uint8_t* from = slot(i) + warp * kTokenStep + lane * 16;
    uint4 v[kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) v[j] = *reinterpret_cast<const uint4*>(from + j * kStreamStep);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) *reinterpret_cast<uint4*>(to + j * kLayerBytes) = v[j];
  }

  __device__ void mix_tile(int i, const Weights<kHyper>& weights, uint2 (&layer)[2]) {
    uint8_t* here = slot(i);
    if constexpr (kMixing) {
      const Slot& whole = m.slot[i % kSlots];
      mix(here + own, whole.post[row], whole.comb[row], layer[0]);
      mix(here + own + 8 * kTokenStep, whole.post[row + 8], whole.comb[row + 8], layer[1]);
      load_layer(i + 1, layer);
      __syncwarp();
    }
    Sums sums{};
    multiply_weights(here, weights, warp * 32, lane, sums);
    if (i > 0) wait(m.part_empty, (i - 1) & 1);
    keep_sums(m.part[warp], lane, sums);
    multiply_streams(here, m.part[warp], warp * 32, lane);
  }

  // A warp sends what the block has of the token with the warp's number.
  __device__ void send_sums(int i) {
    float sum, more;
    add_up(m.part[0] + warp * kPartStep, kPartOfWarp, lane, sum, more);
    tell(m.part_empty);
    const int travelling = i % kTravelling;
    const uint32_t to = place_at(m.received[travelling][share.rank], warp);
    const uint32_t barrier = place_at(&m.sums[travelling], warp);
    send(to + lane * 4, sum, barrier);
    if (lane < 4) send(to + (32 + lane) * 4, more, barrier);
  }

  __device__ Four norm_weight() const {
    const int column = share.rank * kColumns + byte / 2;
    const void* from = a.collapse.norm_weight;
    if (a.collapse.weight_is_bf16) {
      return unpack(*reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + column));
    }
    const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + column);
    return {v.x, v.y, v.z, v.w};
  }

  __device__ void collapse_tile(int i) {
    uint8_t* from = slot(i) + own;
    const int travelling = i % kTravelling;
    const Four norm = norm_weight();
    uint8_t* to = of_rank(a.collapse.layer_in) + (first(i) + row) * kLayerBytes + byte;
    wait(m.answers[travelling], i / kTravelling & 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 w = m.weights[travelling][row + half * 8];
      const float by = m.factor[travelling][row + half * 8];
      Four total{};
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const Four own_stream = unpack(eight_bytes(from + half * 8 * kTokenStep + j * kStreamStep));
        const float weight = j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w;
#pragma unroll
        for (int v = 0; v < 4; ++v) total.x[v] = fmaf(weight, own_stream.x[v], total.x[v]);
      }
      Four rounded = unpack(pack(total));
#pragma unroll
      for (int v = 0; v < 4; ++v) rounded.x[v] = rounded.x[v] * by * norm.x[v];
      store_if(has(i, row + half * 8), to + half * 8 * kLayerBytes, pack(rounded));
    }
  }

  __device__ void work() {
    uint8_t* staged = slot(kFirstStaged);
    Weights<kHyper>::stage(staged, a.mix.fn, share.rank);
    end_of_group();
    for (int i = 0; i < kFirstStaged; ++i) load(i);
    uint2 layer[2] = {};
    load_layer(0, layer);
    wait_for_groups<kFirstStaged>();
    meet();
    const Weights<kHyper> weights(staged, warp * 16 + lane % 4 * 2, lane / 4);
    wait_for_groups<kFirstStaged - 1>();
    meet();
    wait_for_cluster();
    for (int i = 0; i < share.tiles + kLag; ++i) {
      if (i < share.tiles) {
        mix_tile(i, weights, layer);
        wait_for_groups<kSlots - kLag - 2>();  // the next tile is there, and everybody will know
        tell(m.part_full);
      }
      if (i >= kLag) collapse_tile(i - kLag);
      tell(m.collapsed);
      if (i < share.tiles) {
        wait(m.part_full, i & 1);
        send_sums(i);
        store_streams(i);
      }
      wait(m.collapsed, i & 1);
      load(i + kSlots - kLag);
    }
  }
  // All warps of columns.
  __device__ static void meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory"); }
  // All of the warp have done what the barrier counts.
  __device__ void tell(uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }
};

__device__ void make_barriers(Memory& m) {
  make_barrier(m.part_full, kWarps);
  make_barrier(m.part_empty, kWarps);
  make_barrier(m.collapsed, kWarps);
  for (auto& one : m.sums) make_barrier(one, 1);
  for (auto& one : m.answers) make_barrier(one, 1);
  publish_barriers();
}

#endif

template <Hyper kHyper>
__global__ void __launch_bounds__(kThreads, 1) cluster_kernel(const __grid_constant__ ClusterArguments a) {
  after_predecessor();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t bytes[];
  Memory& m = *kept(reinterpret_cast<Memory*>(bytes));
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) make_barriers(m);
  __syncthreads();
  arrive_at_cluster();
  const Share share(a);
  if (warp < kWarps) {
    Columns<kHyper>{a, m, share}.work();
  } else {
    own_tokens<kHyper>(a, m, share, warp - kWarps);
  }
#endif
}

// -- launches ----------------------------------------------------------------------------------------------

cudaLaunchConfig_t configuration(cudaLaunchAttribute (&attributes)[2]) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Memory);
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}

// How many clusters the current device runs at a time; 0 where it has none of sixteen.
template <Hyper kHyper>
int most_clusters() {
  static int known[kDevices] = {};  // one more than the number, 0 not asked yet; writers agree
  const int device = current_device();
  if (device >= kDevices || !is_hopper()) return 0;
  if (known[device] == 0) {
    int found = 0;
    cudaLaunchAttribute attributes[2];
    const cudaLaunchConfig_t config = configuration(attributes);
    const bool failed =
        cudaFuncSetAttribute(cluster_kernel<kHyper>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(config.dynamicSmemBytes)) != cudaSuccess ||
        cudaFuncSetAttribute(cluster_kernel<kHyper>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
            cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&found, cluster_kernel<kHyper>, &config) != cudaSuccess;
    if (failed) cudaGetLastError();  // the device's answer is no
    known[device] = 1 + (failed ? 0 : found);
  }
  return known[device] - 1;
}

template <Hyper kHyper>
bool launched(const Call& call, ClusterArguments& a) {
  const int most = most_clusters<kHyper>();
  if (most == 0) return false;
  // As few turns as there can be, all alike; half a tile is enough for a cluster of its own.
  const int clusters = min(most, ceil_div(a.mix.tokens, kTokens / 2));
  const int turns = ceil_div(a.mix.tokens, kTokens * clusters);
  a.rows = ceil_div(a.mix.tokens, turns * clusters);
  a.tiles = ceil_div(a.mix.tokens, a.rows);
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = configuration(attributes);
  config.gridDim = dim3(kCluster * min(clusters, a.tiles));
  config.stream = call.stream;
  const cudaError_t code = cudaLaunchKernelEx(&config, cluster_kernel<kHyper>, a);
  if (code != cudaSuccess) {
    cudaGetLastError();  // the error is reported here, not by whoever launches next
    throw LaunchFailed(call.op, code);
  }
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
