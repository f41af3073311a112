// What the GPUs of one machine see of each other: memory that kernels of other processes write (CUDA IPC) for the
// inboxes of a group, and pinned memory for the word that says why somebody gave up. All throw std::runtime_error.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace swiftspec::cuda {

using PeerHandle = std::array<char, 64>;

// Memory of the current device, zeroed, that others can open. To be freed when nobody has it open any more.
class Inbox {
 public:
  explicit Inbox(int64_t bytes);
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  void* data() const { return data_; }
  PeerHandle handle() const;

 private:
  void* data_ = nullptr;
};

// Another process's inbox, as the current device reaches it.
class PeerInbox {
 public:
  explicit PeerInbox(const PeerHandle& handle);
  ~PeerInbox();
  PeerInbox(const PeerInbox&) = delete;
  PeerInbox& operator=(const PeerInbox&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Host memory that the devices of this process read and write.
class PinnedMemory {
 public:
  PinnedMemory(void* data, int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

 private:
  void* data_;
};

void* device_pointer(void* pinned);  // the address at which the current device has pinned host memory

int current_device();          // its index, or -1 where there is none
void use_device(int ordinal);  // makes it this thread's: torch has a CUDA runtime of its own, with its own idea of it
std::string bus_id();          // of the current device: what all processes of the machine call it

// Whether the current device reaches the memory of another one, or is it. Where this process cannot see that: false.
bool can_access_peer(const std::string& other_bus_id);

}  // namespace swiftspec::cuda
