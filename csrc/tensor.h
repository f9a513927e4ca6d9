// Torch tensors read through DLPack's C table (DLPack 1.3, `torch.Tensor.__dlpack_c_exchange_api__`): no torch headers,
// about 50 ns a tensor, no reference taken.  And the checks every binding makes before a kernel touches memory.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "kernels.h"

namespace tokserve {

// The stable layout that dlpack.h gives these structures.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLExchange {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  int (*managed_from_object)(void*, void**);
  int (*object_from_managed)(void*, void**);
  int (*view)(void* object, DLTensor* out);  // 0, or -1 with a Python exception set
  void* stream;
};

struct Exchange {
  const DLExchange* api = nullptr;
  PyTypeObject* tensor = nullptr;  // torch.Tensor
};
inline Exchange exchange;

enum class Kind { f32, bf16, f16, i32, i64, boolean, u8, i8, other };

// A CPU tensor for the length of one call.
class Tensor {
 public:
  bool read(PyObject* object) noexcept {
    if (!exchange.api || !PyObject_TypeCheck(object, exchange.tensor)) return false;
    if (exchange.api->view(object, &t_) != 0) {
      PyErr_Clear();
      return false;
    }
    return t_.device_type == 1 && t_.lanes == 1;
  }

  int ndim() const { return t_.ndim; }
  int64_t size(int i) const { return t_.shape[i]; }
  int64_t stride(int i) const { return t_.strides[i]; }
  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(t_.data) + t_.byte_offset);
  }
  int64_t item() const { return t_.bits / 8; }
  Kind kind() const {
    switch (t_.code << 8 | t_.bits) {
      case 2 << 8 | 32: return Kind::f32;
      case 4 << 8 | 16: return Kind::bf16;
      case 2 << 8 | 16: return Kind::f16;
      case 0 << 8 | 32: return Kind::i32;
      case 0 << 8 | 64: return Kind::i64;
      case 6 << 8 | 8: return Kind::boolean;
      case 1 << 8 | 8: return Kind::u8;
      case 0 << 8 | 8: return Kind::i8;
      default: return Kind::other;
    }
  }
  // Dimensions from `from` on are contiguous.
  bool dense(int from = 0) const {
    int64_t expected = 1;
    for (int i = t_.ndim - 1; i >= from; i--) {
      if (t_.shape[i] != 1 && t_.strides[i] != expected) return elements() == 0;
      expected *= t_.shape[i];
    }
    return true;
  }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < t_.ndim; i++) n *= t_.shape[i];
    return n;
  }

 private:
  DLTensor t_;
};

// Raises ValueError "<op>: <what>" unless `right`.
inline void require(bool right, const char* op, const char* what) {
  if (!right) throw nanobind::value_error((std::string(op) + ": " + what).c_str());
}

// `t` is a dense tensor of this kind and shape (-1: any size).
inline void require(const Tensor& t, Kind kind, std::initializer_list<int64_t> shape, const char* op,
                    const char* what) {
  bool right = t.kind() == kind && t.ndim() == static_cast<int>(shape.size()) && t.dense();
  int i = 0;
  for (const int64_t size : shape) {
    right = right && (size < 0 || t.size(i) == size);
    i++;
  }
  require(right, op, what);
}

// The kind of a floating point tensor the kernels compute with.
inline DType float_type(const Tensor& t, const char* op) {
  const Kind kind = t.kind();
  require(kind == Kind::f32 || kind == Kind::bf16 || kind == Kind::f16, op, "takes float32, bfloat16 or float16");
  return static_cast<DType>(kind);
}
static_assert(static_cast<int>(Kind::f32) == static_cast<int>(DType::f32));
static_assert(static_cast<int>(Kind::bf16) == static_cast<int>(DType::bf16));
static_assert(static_cast<int>(Kind::f16) == static_cast<int>(DType::f16));

}  // namespace tokserve

namespace nanobind::detail {

template <>
struct type_caster<tokserve::Tensor> {
  NB_TYPE_CASTER(tokserve::Tensor, const_name("torch.Tensor"))
  bool from_python(handle source, uint32_t, cleanup_list*) noexcept { return value.read(source.ptr()); }
};

}  // namespace nanobind::detail
