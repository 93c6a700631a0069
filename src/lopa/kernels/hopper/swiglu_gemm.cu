// x · weightᵀ in bf16 for many tokens on Hopper; if GATED, silu(x · gateᵀ) · (x · upᵀ).
//
//   x       [tokens, inner]
//   weight  [rows, inner]; if GATED, gate before up
//   out     [tokens, columns], columns = rows, or half of them
//
// The product is split into tiles of TOKENS by 64 · WORKERS rows of the weight. A block computes one
// tile after another. Its first thread, the producer, copies by TMA into a ring of STAGES what the
// consumers, WORKERS warpgroups, multiply by wgmma. A warpgroup has 64 rows. The tensor map permutes
// every 16 of them so that a thread gets two adjacent columns of a token, or gate and up of one value
// (`arrange_rows` in common.py).
//
// The tokens are wgmma's right operand, which passes through the tensor cores one token after another.
// Where neighbours are alike fewer bits change, and with so many tokens power is what limits a product
// (measurements/kernels.md).
//
// Blocks work in pairs (clusters of two), on the same rows for two tiles of tokens, and share the
// weights.
//
// Set by swiglu_gemm.py:
//   TOKENS   of a tile
//   PARTS    of the tokens of a tile, one wgmma each
//   WORKERS  warpgroups that multiply
//   GATED    0 or 1
//   CHUNK    of the inner axis, per stage: 128 bytes, a row of the swizzle
//   STAGES   of the ring
//   THREADS  of a block
//   PRODUCER_REGISTERS, CONSUMER_REGISTERS  per thread

#include "common.h"
#include "mma.h"  // by swiglu_gemm.py: mma, sums += weight · xᵀ, for 64 rows and a part of the tokens

constexpr int ROWS = 64 * WORKERS;        // of the weight
constexpr int WIDTH = GATED ? 32 : 64;    // columns of the result, per warpgroup
constexpr int COLUMNS = WORKERS * WIDTH;  // of a tile
constexpr int SUMS = TOKENS / PARTS / 2;  // of a thread, for a part
constexpr int PAIR = 2;                   // blocks
constexpr int WEIGHT_BYTES = ROWS * CHUNK * 2, X_BYTES = TOKENS * CHUNK * 2;
constexpr int STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
static_assert(TOKENS % (8 * PARTS) == 0 && THREADS == 128 * (WORKERS + 1), "as in swiglu_gemm.py");

// -- pairs ----------------------------------------------------------------------------------------

__device__ __forceinline__ u32 rank_in_pair() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Waits for all threads of both blocks.
__device__ __forceinline__ void sync_pair() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same with release semantics, before a block exits: the other may still arrive at its barriers.
__device__ __forceinline__ void sync_pair_release() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// At the same barrier of a block of the pair. Not .release.cluster: the stage was only read, by a
// wgmma that has ended. It would compile to a memory barrier of the whole device in the inner loop,
// which costs a fifth of the speed.
__device__ __forceinline__ void arrive_in(u32 block, u32 barrier) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// -- copies ---------------------------------------------------------------------------------------

// A box from memory into a stage of this block.
__device__ __forceinline__ void copy_x(u32 to, const Map* map, int k, int token, u32 barrier) {
  const u64 policy = 0x14F0000000000000ull;  // evict last: every column of tiles reads it
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(k), "r"(token), "r"(barrier), "l"(policy)
      : "memory");
}
// The same, to the same address in both blocks of a pair. The map counts groups of 16 rows.
__device__ __forceinline__ void copy_weight(u32 to, const Map* map, int k, int sixteen, u32 barrier) {
  const u64 policy = 0x12F0000000000000ull;  // evict first: read once
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, 0, 0, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(map), "r"(k), "r"(sixteen), "r"(barrier), "h"((unsigned short)3), "l"(policy)
      : "memory");
}

// -- shared by producer and consumers -------------------------------------------------------------

struct Ring {
  u32 stages, barriers;  // in shared memory

  __device__ u32 weight(int stage) const { return stages + stage * STAGE_BYTES; }
  __device__ u32 x(int stage) const { return weight(stage) + WEIGHT_BYTES; }
  __device__ u32 full(int stage) const { return barriers + 8 * stage; }
  __device__ u32 empty(int stage) const { return barriers + 8 * (STAGES + stage); }

  // A stage is full when its bytes have arrived, and empty when all warpgroups of both blocks have
  // read it: each block writes into the other's memory.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < STAGES; stage++) {
      init(full(stage), 1);
      init(empty(stage), WORKERS * PAIR);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void release(int stage) const {  // by all threads of a warpgroup
    const int thread = threadIdx.x % 128;
    if (thread >= PAIR) return;
    arrive_in(thread, empty(stage));
  }
};

// The tiles of this block. A unit is the two tiles of a pair. Units with the same columns follow one
// another, so that the weights are read from memory once.
struct Units {
  int rank, deep, count, first, stride;

  __device__ __forceinline__ Units(int tokens, int columns) {
    rank = rank_in_pair();
    deep = (tokens + PAIR * TOKENS - 1) / (PAIR * TOKENS);  // of the same columns
    count = deep * ((columns + COLUMNS - 1) / COLUMNS);
    first = blockIdx.x / PAIR;
    stride = gridDim.x / PAIR;
  }
  __device__ int token(int unit) const { return TOKENS * (unit % deep * PAIR + rank); }
  __device__ int column(int unit) const { return COLUMNS * (unit / deep); }
};

// -- producer -------------------------------------------------------------------------------------

struct Copies {
  const Map *x_map, *weight_map;
  int rank;

  __device__ __forceinline__ void x(const Ring& ring, int stage, int chunk, int token) const {
    copy_x(ring.x(stage), x_map, chunk * CHUNK, token, ring.full(stage));
  }
  // Each block of a pair fetches half of them, for both.
  __device__ __forceinline__ void weights(const Ring& ring, int stage, int chunk, int column) const {
    const u32 to = ring.weight(stage) + rank * (WEIGHT_BYTES / PAIR);
    const int sixteen = (column + rank * (COLUMNS / PAIR)) / (WIDTH / 4);
    copy_weight(to, weight_map, chunk * CHUNK, sixteen, ring.full(stage));
  }
};

// By one thread, which has few registers: loops are not unrolled. There are at least STAGES chunks, and
// every block has a unit.
__device__ __forceinline__ void copy_all(
    const Ring& ring, const Units& units, const Copies& copies, int chunks) {
  int unit = units.first;
  // The kernel in front of this one computes x and does not touch the weights: they are fetched
  // while it ends.
#pragma unroll 1
  for (int stage = 0; stage < STAGES; stage++) {
    expect(ring.full(stage), STAGE_BYTES);
    copies.weights(ring, stage, stage, units.column(unit));
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
  for (int stage = 0; stage < STAGES; stage++) copies.x(ring, stage, stage, units.token(unit));

  int at = STAGES, chunk = STAGES;  // counts all chunks, and those of this unit
  for (; unit < units.count; unit += units.stride) {
    const int token = units.token(unit), column = units.column(unit);
#pragma unroll 1
    for (; chunk < chunks; chunk++, at++) {
      const int stage = at % STAGES;
      await(ring.empty(stage), at / STAGES & 1 ^ 1);
      expect(ring.full(stage), STAGE_BYTES);
      copies.x(ring, stage, chunk, token);
      copies.weights(ring, stage, chunk, column);
    }
    chunk = 0;
  }
}

// -- consumers ------------------------------------------------------------------------------------

// A tile's sums; `at` counts the chunks of all tiles.
__device__ __forceinline__ void multiply(
    float (&sums)[PARTS][SUMS], const Ring& ring, int group, int chunks, int& at) {
  for (int chunk = 0; chunk < chunks; chunk++, at++) {
    const int stage = at % STAGES;
    const u64 weight = described(ring.weight(stage) + group * 64 * CHUNK * 2);
    const u64 x = described(ring.x(stage));
    await(ring.full(stage), at / STAGES & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) {  // 32 bytes per step; the very first starts at zero
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        mma(sums[part], weight + 2 * k, x + part * (X_BYTES / PARTS / 16) + 2 * k, chunk + k);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the chunk before
    if (chunk > 0) ring.release((at - 1) % STAGES);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  ring.release((at - 1) % STAGES);
#pragma unroll
  for (int i = 0; i < PARTS * SUMS; i++)
    asm volatile("" : "+f"(sums[i / SUMS][i % SUMS])::"memory");  // not to be read before
}

struct Result {
  bf16* out;
  int tokens, columns;

  __device__ __forceinline__ void put(int token, int column, u32 two) const {
    if (token < tokens && column < columns) *(u32*)(out + (long long)token * columns + column) = two;
  }
  // wgmma gives a thread two tokens of every eight, for a row and the eighth row after it: the next
  // column, or the same column of up.
  __device__ __forceinline__ void store(const float (&sums)[PARTS][SUMS], int token, int column) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, high = lane / 4, low = lane % 4;
#pragma unroll
    for (int eight = 0; eight < TOKENS / 8; eight++, token += 8) {
      const float* v = &sums[eight / (SUMS / 4)][4 * (eight % (SUMS / 4))];
      if (GATED) {  // transposed, it is two columns of one token
        u32 two = bf16_pair(active(v[0], v[2]), active(v[1], v[3]));
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(two));
        put(token + high, column + 8 * warp + 2 * low, two);
      } else {
        put(token + 2 * low, column + 16 * warp + 2 * high, bf16_pair(v[0], v[2]));
        put(token + 2 * low + 1, column + 16 * warp + 2 * high, bf16_pair(v[1], v[3]));
      }
    }
  }
};

__device__ __forceinline__ void multiply_all(
    const Ring& ring, const Units& units, const Result& result, int chunks) {
  const int group = threadIdx.x / 128 - 1;
  float sums[PARTS][SUMS];
  int at = 0;
  for (int unit = units.first; unit < units.count; unit += units.stride) {
    multiply(sums, ring, group, chunks, at);
    result.store(sums, units.token(unit), units.column(unit) + WIDTH * group);
  }
}

extern "C" __global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(THREADS, 1)
    swiglu_gemm(const __grid_constant__ Map x_map, const __grid_constant__ Map weight_map, bf16* out,
                int tokens, int columns, int inner) {
  extern __shared__ char memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const Ring ring{(shared_at(memory) + 1023) & ~1023u, shared_at(barriers)};  // aligned for the swizzle
  const Units units(tokens, columns);
  const int chunks = inner / CHUNK;
  if (threadIdx.x == 0) ring.init_barriers();
  sync_pair();
  // A kernel behind this one that is launched the same way may start on free SMs; it waits itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // The sums of a consumer do not fit its share of the registers, 65536 / THREADS: it gets those that
  // the producer does not need.
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) {
      copy_all(ring, units, Copies{&x_map, &weight_map, units.rank}, chunks);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    multiply_all(ring, units, Result{out, tokens, columns}, chunks);
  }
  __syncwarp();
  sync_pair_release();
}
