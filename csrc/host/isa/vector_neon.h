// Sixteen lanes in four NEON registers of aarch64. Same functions and, operation by operation, same results as
// vector256.h and vector_x86.h, except for the sign of a NaN, and without the functions that only matrix tiles need.
// Included inside the target region and the namespace of an ISA level (level_neon*.cpp).

struct F {  // sixteen float32
  float32x4_t a, b, c, d;
};
struct I {  // sixteen 32-bit integers
  uint32x4_t a, b, c, d;
};

constexpr int kRowTile = 4;       // rows per tile of a product
constexpr int kAccumulators = 4;  // accumulator registers of a product
constexpr int kBlocks = 4;        // largest number of blocks per tile

// Functions of one register, applied to all four.
template <class Function>
inline F each(Function f, F x) {
  return {f(x.a), f(x.b), f(x.c), f(x.d)};
}
template <class Function>
inline F each(Function f, F x, F y) {
  return {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)};
}
template <class Function>
inline I each(Function f, I x) {
  return {f(x.a), f(x.b), f(x.c), f(x.d)};
}
template <class Function>
inline I each(Function f, I x, I y) {
  return {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)};
}

inline F broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F zeros() { return broadcast(0.0f); }
inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
inline F add(F x, F y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline F sub(F x, F y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
inline F mul(F x, F y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
inline F div(F x, F y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
inline F fma(F x, F y, F z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// As on x86 the second operand is the result if one is NaN, or if both are zeros; vmaxq_f32 and vminq_f32 differ.
inline float32x4_t max_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline F max(F x, F y) { return each([](float32x4_t p, float32x4_t q) { return max_of(p, q); }, x, y); }
inline F min(F x, F y) {
  return each([](float32x4_t p, float32x4_t q) { return vbslq_f32(vcltq_f32(p, q), p, q); }, x, y);
}
inline F round_even(F x) {
  return each([](float32x4_t p) { return vrndnq_f32(p); }, x);
}

// Bit i: the lowest bit of lane i, of lanes that are all ones or all zeros.
inline unsigned bit_mask(I x) {
  const uint32x4_t bits = {1, 2, 4, 8};
  const uint32x4_t low = (x.a & bits) | (x.b & (bits << 4)), high = (x.c & (bits << 8)) | (x.d & (bits << 12));
  return vaddvq_u32(low | high);
}
inline unsigned greater(F x, F y) {  // bit i: x[i] > y[i]
  return bit_mask({vcgtq_f32(x.a, y.a), vcgtq_f32(x.b, y.b), vcgtq_f32(x.c, y.c), vcgtq_f32(x.d, y.d)});
}
inline unsigned not_less_equal(F x, F y) {  // bit i: x[i] > y[i], or one of them is NaN
  return bit_mask({vcleq_f32(x.a, y.a), vcleq_f32(x.b, y.b), vcleq_f32(x.c, y.c), vcleq_f32(x.d, y.d)}) ^ 0xffffu;
}

inline I broadcast_int(uint32_t x) { return {vdupq_n_u32(x), vdupq_n_u32(x), vdupq_n_u32(x), vdupq_n_u32(x)}; }
inline I load_int(const void* p) {
  const auto* at = static_cast<const uint8_t*>(p);
  const auto quarter = [at](int i) { return vreinterpretq_u32_u8(vld1q_u8(at + 16 * i)); };
  return {quarter(0), quarter(1), quarter(2), quarter(3)};
}
inline void store_int(void* p, I x) {
  auto* at = static_cast<uint8_t*>(p);
  vst1q_u8(at, vreinterpretq_u8_u32(x.a));
  vst1q_u8(at + 16, vreinterpretq_u8_u32(x.b));
  vst1q_u8(at + 32, vreinterpretq_u8_u32(x.c));
  vst1q_u8(at + 48, vreinterpretq_u8_u32(x.d));
}
inline I add(I x, I y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline I sub(I x, I y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
inline I mul(I x, I y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
inline I bit_and(I x, I y) { return {x.a & y.a, x.b & y.b, x.c & y.c, x.d & y.d}; }
inline I bit_or(I x, I y) { return {x.a | y.a, x.b | y.b, x.c | y.c, x.d | y.d}; }
inline I bit_xor(I x, I y) { return {x.a ^ y.a, x.b ^ y.b, x.c ^ y.c, x.d ^ y.d}; }
template <int N>
inline I shift_left(I x) {
  return {x.a << N, x.b << N, x.c << N, x.d << N};
}
template <int N>
inline I shift_right(I x) {
  return {x.a >> N, x.b >> N, x.c >> N, x.d >> N};
}
template <int N>
inline I shift_right_signed(I x) {
  return each([](uint32x4_t p) { return vreinterpretq_u32_s32(vreinterpretq_s32_u32(p) >> N); }, x);
}
inline F as_float(I x) {
  return {vreinterpretq_f32_u32(x.a), vreinterpretq_f32_u32(x.b), vreinterpretq_f32_u32(x.c),
          vreinterpretq_f32_u32(x.d)};
}
inline I as_int(F x) {
  return {vreinterpretq_u32_f32(x.a), vreinterpretq_u32_f32(x.b), vreinterpretq_u32_f32(x.c),
          vreinterpretq_u32_f32(x.d)};
}
inline F to_float(I x) {
  const auto quarter = [](uint32x4_t p) { return vcvtq_f32_s32(vreinterpretq_s32_u32(p)); };
  return {quarter(x.a), quarter(x.b), quarter(x.c), quarter(x.d)};
}
inline F unsigned_to_float(I x) {
  return {vcvtq_f32_u32(x.a), vcvtq_f32_u32(x.b), vcvtq_f32_u32(x.c), vcvtq_f32_u32(x.d)};
}
// As on x86 0x80000000 for NaN and for numbers from 2^31 on, where vcvtnq_s32_f32 returns 0 or the largest integer.
inline uint32x4_t to_int(float32x4_t x) {
  const uint32x4_t below = vcltq_f32(x, vdupq_n_f32(0x1p31f));
  return vbslq_u32(below, vreinterpretq_u32_s32(vcvtnq_s32_f32(x)), vdupq_n_u32(0x80000000));
}
inline I to_int(F x) { return {to_int(x.a), to_int(x.b), to_int(x.c), to_int(x.d)}; }

inline F widen(const uint16_t* p) {
  const uint16x8_t first = vld1q_u16(p), second = vld1q_u16(p + 8);
  return as_float({vshll_n_u16(vget_low_u16(first), 16), vshll_high_n_u16(first, 16),
                   vshll_n_u16(vget_low_u16(second), 16), vshll_high_n_u16(second, 16)});
}
inline F widen_half(const void* p) {
  const auto* at = static_cast<const uint8_t*>(p);
  const auto quarter = [at](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at + 8 * i))); };
  return {quarter(0), quarter(1), quarter(2), quarter(3)};
}
inline F widen_bytes(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t first = vmovl_u8(vget_low_u8(bytes)), second = vmovl_high_u8(bytes);
  return unsigned_to_float({vmovl_u16(vget_low_u16(first)), vmovl_high_u16(first), vmovl_u16(vget_low_u16(second)),
                            vmovl_high_u16(second)});
}
inline F widen_bytes(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t first = vmovl_s8(vget_low_s8(bytes)), second = vmovl_high_s8(bytes);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(first))), vcvtq_f32_s32(vmovl_high_s16(first)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(second))), vcvtq_f32_s32(vmovl_high_s16(second))};
}

// Stores sixteen integers as signed bytes, those of each eight in the order 0 4 1 5 2 6 3 7.
inline void store_row_bytes(void* p, I x) {
  const auto half = [](uint32x4_t low, uint32x4_t high) {
    const int16x4_t first = vqmovn_s32(vreinterpretq_s32_u32(low)), second = vqmovn_s32(vreinterpretq_s32_u32(high));
    return vqmovn_s16(vcombine_s16(vzip1_s16(first, second), vzip2_s16(first, second)));
  };
  vst1q_s8(static_cast<int8_t*>(p), vcombine_s8(half(x.a, x.b), half(x.c, x.d)));
}

// Adds the dot product of four signed bytes to each lane. Without the instruction two products, of which no code is
// -128 times a row's -128, are summed in 16 bits first.
inline uint32x4_t dot_signed(uint32x4_t sum, uint32x4_t codes, uint32x4_t row) {
  const int8x16_t x = vreinterpretq_s8_u32(codes), y = vreinterpretq_s8_u32(row);
#ifdef SWIFTSPEC_DOT_INT8
  return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sum), x, y));
#else
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
  return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sum), vpaddq_s16(low, high)));
#endif
}
inline I dot_signed(I sum, I codes, I row) {
  return {dot_signed(sum.a, codes.a, row.a), dot_signed(sum.b, codes.b, row.b), dot_signed(sum.c, codes.c, row.c),
          dot_signed(sum.d, codes.d, row.d)};
}

// The same for two vectors of codes below 16, of which four products fit 16 bits.
inline I dot_nibbles(I sum, I first, I second, I row_first, I row_second) {
#ifdef SWIFTSPEC_DOT_INT8
  return dot_signed(dot_signed(sum, first, row_first), second, row_second);
#else
  const auto quarter = [](uint32x4_t total, uint32x4_t p, uint32x4_t q, uint32x4_t row_p, uint32x4_t row_q) {
    const int8x16_t x = vreinterpretq_s8_u32(p), y = vreinterpretq_s8_u32(q);
    const int8x16_t row_x = vreinterpretq_s8_u32(row_p), row_y = vreinterpretq_s8_u32(row_q);
    const int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(x), vget_low_s8(row_x)), vget_low_s8(y), vget_low_s8(row_y));
    const int16x8_t high = vmlal_high_s8(vmull_high_s8(x, row_x), y, row_y);
    return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(total), vpaddq_s16(low, high)));
  };
  return {quarter(sum.a, first.a, second.a, row_first.a, row_second.a),
          quarter(sum.b, first.b, second.b, row_first.b, row_second.b),
          quarter(sum.c, first.c, second.c, row_first.c, row_second.c),
          quarter(sum.d, first.d, second.d, row_first.d, row_second.d)};
#endif
}

inline void store_upper_halves(uint16_t* p, I x) {  // of each lane, truncated
  vst1q_u16(p, vshrn_high_n_u32(vshrn_n_u32(x.a, 16), x.b, 16));
  vst1q_u16(p + 8, vshrn_high_n_u32(vshrn_n_u32(x.c, 16), x.d, 16));
}

// The sum of the lanes, in the order of vector_x86.h.
inline float reduce_add(F x) {
  const float32x4_t four = (x.a + x.c) + (x.b + x.d);
  return vpadds_f32(vget_low_f32(four) + vget_high_f32(four));
}

inline float reduce_max(F x) {
  const float32x4_t four = max_of(max_of(x.a, x.c), max_of(x.b, x.d));
  const float32x4_t two = max_of(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(max_of(two, vdupq_laneq_f32(two, 1)), 0);
}

// Each lane holds eight codes: nibble i belongs to input 2i and nibble 4 + i to input 2i + 1, i = 0 .. 3.
template <int N>
inline F nibble(I codes) {  // code N minus 8 as float32
  return to_float(sub(bit_and(shift_right<4 * N>(codes), broadcast_int(15)), broadcast_int(8)));
}

// Returns entry `index` of a table for each byte, below 16.
inline I lookup_bytes(const uint8_t (&table)[16], I index) {
  const uint8x16_t entries = vld1q_u8(table);
  return each([&](uint32x4_t p) { return vreinterpretq_u32_u8(vqtbl1q_u8(entries, vreinterpretq_u8_u32(p))); }, index);
}

template <int N>
inline F float4(I codes) {  // twice the e2m1 number of code N
  static constexpr uint8_t kMagnitudes[16] = {0, 1, 2, 3, 4, 6, 8, 12};
  const F magnitude = to_float(lookup_bytes(kMagnitudes, bit_and(shift_right<4 * N>(codes), broadcast_int(7))));
  return as_float(bit_or(as_int(magnitude), bit_and(shift_left<28 - 4 * N>(codes), broadcast_int(0x80000000))));
}

// Transposes sixteen rows of four 32-bit words.
inline void transpose_block(const uint8_t* const (&rows)[16], int64_t offset, int64_t, uint8_t* out) {
  for (int r = 0; r < 16; r += 4, out += 16) {
    const auto row = [&](int i) { return vreinterpretq_u32_u8(vld1q_u8(rows[r + i] + offset)); };
    const uint32x4_t a = row(0), b = row(1), c = row(2), d = row(3);
    const uint32x4_t even = vtrn1q_u32(a, b), odd = vtrn2q_u32(a, b);  // words 0 and 2, 1 and 3 of rows 0 and 1
    const uint32x4_t even2 = vtrn1q_u32(c, d), odd2 = vtrn2q_u32(c, d);
    const auto put = [out](int word, uint64x2_t x) { vst1q_u8(out + 64 * word, vreinterpretq_u8_u64(x)); };
    put(0, vtrn1q_u64(vreinterpretq_u64_u32(even), vreinterpretq_u64_u32(even2)));
    put(1, vtrn1q_u64(vreinterpretq_u64_u32(odd), vreinterpretq_u64_u32(odd2)));
    put(2, vtrn2q_u64(vreinterpretq_u64_u32(even), vreinterpretq_u64_u32(even2)));
    put(3, vtrn2q_u64(vreinterpretq_u64_u32(odd), vreinterpretq_u64_u32(odd2)));
  }
}
// 32-bit words of a row per call of transpose_block
constexpr int64_t kTransposeWords = 4;
