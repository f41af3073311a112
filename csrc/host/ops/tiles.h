// Splits products of any number of rows and blocks into the tiles of product.h and product_int8.h.

template <Format W, int M, int B, class In>
inline void product_tile(const In& in, const Operand& w, float* out, int64_t stride) {
  if constexpr (std::is_same_v<In, QuantizedRows>) {
    product_quantized<W, M, B>(in, w, out, stride);
  } else if constexpr (W == Format::bf16) {
    product_bf16<M, B>(in, w, out, stride);
  } else if constexpr (W == Format::int4 || W == Format::float4) {
    product_nibbles<W, M, B>(in, w, out, stride);
  } else if constexpr (W == Format::int8) {
    product_int8<M, B>(in, w, out, stride);
  } else {
    product_f32<M, B>(in, w, out, stride);
  }
}

// M rows against `blocks` blocks, B blocks at a time.
template <Format W, int M, int B, class In>
void product_blocks(const In& in, Operand w, int64_t blocks, float* out, int64_t stride) {
  for (; blocks >= B; blocks -= B) {
    product_tile<W, M, B>(in, w, out, stride);
    w = advance(w, B);
    out += B * kLanes;
  }
  if constexpr (B > 1) {
    if (blocks > 0) product_blocks<W, M, B / 2>(in, w, blocks, out, stride);
  }
}

// Blocks per tile such that all accumulators fit the registers. Quantised rows need two more registers per block.
template <class In>
constexpr int max_blocks_per_tile(int rows) {
  int blocks = !std::is_same_v<In, QuantizedRows> ? kBlocks : unroll_factor(rows) > 1 ? kBlocks / 4 : kBlocks / 2;
  while (blocks > 1 && rows * blocks > kAccumulators) blocks /= 2;
  return blocks;
}

// out[r, 16 b + i] = x[r] . W_b[i] for up to kRowTile rows and `blocks` blocks.
template <Format W, int M = kRowTile, class In>
void product(const In& in, const Operand& w, int64_t rows, int64_t blocks, float* out, int64_t stride) {
  if (rows == M) {
    product_blocks<W, M, max_blocks_per_tile<In>(M)>(in, w, blocks, out, stride);
  } else if constexpr (M > 1) {
    product<W, M - 1>(in, w, rows, blocks, out, stride);
  }
}

inline void dispatch_product(Format format, const QuantizedRows& in, const Operand& w, int64_t rows, int64_t blocks,
                             float* out, int64_t stride) {
  if (format == Format::int4) return product<Format::int4>(in, w, rows, blocks, out, stride);
  if (format == Format::float4) return product<Format::float4>(in, w, rows, blocks, out, stride);
  product<Format::int8>(in, w, rows, blocks, out, stride);
}

template <class X>
void dispatch_product(Format format, const Inputs<X>& in, const Operand& w, int64_t rows, int64_t blocks, float* out,
                      int64_t stride) {
  if (format == Format::bf16) {
    product<Format::bf16>(in, w, rows, blocks, out, stride);
  } else if (format == Format::int4) {
    product<Format::int4>(in, w, rows, blocks, out, stride);
  } else if (format == Format::int8) {
    product<Format::int8>(in, w, rows, blocks, out, stride);
  } else if (format == Format::float4) {
    product<Format::float4>(in, w, rows, blocks, out, stride);
  } else if constexpr (std::is_same_v<X, float>) {
    product<Format::f32>(in, w, rows, blocks, out, stride);
  }
}
