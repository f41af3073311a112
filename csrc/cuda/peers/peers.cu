#include "cuda/peers/peers.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "cuda/check.cuh"

namespace swiftspec::cuda {

static_assert(sizeof(PeerHandle) == sizeof(cudaIpcMemHandle_t));

namespace {

// SWIFTSPEC_PEERS=0 makes groups sum by a library, for links that lose writes only now and then.
void check_switch() {
  const char* value = std::getenv("SWIFTSPEC_PEERS");
  if (value != nullptr && std::strcmp(value, "0") == 0) throw std::runtime_error("SWIFTSPEC_PEERS=0");
}

}  // namespace

Inbox::Inbox(int64_t bytes) : bytes_((bytes + kAllocationBytes - 1) / kAllocationBytes * kAllocationBytes) {
  check_switch();
  check(cudaMalloc(&data_, static_cast<size_t>(bytes_)), "inbox");
  clear();
}

Inbox::~Inbox() { cudaFree(data_); }

PeerHandle Inbox::handle() const {
  cudaIpcMemHandle_t native;
  check(cudaIpcGetMemHandle(&native, data_), "inbox");
  PeerHandle handle;
  std::memcpy(handle.data(), &native, sizeof native);
  return handle;
}

std::string Inbox::read(int64_t offset, int64_t bytes) const {
  std::string out(static_cast<size_t>(bytes), '\0');
  check(cudaMemcpy(out.data(), static_cast<const char*>(data_) + offset, out.size(), cudaMemcpyDeviceToHost), "inbox");
  return out;
}

void Inbox::clear() {
  check(cudaMemset(data_, 0, static_cast<size_t>(bytes_)), "inbox");
  check(cudaDeviceSynchronize(), "inbox");
}

PeerInbox::PeerInbox(const PeerHandle& handle) {
  cudaIpcMemHandle_t native;
  std::memcpy(&native, handle.data(), sizeof native);
  check(cudaIpcOpenMemHandle(&data_, native, cudaIpcMemLazyEnablePeerAccess), "a peer's inbox");
}

PeerInbox::~PeerInbox() { cudaIpcCloseMemHandle(data_); }

void PeerInbox::write(int64_t offset, const std::string& bytes) {
  char* to = static_cast<char*>(data_) + offset;
  check(cudaMemcpy(to, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "a peer's inbox");
  check(cudaDeviceSynchronize(), "a peer's inbox");
}

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
