// Runs the kernels of one instruction set on fixed cases and writes what they give, to be compared with what other
// instruction sets and other processors give.
//   kernel_cases       lists the instruction sets that run here: name, arithmetic
//   kernel_cases NAME  runs the cases with the kernels of that name; the results go to the standard output
#include <cstdio>
#include <cstring>

#include "cases.h"
#include "cpu.h"

int main(int count, char** arguments) {
  using namespace tokserve;
  if (count == 1) {
    for (const Kernels* table : runnable_kernels()) std::printf("%s %s\n", table->name, table->arithmetic);
    return 0;
  }
  for (const Kernels* table : runnable_kernels()) {
    if (count != 2 || std::strcmp(table->name, arguments[1]) != 0) continue;
    cases::Results results(stdout);
    cases::run_rows(*table, results);
    cases::run_products(*table, results);
    cases::run_wna16(*table, results);
    cases::run_lora(*table, results);
    cases::run_attention(*table, results);
    cases::run_recurrent(*table, results);
    cases::run_gradients(*table, results);
    cases::run_sampling(*table, results);
    return 0;
  }
  std::fprintf(stderr, "usage: %s [NAME]\n", arguments[0]);
  return 2;
}
