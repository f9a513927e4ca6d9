// What the kernels' test cases share: random elements that are the same on every processor, arrays, and how results are
// written.  Nothing here computes in floating point: an element is drawn as its bits.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace tokserve::cases {

enum class Kind : int { f32, bf16, f16, i8, u8, i32, i64 };

inline constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

inline Kind kind_of(DType dtype) { return static_cast<Kind>(dtype); }
inline const char* name_of(Kind kind) {
  constexpr const char* names[] = {"f32", "bf16", "f16", "i8", "u8", "i32", "i64"};
  return names[static_cast<int>(kind)];
}
inline const char* name_of(DType dtype) { return name_of(kind_of(dtype)); }
inline int64_t size_of(Kind kind) {
  constexpr int64_t sizes[] = {4, 2, 2, 1, 1, 4, 8};
  return sizes[static_cast<int>(kind)];
}
inline int64_t size_of(DType dtype) { return size_of(kind_of(dtype)); }

// The parts of a floating-point format.
struct Format {
  int mantissa, bias;
  uint32_t infinity, sign;
};
inline Format format_of(Kind kind) {
  if (kind == Kind::f32) return {23, 127, 0x7f800000, 0x80000000};
  if (kind == Kind::bf16) return {7, 127, 0x7f80, 0x8000};
  return {10, 15, 0x7c00, 0x8000};
}

// SplitMix64 (Steele et al., OOPSLA 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// Exponents that a random element may have.
struct Range {
  int low = -4, high = 1;
};

// Memory of exactly this many elements, aligned like a tensor.  Its bytes are 0xff: not a number, if it is read too
// early.
class Array {
 public:
  Array(Kind kind, int64_t count)
      : kind_(kind), count_(count), data_(static_cast<char*>(std::aligned_alloc(64, (bytes() + 64) / 64 * 64))) {
    std::memset(data_, 0xff, bytes());
  }
  Array(Array&& other) noexcept
      : kind_(other.kind_), count_(other.count_), data_(std::exchange(other.data_, nullptr)) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(kind_, other.kind_), std::swap(count_, other.count_), std::swap(data_, other.data_);
    return *this;
  }
  ~Array() { std::free(data_); }

  Kind kind() const { return kind_; }
  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * size_of(kind_); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  char* at(int64_t element) const { return data_ + element * size_of(kind_); }
  void set(int64_t element, uint64_t bits) { std::memcpy(at(element), &bits, size_of(kind_)); }  // little endian

 private:
  Kind kind_;
  int64_t count_;
  char* data_;
};

inline Array scratch(int64_t bytes) { return Array(Kind::u8, bytes); }

Array random(Kind kind, int64_t count, Random& from, Range range = {});
inline Array random(DType dtype, int64_t count, Random& from, Range range = {}) {
  return random(kind_of(dtype), count, from, range);
}
// Integers in [low, high].
Array integers(Kind kind, int64_t count, Random& from, int64_t low, int64_t high);
Array numbers(const std::vector<float>& values);
// A copy with the element replaced by one that is special about one time in `every`: not a number, infinite, subnormal,
// zero, the largest or the smallest; or only by one of those that are finite.
enum class Specials { all, finite };
Array with_specials(const Array& array, Random& from, int64_t every, Specials which = Specials::all);
Array copy_of(const Array& array);

// Results of the kernels: a line "name kind count" before the bytes of each array.  All NaN are written
// as the same one: their sign and payload depend on the processor.
class Results {
 public:
  explicit Results(std::FILE* file) : file_(file) {}
  void add(const std::string& name, const Array& array);

 private:
  std::FILE* file_;
};

template <class... Arguments>
std::string text(const char* format, Arguments... arguments) {
  char buffer[256];
  std::snprintf(buffer, sizeof buffer, format, arguments...);
  return buffer;
}

// Each runs its kernels on all of its cases; a result's name begins with the kernel's.
void run_rows(const Kernels& kernels, Results& results);
void run_products(const Kernels& kernels, Results& results);
void run_wna16(const Kernels& kernels, Results& results);
void run_lora(const Kernels& kernels, Results& results);
void run_attention(const Kernels& kernels, Results& results);
void run_recurrent(const Kernels& kernels, Results& results);
void run_gradients(const Kernels& kernels, Results& results);
void run_sampling(const Kernels& kernels, Results& results);

}  // namespace tokserve::cases
