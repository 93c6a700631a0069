// What the kernels for Hopper share: types, and instructions that CUDA C++ lacks.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // its bits

struct alignas(64) Map {  // CUtensorMap
  char bytes[128];
};

__device__ __forceinline__ u32 shared_at(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}
__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra AGAIN;\n"
      "DONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The wgmma descriptor of a matrix in a stage: rows of 128 bytes, swizzled, 8 rows per 1024 bytes.
__device__ __forceinline__ u64 described(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ u32 bf16_pair(float low, float high) {  // two bf16
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float active(float gate, float up) {  // silu(gate) · up
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}
