// The part of DLPack's C interface that array.cpp uses. A Python array type has `__dlpack_c_exchange_api__`, a capsule
// of the function table below; its layout is that of DLPack 1.
#pragma once

#include <cstdint>

namespace swiftspec::binding::dlpack {

inline constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
inline constexpr const char* kCapsule = "dlpack_exchange_api";
inline constexpr uint32_t kMajor = 1;

enum Device : int32_t { kCpu = 1, kCuda = 2, kPinned = 3 };
enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Tensor {
  void* data;
  int32_t device_type, device_index;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

struct Exchange {
  uint32_t major, minor;
  void* older;
  void (*allocate)();
  void (*managed_from_object)();
  void (*managed_to_object)();
  int (*from_object)(void* object, Tensor* out);  // borrows shape and strides from the object
  void (*current_stream)();
};

}  // namespace swiftspec::binding::dlpack
