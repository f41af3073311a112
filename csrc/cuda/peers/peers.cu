#include "cuda/peers/peers.h"

#include <cuda_runtime.h>

#include <cstring>

#include "cuda/check.cuh"

namespace swiftspec::cuda {
namespace {

// Allocation granularity: the driver may place smaller allocations in a shared block, and a handle opens the whole
// block.
constexpr int64_t kAllocationBytes = 2 << 20;

}  // namespace

static_assert(sizeof(PeerHandle) == sizeof(cudaIpcMemHandle_t));

Inbox::Inbox(int64_t bytes) {
  const auto size = static_cast<size_t>((bytes + kAllocationBytes - 1) / kAllocationBytes * kAllocationBytes);
  check(cudaMalloc(&data_, size), "inbox");
  check(cudaMemset(data_, 0, size), "inbox");
  check(cudaDeviceSynchronize(), "inbox");
}

Inbox::~Inbox() { cudaFree(data_); }

PeerHandle Inbox::handle() const {
  cudaIpcMemHandle_t native;
  check(cudaIpcGetMemHandle(&native, data_), "inbox");
  PeerHandle handle;
  std::memcpy(handle.data(), &native, sizeof native);
  return handle;
}

PeerInbox::PeerInbox(const PeerHandle& handle) {
  cudaIpcMemHandle_t native;
  std::memcpy(&native, handle.data(), sizeof native);
  check(cudaIpcOpenMemHandle(&data_, native, cudaIpcMemLazyEnablePeerAccess), "a peer's inbox");
}

PeerInbox::~PeerInbox() { cudaIpcCloseMemHandle(data_); }

PinnedMemory::PinnedMemory(void* data, int64_t bytes) : data_(data) {
  check(cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable | cudaHostRegisterMapped), "pin");
}

PinnedMemory::~PinnedMemory() { cudaHostUnregister(data_); }

void* device_pointer(void* pinned) {
  void* there = nullptr;
  check(cudaHostGetDevicePointer(&there, pinned, 0), "pinned memory");
  return there;
}

void use_device(int ordinal) { check(cudaSetDevice(ordinal), "device"); }

int current_device() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) return device;
  cudaGetLastError();  // clears the error, which the caller handles
  return -1;
}

std::string bus_id() {
  char name[32] = {};
  check(cudaDeviceGetPCIBusId(name, sizeof name, current_device()), "peers");
  return name;
}

bool can_access_peer(const std::string& other_bus_id) {
  const int device = current_device();
  int other = 0, can = 0;
  if (cudaDeviceGetByPCIBusId(&other, other_bus_id.c_str()) != cudaSuccess) {
    cudaGetLastError();  // clears the error, which the caller handles
    return false;
  }
  if (other == device) return true;
  check(cudaDeviceCanAccessPeer(&can, device, other), "peers");
  return can != 0;
}

}  // namespace swiftspec::cuda
