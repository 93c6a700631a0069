// silu(x · gateᵀ) · (x · upᵀ) in bf16 on Hopper: two products and the activation in one kernel.
//
//   x       [tokens, inner]
//   weight  [2 · columns, inner], gate before up
//   out     [tokens, columns]
//
// The result is cut into tiles of TOKENS × COLUMNS. A block makes one tile after another, of as
// many rows of gate as of up, so that both factors of a value end in the same thread. Its first
// warp copies by TMA what two groups of four warps multiply by wgmma, through a ring of STAGES. Each
// group has half of the tokens.
//
// Blocks work in pairs, which share what they both need of one of the two matrices.
//
// Set by gated.py:
//   TOKENS, COLUMNS  of a tile
//   CHUNK            of the inner axis, that a stage holds: 128 bytes, a row of the swizzle
//   STAGES           places in the ring
//   THREADS          of a block
//   SHARE            1: the blocks of a pair have the same columns and share their weights
//                    2: they have the same tokens and share their part of x

#include "hopper.h"
#include "mma.h"  // by gated.py: mma, sums += x · weightᵀ, for a group's tokens and all columns

constexpr int ROWS = TOKENS / 2;     // of a group
constexpr int SUMS = COLUMNS / 2;    // of a thread, of gate and of up
constexpr int PAIR = 2;              // blocks
constexpr int X_BYTES = TOKENS * CHUNK * 2;
constexpr int WEIGHT_BYTES = COLUMNS * CHUNK * 2;  // of gate, and of up
constexpr int STAGE_BYTES = X_BYTES + 2 * WEIGHT_BYTES;
static_assert(ROWS == 64, "a wgmma has 64 rows");

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

// A box from memory into a stage: of this block, or at the same place of both blocks of a pair.
#define COPY(DIMENSIONS, PLACE, BOTH, MASK)                                                  \
  asm volatile("cp.async.bulk.tensor." DIMENSIONS                                            \
               ".shared::cluster.global.tile.mbarrier::complete_tx::bytes" BOTH              \
               ".L2::cache_hint [%0], [%1, " PLACE "], [%4], " MASK "%5;" ::"r"(to),         \
               "l"(map), "r"(k), "r"(row), "r"(barrier), "l"(policy), "h"((unsigned short)3) \
               : "memory")
#define TO_ONE(DIMENSIONS, PLACE) COPY(DIMENSIONS, PLACE, "", "")
#define TO_BOTH(DIMENSIONS, PLACE) COPY(DIMENSIONS, PLACE, ".multicast::cluster", "%6, ")

__device__ __forceinline__ void copy_x(u32 to, const Map* map, int k, int row, u32 barrier) {
  const u64 policy = 0x14F0000000000000ull;  // evicted last: every column of tiles reads it
  if (SHARE == 2)
    TO_BOTH("2d", "{%2, %3}");
  else
    TO_ONE("2d", "{%2, %3}");
}

__device__ __forceinline__ void copy_weight(u32 to, const Map* map, int k, int at, u32 barrier) {
  const u64 policy = 0x12F0000000000000ull;  // evicted first: read once
  const int row = at / 16;  // the last axis of the map counts rows by sixteens
  if (SHARE == 1)
    TO_BOTH("5d", "{%2, 0, 0, 0, %3}");
  else
    TO_ONE("5d", "{%2, 0, 0, 0, %3}");
}

// -- what is shared by those that copy and those that multiply ------------------------------------

struct Ring {
  u32 stages, barriers;  // in shared memory

  __device__ u32 x(int stage) const { return stages + stage * STAGE_BYTES; }
  __device__ u32 gate(int stage) const { return x(stage) + X_BYTES; }
  __device__ u32 up(int stage) const { return gate(stage) + WEIGHT_BYTES; }
  __device__ u32 full(int stage) const { return barriers + 8 * stage; }
  __device__ u32 empty(int stage) const { return barriers + 8 * (STAGES + stage); }

  // A stage is full when its bytes have come, and empty when both groups of both blocks are done
  // with it: each block writes into the other's memory.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < STAGES; stage++) {
      init(full(stage), 1);
      init(empty(stage), 2 * PAIR);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void release(int stage) const {  // by all threads of a group
    const int thread = threadIdx.x % 128;
    if (thread >= PAIR) return;
    arrive_in(thread, empty(stage));
  }
};

// The tiles of this block. A unit is the two of a pair. Units of the same
// columns follow one another, so that the weights are read from memory once.
struct Units {
  int rank, deep, count, first, stride;

  __device__ __forceinline__ Units(int tokens, int columns) {
    const int token_tiles = (tokens + TOKENS - 1) / TOKENS;
    const int column_tiles = (columns + COLUMNS - 1) / COLUMNS;
    rank = rank_in_pair();
    deep = SHARE == 1 ? token_tiles / 2 : token_tiles;  // of the same columns
    count = deep * (SHARE == 2 ? column_tiles / 2 : column_tiles);
    first = blockIdx.x / PAIR;
    stride = gridDim.x / PAIR;
  }
  __device__ int token(int unit) const {
    return TOKENS * (SHARE == 1 ? unit % deep * 2 + rank : unit % deep);
  }
  __device__ int column(int unit) const {
    return COLUMNS * (SHARE == 2 ? unit / deep * 2 + rank : unit / deep);
  }
};

// -- those that copy ------------------------------------------------------------------------------

struct Copies {
  const Map *x_map, *weight_map;
  int rank, columns;

  // What a pair shares, either block fetches half of, for both.
  __device__ __forceinline__ void x(const Ring& ring, int stage, int chunk, int token) const {
    const int half = SHARE == 2 ? rank : 0;
    const u32 to = ring.x(stage) + half * (X_BYTES / 2);
    copy_x(to, x_map, chunk * CHUNK, token + half * (TOKENS / 2), ring.full(stage));
  }
  __device__ __forceinline__ void weights(const Ring& ring, int stage, int chunk, int at) const {
    const int k = chunk * CHUNK;
    if (SHARE == 1) {
      const u32 to = ring.gate(stage) + rank * WEIGHT_BYTES;
      copy_weight(to, weight_map, k, at + rank * columns, ring.full(stage));
    } else {
      copy_weight(ring.gate(stage), weight_map, k, at, ring.full(stage));
      copy_weight(ring.up(stage), weight_map, k, at + columns, ring.full(stage));
    }
  }
};

// By one thread. There are at least STAGES chunks, and every block has a unit.
__device__ __forceinline__ void copy_all(
    const Ring& ring, const Units& units, const Copies& copies, int chunks) {
  int unit = units.first;
  // The kernel before this one makes x, and has nothing to do with the weights: they are on their
  // way while it comes to its end.
  for (int stage = 0; stage < STAGES; stage++) {
    expect(ring.full(stage), STAGE_BYTES);
    copies.weights(ring, stage, stage, units.column(unit));
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int stage = 0; stage < STAGES; stage++) copies.x(ring, stage, stage, units.token(unit));

  int at = STAGES, chunk = STAGES;  // of all chunks, and of this unit
  for (; unit < units.count; unit += units.stride) {
    const int token = units.token(unit), column = units.column(unit);
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
    float (&gate)[SUMS], float (&up)[SUMS], const Ring& ring, int group, int chunks, int& at) {
  for (int chunk = 0; chunk < chunks; chunk++, at++) {
    const int stage = at % STAGES;
    const u64 x = described(ring.x(stage) + group * ROWS * CHUNK * 2);
    const u64 gate_rows = described(ring.gate(stage));
    const u64 up_rows = described(ring.up(stage));
    await(ring.full(stage), at / STAGES & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) {  // 32 bytes a step; the first begins from zero
      mma(gate, x + 2 * k, gate_rows + 2 * k, chunk + k);
      mma(up, x + 2 * k, up_rows + 2 * k, chunk + k);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // for the chunk before
    if (chunk > 0) ring.release((at - 1) % STAGES);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  ring.release((at - 1) % STAGES);
#pragma unroll
  for (int i = 0; i < SUMS; i++) {  // not to be read before this point
    asm volatile("" : "+f"(gate[i])::"memory");
    asm volatile("" : "+f"(up[i])::"memory");
  }
}

// wgmma gives a thread two columns of every eight, for a token and for the eighth after it. The
// tensor map turns rows of the weight so that those of sixteen are four that lie together.
__device__ __forceinline__ void store(const float (&gate)[SUMS], const float (&up)[SUMS], bf16* out,
                                      int tokens, int columns, int token, int column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int high = token + warp * 16 + lane / 4, low = high + 8;
#pragma unroll
  for (int block = 0; block < COLUMNS / 8; block += 2) {
    u32 top[2], bottom[2];
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      const int i = 4 * (block + pair);
      top[pair] = bf16_pair(active(gate[i], up[i]), active(gate[i + 1], up[i + 1]));
      bottom[pair] = bf16_pair(active(gate[i + 2], up[i + 2]), active(gate[i + 3], up[i + 3]));
    }
    const int at = column + 8 * block + 4 * (lane % 4);
    bf16* to = out + (long long)high * columns + at;
    bf16* below = out + (long long)low * columns + at;
    if (at < columns && high < tokens) *(uint2*)to = make_uint2(top[0], top[1]);
    if (at < columns && low < tokens) *(uint2*)below = make_uint2(bottom[0], bottom[1]);
  }
}

__device__ __forceinline__ void multiply_all(
    const Ring& ring, const Units& units, bf16* out, int tokens, int columns, int chunks) {
  const int group = threadIdx.x / 128 - 1;
  float gate[SUMS], up[SUMS];
  int at = 0;
  for (int unit = units.first; unit < units.count; unit += units.stride) {
    multiply(gate, up, ring, group, chunks, at);
    const int token = units.token(unit) + group * ROWS;
    store(gate, up, out, tokens, columns, token, units.column(unit));
  }
}

extern "C" __global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(THREADS, 1)
    gated(const __grid_constant__ Map x_map, const __grid_constant__ Map weight_map, bf16* out,
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      copy_all(ring, units, Copies{&x_map, &weight_map, units.rank, columns}, chunks);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_all(ring, units, out, tokens, columns, chunks);
  }
  __syncwarp();
  part();
}
