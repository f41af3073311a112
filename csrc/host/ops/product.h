// Small-M products with packed matrices: the inner loop of `linear` and of the scores in `attention`. Each output is
// one float32 accumulator summed in input order whatever the tile, so a row's result does not depend on other rows.
//
// A block holds sixteen outputs. Layouts (K is padded to a multiple of 8):
//   bf16 [K / 2][16][2]; f32 [K][16];
//   int4 and float4 [K / 8][16] words of eight codes: input 2i in nibble i, input 2i + 1 in nibble 4 + i;
//   int8 [K / 4][16] words: of eight inputs, 0 4 1 5 are the bytes of one word and 2 6 3 7 of the next, which is the
//   order of the low and high nibbles of int4.

struct Operand {
  const uint8_t* data;
  int64_t block_bytes;              // distance between two blocks
  int64_t k;                        // padded
  const uint8_t* scales = nullptr;  // this and the following members as in Weights, from this block on
  ScaleType scale_type = ScaleType::f32;
  const uint8_t* zeros = nullptr;
  const uint8_t* minima = nullptr;
  const uint8_t* super_scales = nullptr;
  const uint8_t* super_minima = nullptr;
  int64_t group = 0;
};

inline bool has_supers(ScaleType scale_type) { return scale_type == ScaleType::u8 || scale_type == ScaleType::i8; }
inline int64_t scale_bytes(ScaleType scale_type) {
  if (has_supers(scale_type) || scale_type == ScaleType::exponent) return 1;
  return scale_type == ScaleType::f32 ? 4 : 2;
}

// The operand `blocks` blocks further.
inline Operand advance(Operand w, int64_t blocks) {
  w.data += blocks * w.block_bytes;
  if (w.group == 0) return w;
  const int64_t count = blocks * (w.k / w.group) * kLanes;
  w.scales += count * scale_bytes(w.scale_type);
  if (w.zeros != nullptr) w.zeros += count;
  if (w.minima != nullptr) w.minima += count * scale_bytes(w.scale_type);
  const int64_t super_bytes = blocks * (w.k / kSuperInputs) * kLanes * 2;
  if (w.super_scales != nullptr) w.super_scales += super_bytes;
  if (w.super_minima != nullptr) w.super_minima += super_bytes;
  return w;
}

// The scales or the minima of a group; `group` counts the groups of all blocks.
inline F load_by_group(const Operand& w, const uint8_t* values, const uint8_t* supers, int64_t group) {
  const uint8_t* p = values + group * kLanes * scale_bytes(w.scale_type);
  if (has_supers(w.scale_type)) {
    const F super = widen_half(supers + group / (kSuperInputs / w.group) * kLanes * 2);
    return mul(w.scale_type == ScaleType::i8 ? widen_bytes(reinterpret_cast<const int8_t*>(p)) : widen_bytes(p), super);
  }
  if (w.scale_type == ScaleType::exponent) return as_float(shift_left<23>(to_int(widen_bytes(p))));
  if (w.scale_type == ScaleType::f16) return widen_half(p);
  if (w.scale_type == ScaleType::bf16) return widen(reinterpret_cast<const uint16_t*>(p));
  return load(reinterpret_cast<const float*>(p));
}

inline F load_scales(const Operand& w, int64_t group) { return load_by_group(w, w.scales, w.super_scales, group); }
inline F load_minima(const Operand& w, int64_t group) { return load_by_group(w, w.minima, w.super_minima, group); }

// The zero points of a group of int4 codes.
inline F load_zeros(const Operand& w, int64_t group) {
  if (w.zeros != nullptr) return widen_bytes(w.zeros + group * kLanes);
  return broadcast(w.minima == nullptr ? 8.0f : 0.0f);
}

template <class X>
struct Inputs {
  static constexpr int64_t kMaxRows = kRowTile;  // of a product

  const X* x;         // [rows, k]
  const float* sums;  // [rows, K / group], sums of each group's inputs; for int4 and int8

  Inputs from(int64_t row, const Operand& w) const {
    return {x + row * w.k, w.group == 0 ? nullptr : sums + row * (w.k / w.group)};
  }
};

#ifdef SWIFTSPEC_DOT_BF16  // AVX-512 BF16 multiplies two inputs of sixteen outputs per instruction

using Pair = __m512bh;
using Packed16 = uint16_t;  // type of a row's values in a bfloat16 model

inline Pair load_pair(const uint8_t* p) { return (Pair)_mm512_loadu_si512(p); }
inline Pair broadcast_pair(const uint16_t* x) {
  int32_t two;
  std::memcpy(&two, x, sizeof two);
  return (Pair)_mm512_set1_epi32(two);
}
inline F dot(F sum, Pair weights, Pair row) { return _mm512_dpbf16_ps(sum, weights, row); }
template <Format W, int N>
inline Pair nibble_pair(I codes) {
  // In bfloat16, -8 .. 7 and twice the e2m1 numbers, each table twice: the instruction reads five bits of each half, of
  // which the fifth belongs to the next code
  alignas(64) static constexpr uint16_t kInt4[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  alignas(64) static constexpr uint16_t kFloat4[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0x8000, 0xbf80, 0xc000,
      0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0,
      0x4100, 0x4140, 0x8000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};
  const I table = _mm512_load_si512(W == Format::int4 ? kInt4 : kFloat4);
  return (Pair)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * N), table);
}
inline Pair make_pair(F even, F odd) {  // of values that bfloat16 holds exactly
  return (Pair)bit_or(shift_right<16>(as_int(even)), bit_and(as_int(odd), broadcast_int(0xffff0000)));
}

#else

struct Pair {
  F even, odd;
};
using Packed16 = float;

inline Pair load_pair(const uint8_t* p) {
  const I two = load_int(p);
  return {as_float(shift_left<16>(two)), as_float(bit_and(two, broadcast_int(0xffff0000)))};
}
inline Pair broadcast_pair(const float* x) { return {broadcast(x[0]), broadcast(x[1])}; }
inline F dot(F sum, Pair weights, Pair row) {
  return fma(weights.odd, row.odd, fma(weights.even, row.even, sum));
}
inline F dot(F sum, F weights, F row) { return fma(weights, row, sum); }
template <Format W, int N>
inline Pair nibble_pair(I codes) {
  if constexpr (W == Format::float4) return {float4<N>(codes), float4<N + 4>(codes)};
  return {nibble<N>(codes), nibble<N + 4>(codes)};
}
inline Pair make_pair(F even, F odd) { return {even, odd}; }

#endif

// sum[m][b] += x[m] W_b over one pair of inputs.
template <int M, int B, class X>
inline void add_pair(F (&sum)[M][B], const Pair (&weights)[B], const X* x, int64_t stride) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Pair row = broadcast_pair(x + m * stride);
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) sum[m][b] = dot(sum[m][b], weights[b], row);
  }
}

template <Format W, int N, int M, int B, class X>
inline void add_codes(F (&sum)[M][B], const I (&codes)[B], const X* x, int64_t stride) {
  Pair weights[B];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) weights[b] = nibble_pair<W, N>(codes[b]);
  add_pair(sum, weights, x + 2 * N, stride);
}

// Byte N of each word, less 128, as float32.
template <int N>
inline F signed_byte(I codes) {
  return to_float(sub(bit_and(shift_right<8 * N>(codes), broadcast_int(255)), broadcast_int(128)));
}

// Adds the products of two inputs, whose codes are bytes N and N + 2 of the words.
template <int N, int M, int B, class X>
inline void add_bytes(F (&sum)[M][B], const I (&codes)[B], const X* x, int64_t stride) {
  Pair weights[B];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) weights[b] = make_pair(signed_byte<N>(codes[b]), signed_byte<N + 2>(codes[b]));
  add_pair(sum, weights, x, stride);
}

template <int M, int B>
inline void clear(F (&sum)[M][B]) {
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < B; ++b) sum[m][b] = zeros();
  }
}

template <int M, int B>
inline void load_sums(F (&sum)[M][B], const float* in, int64_t stride) {
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < B; ++b) sum[m][b] = load(in + m * stride + b * kLanes);
  }
}

template <int M, int B>
inline void store_sums(const F (&sum)[M][B], float* out, int64_t stride) {
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < B; ++b) store(out + m * stride + b * kLanes, sum[m][b]);
  }
}

// Prefetch distance in bytes: into the next blocks for a short block, within the block for a long one.
inline int64_t prefetch_distance(const Operand& w, int blocks) {
  return w.block_bytes <= 8192 ? blocks * w.block_bytes : 2048;
}

inline void prefetch(const uint8_t* p) { __builtin_prefetch(p); }  // for a load, into all cache levels

template <int M, int B, class X>
void product_bf16(const Inputs<X>& in, const Operand& w, float* out, int64_t stride) {
  F sum[M][B];
  clear(sum);
  const int64_t distance = prefetch_distance(w, B);
  for (int64_t k = 0; k < w.k; k += 2) {
    Pair weights[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      weights[b] = load_pair(w.data + b * w.block_bytes + k * 32);
      prefetch(w.data + b * w.block_bytes + k * 32 + distance);
    }
    add_pair(sum, weights, in.x + k, w.k);
  }
  store_sums(sum, out, stride);
}

template <int M, int B>
void product_f32(const Inputs<float>& in, const Operand& w, float* out, int64_t stride) {
  F sum[M][B];
  clear(sum);
  for (int64_t k = 0; k < w.k; ++k) {
    F weights[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b)
      weights[b] = load(reinterpret_cast<const float*>(w.data + b * w.block_bytes) + k * 16);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const F row = broadcast(in.x[m * w.k + k]);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) sum[m][b] = fma(weights[b], row, sum[m][b]);
    }
  }
  store_sums(sum, out, stride);
}

// Adds the sums of group g to the outputs. `sum`: products with the codes less `Offset`, the zero point of int8 codes
// being subtracted already.
template <int Offset, int M, int B, class X>
inline void add_group(const Inputs<X>& in, const Operand& w, int64_t g, const F (&sum)[M][B], float* out,
                      int64_t stride) {
  const int64_t groups = w.k / w.group;
  for (int b = 0; b < B; ++b) {
    const F scale = load_scales(w, b * groups + g);
    const F shift = Offset == 0 ? zeros() : sub(broadcast(Offset), load_zeros(w, b * groups + g));
    const F minimum = w.minima == nullptr ? zeros() : load_minima(w, b * groups + g);
    for (int m = 0; m < M; ++m) {
      float* at = out + m * stride + b * kLanes;
      const F row = broadcast(in.sums[m * groups + g]);
      const F shifted = Offset == 0 ? sum[m][b] : fma(shift, row, sum[m][b]);
      const F before = w.minima == nullptr ? load(at) : fma(minimum, row, load(at));
      store(at, fma(shifted, scale, before));
    }
  }
}

// Of int4 and float4 weights. The dequantised weight (q - z) s + m is never formed: a group's codes are summed, then
// shifted and scaled in float32.
template <Format W, int M, int B, class X>
void product_nibbles(const Inputs<X>& in, const Operand& w, float* out, int64_t stride) {
  F sum[M][B];
  clear(sum);
  store_sums(sum, out, stride);
  const int64_t distance = prefetch_distance(w, B);
  const int64_t groups = w.k / w.group;
  for (int64_t g = 0; g < groups; ++g) {
    clear(sum);
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8) {
      I codes[B];
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) {
        codes[b] = load_int(w.data + b * w.block_bytes + k * 8);
        prefetch(w.data + b * w.block_bytes + k * 8 + distance);
      }
      add_codes<W, 0>(sum, codes, in.x + k, w.k);
      add_codes<W, 1>(sum, codes, in.x + k, w.k);
      add_codes<W, 2>(sum, codes, in.x + k, w.k);
      add_codes<W, 3>(sum, codes, in.x + k, w.k);
    }
    add_group<W == Format::int4 ? 8 : 0>(in, w, g, sum, out, stride);
  }
}

template <int M, int B, class X>
void product_int8(const Inputs<X>& in, const Operand& w, float* out, int64_t stride) {
  F sum[M][B];
  clear(sum);
  store_sums(sum, out, stride);
  const int64_t distance = prefetch_distance(w, B);
  const int64_t groups = w.k / w.group;
  for (int64_t g = 0; g < groups; ++g) {
    clear(sum);
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8) {
      I first[B], second[B];  // inputs 0 4 1 5 and 2 6 3 7
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) {
        const uint8_t* p = w.data + b * w.block_bytes + k * 16;
        first[b] = load_int(p), second[b] = load_int(p + 64);
        prefetch(p + distance);
        prefetch(p + 64 + distance);
      }
      add_bytes<0>(sum, first, in.x + k, w.k);
      add_bytes<0>(sum, second, in.x + k + 2, w.k);
      add_bytes<1>(sum, first, in.x + k + 4, w.k);
      add_bytes<1>(sum, second, in.x + k + 6, w.k);
    }
    add_group<0>(in, w, g, sum, out, stride);
  }
}

// Arithmetic peak: accumulates `rounds` products into every accumulator register. `seed` [16] is opaque to the
// compiler, so the loop is not optimised away. Returns the number of floating-point operations.
inline int64_t peak(int64_t rounds, float* seed) {
#ifdef SWIFTSPEC_DOT_BF16
  const Pair weight = (Pair)load_int(seed), row = weight;
  constexpr int64_t kOpsPerProduct = 4 * kLanes;
#else
  const F weight = load(seed), row = weight;
  constexpr int64_t kOpsPerProduct = 2 * kLanes;
#endif
  F sums[kAccumulators][1];
  clear(sums);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int m = 0; m < kAccumulators; ++m) sums[m][0] = dot(sums[m][0], weight, row);
  }
  for (int m = 0; m < kAccumulators; ++m) store(seed, add(load(seed), sums[m][0]));
  return rounds * kAccumulators * kOpsPerProduct;
}
