// Every launch, on one page. Raw pointers, sizes and (on the device) a stream; the callers have checked the arguments.
// A launch is asynchronous and throws std::runtime_error when CUDA refuses it.
#pragma once

#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to this, so no CUDA header is needed here

namespace swiftspec {

using Stream = CUstream_st*;

namespace host {

// out[row, token] = bits(row_key(seed, stream, positions[row]), token); out is rows x vocab, contiguous.
void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab,
                uint32_t* out);

}  // namespace host

namespace cuda {

void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab,
                uint32_t* out, Stream cuda_stream);

}  // namespace cuda

}  // namespace swiftspec
