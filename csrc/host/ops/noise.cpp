#include "common/noise.h"

#include "kernels_host.h"

namespace swiftspec::host {

void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab,
                uint32_t* out) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint32_t key = noise::row_key(seed, stream, static_cast<uint32_t>(positions[row]));
    uint32_t* line = out + row * vocab;
    for (int64_t token = 0; token < vocab; ++token) {
      line[token] = noise::bits(key, static_cast<uint32_t>(token));
    }
  }
}

}  // namespace swiftspec::host
