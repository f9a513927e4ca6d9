// Whether this machine's AMX may be used, and the single tile products with which that is checked.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tokserve {

// c [rows][16] += a [rows][32] times b [16][16][2]: one tile instruction on bfloat16, 1 to 16 rows.
using TileProduct = std::function<void(const uint16_t* a, const uint16_t* b, float* c, int rows)>;

namespace amx {
void multiply_tile(const uint16_t* a, const uint16_t* b, float* c, int rows);
}
namespace amx_software {  // runs where avx512_bf16 does
void multiply_tile(const uint16_t* a, const uint16_t* b, float* c, int rows);
}

// Whether `product` has the bits of the software tiles on random tiles, special values included; any NaN equals any
// other.
bool tiles_agree(const TileProduct& product);

// Empty if the kernels named amx may be used, else the reason why not. The first call requests the tile state from the
// system, for this process and its threads, and compares the processor's tiles with the software ones.
const std::string& amx_status();

}  // namespace tokserve
