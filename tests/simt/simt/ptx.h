// csrc/cuda/ptx.cuh on the emulated GPU.
#pragma once

#include <atomic>
#include <chrono>

#include "cuda/arch.h"
#include "cuda_runtime.h"

namespace simt {

inline float low_half(uint32_t pair) { return std::bit_cast<float>(pair << 16); }
inline float high_half(uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); }

struct Operands {
  uint32_t a[4], b[2];
  float c[4];
};

// PTX ISA, "Matrix Fragments for mma.m16n8k16": the elements of a [16, 16], b [16, 8] and c [16, 8] per lane.
inline void multiply(Warp& warp) {
  float a[16][16], b[16][8], c[16][8];
  const auto row = [](int lane, int i) { return lane / 4 + i / 2 * 8; };
  const auto column = [](int lane, int i) { return lane % 4 * 2 + i % 2; };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Operands*>(warp.in[lane]);
    const int group = lane / 4, place = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const int at = group + i % 2 * 8, from = place + i / 2 * 8;
      a[at][from] = low_half(mine.a[i]), a[at][from + 1] = high_half(mine.a[i]);
      c[row(lane, i)][column(lane, i)] = mine.c[i];
    }
    for (int i = 0; i < 2; ++i) {
      b[place + 8 * i][group] = low_half(mine.b[i]), b[place + 8 * i + 1][group] = high_half(mine.b[i]);
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) static_cast<float*>(warp.out[lane])[i] = c[row(lane, i)][column(lane, i)];
  }
}

// To nearest, ties to even; one NaN.
inline uint32_t bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void mma(float (&c)[4], const Operands& operands) {
  if (Machine::get().clock) return Machine::get().product();  // values do not matter
  Machine::get().collective(0xffffffffu, "mma.sync", &operands, c, &multiply);
}

// Register i of lane l: of matrix i row l / 4, columns l % 4 * 2 and the next; transposed, of its transpose.
template <bool kTransposed>
void load_matrices(Warp& warp) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const auto at = [&](int row, int column) {
        return uint32_t{(*static_cast<const uint16_t* const*>(warp.in[8 * i + row]))[column]};
      };
      const int row = lane / 4, column = lane % 4 * 2;
      const uint32_t low = kTransposed ? at(column, row) : at(row, column);
      const uint32_t high = kTransposed ? at(column + 1, row) : at(row, column + 1);
      static_cast<uint32_t*>(warp.out[lane])[i] = low | high << 16;
    }
  }
}

// ---- wgmma.m64n128k16, of which a warp computes 16 rows.

// What a lane passes.
struct WarpgroupOperands {
  float* d;
  const uint32_t* a;
  uint64_t b;
  bool accumulate;
};

// Element `k` of column `n` of an operand in shared memory. PTX ISA, "Matrix descriptor" and "Strides": the start
// address, the stride between groups of eight columns, and the swizzle, which exchanges address bits.
inline float shared_operand(uint64_t descriptor, int n, int k) {
  constexpr uintptr_t kWindow = 1 << 18;
  const auto field = [&](int first) { return (descriptor >> first & 0x3fff) << 4; };
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) Machine::get().fault("wgmma: not swizzled by 128 bytes");
  uint64_t address = field(0) + n / 8 * field(32) + n % 8 * 128 + 2 * k;
  address ^= (address >> 7 & 7) << 4;
  const uint8_t* base = Machine::get().self().block->dynamic.get();
  const uint8_t* at = base + ((address - reinterpret_cast<uintptr_t>(base)) & (kWindow - 1));
  Machine::get().check_shared(at, 2, 2, "wgmma");
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

inline void multiply(const Product& product) {
  float a[16][16], b[16][128], d[16][128] = {};
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < 128; ++n) b[k][n] = shared_operand(product.b, n, k);
  }
  const auto each_sum = [&](auto one) {
    for (int i = 0; i < 64 * 32; ++i) {
      const int lane = i / 64, r = i % 64;
      one(product.d[lane][r], d[lane / 4 + r / 2 % 2 * 8][r / 4 * 8 + lane % 4 * 2 + r % 2]);
    }
  };
  for (int i = 0; i < 4 * 32; ++i) {
    const int lane = i / 4, r = i % 4, row = lane / 4 + r % 2 * 8, column = lane % 4 * 2 + r / 2 * 8;
    a[row][column] = low_half(product.a[lane][r]), a[row][column + 1] = high_half(product.a[lane][r]);
  }
  if (product.accumulate) each_sum([](float of_lane, float& sum) { sum = of_lane; });
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 128; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  each_sum([](float& of_lane, float sum) { of_lane = sum; });
}

inline void start_product(Warp& warp) {
  Product product{};
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const WarpgroupOperands*>(warp.in[lane]);
    const auto& first = *static_cast<const WarpgroupOperands*>(warp.in[0]);
    if (mine.b != first.b || mine.accumulate != first.accumulate) Machine::get().fault("wgmma: lanes differ");
    product.d[lane] = mine.d, product.a[lane] = mine.a;
    product.b = mine.b, product.accumulate = mine.accumulate;
  }
  warp.products.back().push_back(product);
}

// Finishes all but the last `most` committed groups.
inline void finish_products(Warp& warp, size_t most) {
  while (warp.products.size() > most + 1) {
    for (const Product& product : warp.products.front()) multiply(product);
    warp.products.pop_front();
  }
}

// The products of a group are computed immediately, or when they are waited for.
inline void commit_products(Warp& warp) {
  warp.products.emplace_back();
  if (Machine::get().chance(2)) finish_products(warp, 0);
}

}  // namespace simt

namespace swiftspec::ptx {

inline void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  const simt::WarpgroupOperands mine{d, a, b, accumulate};
  simt::Machine::get().collective(0xffffffffu, "wgmma", &mine, nullptr, &simt::start_product);
}
inline void wgmma_fence(uint32_t (&)[2][4]) {}
inline void wgmma_commit() {
  simt::Machine::get().collective(0xffffffffu, "wgmma.commit_group", nullptr, nullptr, &simt::commit_products);
}
template <int N>
void wgmma_wait() {
  simt::Machine::get().collective(0xffffffffu, "wgmma.wait_group", nullptr, nullptr,
                                  [](simt::Warp& warp) { simt::finish_products(warp, N); });
}
inline void wgmma_wait_all(float (&)[64]) { wgmma_wait<0>(); }
template <int kCount>
void release_registers() {}
template <int kCount>
void claim_registers() {}

inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  simt::mma(d, {{a0, a1, a2, a3}, {b0, b1}, {d[0], d[1], d[2], d[3]}});
}

template <bool kTransposed>
void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  simt::Machine::get().check_shared(row, 16, 16, "ldmatrix");
  simt::Machine::get().collective(0xffffffffu, "ldmatrix", &row, r, &simt::load_matrices<kTransposed>);
}

inline uint32_t bf16_pair(float low, float high) { return simt::bf16(high) << 16 | simt::bf16(low); }

inline uint32_t bf16_fma(uint32_t a, uint32_t b, uint32_t c) {
  using simt::high_half, simt::low_half;
  return bf16_pair(std::fma(low_half(a), low_half(b), low_half(c)), std::fma(high_half(a), high_half(b), high_half(c)));
}

inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }

// The bytes arrive when they are waited for, or immediately.
inline void cp_async16(void* shared, const void* global) {
  simt::Machine& machine = simt::Machine::get();
  machine.check_shared(shared, 16, 16, "cp.async");
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) machine.fault("cp.async: misaligned");
  if (machine.clock) return machine.load_async();  // values do not matter
  if (machine.chance(2)) {
    std::memcpy(shared, global, 16);
  } else {
    machine.self().groups.back().push_back({shared, global, 16});
  }
}

inline void cp_async_commit() { simt::Machine::get().self().groups.emplace_back(); }

template <int N>
void cp_async_wait() {
  simt::Machine::get().await_async();
  auto& groups = simt::Machine::get().self().groups;
  while (groups.size() > N + 1) {
    for (const simt::Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    groups.pop_front();
  }
}

// ---- mbarriers and bulk copies.

// An address within the window of 256 KiB that descriptors of matrices span.
inline uint32_t shared_address(const void* p) { return reinterpret_cast<uintptr_t>(p) & 0x3ffff; }

inline void barrier_init(uint64_t* barrier, uint32_t arrivals = kLoaders) {
  simt::Machine::get().check_shared(barrier, 8, 8, "mbarrier");
  const simt::Barrier state{0, arrivals & 0x7fff, arrivals & 0xffff, 0};
  std::memcpy(barrier, &state, sizeof state);
}
inline void arrive(uint64_t* barrier) {
  simt::Machine::get().settle();
  simt::Machine::get().change_barrier(barrier, 1, 0);
}
inline void barrier_arrive(uint64_t* barrier, bool active) {
  if (active) arrive(barrier);
}
inline void fence_barrier_init() {}
inline void fence_bulk_loads() {}
inline uint64_t evict_first() { return 0; }
inline uint64_t evict_last() { return 1; }

// One copy by the hardware, or a lane's share in pieces of 16 bytes.
inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t policy, int lane) {
  simt::Machine& machine = simt::Machine::get();
  machine.check_shared(to, bytes, 16, "cp.async.bulk");
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) machine.fault("cp.async.bulk: misaligned");
  if (lane >= kLoaders) machine.fault("cp.async.bulk: by another lane");
  machine.settle();
  const uint32_t each = kBulk ? bytes : 16;
  int32_t mine = 0;
  for (uint32_t at = each * lane; at < bytes; at += each * kLoaders) mine += static_cast<int32_t>(each);
  machine.change_barrier(barrier, 1, mine);
  for (uint32_t at = each * lane; at < bytes; at += each * kLoaders) {
    machine.start_copy({{static_cast<uint8_t*>(to) + at, static_cast<const uint8_t*>(from) + at, each}, barrier},
                       policy == evict_last());
  }
}

inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  simt::Machine::get().settle();
  for (;;) {
    simt::Barrier state;
    std::memcpy(&state, barrier, sizeof state);
    if (state.phase != parity) return;
    simt::Machine::get().await(barrier);
  }
}

inline void prefetch(const uint8_t* from, uint32_t bytes, int) {
  const volatile uint8_t* first = from;
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    simt::Machine::get().fault("cp.async.bulk.prefetch: nothing, or misaligned");
  }
  static_cast<void>(first[0]), static_cast<void>(first[bytes - 1]);
}

inline void launch_dependents() {
  if (kBulk) simt::Machine::get().launch_dependents();
}
inline void wait_for_dependencies() {
  if (kBulk) simt::Machine::get().wait_for_dependencies();
}

// ---- Clusters.

inline uint32_t cluster_rank() { return simt::Machine::get().self().block->rank; }

inline void cluster_sync() {
  simt::Cluster& cluster = *simt::Machine::get().self().block->cluster;
  simt::Machine::get().meet(cluster.gate, cluster.live, "barrier.cluster");
}
inline void cluster_meet() {
  if (kClusters) cluster_sync();
}

template <class T>
T remote(const void* p, uint32_t rank) {
  simt::Block& mine = *simt::Machine::get().self().block;
  T value;
  simt::Machine::get().load_from_peer(sizeof value);
  std::memcpy(&value, mine.in(*mine.cluster->blocks.at(rank), p, sizeof value), sizeof value);
  return value;
}

template <class T>
T* in_block(T* p, uint32_t rank) {
  simt::Block& mine = *simt::Machine::get().self().block;
  return static_cast<T*>(mine.in(*mine.cluster->blocks.at(rank), p, sizeof(T)));
}
inline void remote_arrive(uint64_t* barrier, uint32_t rank) { simt::Machine::get().signal(in_block(barrier, rank), 0); }
inline void cluster_barrier_wait(uint64_t* barrier, uint32_t parity) { barrier_wait(barrier, parity); }
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  simt::Machine::get().settle();
  simt::Machine::get().change_barrier(barrier, 1, static_cast<int32_t>(bytes));
}
inline void store_async(float4* p, uint32_t rank, const float4& v, uint64_t* barrier) {
  simt::Machine& machine = simt::Machine::get();
  if (!machine.clock && machine.chance(4)) machine.yield();
  *in_block(p, rank) = v;
  machine.signal(in_block(barrier, rank), sizeof v);
}
inline float4 remote_load4(const float4* p, uint32_t rank) { return remote<float4>(p, rank); }
inline float remote_load(const float* p, uint32_t rank) { return remote<float>(p, rank); }

// ---- System-wide memory. Other threads may run between any two accesses, also between the halves of a line.

inline uint64_t load_system(const uint64_t* p) {
  simt::Machine::get().yield();
  return std::atomic_ref(*const_cast<uint64_t*>(p)).load(std::memory_order_relaxed);
}

inline void store_system(uint64_t* p, uint64_t a) {
  if (simt::Machine::get().chance(4)) simt::Machine::get().yield();
  std::atomic_ref(*p).store(a, std::memory_order_relaxed);
}

inline void load_system(const void* p, uint64_t& a, uint64_t& b) {
  const auto* halves = static_cast<const uint64_t*>(p);
  const bool second_first = simt::Machine::get().chance(2);
  if (second_first) b = load_system(halves + 1);
  a = load_system(halves);
  if (!second_first) b = load_system(halves + 1);
}

inline void store_system(void* p, uint64_t a, uint64_t b) {
  auto* halves = static_cast<uint64_t*>(p);
  const bool second_first = simt::Machine::get().chance(2);
  if (second_first) store_system(halves + 1, b);
  store_system(halves, a);
  if (!second_first) store_system(halves + 1, b);
}

inline uint64_t nanoseconds() {
  if (simt::Machine::get().clock) return simt::Machine::get().virtual_ns();
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline bool is_first_active_lane() { return true; }  // lanes run one at a time

}  // namespace swiftspec::ptx
