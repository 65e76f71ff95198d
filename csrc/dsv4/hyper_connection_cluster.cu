// The streams mixed, multiplied, collapsed and normed in one launch: each is read once and written once.
//
// Floor at hidden size 4096: residual and y read, mixed streams and layer_in written: 80 KB a token. A cluster of
// sixteen blocks takes sixteen tokens at a time; a block has 256 columns of all their streams in shared memory from
// their arrival until layer_in leaves, and its part of fn in registers for all of its tokens, as two bf16 terms. What
// the weights of a token need of all columns goes through the cluster: a block sends, for each token, its part of the
// 24 sums and of the products of the streams with each other to the block that owns the token (the one with its
// number); that one sends back the four weights of the sum and the factor of its norm, which follows from the products:
// |sum_i w_i R_i|^2 = sum_ij w_i w_j R_i.R_j.
//
// Sixteen warps load, mix, collapse and store, a warp sixteen columns; two more own tokens. The sums of a tile travel
// while the next ones are mixed.
#include "hyper_connection_owner.cuh"
#include "launch.cuh"

namespace dsv4 {
namespace {

constexpr int kThreads = 32 * (kWarps + kOwners);

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A warp's sixteen columns: what it loads, mixes, collapses and stores is its own, but for post and comb of the token
// with its number.
template <Hyper kHyper>
struct Columns {
  const ClusterArguments& a;
  Memory& m;
  const Share& share;
  int warp, lane;

  static constexpr bool kMixing = kHyper == Hyper::post_pre;
  static constexpr int64_t kLayerBytes = kHidden * 2;

  // The first byte of this lane's four columns in the block's 512.
  __device__ int at() const { return warp * 32 + lane % 4 * 8; }
  __device__ int row() const { return lane / 4; }  // and eight more

  // A row of hidden size of this block.
  template <class T>
  __device__ uint8_t* place(T* of, int row) const {
    return const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(of)) + row * kLayerBytes + share.rank * kPieceBytes;
  }

  __device__ void load(int i) {
    if (i < share.tiles) {
      const int tile = share.tile(i), first = a.first(tile), count = a.count(tile);
      Slot& to = m.slot[i % kSlots];
      const int token = lane / 2, byte = warp * 32 + lane % 2 * 16;
      if (token < count) {
        const uint8_t* from = place(a.mix.residual, (first + token) * kStreams) + byte;
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          copy_in(to.streams[token] + j * kStreamStep + byte, from + j * kLayerBytes);
        }
      }
      if constexpr (kMixing) {
        if (warp < count) {
          if (lane < kStreams) copy_in(&to.comb[warp][lane], a.mix.comb + (first + warp) * kStreams + lane);
          if (lane == kStreams) copy_in(&to.post[warp], a.mix.post + first + warp);
        }
        if (lane < count) fetch_ahead(place(a.mix.y, first + lane) + warp * 32);
      }
    }
    end_of_group();
  }
  __device__ void load_layer(int i, uint2 (&y)[2]) {
    if (!kMixing || i >= share.tiles) return;
    const int tile = share.tile(i), count = a.count(tile) - row();
    const uint8_t* from = place(a.mix.y, a.first(tile) + row()) + at();
    if (count > 0) y[0] = *reinterpret_cast<const uint2*>(from);
    if (count > 8) y[1] = *reinterpret_cast<const uint2*>(from + 8 * kLayerBytes);
  }

  __device__ void mix_tile(int i, const Weights<kHyper>& weights, uint2 (&y)[2]) {
    Slot& slot = m.slot[i % kSlots];
    if constexpr (kMixing) {
      const int tile = share.tile(i), count = a.count(tile) - row();
      uint8_t* mixed = place(a.mix.mixed, (a.first(tile) + row()) * kStreams) + at();
      mix(slot, row(), at(), y[0], count > 0 ? mixed : nullptr);
      mix(slot, row() + 8, at(), y[1], count > 8 ? mixed + 8 * kStreams * kLayerBytes : nullptr);
      load_layer(i + 1, y);
      __syncwarp();
    }
    Sums sums{};
    multiply_weights(slot, weights, warp * 32, lane, sums);
    if (i > 0) wait(m.part_empty, (i - 1) & 1);
    keep_sums(m.part[warp], lane, sums);
    multiply_streams(slot, m.part[warp], warp * 32, lane);
  }

  // A warp sends what the block has of the token with the warp's number.
  __device__ void send_sums(int i) {
    wait(m.part_full, i & 1);
    float sum, more;
    add_up(m.part[0] + warp * kPartStep, kPartOfWarp, lane, sum, more);
    __syncwarp();
    if (lane == 0) arrive(m.part_empty);
    const int travelling = i % kTravelling;
    const uint32_t to = place_at(m.received[travelling][share.rank], warp);
    const uint32_t barrier = place_at(&m.sums[travelling], warp);
    send(to + lane * 4, sum, barrier);
    if (lane < 4) send(to + (32 + lane) * 4, more, barrier);
  }

  __device__ Four norm_weight() const {
    const int column = share.rank * kColumns + at() / 2;
    const void* from = a.collapse.norm_weight;
    if (a.collapse.weight_is_bf16) {
      return unpack(*reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + column));
    }
    const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + column);
    return {v.x, v.y, v.z, v.w};
  }

  __device__ void collapse_tile(int i) {
    Slot& slot = m.slot[i % kSlots];
    const int travelling = i % kTravelling, tile = share.tile(i), count = a.count(tile) - row();
    const Four norm = norm_weight();
    uint8_t* to = place(a.collapse.layer_in, a.first(tile) + row()) + at();
    wait(m.answers[travelling], i / kTravelling & 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row() + half * 8;
      const float4 w = m.weights[travelling][token];
      const float by = m.factor[travelling][token];
      Four total{};
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const Four own = unpack(eight_bytes(slot.streams[token] + j * kStreamStep + at()));
        const float weight = j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w;
#pragma unroll
        for (int v = 0; v < 4; ++v) total.x[v] = fmaf(weight, own.x[v], total.x[v]);
      }
      Four rounded = unpack(pack(total));
#pragma unroll
      for (int v = 0; v < 4; ++v) rounded.x[v] = rounded.x[v] * by * norm.x[v];
      if (count > half * 8) eight_bytes(to + half * 8 * kLayerBytes) = pack(rounded);
    }
    __syncwarp();
  }

  __device__ void work() {
    for (int i = 0; i < kSlots - kLag; ++i) load(i);
    uint2 y[2] = {};
    load_layer(0, y);
    const int column = share.rank * kColumns + warp * 16 + lane % 4 * 2;
    const Weights<kHyper> weights(a.mix.fn, column, lane / 4);
    wait_for_groups<kSlots - kLag - 1>();
    asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory");
    wait_for_cluster();
    for (int i = 0; i < share.tiles + kLag; ++i) {
      if (i < share.tiles) {
        mix_tile(i, weights, y);
        wait_for_groups<kSlots - kLag - 2>();  // the next tile is there, and everybody will know
        __syncwarp();
        if (lane == 0) arrive(m.part_full);
      }
      if (i >= kLag) collapse_tile(i - kLag);
      load(i + kSlots - kLag);
      if (i < share.tiles) send_sums(i);
    }
  }
};

__device__ void make_barriers(Memory& m) {
  make_barrier(m.part_full, kWarps);
  make_barrier(m.part_empty, kWarps);
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
  auto& m = *reinterpret_cast<Memory*>(bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) make_barriers(m);
  __syncthreads();
  arrive_at_cluster();
  const Share share(a);
  if (warp < kWarps) {
    Columns<kHyper>{a, m, share, warp, lane}.work();
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
