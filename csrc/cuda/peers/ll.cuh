// Access to LL lines in memory shared by several GPUs, waiting with a timeout, and the end of an epoch.
#pragma once

#include "cuda/peers/channel.h"
#include "cuda/ptx.cuh"

namespace swiftspec::cuda {

struct DeviceMemory {
  __device__ static ll::Line load(const ll::Line& line) {
    ll::Line seen;
    ptx::load_system(&line, seen.half[0], seen.half[1]);
    return seen;
  }
  __device__ static void store(ll::Line& line, const ll::Line& value) {
    ptx::store_system(&line, value.half[0], value.half[1]);
  }
};

// One of the waiting lanes of a warp checks the clock and the error word, which is in the host's memory, every
// kPollsPerCheck polls. After the timeout it stores the fault in the error word and traps, which the host sees as a
// device error.
class PollLoop {
 public:
  __device__ PollLoop(const Channel& channel, uint64_t epoch) : channel_(channel), epoch_(epoch) {}

  __device__ bool keep_waiting(int source) {
    if (++polls_ % kPollsPerCheck != 0) return true;
    const uint64_t now = ptx::nanoseconds();
    if (start_ == 0) start_ = now;
    if (!ptx::is_first_active_lane()) return true;
    const bool late = now - start_ > ptx::load_system(channel_.error_word + 1) * 1000000ull;
    if (!late && ptx::load_system(channel_.error_word) == 0) return true;
    if (late) report_timeout(source);
    __trap();
    return false;
  }

 private:
  static constexpr uint32_t kPollsPerCheck = 1024;

  __device__ void report_timeout(int source) const {
    const ll::Fault mine{ll::Reason::kTimeout, static_cast<uint8_t>(channel_.rank), static_cast<uint8_t>(source),
                           static_cast<uint8_t>(ll::slot_of(epoch_, protocol_params())), static_cast<uint32_t>(epoch_)};
    ptx::store_system(channel_.error_word, ll::encode_fault(mine));
    __threadfence_system();
  }

  const Channel& channel_;
  uint64_t epoch_, start_ = 0;
  uint32_t polls_ = 0;
};

// Ends the epoch after everything has been received; all threads of all `ctas` of a rank call it. The last CTA advances
// the epoch, which is stored in device memory so that replays of a graph advance it too.
__device__ inline void end_epoch(const Session<DeviceMemory>& session, int64_t used, int cta, int ctas) {
  session.clean(used, static_cast<int64_t>(cta) * blockDim.x + threadIdx.x, static_cast<int64_t>(ctas) * blockDim.x);
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(session.channel.done, 1) + 1 != static_cast<uint32_t>(ctas)) return;
  *session.channel.done = 0;
  *session.channel.epoch = session.epoch + 1;
}

}  // namespace swiftspec::cuda
