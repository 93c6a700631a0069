// x · weightᵀ in bf16 for few tokens on Hopper, with losslessly compressed weights.
//
//   x       [tokens, inner], at most TOKENS of them
//   weight  [units, chunks, GROUPS, RECORD] bytes: see compressed_gemm.py
//   out     [tokens, columns]
//
// With so few tokens the product takes as long as reading the weights. A group is 16 rows of the
// weight, a unit is GROUPS of them; a record is a group's part of a chunk of the inner axis. One
// thread of a block, the producer, copies chunks of x and of a unit by TMA into a ring of STAGES. The
// consumers are the other warps. Each unpacks the records of one group into the registers that wgmma
// reads its left operand from; the right one is x in shared memory. So a thread has the sums of two
// rows, for a quarter of the tokens.
//
// Set by compressed_gemm.py:
//   TOKENS   at most
//   GROUPS   of a unit
//   CHUNK    of the inner axis: 128 bytes of x, a row of the swizzle
//   STAGES   of the ring
//   SPLIT    blocks per unit, each with a part of the inner axis, which add up their sums
//   GATED    1: a group is 8 rows of gate and the same of up, and out is silu(gate) · up
//   THREADS  of a block
//   RECORD   bytes
//   PRODUCER_REGISTERS, CONSUMER_REGISTERS  per thread
//   POLLS    how often a block checks whether the others of its unit are done

#include "common.h"
#include "mma.h"  // by compressed_gemm.py: mma, sums += weight · xᵀ, for 64 rows and TOKENS

typedef unsigned char u8;

constexpr int WORKERS = (GROUPS + 3) / 4;  // warpgroups, one wgmma of 64 rows each
constexpr int STEPS = CHUNK / 16;          // of wgmma
constexpr int SUMS = TOKENS / 2;           // of a thread
constexpr int LOW_BYTES = 16 * CHUNK, HIGH_BYTES = LOW_BYTES / 2;  // of a record
constexpr int X_BYTES = TOKENS * CHUNK * 2, UNIT_BYTES = GROUPS * RECORD;  // of a stage
static_assert(THREADS == 128 * (WORKERS + 1) && STEPS == 4 && RECORD % 16 == 0, "as in compressed_gemm.py");

// -- copies ---------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_x(u32 to, const Map* map, int k, u32 barrier) {
  const u64 policy = 0x14F0000000000000ull;  // evict last: all blocks read it
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, 0}], [%3], %4;" ::"r"(to),
      "l"(map), "r"(k), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_unit(u32 to, const u8* from, u32 barrier) {
  const u64 policy = 0x12F0000000000000ull;  // evict first: read once
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

  // A stage is full when its bytes have arrived, and empty when all warps have read it.
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

// By one thread. A part has at least STAGES chunks, and every block has a unit.
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
  // The kernel in front of this one computes x and does not touch the weights: they are fetched
  // while it ends.
  for (int stage = 0; stage < STAGES; stage++) begin_unit(stage, work.first, stage);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int stage = 0; stage < STAGES; stage++) begin_x(stage, stage);

  int at = STAGES, chunk = STAGES;  // counts all chunks, and those of this unit
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

// A thread's 32 values of a record, two per register, in the order of wgmma. A value is its low byte
// and four bits: the sign, and the difference of its upper seven exponent bits to the record's base.
// Outliers are then replaced. The loop over them is uniform in a warp, and mostly empty.
__device__ __forceinline__ void unpack(u32 (&values)[STEPS][4], u32 record) {
  const int lane = threadIdx.x % 32;
  const u32 notes = record + LOW_BYTES + HIGH_BYTES;
  const uint4 low0 = load16(record + 16 * lane), low1 = load16(record + 512 + 16 * lane);
  const uint4 high = load16(record + LOW_BYTES + 16 * lane);
  const u32 note = load4(notes);  // the base, and the number of outliers
  const u32 base = __byte_perm(note, 0, 0x0000);
  const u32 lows[2 * STEPS] = {low0.x, low0.y, low0.z, low0.w, low1.x, low1.y, low1.z, low1.w};
  const u32 highs[STEPS] = {high.x, high.y, high.z, high.w};
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {  // the second four's bits lie between the first's
      const u32 bits = half ? __funnelshift_r(highs[step], highs[step], 4) : highs[step];
      const u32 upper = (bits & 0x87878787u) + base, lower = lows[2 * step + half];
      values[step][2 * half] = __byte_perm(lower, upper, 0x5140);
      values[step][2 * half + 1] = __byte_perm(lower, upper, 0x7362);
    }
  }
  for (u32 i = 1; i <= note >> 8; i++) {
    // Bits 0 … 15: the value; 16: which of a register's two; 17 … 20: the register; 24 … 28: the lane
    const u32 outlier = load4(notes + 4 * i);
    const u32 at = outlier >> 24 == lane ? outlier >> 17 & 15 : 16;
    const u32 selected = outlier >> 16 & 1 ? 0x5410 : 0x3254;
#pragma unroll
    for (int j = 0; j < 4 * STEPS; j++) {
      u32& two = values[j / 4][j % 4];
      two = at == j ? __byte_perm(two, outlier, selected) : two;
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
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");  // the chunk before
    if (chunk > 0) ring.release((at - 1) % STAGES);
    unpack(values, ring.record(stage, group));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < STEPS; step++)  // 32 bytes of x; the very first starts at zero
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
  // By a warp, for a group and eight tokens: a thread has two tokens of one row in x and y, and of
  // another in z and w: the next row, or the row of up that belongs to the first one's gate.
  __device__ __forceinline__ void store(float4 v, int group, int eight) const {
    const int lane = threadIdx.x % 32, row = lane / 4, token = 8 * eight + 2 * (lane % 4);
    if (!GATED) {
      put(token, 16 * group + 2 * row, v.x, v.z);
      put(token + 1, 16 * group + 2 * row, v.y, v.w);
      return;
    }
    // A thread has one column for two tokens: neighbours swap, so that each has two columns for one.
    const float first = active(v.x, v.z), second = active(v.y, v.w);
    const bool odd = row & 1;
    const float other = __shfl_xor_sync(~0u, odd ? first : second, 4);
    if (odd)
      put(token + 1, 8 * group + row - 1, other, second);
    else
      put(token, 8 * group + row, first, other);
  }
};

constexpr int EIGHTS = TOKENS / 8, PIECES = GROUPS * EIGHTS;  // of a unit; a float4 per lane

__device__ __forceinline__ float4 piece_of(const float (&sums)[SUMS], int eight) {
  const float* v = &sums[4 * eight];
  return make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void sync_workers() {
  asm volatile("bar.sync 1, %0;" ::"n"(128 * WORKERS) : "memory");
}

// Which parts of a unit's totals this block has to store, one bit each; by one thread, after its own
// sums are in memory. Usually that is its own part, once all blocks have arrived. But nothing says
// that all of them run at the same time: a block that has polled POLLS times leaves its part to the
// last one to arrive. At least one of the two sees what the other wrote. If both do, both store that
// part, with the same bits.
__device__ __forceinline__ u32 parts_to_store(u32* arrived, int part) {
  u32* left = arrived + 1;  // [SPLIT]
  __threadfence();
  // The counter goes on from launch to launch and wraps at a multiple of SPLIT, so that a unit always
  // starts at one.
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
  for (int i = 0; i < POLLS; i++)
    if (complete()) return found;
  atomicExch(left + part, target);
  __threadfence();
  return complete() ? found : 0;
}

// Writes this block's sums of a unit beside those of the others, and stores totals.
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
  sync_workers();
  if (threadIdx.x == 128) found = parts_to_store(arrived + unit * (1 + SPLIT), part);
  sync_workers();
  for (u32 rest = found; rest; rest &= rest - 1) {
    const int mine = __ffs(rest) - 1, end = PIECES * (mine + 1) / SPLIT;
    for (int piece = PIECES * mine / SPLIT + warp; piece < end; piece += 4 * WORKERS) {
      float4 v[SPLIT];
#pragma unroll
      for (int i = 0; i < SPLIT; i++) v[i] = __ldcg(parts + 32 * (i * PIECES + piece));
#pragma unroll
      for (int i = 1; i < SPLIT; i++)  // always in the same order
        v[0].x += v[i].x, v[0].y += v[i].y, v[0].z += v[i].z, v[0].w += v[i].w;
      result.store(v[0], unit * GROUPS + piece / EIGHTS, piece % EIGHTS);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    compressed_gemm(const __grid_constant__ Map x_map, const u8* weight, bf16* out, int tokens,
                    int columns, int inner, int units, float4* parts, u32* arrived) {
  extern __shared__ char memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const u32 stages = (shared_at(memory) + 1023) & ~1023u;  // aligned for the swizzle
  const Ring ring{stages, stages + STAGES * X_BYTES, shared_at(barriers)};
  const Work work(units, inner);
  const Result result{out, tokens, columns};
  if (threadIdx.x == 0) ring.init_barriers();
  __syncthreads();
  // A kernel behind this one that is launched the same way may start on free SMs; it waits itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) copy_all(ring, work, &x_map, weight);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
  const int group = threadIdx.x / 32 - 4;
  float sums[SUMS];
  int at = 0;
  for (int unit = work.first; unit < work.count; unit += work.stride) {
    // A warp without a group computes the last one's sums and does not store them.
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
