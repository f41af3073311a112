#include "bind/array.h"

#include <cstring>
#include <span>

#include "bind/dlpack.h"

namespace swiftspec::binding {

namespace {

// The DLPack exchange functions of a Python type, or null.
const dlpack::Exchange* exchange_of(PyTypeObject* type) {
  static PyTypeObject* known = nullptr;  // guarded by the GIL; caches the most frequent type, which is kept alive
  static const dlpack::Exchange* functions = nullptr;
  if (type == known) return functions;
  const auto found = py::reinterpret_steal<py::object>(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), dlpack::kAttribute));
  if (!found) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* table = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(found.ptr(), dlpack::kCapsule));
  if (table == nullptr) throw py::error_already_set();
  if (table->major != dlpack::kMajor || table->from_object == nullptr) return nullptr;
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0) Py_INCREF(type);
  known = type;
  return functions = table;
}

// The element type of a buffer format; `bits` is 0 for unsupported formats.
Type type_of(const char* format, int64_t bytes) {
  const char letter = format == nullptr ? 'B' : format[std::strspn(format, "@=<")];
  const auto bits = static_cast<uint8_t>(8 * bytes);
  if (letter == '?') return kBool;
  if (std::strchr("bhilqn", letter) != nullptr) return {dlpack::kInt, bits};
  if (std::strchr("BHILQN", letter) != nullptr) return {dlpack::kUInt, bits};
  if (std::strchr("efd", letter) != nullptr) return {dlpack::kFloat, bits};
  return {0, 0};
}

std::string name_of(Type type) {
  switch (type.code) {
    case dlpack::kBool: return "bool";
    case dlpack::kInt: return "int" + std::to_string(type.bits);
    case dlpack::kUInt: return "uint" + std::to_string(type.bits);
    case dlpack::kFloat: return "float" + std::to_string(type.bits);
    case dlpack::kBfloat: return "bfloat" + std::to_string(type.bits);
    default: return "elements of " + std::to_string(type.bits) + " bits";
  }
}

std::string name_of(Device device) {
  if (!device.gpu) return "cpu";
  return device.index < 0 ? "a GPU" : "cuda:" + std::to_string(device.index);
}

template <class Sizes>
std::string name_of(const Sizes& sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + (size == kAny ? "*" : std::to_string(size));
  }
  return text + "]";
}

}  // namespace

bool Array::read(py::handle object) {
  return PyObject_CheckBuffer(object.ptr()) != 0 ? read_buffer(object) : read_tensor(object);
}

bool Array::read_tensor(py::handle object) {
  const dlpack::Exchange* functions = exchange_of(Py_TYPE(object.ptr()));
  if (functions == nullptr) return false;
  dlpack::Tensor tensor;
  rank_ = kInaccessible;
  if (functions->from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();  // a meta tensor or an unsupported type: `at` raises when it is used
    return true;
  }
  const bool gpu = tensor.device_type == dlpack::kCuda;
  if (tensor.rank > kMaxDims || tensor.lanes != 1) return true;
  if (!gpu && tensor.device_type != dlpack::kCpu && tensor.device_type != dlpack::kPinned) return true;
  data_ = static_cast<uint8_t*>(tensor.data) + tensor.byte_offset;
  type_ = {tensor.code, tensor.bits};
  device_ = {gpu, gpu ? tensor.device_index : 0};
  rank_ = tensor.rank;
  int64_t inner = 1;
  for (auto dim = static_cast<size_t>(rank_); dim-- > 0;) {
    shape_[dim] = tensor.shape[dim];
    strides_[dim] = tensor.strides == nullptr ? inner : tensor.strides[dim];
    inner *= shape_[dim];
  }
  return true;
}

bool Array::read_buffer(py::handle object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_RECORDS_RO) != 0) throw py::error_already_set();
  const int64_t bytes = buffer.itemsize;
  type_ = type_of(buffer.format, bytes);
  bool plain = buffer.ndim <= kMaxDims && type_.bits != 0;
  data_ = buffer.buf;
  device_ = kCpu;
  rank_ = buffer.ndim;
  for (int dim = 0; plain && dim < rank_; ++dim) {
    shape_[static_cast<size_t>(dim)] = buffer.shape[dim];
    strides_[static_cast<size_t>(dim)] = buffer.strides[dim] / bytes;
    plain = buffer.strides[dim] % bytes == 0;
  }
  PyBuffer_Release(&buffer);
  return plain;
}

int64_t Array::count() const {
  int64_t count = 1;
  for (int dim = 0; dim < rank_; ++dim) count *= size(dim);
  return count;
}

// A dimension of size 1 may have any stride, and an empty array is always contiguous.
bool Array::contiguous() const {
  int64_t inner = 1;
  if (count() == 0) return true;
  for (int dim = rank_ - 1; dim >= 0; --dim) {
    if (size(dim) != 1 && stride(dim) != inner) return false;
    inner *= size(dim);
  }
  return true;
}

bool Array::is(Type type, Shape shape) const {
  if (type_ != type && !(type == kInt32 && type_ == kUint32)) return false;
  if (static_cast<int>(shape.size()) != rank_) return false;
  for (int dim = 0; dim < rank_; ++dim) {
    const int64_t wanted = shape.begin()[dim];
    if (wanted != kAny && wanted != size(dim)) return false;
  }
  return true;
}

void* Array::at(Type type, Device device, const char* name, Shape shape) const {
  if (!is(type, shape) || device_ != device) fail(type, device, name, shape, "");
  if (!contiguous()) fail(type, device, name, shape, ", not contiguous");
  return data_;
}

void* Array::flat(Type type, Device device, const char* name) const {
  if (type_ != type || device_ != device) fail(type, device, name, {kAny}, "");
  if (!contiguous()) fail(type, device, name, {kAny}, ", not contiguous");
  return data_;
}

void* Array::rows_at(Type type, Device device, const char* name, Shape shape) const {
  if (!is(type, shape) || device_ != device) fail(type, device, name, shape, "");
  if (size(rank_ - 1) > 1 && stride(rank_ - 1) != 1) fail(type, device, name, shape, ", rows not contiguous");
  return data_;
}

void* Array::strided_at(Type type, Device device, const char* name, Shape shape) const {
  if (!is(type, shape) || device_ != device) fail(type, device, name, shape, "");
  return data_;
}

std::string Array::text() const {
  if (rank_ == kInaccessible) return "a tensor that has no memory here";
  return name_of(type_) + name_of(std::span(shape_.data(), static_cast<size_t>(rank_)));
}

void Array::fail(Type type, Device device, const char* name, Shape shape, const char* layout) const {
  const std::string wanted = name_of(type) + name_of(shape) + " on " + name_of(device);
  const std::string where = device_ == device || rank_ == kInaccessible ? "" : " on " + name_of(device_);
  throw py::value_error(std::string(name) + ": expected " + wanted + ", got " + text() + where + layout);
}

}  // namespace swiftspec::binding
