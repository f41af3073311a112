// Microbenchmarks of launches, copies and exchanges on a Hopper GPU: the constants of bench/gpu/targets.py. Prints one
// line "name value [unit]" for each. Built and run by bench/gpu/constants.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace {

namespace ptx = swiftspec::ptx;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTile = 2176;                // bytes of an int4 tile of the projections (csrc/cuda/linear/tiling.h)
constexpr int kMostStages = 12;            // tiles in flight per warp
constexpr int64_t kBuffer = 1ll << 30;     // much larger than the L2
constexpr int64_t kFlush = 256ll << 20;    // writing this many bytes evicts everything else from the L2
constexpr int64_t kAhead = 16ll << 20;     // bytes that a QKV prefetches (csrc/cuda/linear/tiling.h)
constexpr int kNodes = 200, kTurns = 2000, kLoads = 500, kReplays = 15;
constexpr uint64_t kPatience = 1000000000;  // nanoseconds; a longer wait ends the kernel

void need(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ? 2 : 1);
}

__global__ void nothing() {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
}

// Two CTAs alternately send each other a line of 16 bytes.
__global__ void exchange(uint64_t* lines) {
  if (threadIdx.x != 0) return;
  uint64_t *mine = lines + 16 * blockIdx.x, *other = lines + 16 * (1 - blockIdx.x);
  const uint64_t start = ptx::nanoseconds();
  for (uint64_t turn = 1; turn <= kTurns; ++turn) {
    if (blockIdx.x == 0) ptx::store_system(other, turn, turn);
    uint64_t a = 0, b = 0;
    while (a != turn || b != turn) {
      ptx::load_system(mine, a, b);
      if (ptx::nanoseconds() - start > kPatience) __trap();
    }
    if (blockIdx.x == 1) ptx::store_system(other, turn, turn);
  }
}

// Dependent bulk copies: each starts when the previous one has arrived, from addresses that were not read before.
__global__ void one_by_one(const uint8_t* from, uint64_t* took) {
  __shared__ __align__(128) uint8_t tile[kTile];
  __shared__ uint64_t barrier;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x >= ptx::kLoaders) return;
  if (lane == 0) {
    ptx::barrier_init(&barrier);
    ptx::fence_barrier_init();
  }
  if constexpr (ptx::kLoaders > 1) __syncwarp();
  const uint64_t policy = ptx::evict_first(), start = ptx::nanoseconds();
  for (uint32_t i = 0; i < kLoads; ++i) {
    const int64_t at = static_cast<int64_t>(i * 2654435761u % (kBuffer / 4096)) * 4096;
    ptx::bulk_load(tile, from + at, kTile, &barrier, policy, lane);
    ptx::barrier_wait(&barrier, i & 1);
  }
  *took = ptx::nanoseconds() - start;
}

// Every warp streams tiles through its own ring, as the projections do, and reads each tile.
__global__ void __launch_bounds__(kThreads) stream(const uint8_t* from, int64_t tiles, int stages, uint32_t* sums) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[kWarps * kMostStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* ring = shared + warp * stages * kTile;
  uint64_t* full = barriers + warp * kMostStages;
  const int64_t first = blockIdx.x * kWarps + warp, step = gridDim.x * kWarps;
  const uint64_t policy = ptx::evict_first();
  if (lane == 0) {
    for (int i = 0; i < stages; ++i) ptx::barrier_init(full + i);
    ptx::fence_barrier_init();
  }
  __syncwarp();
  const auto fetch = [&](int64_t i) {
    if (lane >= ptx::kLoaders || first + i * step >= tiles) return;
    const auto slot = static_cast<int>(i % stages);
    ptx::bulk_load(ring + slot * kTile, from + (first + i * step) * kTile, kTile, full + slot, policy, lane);
  };
  for (int64_t i = 0; i < stages; ++i) fetch(i);
  uint32_t sum = 0;
  for (int64_t i = 0; first + i * step < tiles; ++i) {
    const auto slot = static_cast<int>(i % stages);
    ptx::barrier_wait(full + slot, static_cast<uint32_t>(i / stages & 1));
    const auto* words = reinterpret_cast<const uint4*>(ring + slot * kTile);
    for (int at = lane; at < kTile / 16; at += 32) sum ^= words[at].x ^ words[at].y ^ words[at].z ^ words[at].w;
    __syncwarp();
    fetch(i + stages);
  }
  sums[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// Prefetches memory, or does not, and runs until the prefetch must have completed.
__global__ void ask(const uint8_t* from, int64_t bytes, uint64_t stay) {
  const uint64_t start = ptx::nanoseconds();
  for (int64_t at = 4096ll * blockIdx.x; threadIdx.x < ptx::kLoaders && at < bytes; at += 4096ll * gridDim.x) {
    ptx::prefetch(from + at, 4096, static_cast<int>(threadIdx.x));
  }
  while (ptx::nanoseconds() - start < stay) {}
}

// Microseconds of the work that `work` enqueues on a stream, captured as a graph: the median replay.
double replayed(cudaStream_t on, const std::function<void()>& work) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  cudaEvent_t start = nullptr, stop = nullptr;
  need(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal), "capture");
  work();
  need(cudaStreamEndCapture(on, &graph), "capture");
  need(cudaGraphInstantiate(&ready, graph, 0), "graph");
  need(cudaEventCreate(&start), "event");
  need(cudaEventCreate(&stop), "event");
  std::vector<float> times;
  for (int i = 0; i <= kReplays; ++i) {
    need(cudaEventRecord(start, on), "event");
    need(cudaGraphLaunch(ready, on), "graph");
    need(cudaEventRecord(stop, on), "event");
    need(cudaEventSynchronize(stop), "graph");
    float milliseconds = 0;
    need(cudaEventElapsedTime(&milliseconds, start, stop), "event");
    if (i > 0) times.push_back(milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  need(cudaGraphExecDestroy(ready), "graph");
  need(cudaGraphDestroy(graph), "graph");
  return 1000.0 * times[kReplays / 2];
}

void launches(cudaStream_t on, int processors) {
  const double early = replayed(on, [&] {
    const swiftspec::cuda::Launch how{.grid = dim3(processors), .threads = kThreads, .early = true};
    for (int i = 0; i < kNodes; ++i) swiftspec::cuda::launch("nothing", nothing, how, on);
  });
  const double plain = replayed(on, [&] {
    for (int i = 0; i < kNodes; ++i) nothing<<<processors, kThreads, 0, on>>>();
  });
  std::printf("gap %.4f us\nplain_gap %.4f us\n", early / kNodes, plain / kNodes);
}

void exchanges(cudaStream_t on) {
  uint64_t* lines = nullptr;
  need(cudaMalloc(&lines, 4096), "memory");
  const double took = replayed(on, [&] {
    need(cudaMemsetAsync(lines, 0, 4096, on), "memory");
    exchange<<<2, 32, 0, on>>>(lines);
  });
  std::printf("exchange %.4f us\n", took / (2 * kTurns));
}

void copies(cudaStream_t on, const uint8_t* from, uint8_t* to) {
  const double took = replayed(on, [&] {
    need(cudaMemcpyAsync(to, from, kBuffer, cudaMemcpyDeviceToDevice, on), "copy");
  });
  std::printf("copy %.1f GB/s\n", 2e-3 * kBuffer / took);
  uint64_t* ns = nullptr;
  uint64_t latency = 0;
  need(cudaMalloc(&ns, 8), "memory");
  replayed(on, [&] {
    need(cudaMemsetAsync(to, 1, kFlush, on), "memory");  // otherwise the tiles of the last replay are still cached
    one_by_one<<<1, 32, 0, on>>>(from, ns);
  });
  need(cudaMemcpy(&latency, ns, 8, cudaMemcpyDeviceToHost), "memory");
  std::printf("latency %.4f us\n", 1e-3 * static_cast<double>(latency) / kLoads);
}

void streams(cudaStream_t on, const uint8_t* from, uint8_t* dirty, int processors) {
  uint32_t* sums = nullptr;
  need(cudaMalloc(&sums, static_cast<size_t>(processors) * kThreads * 4), "memory");
  const int most = kWarps * kMostStages * kTile;
  need(cudaFuncSetAttribute(stream, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "stream");
  const auto read = [&](int64_t bytes, int stages) {
    stream<<<processors, kThreads, kWarps * stages * kTile, on>>>(from, bytes / kTile, stages, sums);
    need(cudaGetLastError(), "stream");
  };
  double best = 0;
  for (const int stages : {2, 4, 8, kMostStages}) {
    const double speed = 1e-3 * kBuffer / replayed(on, [&] { read(kBuffer, stages); });
    std::printf("read_%dkB %.1f GB/s\n", kWarps * stages * kTile / 1024, speed);
    best = std::max(best, speed);
  }
  std::printf("read %.1f GB/s\n", best);
  const auto after = [&](int64_t asked, int64_t bytes) {
    return replayed(on, [&] {
      need(cudaMemsetAsync(dirty, 1, kFlush, on), "memory");
      ask<<<processors, 32, 0, on>>>(from, asked, 30000);
      if (bytes > 0) read(bytes, 4);
    });
  };
  const double idle = after(0, 0);
  std::printf("cold_16MB %.3f us\nasked_16MB %.3f us\n", after(0, kAhead) - idle, after(kAhead, kAhead) - idle);
}

}  // namespace

int main() {
  cudaDeviceProp device{};
  need(cudaGetDeviceProperties(&device, 0), "no usable NVIDIA GPU");
  cudaStream_t on = nullptr;
  uint8_t *from = nullptr, *to = nullptr;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // prints each result immediately, so that an abort loses none
  std::printf("gpu %s\n", device.name);
  need(cudaStreamCreateWithFlags(&on, cudaStreamNonBlocking), "stream");
  launches(on, device.multiProcessorCount);
  exchanges(on);
  need(cudaMalloc(&from, kBuffer), "memory");
  need(cudaMalloc(&to, kBuffer), "memory");
  need(cudaMemset(from, 7, kBuffer), "memory");
  copies(on, from, to);
  streams(on, from, to, device.multiProcessorCount);
  return 0;
}
