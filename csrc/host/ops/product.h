// Small-M products with packed matrices: the inner loop of `linear` and of the scores in `attention`. Each output is
// one float32 accumulator summed in input order whatever the tile, so a row's result does not depend on other rows.
//
// A block holds sixteen outputs. Layouts (K is padded to a multiple of 8):
//   bf16 [K / 2][16][2]; f32 [K][16];
//   int4 [K / 8][16] words of eight codes: input 2i in nibble i, input 2i + 1 in nibble 4 + i;
//   int8 [K / 4][16] words: of eight inputs, 0 4 1 5 are the bytes of one word and 2 6 3 7 of the next, which is the
//   order of the low and high nibbles of int4.

struct Operand {
  const uint8_t* data;
  int64_t block_bytes;              // distance between two blocks
  int64_t k;                        // padded
  const uint8_t* scales = nullptr;  // this and the following members as in Weights, from this block on
  ScaleType scale_type = ScaleType::f32;
  const uint8_t* zeros = nullptr;
  int64_t group = 0;
};

inline int64_t scale_bytes(ScaleType scale_type) { return scale_type == ScaleType::f32 ? 4 : 2; }

// The operand `blocks` blocks further.
inline Operand advance(Operand w, int64_t blocks) {
  w.data += blocks * w.block_bytes;
  if (w.group == 0) return w;
  const int64_t count = blocks * (w.k / w.group) * kLanes;
  w.scales += count * scale_bytes(w.scale_type);
  if (w.zeros != nullptr) w.zeros += count;
  return w;
}

// The scales of a group; `group` counts the groups of all blocks.
inline F load_scales(const Operand& w, int64_t group) {
  const uint8_t* p = w.scales + group * kLanes * scale_bytes(w.scale_type);
  if (w.scale_type == ScaleType::f16) return widen_half(p);
  if (w.scale_type == ScaleType::bf16) return widen(reinterpret_cast<const uint16_t*>(p));
  return load(reinterpret_cast<const float*>(p));
}

template <class X>
struct Inputs {
  const X* x;         // [rows, k]
  const float* sums;  // [rows, K / group], sums of each group's inputs; for int4

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
template <int N>
inline Pair nibble_pair(I codes) {
  // -8 .. 7 in bfloat16, twice: the instruction reads five bits of each half, of which the fifth belongs to the next
  // code
  alignas(64) static constexpr uint16_t kTable[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  return (Pair)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * N), _mm512_load_si512(kTable));
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
template <int N>
inline Pair nibble_pair(I codes) {
  return {nibble<N>(codes), nibble<N + 4>(codes)};
}

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

template <int N, int M, int B, class X>
inline void add_codes(F (&sum)[M][B], const I (&codes)[B], const X* x, int64_t stride) {
  Pair weights[B];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) weights[b] = nibble_pair<N>(codes[b]);
  add_pair(sum, weights, x + 2 * N, stride);
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

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

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

// The dequantised weight (q - z) s is never formed: a group's codes are summed, then shifted and scaled in float32.
template <int M, int B, class X>
void product_int4(const Inputs<X>& in, const Operand& w, float* out, int64_t stride) {
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
      add_codes<0>(sum, codes, in.x + k, w.k);
      add_codes<1>(sum, codes, in.x + k, w.k);
      add_codes<2>(sum, codes, in.x + k, w.k);
      add_codes<3>(sum, codes, in.x + k, w.k);
    }
    for (int b = 0; b < B; ++b) {
      const F scale = load_scales(w, b * groups + g);
      const F shift = sub(broadcast(8.0f), widen_bytes(w.zeros + (b * groups + g) * kLanes));
      for (int m = 0; m < M; ++m) {
        float* at = out + m * stride + b * kLanes;
        store(at, fma(fma(shift, broadcast(in.sums[m * groups + g]), sum[m][b]), scale, load(at)));
      }
    }
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
