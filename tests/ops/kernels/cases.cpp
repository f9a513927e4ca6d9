#include "cases.h"

#include <stdexcept>

namespace tokserve::cases {

namespace {

uint32_t special(const Format& format, Random& from, Specials which) {
  const uint32_t least_normal = uint32_t{1} << format.mantissa;
  const uint32_t quiet = format.infinity | least_normal >> 1;
  const uint32_t values[] = {
      quiet,
      format.infinity | 1,
      format.infinity,  // the second is a signalling one
      format.infinity - 1,
      least_normal,
      least_normal - 1,
      1,
      0,
      static_cast<uint32_t>(from.below(least_normal)),  // subnormal
  };
  const int64_t first = which == Specials::all ? 0 : 3, count = sizeof values / sizeof *values;
  return values[first + from.below(count - first)] | (from.below(2) ? format.sign : 0);
}

bool is_floating(Kind kind) { return kind <= Kind::f16; }

}  // namespace

Array random(Kind kind, int64_t count, Random& from, Range range) {
  Array array(kind, count);
  const Format format = format_of(kind);
  for (int64_t i = 0; i < count; i++) {
    const auto exponent = static_cast<uint64_t>(format.bias + range.low + from.below(range.high - range.low + 1));
    const auto mantissa = static_cast<uint64_t>(from.below(int64_t{1} << format.mantissa));
    array.set(i, exponent << format.mantissa | mantissa | (from.below(2) ? format.sign : 0));
  }
  return array;
}

Array integers(Kind kind, int64_t count, Random& from, int64_t low, int64_t high) {
  Array array(kind, count);
  for (int64_t i = 0; i < count; i++) array.set(i, static_cast<uint64_t>(low + from.below(high - low + 1)));
  return array;
}

Array numbers(const std::vector<float>& values) {
  Array array(Kind::f32, static_cast<int64_t>(values.size()));
  std::memcpy(array.as<float>(), values.data(), array.bytes());
  return array;
}

Array copy_of(const Array& array) {
  Array copy(array.kind(), array.count());
  std::memcpy(copy.as<char>(), array.as<char>(), array.bytes());
  return copy;
}

Array with_specials(const Array& array, Random& from, int64_t every, Specials which) {
  Array copy = copy_of(array);
  const Format format = format_of(array.kind());
  for (int64_t i = 0; i < array.count(); i++) {
    if (from.below(every) == 0) copy.set(i, special(format, from, which));
  }
  return copy;
}

void Results::add(const std::string& name, const Array& array) {
  Array written = copy_of(array);
  if (is_floating(array.kind())) {
    const Format format = format_of(array.kind());
    for (int64_t i = 0; i < array.count(); i++) {
      uint32_t bits = 0;
      std::memcpy(&bits, array.at(i), size_of(array.kind()));
      if ((bits & ~format.sign) > format.infinity)
        written.set(i, format.infinity | uint32_t{1} << (format.mantissa - 1));
    }
  }
  std::fprintf(file_, "%s %s %lld\n", name.c_str(), name_of(array.kind()), static_cast<long long>(array.count()));
  if (std::fwrite(written.as<char>(), 1, written.bytes(), file_) != static_cast<size_t>(written.bytes())) {
    throw std::runtime_error("cannot write the results");
  }
}

}  // namespace tokserve::cases
