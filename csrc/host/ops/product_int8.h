// Products of int8-quantised rows with int4, int8 and float4 weights. The sums of a group are integers below 2^24, so float32
// holds them exactly: every ISA level and the reference compute bitwise identical results.
//
//   out += float(sum of code * byte - zero * sum of byte) * (weight scale * row scale), group by group
//   out += sum of byte * (minimum * row scale), after that, if the weights have minima

struct QuantizedRows {
  static constexpr int64_t kMaxRows = kRowTile;  // of a product

  const uint32_t* words;  // tiles of kRowTile rows, the last one shorter: [K / 4][rows of the tile]
  const float* scales;    // [K / group][rows of the tile]
  const float* sums;      // [K / group][rows of the tile], sums of each group's bytes

  QuantizedRows from(int64_t row, const Operand& w) const {  // `row` is the first row of a tile
    const int64_t before = row * (w.k / w.group);
    return {words + row * (w.k / 4), scales + before, sums + before};
  }
};

// A group whose largest magnitude is smaller is set to zero, since the inverse could be infinite.
constexpr float kMinAbsMax = 1e-30f;

// Where the results of a row go, which may be interleaved with those of other rows.
struct RowPlace {
  uint32_t* words;            // word i is at (i / run) * run_stride + (i % run) * stride; `run` is a multiple of 4
  int64_t stride, run, run_stride;
  float *scales, *sums;
  int64_t scale_stride;
};

// What the second int8 number of an input counts: parts of the first one's unit. The rest of rounding is at most half a
// unit, so its magnitude is at most 127.
constexpr float kRestParts = 254.0f;

// Stores 16 codes as the next words of a row.
inline void store_codes(RowPlace& to, int64_t& place, F codes) {
  uint32_t* words = to.words + place * to.stride;
  if (to.stride == 1) {
    store_row_bytes(words, to_int(codes));
  } else {
    uint32_t four[4];
    store_row_bytes(four, to_int(codes));
    for (int j = 0; j < 4; ++j) words[j * to.stride] = four[j];
  }
  place += 4;
  if (place == to.run) place = 0, to.words += to.run_stride;
}

// Quantises one row with one scale per group, so that the largest magnitude becomes 127. A group with a NaN or an
// infinity gets the scale NaN. `rest`: the place of the second numbers, which count parts of the rounding error; null:
// none.
template <class X>
void quantize_row(const X* x, int64_t k, int64_t group, RowPlace to, RowPlace* rest) {
  int64_t place = 0, rest_place = 0;
  for (int64_t g = 0; g * group < k; ++g, x += group) {
    F abs_max = zeros(), nan_probe = zeros(), total = zeros(), rest_total = zeros();
    for (int64_t i = 0; i < group; i += kLanes) {
      const F value = load_as(x + i);
      abs_max = max(abs_max, as_float(bit_and(as_int(value), broadcast_int(0x7fffffff))));
      nan_probe = fma(value, zeros(), nan_probe);
    }
    const float top = reduce_max(abs_max);
    const bool is_zero = top < kMinAbsMax;
    const F inverse = broadcast(is_zero ? 0.0f : 127.0f / top);
    for (int64_t i = 0; i < group; i += kLanes) {
      const F value = mul(load_as(x + i), inverse), code = round_even(value);
      total = add(total, code);
      store_codes(to, place, code);
      if (rest == nullptr) continue;
      const F rest_code = round_even(mul(sub(value, code), broadcast(kRestParts)));
      rest_total = add(rest_total, rest_code);
      store_codes(*rest, rest_place, rest_code);
    }
    const float scale = (is_zero ? 0.0f : top / 127.0f) + reduce_add(nan_probe);
    to.scales[g * to.scale_stride] = scale;
    to.sums[g * to.scale_stride] = reduce_add(total);
    if (rest == nullptr) continue;
    rest->scales[g * to.scale_stride] = scale / kRestParts;
    rest->sums[g * to.scale_stride] = reduce_add(rest_total);
  }
}

#if defined(SWIFTSPEC_DOT_INT8) && !defined(SWIFTSPEC_NEON)  // multiplies unsigned codes

constexpr float kInt8ZeroPoint = 128.0f;

template <Format W>
inline I prepare_codes(I codes) {
  return codes;
}

#else

constexpr float kInt8ZeroPoint = 0.0f;  // `prepare_codes` has subtracted it

template <Format W>
inline I prepare_codes(I codes) {
  return W == Format::int4 ? codes : bit_xor(codes, broadcast_int(0x80808080));
}

#endif

// sum += the products of eight inputs, whose codes are two vectors of bytes.
#if defined(SWIFTSPEC_NEON)

template <Format W>
inline I add_eight(I sum, I first, I second, I row_first, I row_second) {
  if constexpr (W == Format::int4) return dot_nibbles(sum, first, second, row_first, row_second);
  return dot_signed(dot_signed(sum, first, row_first), second, row_second);
}

#elif defined(SWIFTSPEC_DOT_INT8)

template <Format W>
inline I add_eight(I sum, I first, I second, I row_first, I row_second) {
  return dot_bytes(dot_bytes(sum, first, row_first), second, row_second);
}

#else

// Two products must fit 16 bits. For 4-bit codes several fit; for int8 codes only products of magnitudes do.
template <Format W>
inline I add_eight(I sum, I first, I second, I row_first, I row_second) {
  if constexpr (W == Format::int4) {
    return add(sum, sum_halves(add_halves(pairs(first, row_first), pairs(second, row_second))));
  } else {
    sum = add(sum, sum_halves(pairs(absolute_bytes(first), signed_as(row_first, first))));
    return add(sum, sum_halves(pairs(absolute_bytes(second), signed_as(row_second, second))));
  }
}

#endif

// The codes of eight inputs as bytes; those of float4 as the int8 codes with the same values.
template <Format W>
inline void load_bytes(const uint8_t* p, I& first, I& second) {
  if constexpr (W == Format::int8) {
    first = load_int(p), second = load_int(p + 64);
  } else {
    const I codes = load_int(p), low = broadcast_int(0x0f0f0f0f);
    first = bit_and(codes, low), second = bit_and(shift_right<4>(codes), low);
  }
  if constexpr (W == Format::float4) {
    // twice the e2m1 numbers, plus 128
    alignas(16) static constexpr uint8_t kTable[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                                       128, 127, 126, 125, 124, 122, 120, 116};
    first = lookup_bytes(kTable, first), second = lookup_bytes(kTable, second);
  }
}

template <Format W>
inline void load_codes(const uint8_t* p, I& first, I& second) {
  load_bytes<W>(p, first, second);
  first = prepare_codes<W>(first), second = prepare_codes<W>(second);
}

// Few rows are memory-bound and best served by one or two streams of weights. These have too few accumulators to hide
// the latency of the arithmetic, so the loop over eight inputs is unrolled twice into separate accumulators.
constexpr int unroll_factor(int rows) { return rows <= 2 ? 2 : 1; }

template <Format W, int M, int B>
void product_quantized(const QuantizedRows& in, const Operand& w, float* out, int64_t stride) {
  constexpr int64_t kEightInputsBytes = 8 * kLanes * bits_of(W) / 8;  // bytes of eight inputs
  constexpr int kUnroll = unroll_factor(M);
  const int64_t distance = prefetch_distance(w, B), groups = w.k / w.group;
  F total[M][B];
  clear(total);
  store_sums(total, out, stride);
  for (int64_t g = 0; g < groups; ++g) {
    I sum[kUnroll][M][B];
    for (I* one = &sum[0][0][0]; one < &sum[0][0][0] + kUnroll * M * B; ++one) *one = broadcast_int(0);
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8 * kUnroll) {
#pragma GCC unroll 2
      for (int step = 0; step < kUnroll; ++step) {
        const uint32_t* words = in.words + (k / 4 + 2 * step) * M;
        I first[B], second[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) {
          const uint8_t* p = w.data + b * w.block_bytes + (k / 8 + step) * kEightInputsBytes;
          load_codes<W>(p, first[b], second[b]);
          prefetch(p + distance);
          if (W == Format::int8) prefetch(p + 64 + distance);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const I row_first = broadcast_int(words[m]), row_second = broadcast_int(words[M + m]);
#pragma GCC unroll 8
          for (int b = 0; b < B; ++b) {
            sum[step][m][b] = add_eight<W>(sum[step][m][b], first[b], second[b], row_first, row_second);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      const F scale = load_scales(w, b * groups + g);
      const F zero = W == Format::int4 ? load_zeros(w, b * groups + g) : broadcast(kInt8ZeroPoint);
      const F minimum = w.minima == nullptr ? zeros() : load_minima(w, b * groups + g);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const I int_sum = kUnroll == 2 ? add(sum[0][m][b], sum[kUnroll - 1][m][b]) : sum[0][m][b];
        const F row = broadcast(in.sums[g * M + m]), row_scale = broadcast(in.scales[g * M + m]);
        const F exact = fma(sub(zeros(), zero), row, to_float(int_sum));
        float* at = out + m * stride + b * kLanes;
        F result = add(load(at), mul(exact, mul(scale, row_scale)));
        if (w.minima != nullptr) result = add(result, mul(row, mul(minimum, row_scale)));
        store(at, result);
      }
    }
  }
}
