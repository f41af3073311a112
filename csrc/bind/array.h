// Array arguments: a torch tensor or NumPy array converts to an Array, which knows its address, device, type and
// layout. `at` checks these and returns the address, or raises ValueError with one line such as "mask: expected
// int32[8, 4] on cpu, got int64[8, 4]".
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace swiftspec::binding {

namespace py = pybind11;

// An element type, as in DLPack.
struct Type {
  uint8_t code, bits;
  bool operator==(const Type&) const = default;
};
inline constexpr Type kBool{6, 8}, kUint8{1, 8}, kInt8{0, 8}, kInt32{0, 32}, kUint32{1, 32}, kInt64{0, 64},
    kFloat32{2, 32}, kFloat64{2, 64}, kFloat16{2, 16}, kBfloat16{4, 16};

// Maps a C++ element type to its `type` and to its storage type `C`.
struct Bfloat16;
template <class T>
struct Element;
template <>
struct Element<bool> {
  static constexpr Type type = kBool;
  using C = uint8_t;
};
template <>
struct Element<uint8_t> {
  static constexpr Type type = kUint8;
  using C = uint8_t;
};
template <>
struct Element<int32_t> {
  static constexpr Type type = kInt32;
  using C = int32_t;
};
template <>
struct Element<uint32_t> {
  static constexpr Type type = kInt32;  // `at` accepts both signs, since torch has few uint32 operations
  using C = uint32_t;
};
template <>
struct Element<int64_t> {
  static constexpr Type type = kInt64;
  using C = int64_t;
};
template <>
struct Element<float> {
  static constexpr Type type = kFloat32;
  using C = float;
};
template <>
struct Element<double> {
  static constexpr Type type = kFloat64;
  using C = double;
};
template <>
struct Element<Bfloat16> {
  static constexpr Type type = kBfloat16;
  using C = uint16_t;
};

// The memory in which an array lies: that of the CPU or of one GPU.
struct Device {
  bool gpu;
  int index;  // GPU ordinal, negative without a GPU
  bool operator==(const Device&) const = default;
};
inline constexpr Device kCpu{false, 0};

inline constexpr int64_t kAny = -1;  // in a shape: any size
using Shape = std::initializer_list<int64_t>;

class Array {
 public:
  static constexpr int kMaxDims = 6, kInaccessible = -1;

  Array() = default;

  // Reads a tensor or an array without copying; the caller keeps it alive. Returns false for other objects.
  bool read(py::handle object);

  Type type() const { return type_; }
  int rank() const { return rank_; }
  int64_t size(int dim) const { return dim < rank_ ? shape_[static_cast<size_t>(dim)] : 1; }
  int64_t stride(int dim) const { return strides_[static_cast<size_t>(dim)]; }  // in elements
  int64_t count() const;
  int64_t bytes() const { return count() * (type_.bits / 8); }
  bool contiguous() const;

  // The address of a contiguous array of this type, shape and device; raises ValueError otherwise.
  template <class T>
  typename Element<T>::C* at(Device device, const char* name, Shape shape) const {
    return static_cast<typename Element<T>::C*>(at(Element<T>::type, device, name, shape));
  }
  void* at(Type type, Device device, const char* name, Shape shape) const;

  // The same for a contiguous array of any shape.
  void* flat(Type type, Device device, const char* name) const;

  // The same for an array of which only the rows are contiguous.
  void* rows_at(Type type, Device device, const char* name, Shape shape) const;

  // The same for an array of any strides.
  void* strided_at(Type type, Device device, const char* name, Shape shape) const;

  // The address, unchecked.
  template <class T = void>
  T* data() const {
    return static_cast<T*>(data_);
  }

  std::string text() const;  // such as "int64[8, 4]"

 private:
  bool read_tensor(py::handle object);
  bool read_buffer(py::handle object);
  bool is(Type type, Shape shape) const;
  [[noreturn]] void fail(Type type, Device device, const char* name, Shape shape, const char* layout) const;

  void* data_ = nullptr;
  Type type_{};
  Device device_{};
  int rank_ = 0;  // or kInaccessible
  std::array<int64_t, kMaxDims> shape_{}, strides_{};
};

using MaybeArray = std::optional<Array>;

// The address, or null without an array.
template <class T>
typename Element<T>::C* at_or_null(const MaybeArray& array, Device device, const char* name, Shape shape) {
  return array ? array->at<T>(device, name, shape) : nullptr;
}

// The element type of a model.
inline Type model_type(bool is_f32) { return is_f32 ? kFloat32 : kBfloat16; }

}  // namespace swiftspec::binding

namespace pybind11::detail {

template <>
struct type_caster<swiftspec::binding::Array> {
  PYBIND11_TYPE_CASTER(swiftspec::binding::Array, const_name("torch.Tensor | numpy.ndarray"));
  bool load(handle object, bool) { return value.read(object); }
};

}  // namespace pybind11::detail
