// Device memory of the emulated GPU: the CPU's, which other processes can open.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace simt {

struct Mapping {
  int file;
  size_t bytes;
};

inline std::unordered_map<void*, Mapping>& mappings() {
  static std::unordered_map<void*, Mapping> all;
  return all;
}

inline void* map(int file, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) return nullptr;
  mappings()[data] = {file, bytes};
  return data;
}

}  // namespace simt

struct cudaIpcMemHandle_t {
  char reserved[64];
};
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2;

inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  const int file = memfd_create("emulated GPU", 0);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return cudaErrorInvalidValue;
  *data = simt::map(file, bytes);
  return *data == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}

inline cudaError_t cudaFree(void* data) {
  try {  // destructors call this
    simt::Machine::get().finish();
  } catch (const std::runtime_error& fault) {
    std::fprintf(stderr, "%s\n", fault.what());
    std::abort();
  }
  const auto found = simt::mappings().find(data);
  if (found == simt::mappings().end()) return cudaErrorInvalidValue;
  munmap(data, found->second.bytes);
  close(found->second.file);
  simt::mappings().erase(found);
  return cudaSuccess;
}

inline cudaError_t cudaMemset(void* data, int value, size_t bytes) { return std::memset(data, value, bytes), cudaSuccess; }

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  simt::Machine::get().finish();
  return std::memcpy(to, from, bytes), cudaSuccess;
}

// A handle is the path under which the kernel shows another process's open file.
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  const auto found = simt::mappings().find(data);
  if (found == simt::mappings().end()) return cudaErrorInvalidValue;
  std::snprintf(handle->reserved, sizeof handle->reserved, "/proc/%d/fd/%d", getpid(), found->second.file);
  return cudaSuccess;
}

inline cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
  const int file = open(handle.reserved, O_RDWR);
  if (file < 0) return cudaErrorInvalidValue;
  *data = simt::map(file, static_cast<size_t>(lseek(file, 0, SEEK_END)));
  return *data == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}

inline cudaError_t cudaIpcCloseMemHandle(void* data) { return cudaFree(data); }
inline cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
inline cudaError_t cudaHostGetDevicePointer(void** seen, void* data, unsigned) { return *seen = data, cudaSuccess; }

inline constexpr char kBus[] = "0000:00:00.0";
inline cudaError_t cudaDeviceGetPCIBusId(char* name, int bytes, int) {
  std::snprintf(name, static_cast<size_t>(bytes), "%s", kBus);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* name) {
  *device = 0;
  return std::string(name) == kBus ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
