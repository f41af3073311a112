// Products of rows that are rounded to int8 with int4 and int8 weights. The sums of a group are integers below
// 2^24, so they are exact, and float32 holds them: every level, and the reference, computes the same bits.
//
//   out += float(sum of code * byte - zero * sum of byte) * (weight's scale * row's scale), group by group

struct Bytes {
  const uint32_t* words;  // tiles of kRowTile rows, the last one shorter: [K / 4][rows of the tile]
  const float* scales;    // [K / group][rows of the tile]
  const float* sums;      // the same: of each group's bytes

  Bytes from(int64_t row, const Operand& w) const {  // the tile that starts there
    const int64_t before = row * (w.k / w.group);
    return {words + row * (w.k / 4), scales + before, sums + before};
  }
};

constexpr float kTooSmall = 1e-30f;  // a group without a larger number is zero: the inverse of less may be infinite

// One row in bytes, each group with a scale of its own, 127 for its largest number; what the rows of a tile have
// alike lies together, `stride` apart. A group with a NaN or an infinity has the scale NaN.
template <class X>
void round_row(const X* x, int64_t k, int64_t group, int64_t stride, uint32_t* words, float* scales, float* sums) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  for (int64_t g = 0; g * group < k; ++g, x += group) {
    F most = zeros(), spoilt = zeros(), total = zeros();
    for (int64_t i = 0; i < group; i += kLanes) {
      const F value = load_as(x + i);
      most = largest(most, as_float(both(as_int(value), all_int(0x7fffffff))));
      spoilt = fma(value, zeros(), spoilt);
    }
    const float top = highest(most);
    const bool none = top < kTooSmall;
    const F inverse = all(none ? 0.0f : 127.0f / top);
    for (int64_t i = 0; i < group; i += kLanes) {
      const F value = round_even(mul(load_as(x + i), inverse));
      total = add(total, value);
      uint32_t four[4];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(four), _mm_shuffle_epi8(narrow_bytes(to_int(value)), order));
      for (int j = 0; j < 4; ++j, words += stride) *words = four[j];
    }
    scales[g * stride] = (none ? 0.0f : top / 127.0f) + sum(spoilt);
    sums[g * stride] = sum(total);
  }
}

#ifdef SWIFTSPEC_DOT_INT8

constexpr float kZeroOfInt8 = 128.0f;

// sum += the products of eight inputs, whose codes are two vectors of bytes.
template <Format W>
inline I add_eight(I sum, I first, I second, I row_first, I row_second) {
  return dot_bytes(dot_bytes(sum, first, row_first), second, row_second);
}
template <Format W>
inline I ready_codes(I codes) {
  return codes;
}

#else

constexpr float kZeroOfInt8 = 0.0f;  // `ready_codes` takes it away

// Two products must fit 16 bits: of codes up to 15 a few do, of whole bytes only magnitudes.
template <Format W>
inline I add_eight(I sum, I first, I second, I row_first, I row_second) {
  if constexpr (W == Format::int4) {
    return add(sum, sum_halves(add_halves(pairs(first, row_first), pairs(second, row_second))));
  } else {
    sum = add(sum, sum_halves(pairs(absolute_bytes(first), signed_as(row_first, first))));
    return add(sum, sum_halves(pairs(absolute_bytes(second), signed_as(row_second, second))));
  }
}
template <Format W>
inline I ready_codes(I codes) {
  return W == Format::int4 ? codes : flip(codes, all_int(0x80808080));
}

#endif

template <Format W>
inline void load_codes(const uint8_t* p, I& first, I& second) {
  if constexpr (W == Format::int4) {
    const I codes = load_int(p), low = all_int(0x0f0f0f0f);
    first = both(codes, low), second = both(right<4>(codes), low);
  } else {
    first = ready_codes<W>(load_int(p)), second = ready_codes<W>(load_int(p + 64));
  }
}

// A few rows are bound by memory, which one or two streams of weights use best. Their chains of sums are then too few
// for the arithmetic, so that two steps of eight inputs take turns.
constexpr int turns(int rows) { return rows <= 2 ? 2 : 1; }

template <Format W, int M, int B>
void product_bytes(const Bytes& in, const Operand& w, float* out, int64_t stride) {
  constexpr int64_t kEight = 8 * kLanes * bits_of(W) / 8;  // bytes of eight inputs
  constexpr int kTurns = turns(M);
  const int64_t ahead = fetch_distance(w, B), groups = w.k / w.group;
  F total[M][B];
  clear(total);
  write(total, out, stride);
  for (int64_t g = 0; g < groups; ++g) {
    I sum[kTurns][M][B];
    for (I* one = &sum[0][0][0]; one < &sum[0][0][0] + kTurns * M * B; ++one) *one = all_int(0);
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8 * kTurns) {
#pragma GCC unroll 2
      for (int turn = 0; turn < kTurns; ++turn) {
        const uint32_t* words = in.words + (k / 4 + 2 * turn) * M;
        I first[B], second[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) {
          const uint8_t* p = w.data + b * w.block_bytes + (k / 8 + turn) * kEight;
          load_codes<W>(p, first[b], second[b]);
          prefetch(p + ahead);
          if (W == Format::int8) prefetch(p + 64 + ahead);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const I row_first = all_int(words[m]), row_second = all_int(words[M + m]);
#pragma GCC unroll 8
          for (int b = 0; b < B; ++b) {
            sum[turn][m][b] = add_eight<W>(sum[turn][m][b], first[b], second[b], row_first, row_second);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      const F scale = load_scales(w, b * groups + g);
      const F zero =
          W == Format::int4 ? widen_bytes(w.zeros + (b * groups + g) * kLanes) : all(kZeroOfInt8);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const I whole = kTurns == 2 ? add(sum[0][m][b], sum[kTurns - 1][m][b]) : sum[0][m][b];
        const F exact = fma(sub(zeros(), zero), all(in.sums[g * M + m]), to_float(whole));
        float* at = out + m * stride + b * kLanes;
        store(at, add(load(at), mul(exact, mul(scale, all(in.scales[g * M + m])))));
      }
    }
  }
}
