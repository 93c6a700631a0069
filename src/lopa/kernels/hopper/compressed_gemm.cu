// x · weightᵀ in bf16 for few tokens on Hopper, of weights that are packed without loss.
//
//   x       [tokens, inner], at most TOKENS of them
//   weight  [units, chunks, GROUPS, RECORD] bytes: see packed.py
//   out     [tokens, columns]
//
// So few tokens take as long as their weights take to be read. A group is sixteen rows of the weight,
// a unit GROUPS of them; a record is what a group has in a chunk of the inner axis. One thread of a
// block copies chunk after chunk by TMA into a ring of STAGES, of x and of a unit. Every other warp
// unpacks the records of one group, into the registers that wgmma takes its left factor from; the
// right one is x in shared memory. So a thread has the sums of two rows, for a quarter of the tokens.
//
// Set by packed.py:
//   TOKENS   that there is room for
//   GROUPS   of a unit
//   CHUNK    of the inner axis: 128 bytes of x, a row of the swizzle
//   STAGES   places in the ring
//   SPLIT    blocks that have a unit together, each a part of the inner axis, and add up their sums
//   GATED    1: a group is eight rows of gate and the same of up, and out is silu(gate) · up
//   THREADS  of a block
//   RECORD   bytes
//   COPYING, MULTIPLYING  registers of a thread that does that
//   PATIENCE how often a block looks whether the others of its unit are there

#include "common.h"
#include "mma.h"  // by packed.py: mma, sums += weight · xᵀ, for 64 rows and TOKENS

typedef unsigned char u8;

constexpr int WORKERS = (GROUPS + 3) / 4;  // of four warps, which make 64 rows by one wgmma
constexpr int STEPS = CHUNK / 16;          // of wgmma
constexpr int SUMS = TOKENS / 2;           // of a thread
constexpr int LOW_BYTES = 16 * CHUNK, HIGH_BYTES = LOW_BYTES / 2;  // of a record
constexpr int X_BYTES = TOKENS * CHUNK * 2, UNIT_BYTES = GROUPS * RECORD;  // of a stage
static_assert(THREADS == 128 * (WORKERS + 1) && STEPS == 4 && RECORD % 16 == 0, "as packed.py has it");

// -- copies ---------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_x(u32 to, const Map* map, int k, u32 barrier) {
  const u64 policy = 0x14F0000000000000ull;  // evicted last: all blocks read it
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, 0}], [%3], %4;" ::"r"(to),
      "l"(map), "r"(k), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_unit(u32 to, const u8* from, u32 barrier) {
  const u64 policy = 0x12F0000000000000ull;  // evicted first: read once
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(UNIT_BYTES), "r"(barrier), "l"(policy)
      : "memory");
}

struct Ring {
  u32 xs, units, barriers;  // in shared memory

  __device__ u32 x(int stage) const { return xs + stage * X_BYTES; }
  __device__ u32 record(int stage, int group) const {
    return units + stage * UNIT_BYTES + group * RECORD;
  }
  __device__ u32 full(int stage) const { return barriers + 8 * stage; }
  __device__ u32 empty(int stage) const { return barriers + 8 * (STAGES + stage); }

  // A stage is full when its bytes have come, and empty when all warps are done with it.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < STAGES; stage++) {
      init(full(stage), 1);
      init(empty(stage), 4 * WORKERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void release(int stage) const {  // by all threads of a warp
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty(stage)) : "memory");
  }
};

// The units of this block, and its part of the inner axis, in chunks.
struct Work {
  int first, stride, count;  // units
  int part, begin, chunks, all_chunks;

  __device__ __forceinline__ Work(int units, int inner) {
    first = blockIdx.x / SPLIT;
    stride = gridDim.x / SPLIT;
    count = units;
    part = blockIdx.x % SPLIT;
    all_chunks = inner / CHUNK;
    begin = all_chunks * part / SPLIT;
    chunks = all_chunks * (part + 1) / SPLIT - begin;
  }
};

// By one thread. A part has at least STAGES chunks, and every block a unit.
__device__ __forceinline__ void copy_all(
    const Ring& ring, const Work& work, const Map* x_map, const u8* weight) {
  const auto begin_x = [&](int stage, int chunk) {
    copy_x(ring.x(stage), x_map, (work.begin + chunk) * CHUNK, ring.full(stage));
  };
  const auto begin_unit = [&](int stage, int unit, int chunk) {
    const long long at = (long long)unit * work.all_chunks + work.begin + chunk;
    expect(ring.full(stage), X_BYTES + UNIT_BYTES);
    copy_unit(ring.record(stage, 0), weight + at * UNIT_BYTES, ring.full(stage));
  };
  // The kernel before this one makes x, and has nothing to do with the weights: they are on their
  // way while it comes to its end.
  for (int stage = 0; stage < STAGES; stage++) begin_unit(stage, work.first, stage);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int stage = 0; stage < STAGES; stage++) begin_x(stage, stage);

  int at = STAGES, chunk = STAGES;  // of all chunks, and of this unit
  for (int unit = work.first; unit < work.count; unit += work.stride) {
    for (; chunk < work.chunks; chunk++, at++) {
      const int stage = at % STAGES;
      await(ring.empty(stage), at / STAGES & 1 ^ 1);
      begin_unit(stage, unit, chunk);
      begin_x(stage, chunk);
    }
    chunk = 0;
  }
}

// -- products -------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at));
  return v;
}
__device__ __forceinline__ u32 load4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

// What a thread has of a record: 32 values, two to a register, in the order of wgmma. A value is its
// low byte and four bits: the sign, and by how much the upper seven bits of its exponent are above
// the record's base. All branches are the same for a warp, and few are taken.
__device__ __forceinline__ void unpack(u32 (&values)[STEPS][4], u32 record) {
  const int lane = threadIdx.x % 32;
  const u32 notes = record + LOW_BYTES + HIGH_BYTES;
  const uint4 low0 = load16(record + 16 * lane), low1 = load16(record + 512 + 16 * lane);
  const uint4 high = load16(record + LOW_BYTES + 16 * lane);
  const u32 note = load4(notes);  // the base, and how many values it does not reach
  const u32 base = __byte_perm(note, 0, 0x0000);
  const u32 lows[2 * STEPS] = {low0.x, low0.y, low0.z, low0.w, low1.x, low1.y, low1.z, low1.w};
  const u32 highs[STEPS] = {high.x, high.y, high.z, high.w};
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {  // the bits of the second four lie between the others
      const u32 bits = half ? __funnelshift_r(highs[step], highs[step], 4) : highs[step];
      const u32 upper = (bits & 0x87878787u) + base, lower = lows[2 * step + half];
      values[step][2 * half] = __byte_perm(lower, upper, 0x5140);
      values[step][2 * half + 1] = __byte_perm(lower, upper, 0x7362);
    }
  }
  for (u32 i = 1; i <= note >> 8; i++) {
    const u32 patch = load4(notes + 4 * i);  // the bits, which of two, which two, whose
    const u32 at = patch >> 24 == lane ? patch >> 17 & 15 : 16;
    const u32 selected = patch >> 16 & 1 ? 0x5410 : 0x3254;
#pragma unroll
    for (int j = 0; j < 4 * STEPS; j++) {
      u32& two = values[j / 4][j % 4];
      two = at == j ? __byte_perm(two, patch, selected) : two;
    }
  }
}

// A unit's sums; `at` counts the chunks of all units.
__device__ __forceinline__ void multiply(
    float (&sums)[SUMS], const Ring& ring, int group, int chunks, int& at) {
  u32 values[STEPS][4];
  for (int chunk = 0; chunk < chunks; chunk++, at++) {
    const int stage = at % STAGES;
    const u64 x = described(ring.x(stage));
    await(ring.full(stage), at / STAGES & 1);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");  // for the chunk before
    if (chunk > 0) ring.release((at - 1) % STAGES);
    unpack(values, ring.record(stage, group));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < STEPS; step++)  // 32 bytes of x; the first begins from zero
      mma(sums, values[step], x + 2 * step, chunk + step);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  ring.release((at - 1) % STAGES);
#pragma unroll
  for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");  // not read before
}

// -- results --------------------------------------------------------------------------------------

struct Result {
  bf16* out;
  int tokens, columns;

  __device__ __forceinline__ void put(int token, int column, float low, float high) const {
    if (token < tokens && column < columns)
      *(u32*)(out + (long long)token * columns + column) = bf16_pair(low, high);
  }
  // By a warp, of a group and eight tokens: a thread has two tokens of one row in x and y, and of
  // another in z and w: the next one, or the row of up whose gate is the first.
  __device__ __forceinline__ void store(float4 v, int group, int eight) const {
    const int lane = threadIdx.x % 32, row = lane / 4, token = 8 * eight + 2 * (lane % 4);
    if (!GATED) {
      put(token, 16 * group + 2 * row, v.x, v.z);
      put(token + 1, 16 * group + 2 * row, v.y, v.w);
      return;
    }
    // A thread has one column: of two neighbours either gives the other one of its tokens.
    const float first = active(v.x, v.z), second = active(v.y, v.w);
    const bool odd = row & 1;
    const float other = __shfl_xor_sync(~0u, odd ? first : second, 4);
    if (odd)
      put(token + 1, 8 * group + row - 1, other, second);
    else
      put(token, 8 * group + row, first, other);
  }
};

constexpr int EIGHTS = TOKENS / 8, PIECES = GROUPS * EIGHTS;  // of a unit; a float4 to each of a warp

__device__ __forceinline__ float4 piece_of(const float (&sums)[SUMS], int eight) {
  const float* v = &sums[4 * eight];
  return make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void workers_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(128 * WORKERS) : "memory");
}

// Which parts of a unit's totals this block is to store, a bit each, once its own sums are where the
// others find them; by one thread. As a rule its own one, when all blocks have arrived. But nothing
// says that all of them are at work at the same time: who has waited for long leaves its part to the
// last one to arrive. At least one of them sees what the other wrote; where both do, both store that
// part, and the same bits.
__device__ __forceinline__ u32 duties(u32* arrived, int part) {
  u32* left = arrived + 1;  // [SPLIT]
  __threadfence();
  // It goes on from one launch to the next, in whole SPLITs: else it would be out of step for ever
  // once it has begun from 0 again.
  const u32 before = atomicInc(arrived, ~0u / SPLIT * SPLIT - 1);
  __threadfence();
  const u32 target = (before / SPLIT + 1) * SPLIT;
  const auto complete = [&] {
    u32 now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
    return (int)(now - target) >= 0;
  };
  u32 found = 1u << part;
  if (before + 1 == target) {
    for (int i = 0; i < SPLIT; i++)
      if (__ldcg(left + i) == target) found |= 1u << i;
    return found;
  }
  for (int i = 0; i < PATIENCE; i++)
    if (complete()) return found;
  atomicExch(left + part, target);
  __threadfence();
  return complete() ? found : 0;
}

// Puts this block's sums of a unit beside those of the others, and stores totals.
__device__ __forceinline__ void add_up(const float (&sums)[SUMS], float4* parts, u32* arrived,
                                       const Result& result, int unit, int group, int part) {
  __shared__ u32 found;
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  parts += (long long)unit * SPLIT * PIECES * 32 + lane;
  if (group < GROUPS) {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
      __stcg(parts + 32 * (part * PIECES + group * EIGHTS + eight), piece_of(sums, eight));
  }
  __threadfence();
  workers_meet();
  if (threadIdx.x == 128) found = duties(arrived + unit * (1 + SPLIT), part);
  workers_meet();
  for (u32 rest = found; rest; rest &= rest - 1) {
    const int mine = __ffs(rest) - 1, end = PIECES * (mine + 1) / SPLIT;
    for (int piece = PIECES * mine / SPLIT + warp; piece < end; piece += 4 * WORKERS) {
      float4 v[SPLIT];
#pragma unroll
      for (int i = 0; i < SPLIT; i++) v[i] = __ldcg(parts + 32 * (i * PIECES + piece));
#pragma unroll
      for (int i = 1; i < SPLIT; i++)  // always in this order
        v[0].x += v[i].x, v[0].y += v[i].y, v[0].z += v[i].z, v[0].w += v[i].w;
      result.store(v[0], unit * GROUPS + piece / EIGHTS, piece % EIGHTS);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    packed(const __grid_constant__ Map x_map, const u8* weight, bf16* out, int tokens, int columns,
           int inner, int units, float4* parts, u32* arrived) {
  extern __shared__ char memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const u32 stages = (shared_at(memory) + 1023) & ~1023u;  // as the swizzle asks
  const Ring ring{stages, stages + STAGES * X_BYTES, shared_at(barriers)};
  const Work work(units, inner);
  const Result result{out, tokens, columns};
  if (threadIdx.x == 0) ring.init_barriers();
  __syncthreads();
  // A kernel that is launched as this one is may begin where blocks are done; it waits for the rest.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING));
    if (threadIdx.x == 0) copy_all(ring, work, &x_map, weight);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
  const int group = threadIdx.x / 32 - 4;
  float sums[SUMS];
  int at = 0;
  for (int unit = work.first; unit < work.count; unit += work.stride) {
    // A warp that no group is left for makes the sums of the last one too, and does not store them.
    multiply(sums, ring, min(group, GROUPS - 1), work.chunks, at);
    if (SPLIT > 1) {
      add_up(sums, parts, arrived, result, unit, group, work.part);
    } else if (group < GROUPS) {
#pragma unroll
      for (int eight = 0; eight < EIGHTS; eight++)
        result.store(piece_of(sums, eight), unit * GROUPS + group, eight);
    }
  }
}
