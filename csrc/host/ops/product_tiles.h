// Products on matrix tiles: of int8-quantised rows with int4, int8 and float4 weights, and of bfloat16 rows with bfloat16
// weights. Integer sums are exact, and scales are applied in the order of product_int8.h, so the results of quantised
// rows are bitwise those of the other ISA levels. bfloat16 sums have an order of their own; for a row's bits not to
// depend on other rows, all products with a bfloat16 matrix run on tiles.

constexpr int64_t kMaxTileRows = 16;    // largest number of rows of a tile
constexpr int64_t kMaxTileGroup = 256;  // largest group that fits TileBuffers

// Inputs of a tile: a divisor of the group.
inline int64_t tile_inputs(int64_t group) { return group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 16; }

// Whether tiles are faster for this number of rows. Small groups leave most of a tile empty.
inline bool suits_tiles(int64_t rows, int64_t group) {
  return group <= kMaxTileGroup && rows >= (group % 64 == 0 ? 6 : 8);
}

// Rows quantised to int8, in the order in which tiles load them.
struct TileRows {
  static constexpr int64_t kMaxRows = 256;  // of a product

  const int8_t* bytes;  // [K / tile_inputs][rows][tile_inputs], and kMaxTileRows - 1 further rows that may be read
  const float* scales;  // [K / group][rows]
  const float* sums;    // [K / group][rows], sums of each group's bytes
  int64_t rows;

  TileRows from(int64_t row, const Operand& w) const {
    return {bytes + row * tile_inputs(w.group), scales + row, sums + row, rows};
  }
};

// Buffers of products with B blocks, apart from TileProduct, whose initialisation would set them to zero.
template <int B>
struct TileBuffers {
  // of two groups: [group / Inputs][B][Inputs / 4][16 outputs][4 inputs]
  alignas(64) int8_t codes[2][B * kMaxTileGroup * kLanes];
  // of two tiles of rows: [tile_rows][B][16 outputs]
  alignas(64) int32_t sums[2][kMaxTileRows * B * kLanes];
};

// A product of rows with B blocks; a tile has `Inputs` inputs. For each tile of rows the loop multiplies the codes of a
// group and scales the sums of the previous tile of rows; with the first one it expands the codes of the next group,
// less the zero points. The three are independent and use different execution units. The loop uses few tile registers:
// while another thread runs on the same core, loads into many of them take several times as long.
template <Format W, int Inputs, int B>
struct TileProduct {
  const TileRows& in;
  const Operand& w;
  int64_t rows, tile_rows;  // rows of this product, and of a tile
  float* out;
  int64_t stride;
  TileBuffers<B>& buffers;

  const int64_t groups = w.k / w.group, steps = w.group / Inputs, distance = prefetch_distance(w, B);

  // A tile of rows of which the sums are stored.
  struct Unscaled {
    int64_t group = 0, row = 0, count = 0;  // count 0: none
  };

  int8_t* codes_at(int64_t g, int64_t step, int64_t block) {
    return buffers.codes[g % 2] + (step * B + block) * Inputs * kLanes;
  }

  void expand(int64_t g, int64_t step, int64_t block) {
    constexpr int64_t kEightInputsBytes = 8 * kLanes * bits_of(W) / 8;
    const uint8_t* p = w.data + block * w.block_bytes + (g * w.group + step * Inputs) / 8 * kEightInputsBytes;
    const I zero = W != Format::int4 ? broadcast_int(0x80808080)
                                     : mul(to_int(load_zeros(w, block * groups + g)), broadcast_int(0x01010101));
    int8_t* to = codes_at(g, step, block);
#pragma GCC unroll 8
    for (int i = 0; i < Inputs; i += 8, p += kEightInputsBytes, to += 8 * kLanes) {
      I first, second;
      load_bytes<W>(p, first, second);
      prefetch(p + distance);
      if (W == Format::int8) prefetch(p + 64 + distance);
      store_int(to, sub_bytes(first, zero));
      store_int(to + 4 * kLanes, sub_bytes(second, zero));
    }
  }

  void expand_group(int64_t g) {
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t block = 0; block < B; ++block) expand(g, step, block);
    }
  }

  void multiply(int64_t g, int64_t row, bool expands) {
    const int8_t* left = in.bytes + g * w.group * in.rows + row * Inputs;
    const int8_t* codes = codes_at(g, 0, 0);
    zero_tile<0>();
    if (B == 2) zero_tile<1>();
    for (int64_t step = 0; step < steps; ++step, left += in.rows * Inputs, codes += B * Inputs * kLanes) {
      if (expands) expand(g + 1, step, 0);
      load_tile<4>(left, Inputs);
      load_tile<6>(codes, 64);
      multiply_tiles<0, 4, 6>();
      if constexpr (B == 2) {
        if (expands) expand(g + 1, step, 1);
        load_tile<6>(codes + Inputs * kLanes, 64);
        multiply_tiles<1, 4, 6>();
      }
    }
  }

  void store_sums(int parity) {
    constexpr int64_t kStride = B * kLanes * sizeof(int32_t);
    store_tile<0>(buffers.sums[parity], kStride);
    if (B == 2) store_tile<1>(buffers.sums[parity] + kLanes, kStride);
  }

  // Adds the scaled sums of a tile of rows to the outputs.
  template <bool HasMinima>
  void scale(const Unscaled& tile, int parity) {
    const int64_t at = tile.group * in.rows + tile.row;
    const float* row_scales = in.scales + at, *row_sums = in.sums + at;
    const int32_t* sums = buffers.sums[parity];
    float* to = out + tile.row * stride;
    F scale[B], minimum[B];
    for (int b = 0; b < B; ++b) {
      scale[b] = load_scales(w, b * groups + tile.group);
      if (HasMinima) minimum[b] = load_minima(w, b * groups + tile.group);
    }
    for (int64_t m = 0; m < tile.count; ++m, to += stride, sums += B * kLanes) {
      const F row_scale = broadcast(row_scales[m]);
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const F exact = to_float(load_int(sums + b * kLanes));
        F result = add(load(to + b * kLanes), mul(exact, mul(scale[b], row_scale)));
        if (HasMinima) result = add(result, mul(broadcast(row_sums[m]), mul(minimum[b], row_scale)));
        store(to + b * kLanes, result);
      }
    }
  }

  void add_scaled(const Unscaled& tile, int parity) {
    w.minima == nullptr ? scale<false>(tile, parity) : scale<true>(tile, parity);
  }

  void run() {
    for (int64_t r = 0; r < rows; ++r) {
      for (int b = 0; b < B; ++b) store(out + r * stride + b * kLanes, zeros());
    }
    expand_group(0);
    Unscaled last;
    int parity = 0;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t row = 0; row < rows; row += tile_rows, parity = 1 - parity) {
        multiply(g, row, row == 0 && g + 1 < groups);
        add_scaled(last, 1 - parity);
        last = {g, row, std::min(tile_rows, rows - row)};
        store_sums(parity);
      }
    }
    add_scaled(last, 1 - parity);
  }
};

template <Format W, int Inputs>
void product_with_tiles(const TileRows& in, Operand w, int64_t rows, int64_t blocks, float* out, int64_t stride) {
  const int64_t tiles = (rows + kMaxTileRows - 1) / kMaxTileRows, tile_rows = (rows + tiles - 1) / tiles;
  TileBuffers<2> buffers;
  configure_tiles(static_cast<int>(tile_rows), Inputs);
  for (; blocks >= 2; blocks -= 2, w = advance(w, 2), out += 2 * kLanes) {
    TileProduct<W, Inputs, 2>{in, w, rows, tile_rows, out, stride, buffers}.run();
  }
  if (blocks > 0) {
    TileBuffers<1> buffers_of_one;
    TileProduct<W, Inputs, 1>{in, w, rows, tile_rows, out, stride, buffers_of_one}.run();
  }
  release_tiles();
}

template <Format W>
void product_with_tiles(const TileRows& in, const Operand& w, int64_t rows, int64_t blocks, float* out,
                        int64_t stride) {
  const int64_t inputs = tile_inputs(w.group);
  if (inputs == 64) return product_with_tiles<W, 64>(in, w, rows, blocks, out, stride);
  if (inputs == 32) return product_with_tiles<W, 32>(in, w, rows, blocks, out, stride);
  product_with_tiles<W, 16>(in, w, rows, blocks, out, stride);
}

inline void dispatch_product(Format format, const TileRows& in, const Operand& w, int64_t rows, int64_t blocks,
                             float* out, int64_t stride) {
  if (format == Format::int4) return product_with_tiles<Format::int4>(in, w, rows, blocks, out, stride);
  if (format == Format::float4) return product_with_tiles<Format::float4>(in, w, rows, blocks, out, stride);
  product_with_tiles<Format::int8>(in, w, rows, blocks, out, stride);
}

constexpr int64_t kBf16TileInputs = 32;

// Whether products with bfloat16 weights of k inputs run on tiles.
inline bool bf16_suits_tiles(int64_t k) { return k % kBf16TileInputs == 0; }

// Rows of bfloat16 values, as tiles load them.
struct Bf16TileRows {
  static constexpr int64_t kMaxRows = 128;  // of a product

  const uint16_t* x;  // input k of row r is x[k / 32 * step_stride + r * row_stride + k % 32]
  int64_t row_stride, step_stride;

  Bf16TileRows from(int64_t row, const Operand&) const { return {x + row * row_stride, row_stride, step_stride}; }
};

// out[r, 16 b + i] = x[r] . W_b[i] for B blocks and one or two tiles of rows; with `Adds` out += x[r] . W_b[i].
template <int B, bool Adds>
void product_bf16_tiles(const Bf16TileRows& in, const Operand& w, int64_t tile_rows, bool two, float* out,
                        int64_t stride) {
  const int64_t row_bytes = in.row_stride * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t out_bytes = stride * static_cast<int64_t>(sizeof(float)), distance = prefetch_distance(w, B);
  float* second = out + tile_rows * stride;
  if constexpr (Adds) {
    load_tile<0>(out, out_bytes);
    if (B == 2) load_tile<1>(out + kLanes, out_bytes);
    if (two) load_tile<2>(second, out_bytes);
    if (B == 2 && two) load_tile<3>(second + kLanes, out_bytes);
  } else {
    zero_tile<0>();
    if (B == 2) zero_tile<1>();
    if (two) zero_tile<2>();
    if (B == 2 && two) zero_tile<3>();
  }
  const uint16_t* left = in.x;
  for (int64_t k = 0; k < w.k; k += kBf16TileInputs, left += in.step_stride) {
    const uint8_t* right = w.data + k * 2 * kLanes;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      prefetch(right + distance + 64 * i);
      if (B == 2) prefetch(right + w.block_bytes + distance + 64 * i);
    }
    load_tile<4>(left, row_bytes);
    if (two) load_tile<5>(left + tile_rows * in.row_stride, row_bytes);
    load_tile<6>(right, 64);
    multiply_bf16_tiles<0, 4, 6>();
    if (two) multiply_bf16_tiles<2, 5, 6>();
    if (B == 1) continue;
    load_tile<6>(right + w.block_bytes, 64);
    multiply_bf16_tiles<1, 4, 6>();
    if (two) multiply_bf16_tiles<3, 5, 6>();
  }
  store_tile<0>(out, out_bytes);
  if (B == 2) store_tile<1>(out + kLanes, out_bytes);
  if (two) store_tile<2>(second, out_bytes);
  if (B == 2 && two) store_tile<3>(second + kLanes, out_bytes);
}

// All rows against `blocks` blocks. Reads and writes whole tiles.
template <bool Adds>
void product_bf16_blocks(const Bf16TileRows& in, Operand w, int64_t rows, int64_t tile_rows, int64_t blocks, float* out,
                         int64_t stride) {
  for (; blocks > 0; blocks -= 2, w = advance(w, 2), out += 2 * kLanes) {
    for (int64_t row = 0; row < rows; row += 2 * tile_rows) {
      const auto product = blocks == 1 ? product_bf16_tiles<1, Adds> : product_bf16_tiles<2, Adds>;
      product(in.from(row, w), w, tile_rows, row + tile_rows < rows, out + row * stride, stride);
    }
  }
}

inline void dispatch_product(Format, const Bf16TileRows& in, const Operand& w, int64_t rows, int64_t blocks, float* out,
                             int64_t stride) {
  const int64_t tiles = (rows + kMaxTileRows - 1) / kMaxTileRows, tile_rows = (rows + tiles - 1) / tiles;
  configure_tiles(static_cast<int>(tile_rows), 64);
  product_bf16_blocks<false>(in, w, rows, tile_rows, blocks, out, stride);
  release_tiles();
}

// Products of any number of rows that read and write these rows only. Configures tiles as needed.
class ExactTiles {
 public:
  ExactTiles() = default;
  ExactTiles(const ExactTiles&) = delete;
  ExactTiles& operator=(const ExactTiles&) = delete;
  ~ExactTiles() {
    if (rows_ != 0) release_tiles();
  }

  template <bool Adds>
  void product(const Bf16TileRows& in, const Operand& w, int64_t rows, int64_t blocks, float* out, int64_t stride) {
    const int64_t whole = rows / kMaxTileRows * kMaxTileRows;
    if (whole > 0) {
      configure(kMaxTileRows);
      product_bf16_blocks<Adds>(in, w, whole, kMaxTileRows, blocks, out, stride);
    }
    if (whole == rows) return;
    configure(rows - whole);
    product_bf16_blocks<Adds>(in.from(whole, w), w, rows - whole, rows - whole, blocks, out + whole * stride, stride);
  }

 private:
  void configure(int64_t rows) {
    if (rows == rows_) return;
    configure_tiles(static_cast<int>(rows), 64);
    rows_ = rows;
  }

  int64_t rows_ = 0;  // of the tiles of the present configuration; 0: none
};
