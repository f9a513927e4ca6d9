// Bindings of what a delta of weights is made with and applied by.  They take numpy arrays, and run in the calling
// thread without the interpreter lock: callers divide tensors among threads of their own.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "bind.h"

namespace nb = nanobind;

namespace tokserve {

namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kColumns = 4096;  // places that share a row's factor: COLUMNS of tokserve/rl/sums.py

// The splitmix64 finalizer of (n + 1) times its increment, made odd.
uint64_t mixed(uint64_t n) {
  uint64_t z = (n + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return (z ^ z >> 31) | 1;
}

// The coefficients of ascending places.
class Coefficients {
 public:
  uint64_t at(int64_t place) {
    if (const int64_t row = place / kColumns; row != row_) {
      row_ = row;
      factor_ = mixed(kColumns + row);
    }
    return factor_ * mixed(place % kColumns);
  }

 private:
  int64_t row_ = -1;
  uint64_t factor_ = 0;
};

DType type_of(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  require(name == "float16", "difference", "takes float32, bfloat16 or float16");
  return DType::f16;
}
size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

template <class Bits>
uint64_t describe(const DifferenceArgs& a, int64_t start, int64_t count, int64_t* indices) {
  const Bits* old = static_cast<const Bits*>(a.old);
  const Bits* values = static_cast<const Bits*>(a.values);
  Coefficients coefficients;
  uint64_t added = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t place = a.places[i];
    indices[i] = start + place;
    added += coefficients.at(start + place) * (uint64_t{values[i]} - uint64_t{old[place]});
  }
  return added;
}

std::pair<int64_t, uint64_t> difference(const AnyArray& old, const std::string& dtype, const AnyArray& fresh,
                                        const std::string& fresh_dtype, int64_t start, const Array<uint32_t>& places,
                                        const Array<int64_t>& indices,
                                        const nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>& values) {
  const char* op = "difference";
  const DType type = type_of(dtype), fresh_type = type_of(fresh_dtype);
  const size_t n = old.size();
  require(n < size_t{1} << 32 && start >= 0, op, "takes pieces of less than 2**32 elements");
  require(old.itemsize() == size_of(type) && values.itemsize() == size_of(type), op,
          "old and values must have the size of their dtype");
  require(fresh.itemsize() == size_of(fresh_type) && fresh.size() == n, op, "the new elements must be as many");
  require(places.size() >= n && indices.size() >= n && values.size() >= n, op, "the outputs must have room for all");
  const DifferenceArgs a{type,          fresh_type,   old.data(), fresh.data(), static_cast<int64_t>(n),
                         places.data(), values.data()};
  const nb::gil_scoped_release unlocked;
  const int64_t count = kernels().difference(a);
  const uint64_t added = type == DType::f32 ? describe<uint32_t>(a, start, count, indices.data())
                                            : describe<uint16_t>(a, start, count, indices.data());
  return {count, added};
}

template <class Bits>
uint64_t change(const Array<const int64_t>& indices, const Array<const Bits>& old, const Array<const Bits>& fresh) {
  require(old.size() == indices.size() && fresh.size() == indices.size(), "change", "the arrays must be as long");
  const nb::gil_scoped_release unlocked;
  Coefficients coefficients;
  uint64_t added = 0;
  for (size_t i = 0; i < indices.size(); i++) {
    added += coefficients.at(indices.data()[i]) * (uint64_t{fresh.data()[i]} - uint64_t{old.data()[i]});
  }
  return added;
}

// How many gaps are above 255, and the escapes that steps of 8 and of 16 bits need.
nb::tuple count_escapes(const Array<const int64_t>& indices) {
  int64_t wide = 0, narrow_escapes = 0, wide_escapes = 0, last = -1;
  {
    const nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < indices.size(); i++) {
      const int64_t gap = indices.data()[i] - last;
      last = indices.data()[i];
      if (gap <= 255) continue;
      wide++;
      narrow_escapes += (gap - 1) / 255;
      wide_escapes += (gap - 1) / 65535;
    }
  }
  return nb::make_tuple(wide, narrow_escapes, wide_escapes);
}

template <class Step>
void encode_steps(const Array<const int64_t>& indices, const Array<Step>& steps) {
  constexpr int64_t limit = static_cast<Step>(-1);
  bool fits = true;
  {
    const nb::gil_scoped_release unlocked;
    Step *next = steps.data(), *end = next + steps.size();
    int64_t last = -1;
    for (size_t i = 0; i < indices.size() && fits; i++) {
      int64_t gap = indices.data()[i] - last;
      last = indices.data()[i];
      fits = gap > 0 && (gap - 1) / limit < end - next;
      if (!fits) break;
      for (; gap > limit; gap -= limit) *next++ = 0;
      *next++ = static_cast<Step>(gap);
    }
    fits = fits && next == end;
  }
  require(fits, "encode_steps", "the places must ascend, and the steps be as many as they need");
}

// Writes the places; returns how many the steps say, of which those that fit are written, and the last place.
template <class Step>
std::pair<int64_t, int64_t> decode_steps(const Array<const Step>& steps, const Array<int64_t>& indices) {
  constexpr int64_t limit = static_cast<Step>(-1);
  const nb::gil_scoped_release unlocked;
  const int64_t room = indices.size();
  int64_t place = -1, count = 0, last = -1;
  for (size_t i = 0; i < steps.size(); i++) {
    const Step step = steps.data()[i];
    place += step ? step : limit;
    if (!step) continue;
    if (count < room) indices.data()[count] = place;
    last = place;
    count++;
  }
  return {count, last};
}

// Where elements of a weight, counted row by row from `first_row` on, lie in its packed memory.
void packed_positions(const Tensor& elements, int64_t first_row, int64_t rows, int64_t columns, int64_t panel,
                      int64_t depth, bool gated, const Tensor& out) {
  const char* op = "packed_positions";
  require(elements, Kind::i64, {-1}, op, "elements must be contiguous int64");
  require(out, Kind::i64, {elements.size(0)}, op, "out must be like elements");
  require(first_row >= 0 && rows > 0 && columns > 0 && panel > 0 && depth > 0, op, "sizes must be positive");
  require(!gated || (panel % 2 == 0 && rows % 2 == 0), op, "a gated weight has panels and rows in two halves");
  const int64_t n = elements.size(0), half = panel / 2, gates = rows / 2;
  const int64_t height = (columns + depth - 1) / depth * depth;
  const int64_t* from = elements.data<int64_t>();
  int64_t* to = out.data<int64_t>();
  bool inside = true;
  {
    const nb::gil_scoped_release unlocked;
    int64_t row = 0, begin = 0, start = 0;  // of the row that is known: its first element, and its place
    bool known = false;
    for (int64_t i = 0; i < n; i++) {
      if (!known || from[i] < begin || from[i] >= begin + columns) {
        if (from[i] < 0 || from[i] / columns >= rows - first_row) {
          inside = false;
          break;
        }
        row = first_row + from[i] / columns;
        begin = from[i] / columns * columns;
        int64_t lane = row;
        if (gated) {
          const int64_t within = row < gates ? row : row - gates;
          lane = within / half * panel + within % half + (row < gates ? 0 : half);
        }
        start = (lane - lane % panel) * height + lane % panel * depth;
        known = true;
      }
      const int64_t column = from[i] - begin;
      to[i] = depth == 1 ? start + column * panel : start + column / depth * (panel * depth) + column % depth;
    }
  }
  require(inside, op, "an element lies outside of the weight");
}

}  // namespace

void bind_deltas(nb::module_& m) {
  m.def("difference", difference, nb::arg("old").noconvert(), nb::arg("dtype"), nb::arg("fresh").noconvert(),
        nb::arg("fresh_dtype"), nb::arg("start"), nb::arg("places").noconvert(), nb::arg("indices").noconvert(),
        nb::arg("values").noconvert(),
        "(how many elements differ, what that adds to the sum), with their indices, from `start` on, and new bits.");
  m.def("change", change<uint8_t>, nb::arg("indices").noconvert(), nb::arg("old").noconvert(),
        nb::arg("fresh").noconvert());
  m.def("change", change<uint16_t>, nb::arg("indices").noconvert(), nb::arg("old").noconvert(),
        nb::arg("fresh").noconvert());
  m.def("change", change<uint32_t>, nb::arg("indices").noconvert(), nb::arg("old").noconvert(),
        nb::arg("fresh").noconvert());
  m.def("count_escapes", count_escapes, nb::arg("indices").noconvert());
  m.def("encode_steps", encode_steps<uint8_t>, nb::arg("indices").noconvert(), nb::arg("steps").noconvert());
  m.def("encode_steps", encode_steps<uint16_t>, nb::arg("indices").noconvert(), nb::arg("steps").noconvert());
  m.def("decode_steps", decode_steps<uint8_t>, nb::arg("steps").noconvert(), nb::arg("indices").noconvert());
  m.def("decode_steps", decode_steps<uint16_t>, nb::arg("steps").noconvert(), nb::arg("indices").noconvert());
  m.def("packed_positions", packed_positions);
}

}  // namespace tokserve
