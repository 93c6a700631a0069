// x · weightᵀ in bf16 for many tokens on Hopper; if GATED, silu(x · gateᵀ) · (x · upᵀ).
//
//   x       [tokens, inner]
//   weight  [rows, inner]; if GATED, gate before up
//   out     [tokens, columns], columns = rows, or half of them
//
// The product is cut into tiles of TOKENS by 64 · WORKERS rows of the weight. A block makes one tile
// after another. Its first warp copies by TMA what the others, WORKERS groups of four warps, multiply
// by wgmma, through a ring of STAGES. A group has 64 rows: the tensor map turns every sixteen of them
// so that a thread gets two neighbours of the same token, or both factors of one value (`arranged` in
// hopper.py).
//
// The tokens are wgmma's right factor, which goes through the tensor cores one token after another:
// where neighbours are alike, fewer bits change, and with so many tokens a product takes as long as
// its energy takes (measurements/kernels.md).
//
// Blocks work in pairs, on the same rows for two tiles of tokens, so that they share the weights.
//
// Set by paired.py:
//   TOKENS   of a tile
//   PARTS    of them, each for a wgmma of its own
//   WORKERS  groups of four warps
//   GATED    0 or 1
//   CHUNK    of the inner axis, that a stage holds: 128 bytes, a row of the swizzle
//   STAGES   places in the ring
//   THREADS  of a block
//   COPYING, MULTIPLYING  registers of a thread that does that

#include "common.h"
#include "mma.h"  // by paired.py: mma, sums += weight · xᵀ, for a group's rows and a part of the tokens

constexpr int ROWS = 64 * WORKERS;        // of the weight
constexpr int WIDTH = GATED ? 32 : 64;    // columns of the result that a group makes
constexpr int COLUMNS = WORKERS * WIDTH;  // of a tile
constexpr int SUMS = TOKENS / PARTS / 2;  // of a thread, for a part
constexpr int PAIR = 2;                   // blocks
constexpr int WEIGHT_BYTES = ROWS * CHUNK * 2, X_BYTES = TOKENS * CHUNK * 2;
constexpr int STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
static_assert(TOKENS % (8 * PARTS) == 0 && THREADS == 128 * (WORKERS + 1), "as paired.py has it");

// -- pairs ----------------------------------------------------------------------------------------

__device__ __forceinline__ u32 rank_in_pair() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Until all threads of both blocks are there.
__device__ __forceinline__ void meet() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same, and all they did before is done: one may yet be arriving at a barrier of the other.
__device__ __forceinline__ void part() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// At the same barrier of a block of the pair. Not .release.cluster: what was read was read by
// wgmma, which is over, and nothing was written. It would be compiled to a memory barrier of the
// whole device, in the inner loop, and cost a fifth of the speed.
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
  const u64 policy = 0x14F0000000000000ull;  // evicted last: every column of tiles reads it
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(k), "r"(token), "r"(barrier), "l"(policy)
      : "memory");
}
// The same, at the same place of both blocks of a pair. The map counts sixteens of rows.
__device__ __forceinline__ void copy_weight(u32 to, const Map* map, int k, int sixteen, u32 barrier) {
  const u64 policy = 0x12F0000000000000ull;  // evicted first: read once
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, 0, 0, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(map), "r"(k), "r"(sixteen), "r"(barrier), "h"((unsigned short)3), "l"(policy)
      : "memory");
}

// -- what is shared by those that copy and those that multiply ------------------------------------

struct Ring {
  u32 stages, barriers;  // in shared memory

  __device__ u32 weight(int stage) const { return stages + stage * STAGE_BYTES; }
  __device__ u32 x(int stage) const { return weight(stage) + WEIGHT_BYTES; }
  __device__ u32 full(int stage) const { return barriers + 8 * stage; }
  __device__ u32 empty(int stage) const { return barriers + 8 * (STAGES + stage); }

  // A stage is full when its bytes have come, and empty when all groups of both blocks are done
  // with it: each block writes into the other's memory.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < STAGES; stage++) {
      init(full(stage), 1);
      init(empty(stage), WORKERS * PAIR);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void release(int stage) const {  // by all threads of a group
    const int thread = threadIdx.x % 128;
    if (thread >= PAIR) return;
    arrive_in(thread, empty(stage));
  }
};

// The tiles of this block. A unit is the two of a pair. Units of the same columns follow one another,
// so that the weights are read from memory once.
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

// -- those that copy ------------------------------------------------------------------------------

struct Copies {
  const Map *x_map, *weight_map;
  int rank;

  __device__ __forceinline__ void x(const Ring& ring, int stage, int chunk, int token) const {
    copy_x(ring.x(stage), x_map, chunk * CHUNK, token, ring.full(stage));
  }
  // Either block of a pair fetches half of them, for both.
  __device__ __forceinline__ void weights(const Ring& ring, int stage, int chunk, int column) const {
    const u32 to = ring.weight(stage) + rank * (WEIGHT_BYTES / PAIR);
    const int sixteen = (column + rank * (COLUMNS / PAIR)) / (WIDTH / 4);
    copy_weight(to, weight_map, chunk * CHUNK, sixteen, ring.full(stage));
  }
};

// By one thread, of few registers: loops stay loops. There are at least STAGES chunks, and every block
// has a unit.
__device__ __forceinline__ void copy_all(
    const Ring& ring, const Units& units, const Copies& copies, int chunks) {
  int unit = units.first;
  // The kernel before this one makes x, and has nothing to do with the weights: they are on their
  // way while it comes to its end.
#pragma unroll 1
  for (int stage = 0; stage < STAGES; stage++) {
    expect(ring.full(stage), STAGE_BYTES);
    copies.weights(ring, stage, stage, units.column(unit));
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
  for (int stage = 0; stage < STAGES; stage++) copies.x(ring, stage, stage, units.token(unit));

  int at = STAGES, chunk = STAGES;  // of all chunks, and of this unit
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

// -- those that multiply --------------------------------------------------------------------------

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
    for (int k = 0; k < CHUNK / 16; k++) {  // 32 bytes a step; the first begins from zero
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        mma(sums[part], weight + 2 * k, x + part * (X_BYTES / PARTS / 16) + 2 * k, chunk + k);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // for the chunk before
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
  // wgmma gives a thread two tokens of every eight, for a row and for the eighth after it: the next
  // column, or the same one of up.
  __device__ __forceinline__ void store(const float (&sums)[PARTS][SUMS], int token, int column) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, high = lane / 4, low = lane % 4;
#pragma unroll
    for (int eight = 0; eight < TOKENS / 8; eight++, token += 8) {
      const float* v = &sums[eight / (SUMS / 4)][4 * (eight % (SUMS / 4))];
      if (GATED) {  // turned, it is two columns of one token
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
    paired(const __grid_constant__ Map x_map, const __grid_constant__ Map weight_map, bf16* out,
          int tokens, int columns, int inner) {
  extern __shared__ char memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const Ring ring{(shared_at(memory) + 1023) & ~1023u, shared_at(barriers)};  // as the swizzle asks
  const Units units(tokens, columns);
  const int chunks = inner / CHUNK;
  if (threadIdx.x == 0) ring.init_barriers();
  meet();
  // A kernel that is launched as this one is may begin where blocks are done; it waits for the rest.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // The sums of a thread that multiplies do not fit in its share of the registers, 65536 / THREADS:
  // it gets those that a thread that copies has no use for.
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING));
    if (threadIdx.x == 0) {
      copy_all(ring, units, Copies{&x_map, &weight_map, units.rank}, chunks);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
    multiply_all(ring, units, Result{out, tokens, columns}, chunks);
  }
  __syncwarp();
  part();
}
