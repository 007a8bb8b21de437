// Reads tensors that Python passes, by the functions that DLPack exchanges: address, size and type come in
// one call, in a part of the time that a tensor's methods take. The structs are those of dlpack.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "bindings/keyed.h"

namespace tierstore {

struct DLTensor {
  void* data;
  std::int32_t device_type, device_id, ndim;
  std::uint8_t type_code, type_bits;
  std::uint16_t type_lanes;
  const std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};

struct DLPackExchange {
  std::uint32_t major, minor;
  const DLPackExchange* older;
  void *allocate, *own_of_object, *object_of_own;
  int (*describe)(void* object, DLTensor* out);
};

// IntegerTensor has integers that the core can read as they are, and the shape that the object had.
struct IntegerTensor {
  IntegerArgs args;
  std::int32_t ndim;
  const std::int64_t* shape;  // which lives as long as the object
};

inline bool IsContiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t apart = 1;
  for (std::int32_t at = tensor.ndim - 1; at >= 0; --at) {
    if (tensor.shape[at] != 1 && tensor.strides[at] != apart) return false;
    apart *= tensor.shape[at];
  }
  return true;
}

// Returns nothing for an object that is no tensor of int32 or int64, contiguous in the memory of this
// machine.
inline std::optional<IntegerTensor> IntegersOf(pybind11::handle object) {
  constexpr std::uint32_t kMajor = 1;
  constexpr std::int32_t kCpu = 1;
  constexpr std::uint8_t kInt = 0;
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  const auto capsule = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(type, name));
  const auto* exchange = static_cast<const DLPackExchange*>(
      capsule ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api") : nullptr);
  DLTensor tensor;
  if (exchange == nullptr || exchange->major != kMajor || exchange->describe == nullptr ||
      exchange->describe(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  std::int64_t count = 1;
  for (std::int32_t at = 0; at < tensor.ndim; ++at) count *= tensor.shape[at];
  const Address address = reinterpret_cast<Address>(tensor.data) + tensor.byte_offset;
  const bool is_int32 = tensor.type_bits == 32;
  if (tensor.device_type != kCpu || tensor.type_code != kInt || (!is_int32 && tensor.type_bits != 64) ||
      (count > 0 && (address == 0 || !IsContiguous(tensor))))
    return std::nullopt;
  return IntegerTensor{{address, count, is_int32}, tensor.ndim, tensor.shape};
}

}  // namespace tierstore
