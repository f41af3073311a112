// Wrappers of the PTX instructions that CUDA C++ does not expose: all inline PTX of the project and all differences
// between architectures. They are written here instead of taken from CUTLASS: a few lines each, compared with a
// dependency that a bare GPU image does not have.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/arch.h"

#ifndef __CUDACC__
#include <simt/ptx.h>  // tests/simt, a GPU emulated on a CPU
#else

namespace swiftspec::ptx {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- products of a warp

// d += a b with bf16 operands and float32 accumulators. PTX ISA, "Matrix Fragments for mma.m16n8k16".
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- products of a warpgroup: four consecutive warps, of which the first is a multiple of four. Asynchronous.

// d += a b for 64 x 16 times 16 x 128 bfloat16; without `accumulate` d = a b. Warp w of the warpgroup passes rows 16 w
// to 16 w + 15 of `a`, register for register like `mma`, and d[4 j + i] is register i of the columns from 8 j on. `b` is
// the descriptor of its columns in shared memory, each with contiguous inputs. Until wgmma_wait neither d nor a may be
// accessed, nor shared memory overwritten.
__device__ inline void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#define SWIFTSPEC_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : SWIFTSPEC_8(0), SWIFTSPEC_8(8), SWIFTSPEC_8(16), SWIFTSPEC_8(24), SWIFTSPEC_8(32), SWIFTSPEC_8(40),
        SWIFTSPEC_8(48), SWIFTSPEC_8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// Required between ordinary writes to d or a and the next products, those of `a`. The compiler does not move the writes
// behind it.
__device__ inline void wgmma_fence(uint32_t (&a)[2][4]) {
  asm volatile("wgmma.fence.sync.aligned;"
               : "+r"(a[0][0]), "+r"(a[0][1]), "+r"(a[0][2]), "+r"(a[0][3]), "+r"(a[1][0]), "+r"(a[1][1]),
                 "+r"(a[1][2]), "+r"(a[1][3])
               :
               : "memory");
}
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N groups are in flight.
template <int N>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Waits until none is in flight, after which d may be read.
__device__ inline void wgmma_wait_all(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : SWIFTSPEC_8(0), SWIFTSPEC_8(8), SWIFTSPEC_8(16), SWIFTSPEC_8(24), SWIFTSPEC_8(32), SWIFTSPEC_8(40),
                 SWIFTSPEC_8(48), SWIFTSPEC_8(56)
               :
               : "memory");
#undef SWIFTSPEC_8
}

// Changes the registers of each thread of the warpgroup to kCount, a multiple of 8. A warpgroup that claims more waits
// until others have released theirs.
template <int kCount>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- matrices in shared memory

// Four 8 x 8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8 in shared memory.
template <bool kTransposed>
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const uint32_t address = shared_address(row);
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

// Rounds `low` and `high` to bfloat16 and packs them into 32 bits.
__device__ inline uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// a b + c of two bfloat16 each, rounded once; subnormal numbers are not flushed.
__device__ inline uint32_t bf16_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// (x & mask) | bits in one LOP3. For two immediate constants the compiler emits two, since the instruction has room for
// only one.
__device__ inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(mask), "r"(bits));
  return out;
}

// ---- copies to shared memory, and to L2

// Asynchronous copy of 16 bytes from global to shared memory, bypassing registers and L1.
__device__ inline void cp_async16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global))
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most N of this thread's groups are in flight.
template <int N>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// ---- streams of weights. The phase of a barrier ends when `arrivals` threads have arrived, and the copies that they
// have issued on it complete.

__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals = kLoaders) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// A thread that is not `active` does not arrive. Not a branch, between which ptxas would serialise wgmma.
__device__ inline void barrier_arrive(uint64_t* barrier, bool active) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(shared_address(barrier)),
      "r"(static_cast<int>(active))
      : "memory");
}

// To be called after the last barrier_init and before the first copy that arrives at a barrier.
__device__ inline void fence_barrier_init() {
  if constexpr (kBulk) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
}

__device__ inline uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// L2 policy for data that is read again soon, next to a stream of weights that is not.
__device__ inline uint64_t evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Required before bulk copies of data that an earlier kernel has written with ordinary stores.
__device__ inline void fence_bulk_loads() {
  if constexpr (kBulk) asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Copies `bytes` (a multiple of 16, like both addresses) to shared memory. The first kLoaders lanes of a warp call it.
__device__ inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t policy,
                                 int lane) {
  const uint32_t at = shared_address(barrier), first = shared_address(to);
  const size_t source = __cvta_generic_to_global(from);
  if constexpr (kBulk) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(first),
        "l"(source), "r"(bytes), "r"(at), "l"(policy)
        : "memory");
  } else {
    for (uint32_t i = 16 * lane; i < bytes; i += 16 * kLoaders) {
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(first + i), "l"(source + i),
                   "l"(policy)
                   : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");  // once they are there
  }
}

__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  const uint32_t at = shared_address(barrier);
  uint32_t done = 0;
  while (done == 0) {
    if constexpr (kBulk) {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.b32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(at), "r"(parity)
          : "memory");
    } else {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.b32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(at), "r"(parity)
          : "memory");
    }
  }
}

// Prefetches `bytes` of read-only memory to L2; `bytes` and the address are multiples of 16. The first kLoaders lanes
// of a warp call it.
__device__ inline void prefetch(const uint8_t* from, uint32_t bytes, int lane) {
  if constexpr (kBulk) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
  } else {
    for (uint32_t i = 128 * lane; i < bytes; i += 128 * kLoaders) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from + i)));
    }
  }
}

// ---- launches

// Programmatic dependent launch. `launch_dependents`: the next kernel may start once all blocks of this kernel have
// called it. `wait_for_dependencies`: blocks until the previous kernels have ended and their writes are visible. A
// kernel that is launched early (launch.cuh) waits in all its threads before it accesses memory that another kernel
// writes or reads, unless the other one has ended for a reason that a comment gives; so when it has ended, all kernels
// before it have. Without early starts both functions do nothing.
__device__ inline void launch_dependents() {
  if constexpr (kBulk) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ inline void wait_for_dependencies() {
  if constexpr (kBulk) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- clusters; without them each block is its own cluster

__device__ inline uint32_t cluster_rank() {
  if constexpr (!kClusters) return 0;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of the cluster; their earlier writes to shared memory are visible after it. Not `.aligned`:
// a warp may reach it diverged, after a loop whose trip count differs between its lanes.
__device__ inline void cluster_sync() {
  if constexpr (kClusters) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  } else {
    __syncthreads();
  }
}

// The same barrier without memory ordering.
__device__ inline void cluster_meet() {
  if constexpr (kClusters) {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
  }
}

// Maps `p` in this block's shared memory to the same address in block `rank` of the cluster.
template <class T>
__device__ T* in_block(T* p, uint32_t rank) {
#if SWIFTSPEC_ARCH >= 900
  if constexpr (kClusters) return static_cast<T*>(__cluster_map_shared_rank(p, rank));
#endif
  return p;
}

// The shared::cluster address that corresponds to `p` in block `rank`.
__device__ inline uint32_t remote_address(const void* p, uint32_t rank) {
  uint32_t at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  return at;
}

// Arrives at the barrier of block `rank` of the cluster. A thread that then waits for the barrier with
// cluster_barrier_wait sees the earlier writes to shared memory.
__device__ inline void remote_arrive(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, rank))
               : "memory");
}

__device__ inline void cluster_barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Arrives at the barrier of this block, whose phase then also waits for `bytes` of store_async.
__device__ inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Stores 16 bytes to `p` in block `rank` of the cluster, asynchronously; they count for `barrier` in that block.
__device__ inline void store_async(float4* p, uint32_t rank, const float4& v, uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   remote_address(p, rank)),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote_address(barrier, rank))
               : "memory");
}

__device__ inline float4 remote_load4(const float4* p, uint32_t rank) {
  if constexpr (!kClusters) return *p;
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(remote_address(p, rank))
               : "memory");
  return v;
}

__device__ inline float remote_load(const float* p, uint32_t rank) {
  if constexpr (!kClusters) return *p;
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote_address(p, rank)) : "memory");
  return v;
}

// ---- memory shared with other devices and the host

// Each 8 bytes are one atomic access; compiles to one 16-byte instruction.
__device__ inline void load_system(const void* p, uint64_t& a, uint64_t& b) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(a), "=l"(b)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
}

__device__ inline void store_system(void* p, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "l"(a), "l"(b)
               : "memory");
}

__device__ inline uint64_t load_system(const uint64_t* p) {
  uint64_t a;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(a) : "l"(__cvta_generic_to_global(p)) : "memory");
  return a;
}

__device__ inline void store_system(uint64_t* p, uint64_t a) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(a) : "memory");
}

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Whether no lower lane of the warp executes this call together with the caller. For blocks of one dimension.
__device__ inline bool is_first_active_lane() {
  return __ffs(static_cast<int>(__activemask())) - 1 == static_cast<int>(threadIdx.x % 32);
}

}  // namespace swiftspec::ptx

#endif
