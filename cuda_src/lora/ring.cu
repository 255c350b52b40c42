// Segmented LoRA delta of batches that read many weights, in one node: y[row] += scale · (x Aᵀ) Bᵀ,
// a cluster of CTAs an item (items.cuh). Built for bandwidth: persistent CTAs, several on an SM,
// each with a ring of shared-memory stages that one warp fills with bulk copies and four warps
// consume.
//
// In: x, tile records, slot entries. Out: y of the tiles' rows; no other byte of y is written.
//
// A stage holds 8 or 16 KB of weights and the rows that go with them: chunks of packed A with that
// part of the tile's x rows, then blocks of B's columns with that part of the tile's y rows. An
// item's first stage also carries its header, so consumers read no list. CTA c of C takes the c-th
// share of the K ranges; its sum of h goes into the shared memory of all C CTAs; each adds them as
// the top of the K tree (k_order.cuh) and expands its own columns.
//
// Operands that bulk copies cannot take (alignment, row-major A) bypass the ring: the header comes
// alone, and the consumers fetch them themselves, into the same places of the same products.
//
// Shared memory between CTAs: as in cluster.cu, the buffers for incoming sums alternate.
#include "lora/ring_consumer.cuh"
#include "lora/ring_producer.cuh"

template <typename T, int MT, int NT>
__global__ void __launch_bounds__(kThreads, RingShape<MT, NT>::kBlocksPerSm)
    lora_ring(const __grid_constant__ DeltaArgs args) {
#if __CUDA_ARCH__ >= 900
  using Shape = RingShape<MT, NT>;
  constexpr int kTokens = Shape::kTokens;
  extern __shared__ __align__(128) u8 dynamic[];
  __shared__ __align__(8) u64 barriers[2 * kMaxStages + 2];
  // Behind the stages: headers, lists ahead, the chains' sums of two ranges, the incoming sums of
  // two items.
  u8* const behind = dynamic + args.stages * Shape::kStageBytes;
  const RingShared<Shape> shared{
      shared_address(dynamic),
      args.stages,
      shared_address(barriers),
      shared_address(barriers + kMaxStages),
      shared_address(barriers + 2 * kMaxStages),
      reinterpret_cast<Header<kTokens>*>(behind),
      reinterpret_cast<ListsAhead<kTokens>*>(behind + args.stages * sizeof(Header<kTokens>))};
  float* const chain_sums = reinterpret_cast<float*>(shared.lists + 1);
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 size = static_cast<i32>(cluster_size()), rank_in = static_cast<i32>(cluster_rank());
  if (threadIdx.x == 0) {
    for (int s = 0; s < kMaxStages; ++s) {
      mbarrier_init(shared.full + 8 * s, 1);
      mbarrier_init(shared.empty + 8 * s, kConsumers);
    }
    mbarrier_init(shared.pushed, 1);
    mbarrier_init(shared.pushed + 8, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_arrive_relaxed();
  const bool early = args.plan_settled && warp == kConsumers;
  if (!early) {
    wait_for_predecessor();
    release_successor();
  }
  const KOrder order(args.in_features);
  if (warp == kConsumers) {
    Producer<Shape> producer{args, shared,           order, size,       rank_in,
                             lane, item_count(args), early, RingPlace()};
    producer.run();
  } else {
    cluster_wait();  // the other CTAs' barriers are initialised
    Consumer<T, MT, NT> consumer{
        args,        shared,  order, chain_sums, chain_sums + 2 * args.chain_floats,
        size,        rank_in, warp,  lane >> 2,  lane & 3,
        RingPlace(), 0};
    consumer.run();
  }
#endif
}
