#include "amx.h"

#include "cpu.h"

#if defined(TOKSERVE_HAS_avx512_bf16)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstring>
#include <random>
#endif

namespace tokserve {

#if defined(TOKSERVE_HAS_avx512_bf16)

namespace {

constexpr int kRows = 16, kPairs = 16, kColumns = 16;

struct Operands {
  uint16_t a[kRows][kPairs * 2];
  uint16_t b[kPairs][kColumns * 2];
  float c[kRows][kColumns];
};

// The kind of numbers in a tile. The small ones are multiples of 2^-71 (c: of 2^-142), below and above the smallest
// normal number: every sum below that is exact, so that what is flushed to zero does not depend on when it is rounded.
enum class Numbers { ordinary, special, small, large };

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A float32 of random sign and fraction with an exponent of `range` values from `exponent` on; its upper half is a
// bfloat16.
uint32_t random_bits(std::mt19937& random, uint32_t exponent, uint32_t range) {
  return (random() & 0x807fffff) | (exponent + random() % range) << 23;
}

uint32_t scaled_integer(std::mt19937& random, uint32_t limit, int power) {
  const float x = __builtin_ldexpf(static_cast<float>(random() % limit), power) * (random() % 2 ? 1.0f : -1.0f);
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

uint32_t number(std::mt19937& random, Numbers kind, bool sum) {
  static const uint32_t special[] = {0x00000000, 0x80000000, 0x00010000, 0x807f0000, 0x00800000,
                                     0x80800000, 0x3f800000, 0x7f7f0000, 0xff7f0000, 0x7f800000,
                                     0xff800000, 0x7fc00000, 0xffc10000, 0x7f810000};
  switch (kind) {
    case Numbers::small: return sum ? scaled_integer(random, 1 << 24, -142) : scaled_integer(random, 256, -71);
    case Numbers::large: return sum ? random_bits(random, 230, 25) : random_bits(random, 182, 16);
    case Numbers::special:
      if (random() % 32 == 0) return special[random() % (sizeof special / sizeof *special)];
      break;
    case Numbers::ordinary: break;
  }
  return random_bits(random, 119, 16);
}

Operands random_operands(std::mt19937& random, Numbers kind) {
  Operands all;
  for (auto& row : all.a) {
    for (uint16_t& x : row) x = static_cast<uint16_t>(number(random, kind, false) >> 16);
  }
  for (auto& row : all.b) {
    for (uint16_t& x : row) x = static_cast<uint16_t>(number(random, kind, false) >> 16);
  }
  for (auto& row : all.c) {
    for (float& x : row) x = from_bits(number(random, kind, true));
  }
  return all;
}

bool same(const Operands& left, const Operands& right) {
  for (int r = 0; r < kRows; r++) {
    for (int n = 0; n < kColumns; n++) {
      const float x = left.c[r][n], y = right.c[r][n];
      if (x != x && y != y) continue;
      if (std::memcmp(&x, &y, sizeof x) != 0) return false;
    }
  }
  return true;
}

}  // namespace

bool tiles_agree(const TileProduct& product) {
  std::mt19937 random(0);
  for (const Numbers kind : {Numbers::ordinary, Numbers::special, Numbers::small, Numbers::large}) {
    for (int rows = 1; rows <= kRows; rows++) {
      Operands expected = random_operands(random, kind), result = expected;
      amx_software::multiply_tile(expected.a[0], expected.b[0], expected.c[0], rows);
      product(result.a[0], result.b[0], result.c[0], rows);
      if (!same(expected, result)) return false;
    }
  }
  return true;
}

#endif

namespace {

#if !defined(TOKSERVE_HAS_avx512_bf16)
std::string check_status() { return "the processor has no AMX"; }
#elif !defined(TOKSERVE_HAS_amx)
std::string check_status() { return "the extension was built by a compiler without AMX"; }
#else

// Whether the processor has AMX for bfloat16: CPUID leaf 7, EDX bits 22 (AMX-BF16) and 24 (AMX-TILE).
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}

// Whether the system saves a thread's tiles: XCR0 bits 17 (TILECFG) and 18 (TILEDATA). To be called only where there is
// AMX.
bool system_saves_tiles() {
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3;
}

// Requests the tile state from Linux for this process, its threads and its forks. Returns errno, or 0.
int request_tile_state() {
#if defined(__linux__)
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}

std::string check_status() {
  if (!runs_avx512_bf16() || !has_amx()) return "the processor has no AMX";
  if (!system_saves_tiles()) return "the system does not save AMX tiles";
  if (const int error = request_tile_state())
    return std::string("the system denies the AMX tile state: ") + std::strerror(error);
  if (!tiles_agree(amx::multiply_tile)) return "the processor's AMX tiles differ from their definition";
  return "";
}
#endif

}  // namespace

const std::string& amx_status() {
  static const std::string status = check_status();
  return status;
}

}  // namespace tokserve
