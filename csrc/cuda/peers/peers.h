// Memory shared between the GPUs of one machine: inboxes that kernels of other processes write (CUDA IPC), and pinned
// host memory for the error word. Errors are thrown as std::runtime_error.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace swiftspec::cuda {

using PeerHandle = std::array<char, 64>;

// Allocation granularity: the driver may place smaller allocations in a shared block, and a handle opens the whole
// block. Every inbox has at least this size.
constexpr int64_t kAllocationBytes = 2 << 20;

// Zeroed memory of the current device that other processes can open. Free it only after all of them have closed it.
// Throws if the environment variable SWIFTSPEC_PEERS is 0.
class Inbox {
 public:
  explicit Inbox(int64_t bytes);
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  void* data() const { return data_; }
  PeerHandle handle() const;
  std::string read(int64_t offset, int64_t bytes) const;
  void clear();  // zeroes all of it

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};

// The inbox of another process, mapped for the current device.
class PeerInbox {
 public:
  explicit PeerInbox(const PeerHandle& handle);
  ~PeerInbox();
  PeerInbox(const PeerInbox&) = delete;
  PeerInbox& operator=(const PeerInbox&) = delete;
  void* data() const { return data_; }
  // Copies `bytes` to the first kAllocationBytes of the inbox, and waits until they have left this device.
  void write(int64_t offset, const std::string& bytes);

 private:
  void* data_ = nullptr;
};

// Registers host memory for access by the devices of this process.
class PinnedMemory {
 public:
  PinnedMemory(void* data, int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

 private:
  void* data_;
};

void* device_pointer(void* pinned);  // the address of pinned host memory on the current device

int current_device();          // its index, or -1 without a device
void use_device(int ordinal);  // for this thread; torch has its own CUDA runtime, whose current device may differ
std::string bus_id();          // PCI bus id of the current device, the same in all processes of the machine

// Whether the current device is the other device or can access its memory; false if the other one is not visible to
// this process.
bool can_access_peer(const std::string& other_bus_id);

}  // namespace swiftspec::cuda
