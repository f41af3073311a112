// How an array of Python's reaches a kernel: a torch tensor or a numpy array is an argument of type Array, which knows
// where it lies and how; `at` checks that against what the kernel wants and gives the address. What is wrong is said in
// one line: "mask: expected int32[8, 4] on cpu, got int64[8, 4]".
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace swiftspec::binding {

namespace py = pybind11;

// The type of an element, as DLPack has it.
struct Type {
  uint8_t code, bits;
  bool operator==(const Type&) const = default;
};
inline constexpr Type kBool{6, 8}, kUint8{1, 8}, kInt32{0, 32}, kUint32{1, 32}, kInt64{0, 64}, kFloat32{2, 32},
    kFloat64{2, 64}, kFloat16{2, 16}, kBfloat16{4, 16};

// What a kernel knows elements as: `type` is what they are called, `C` what they are in C++.
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
  static constexpr Type type = kInt32;  // torch computes with no others: 32 bits, whatever their sign
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

// Where an array lies: the CPU's memory, or that of one GPU.
struct Place {
  bool gpu;
  int index;  // of the GPU, below 0 where there is none
  bool operator==(const Place&) const = default;
};
inline constexpr Place kCpu{false, 0};

inline constexpr int64_t kAny = -1;  // in a shape: whatever it is
using Shape = std::initializer_list<int64_t>;

class Array {
 public:
  static constexpr int kMostDims = 6, kElsewhere = -1;

  Array() = default;

  // Reads a tensor or an array; false where it is neither. Whoever passes it keeps it alive.
  bool read(py::handle object);

  Type type() const { return type_; }
  int rank() const { return rank_; }
  int64_t size(int dim) const { return dim < rank_ ? shape_[static_cast<size_t>(dim)] : 1; }
  int64_t stride(int dim) const { return strides_[static_cast<size_t>(dim)]; }  // in elements
  int64_t count() const;
  int64_t bytes() const { return count() * (type_.bits / 8); }
  bool contiguous() const;

  // The address of contiguous elements of this type, shape and place. ValueError where they are others.
  template <class T>
  typename Element<T>::C* at(Place place, const char* name, Shape shape) const {
    return static_cast<typename Element<T>::C*>(at(Element<T>::type, place, name, shape));
  }
  void* at(Type type, Place place, const char* name, Shape shape) const;

  // The same of contiguous elements in whatever shape.
  void* flat(Type type, Place place, const char* name) const;

  // The same of rows [.., columns] that need not touch each other; the elements of a row do.
  void* rows_at(Type type, Place place, const char* name, Shape shape) const;

  // The same of elements that may lie anywhere.
  void* strided_at(Type type, Place place, const char* name, Shape shape) const;

  // The address as it is, for what has been checked.
  template <class T = void>
  T* data() const {
    return static_cast<T*>(data_);
  }

  std::string text() const;  // "int64[8, 4]"

 private:
  bool read_tensor(py::handle object);
  bool read_buffer(py::handle object);
  bool is(Type type, Shape shape) const;
  [[noreturn]] void refuse(Type type, Place place, const char* name, Shape shape, const char* layout) const;

  void* data_ = nullptr;
  Type type_{};
  Place place_{};
  int rank_ = 0;  // or kElsewhere
  std::array<int64_t, kMostDims> shape_{}, strides_{};
};

using MaybeArray = std::optional<Array>;

// Null where there is no array.
template <class T>
typename Element<T>::C* at_or_null(const MaybeArray& array, Place place, const char* name, Shape shape) {
  return array ? array->at<T>(place, name, shape) : nullptr;
}

// Of a model's own type.
inline Type model_type(bool wide) { return wide ? kFloat32 : kBfloat16; }

}  // namespace swiftspec::binding

namespace pybind11::detail {

template <>
struct type_caster<swiftspec::binding::Array> {
  PYBIND11_TYPE_CASTER(swiftspec::binding::Array, const_name("torch.Tensor | numpy.ndarray"));
  bool load(handle object, bool) { return value.read(object); }
};

}  // namespace pybind11::detail
