// Runs the kernel made of AMX instructions on a processor without them: each raises SIGILL, and the handler here
// decodes it and does what it does, with the checks for which a processor would raise #UD or #GP. The results must have
// the bits of the same kernel on software tiles. Built and run by test_amx.py, from this file and csrc/gemm_amx.cpp.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "amx.h"
#include "kernels.h"

namespace {

struct {
  bool configured = false;
  int rows[8] = {}, row_bytes[8] = {};
  alignas(64) uint8_t tile[8][16][64] = {};
} state;
std::map<std::string, long> executed;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "amx_traps: %s\n", what);
  _exit(2);
}

void check(bool condition, const char* what) {
  if (!condition) fail(what);
}

// A VEX instruction of three prefix bytes with registers and memory of 64-bit mode.
struct Instruction {
  const uint8_t* code;
  greg_t* registers;
  int length = 5;  // C4, two bytes, opcode, ModRM

  int map() const { return code[1] & 31; }
  int prefix() const { return code[2] & 3; }
  int vvvv() const { return ~(code[2] >> 3) & 15; }
  int wide() const { return code[2] >> 7 | (code[2] >> 2 & 1); }  // W or L
  int opcode() const { return code[3]; }
  int mod() const { return code[4] >> 6; }
  int reg() const { return (code[4] >> 3 & 7) | (~code[1] >> 7 & 1) << 3; }
  int rm() const { return (code[4] & 7) | (~code[1] >> 5 & 1) << 3; }

  int64_t value(int number) const {
    static const int index[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[index[number]];
  }

  // The address, and the index register's value times its scale.
  int64_t address(int64_t& index) {
    check(mod() != 3, "a memory operand is expected");
    int base = rm();
    index = 0;
    if ((base & 7) == 4) {
      const uint8_t sib = code[length++];
      base = (sib & 7) | (~code[1] >> 5 & 1) << 3;
      const int at = (sib >> 3 & 7) | (~code[1] >> 6 & 1) << 3;
      if (at != 4) index = value(at) << (sib >> 6);
    }
    check(mod() != 0 || (base & 7) != 5, "an address without a base is not emulated");
    int64_t displacement = 0;
    if (mod() == 1) displacement = static_cast<int8_t>(code[length++]);
    if (mod() == 2) {
      int32_t four;
      std::memcpy(&four, code + length, 4);
      displacement = four;
      length += 4;
    }
    return value(base) + displacement;
  }
};

void configure(const uint8_t* shapes) {
  check(shapes[0] == 1 && shapes[1] == 0, "the palette is not 1");
  for (int i = 2; i < 64; i++) {
    const bool reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
    check(!reserved || shapes[i] == 0, "a reserved byte of the configuration is set");
  }
  for (int i = 0; i < 8; i++) {
    state.row_bytes[i] = shapes[16 + 2 * i] | shapes[17 + 2 * i] << 8;
    state.rows[i] = shapes[48 + i];
    check(state.row_bytes[i] <= 64 && state.row_bytes[i] % 4 == 0 && state.rows[i] <= 16, "a tile is too large");
    check((state.rows[i] == 0) == (state.row_bytes[i] == 0), "a tile is empty in one direction only");
  }
  std::memset(state.tile, 0, sizeof state.tile);
  state.configured = true;
}

void check_tile(int tile) { check(state.configured && tile < 8 && state.rows[tile] > 0, "a tile is not configured"); }

void dot(int c, int a, int b) {
  for (const int tile : {a, b, c}) check_tile(tile);
  check(a != b && b != c && a != c, "tiles must differ");
  check(state.rows[c] == state.rows[a] && state.row_bytes[c] == state.row_bytes[b], "sums have another shape");
  check(state.row_bytes[a] == 64 && state.rows[b] == 16 && state.row_bytes[b] == 64, "a step is not 32 elements by 16");
  tokserve::amx_software::multiply_tile(reinterpret_cast<uint16_t*>(state.tile[a]),
                                        reinterpret_cast<uint16_t*>(state.tile[b]),
                                        reinterpret_cast<float*>(state.tile[c]), state.rows[c]);
}

void move(int tile, char* memory, int64_t stride, bool store) {
  check_tile(tile);
  if (!store) std::memset(state.tile[tile], 0, sizeof state.tile[tile]);
  for (int r = 0; r < state.rows[tile]; r++) {
    if (store) std::memcpy(memory + r * stride, state.tile[tile][r], state.row_bytes[tile]);
    else std::memcpy(state.tile[tile][r], memory + r * stride, state.row_bytes[tile]);
  }
}

void emulate(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Instruction in{reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers};
  check(in.code[0] == 0xc4 && in.map() == 2 && !in.wide(), "not an AMX instruction");
  check(in.opcode() == 0x5c || in.vvvv() == 0, "vvvv is used");
  int64_t index = 0;
  if (in.opcode() == 0x5c && in.prefix() == 2 && in.mod() == 3) {
    dot(in.reg(), in.rm(), in.vvvv());
    executed["tdpbf16ps"]++;
  } else if (in.opcode() == 0x4b && (in.prefix() == 3 || in.prefix() == 2)) {
    char* memory = reinterpret_cast<char*>(in.address(index));
    move(in.reg(), memory, index, in.prefix() == 2);
    executed[in.prefix() == 2 ? "tilestored" : "tileloadd"]++;
  } else if (in.opcode() == 0x49 && in.prefix() == 3 && in.mod() == 3 && in.rm() == 0) {
    check_tile(in.reg());
    std::memset(state.tile[in.reg()], 0, sizeof state.tile[0]);
    executed["tilezero"]++;
  } else if (in.opcode() == 0x49 && in.prefix() == 0 && in.code[4] == 0xc0) {
    state.configured = false;
    executed["tilerelease"]++;
  } else if (in.opcode() == 0x49 && in.prefix() == 0 && in.reg() == 0) {
    configure(reinterpret_cast<const uint8_t*>(in.address(index)));
    executed["ldtilecfg"]++;
  } else {
    fail("an unknown instruction");
  }
  registers[REG_RIP] += in.length;
}

using tokserve::Gate;

// Values that end where memory does: to read past them ends the program.
class Values {
 public:
  explicit Values(size_t count) : bytes_((count * 2 + kPage - 1) / kPage * kPage) {
    pages_ =
        static_cast<char*>(mmap(nullptr, bytes_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    check(pages_ != MAP_FAILED && mprotect(pages_ + bytes_, kPage, PROT_NONE) == 0, "no memory");
    first_ = reinterpret_cast<uint16_t*>(pages_ + bytes_) - count;
  }
  Values(const Values&) = delete;
  ~Values() { munmap(pages_, bytes_ + kPage); }
  uint16_t* data() const { return first_; }
  uint16_t* begin() const { return first_; }
  uint16_t* end() const { return reinterpret_cast<uint16_t*>(pages_ + bytes_); }

 private:
  static constexpr size_t kPage = 4096;
  size_t bytes_;
  char* pages_;
  uint16_t* first_;
};

void fill(std::mt19937& random, const Values& values) {
  for (uint16_t& x : values) x = static_cast<uint16_t>((random() & 0x807f) | (119 + random() % 16) << 7);
}

// A packed weight [panels][pairs of K][64][2], zero beyond k.
void fill_weight(std::mt19937& random, const Values& packed, int64_t panels, int64_t k) {
  fill(random, packed);
  for (int64_t panel = 0; k % 2 && panel < panels; panel++) {
    uint16_t* last = packed.data() + (panel * (k + 1) + k - 1) * tokserve::kPanel;
    for (int64_t i = 0; i < tokserve::kPanel; i++) last[2 * i + 1] = 0;
  }
}

std::vector<uint16_t> multiply(const tokserve::Kernels& kernels, tokserve::LinearArgs args, int64_t panels) {
  std::vector<uint16_t> out(args.m * args.n, 0xffff);
  const int64_t size = (kernels.linear_scratch(args) + 63) / 64 * 64;
  char* scratch = static_cast<char*>(std::aligned_alloc(64, size));
  std::memset(scratch, 0xff, size);
  args.out = out.data();
  for (int64_t row = 0; row < args.m; row += tokserve::kRowBlock) kernels.linear(args, row, 0, panels, scratch);
  std::free(scratch);
  return out;
}

void compare(std::mt19937& random, int64_t m, int64_t n, int64_t k, Gate gate) {
  const int64_t width = gate == Gate::none ? tokserve::kPanel : tokserve::kGatedPanel, panels = (n + width - 1) / width;
  const Values x(m * k), packed(panels * ((k + 1) / 2 * 2) * tokserve::kPanel), bias(2 * n);
  fill(random, x);
  fill_weight(random, packed, panels, k);
  fill(random, bias);
  const auto bf16 = tokserve::DType::bf16;
  const tokserve::LinearArgs args{bf16, bf16, gate, x.data(), packed.data(), bias.data(), nullptr, m, n, k, k, false};
  const bool equal =
      multiply(tokserve::amx::table, args, panels) == multiply(tokserve::amx_software::table, args, panels);
  if (!equal || state.configured) {
    std::printf("M %ld, N %ld, K %ld: %s\n", static_cast<long>(m), static_cast<long>(n), static_cast<long>(k),
                equal ? "tiles were not released" : "bits differ");
    std::exit(1);
  }
}

}  // namespace

int main() {
  struct sigaction action{};
  action.sa_sigaction = emulate;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
  std::mt19937 random(0);
  const int64_t shapes[][3] = {{1, 64, 32},   {1, 130, 257},   {2, 3, 1},     {15, 64, 64},
                               {16, 70, 31},  {17, 64, 96},    {33, 100, 45}, {48, 64, 300},
                               {70, 130, 33}, {130, 65, 1000}, {257, 64, 160}};
  for (const auto& [m, n, k] : shapes) {
    compare(random, m, n, k, Gate::none);
    compare(random, m, n, k, Gate::silu);
  }
  for (const auto& [name, count] : executed) std::printf("%s %ld\n", name.c_str(), count);
}
