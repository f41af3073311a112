// All-gather of short messages over the LL lines of a group. It uses no library, so it can be captured in a graph.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "cuda/launch.cuh"
#include "cuda/peers/ll.cuh"

namespace swiftspec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 16;  // per rank

// Kernel arguments of one rank, or of all virtual ranks of a launch.
struct GatherLaunch {
  Channel channels[kMaxPeers];
  Gather tasks[kMaxPeers];
  int32_t blocks;  // per rank
};

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherLaunch g) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int rank = static_cast<int>(blockIdx.x) / g.blocks, block = static_cast<int>(blockIdx.x) % g.blocks;
  const Channel& channel = g.channels[rank];
  const Session<DeviceMemory> session{channel, ptx::load_system(channel.epoch)};
  const int64_t thread = block * kThreads + static_cast<int>(threadIdx.x), threads = g.blocks * kThreads;
  PollLoop wait(channel, session.epoch);
  g.tasks[rank].send(session, thread, threads);
  g.tasks[rank].receive(session, thread, threads, wait);
  end_epoch(session, word_lines(g.tasks[rank].count), block, g.blocks);
}

int32_t blocks_for(int64_t count) {
  return static_cast<int32_t>(std::clamp<int64_t>((word_lines(count) + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

// The chunk of a message that begins at word `first`.
Gather message_chunk(const GatherArgs& args, int64_t first) {
  const int64_t count = std::min(args.count - first, words_of_lines(args.channel->layout.lines));
  return {args.mine + first, args.out + first, count, args.count};
}

}  // namespace

void gather(const GatherArgs& args, Stream stream) {
  for (int64_t first = 0; first < args.count; first += words_of_lines(args.channel->layout.lines)) {
    const Gather piece = message_chunk(args, first);
    const GatherLaunch one{{*args.channel}, {piece}, blocks_for(piece.count)};
    const Launch how{.grid = dim3(static_cast<unsigned>(one.blocks)), .threads = kThreads, .early = true};
    launch("gather", gather_kernel, how, stream, one);
  }
}

void gather_virtual(const GatherArgs* ranks, int count, Stream stream) {
  const int64_t step = words_of_lines(ranks[0].channel->layout.lines);
  for (int64_t first = 0; first < ranks[0].count; first += step) {
    GatherLaunch all{};
    for (int r = 0; r < count; ++r) {
      all.channels[r] = *ranks[r].channel;
      all.tasks[r] = message_chunk(ranks[r], first);
    }
    all.blocks = blocks_for(all.tasks[0].count);
    const Launch how{.grid = dim3(static_cast<unsigned>(all.blocks * count)), .threads = kThreads, .cooperative = true};
    launch("gather", gather_kernel, how, stream, all);
  }
}

}  // namespace swiftspec::cuda
