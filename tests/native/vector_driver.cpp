// Applies each vector function of an ISA level (host/isa/vector*.h) to numbers that include NaN, infinities, zeros,
// subnormal numbers and halves between integers, and prints the results, one function per line. test_aarch64.py
// compares the output of CPUs.
#include <cstdio>

#include "host/isa/headers.h"
#include "host/isa/level.h"

#ifdef SWIFTSPEC_X86
SWIFTSPEC_BEGIN_TARGET("avx2,fma,f16c")
#endif

namespace swiftspec::host {
namespace {
// clang-format off: each header needs those before it
#ifdef SWIFTSPEC_X86
#include "host/isa/vector256.h"
#include "host/isa/vector_x86.h"
#else
#include "host/isa/vector_neon.h"
#endif
#include "host/isa/vector.h"
// clang-format on

using Words = std::vector<uint32_t>;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

void print_word(uint32_t word) { std::printf(" %x", word); }
void print_float(float x) { print_word(std::isnan(x) ? 0x7fc00000 : bits_of(x)); }  // CPUs differ in the sign of NaN

void print(F x) {
  float lanes[kLanes];
  store(lanes, x);
  for (const float lane : lanes) print_float(lane);
}

void print(I x) {
  uint32_t lanes[kLanes];
  store_int(lanes, x);
  for (const uint32_t lane : lanes) print_word(lane);
}

void print(unsigned mask) { print_word(mask); }

// Sixteen numbers of a list at a time, and as many of another.
template <class Function>
void apply(const char* name, const Words& words, const Words& others, const Function& function) {
  std::printf("%s", name);
  for (size_t i = 0; i + kLanes <= words.size(); i += kLanes) {
    print(function(as_float(load_int(words.data() + i)), as_float(load_int(others.data() + i))));
  }
  std::printf("\n");
}

Words random_words(size_t count, uint32_t key) {
  Words out;
  for (size_t i = 0; i < count; ++i) out.push_back(noise::bits(key, static_cast<uint32_t>(i)));
  return out;
}

Words numbers() {
  Words out;
  for (const float x : {0.0f, 0.3f, 0.5f, 1.0f, 1.5f, 2.5f, 3.0f, 0x1p-149f, 0x1.fffffcp-127f, 0x1p-126f, 87.3f, 87.5f,
                        88.1f, 127.5f, 8388607.5f, 2147483520.0f, 0x1p31f, 0x1p32f, 1e30f, 0x1.fffffep127f}) {
    out.push_back(bits_of(x)), out.push_back(bits_of(-x));
  }
  for (const uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f7fffffu, 0x3f800001u}) {
    out.push_back(bits);
  }
  for (const uint32_t bits : random_words(18, 1)) {  // none of them is a signalling NaN
    out.push_back((bits & 0x7f800000u) == 0x7f800000u ? bits & 0xbfffffffu : bits);
  }
  return out;
}

void compare_arithmetic(const Words& first, const Words& second) {
  apply("add", first, second, [](F x, F y) { return add(x, y); });
  apply("sub", first, second, [](F x, F y) { return sub(x, y); });
  apply("mul", first, second, [](F x, F y) { return mul(x, y); });
  apply("div", first, second, [](F x, F y) { return div(x, y); });
  apply("fma", first, second, [](F x, F y) { return fma(x, y, sub(y, x)); });
  apply("max", first, second, [](F x, F y) { return max(x, y); });
  apply("min", first, second, [](F x, F y) { return min(x, y); });
  apply("greater", first, second, [](F x, F y) { return greater(x, y); });
  apply("not_less_equal", first, second, [](F x, F y) { return not_less_equal(x, y); });
  apply("reduce_max", first, second, [](F x, F y) { return broadcast(reduce_max(max(x, y))); });
  apply("int add", first, second, [](F x, F y) { return add(as_int(x), as_int(y)); });
  apply("int sub", first, second, [](F x, F y) { return sub(as_int(x), as_int(y)); });
  apply("int mul", first, second, [](F x, F y) { return mul(as_int(x), as_int(y)); });
  apply("bits", first, second, [](F x, F y) {
    return bit_xor(bit_and(as_int(x), as_int(y)), bit_or(as_int(x), broadcast_int(0x0ff00ff0)));
  });
}

void compare_conversions(const Words& words) {
  apply("round_even", words, words, [](F x, F) { return round_even(x); });
  apply("to_int", words, words, [](F x, F) { return to_int(x); });
  apply("to_float", words, words, [](F x, F) { return to_float(as_int(x)); });
  apply("unsigned_to_float", words, words, [](F x, F) { return unsigned_to_float(as_int(x)); });
  apply("to_bf16", words, words, [](F x, F) { return bit_and(to_bf16(x), broadcast_int(0xffff0000)); });
  apply("rounded", words, words, [](F x, F) { return rounded<uint16_t>(x); });
  apply("exponential", words, words, [](F x, F) { return exponential(x); });
  apply("logarithm", words, words, [](F x, F) { return logarithm(max(x, broadcast(0x1p-126f))); });
  apply("soft_cap", words, words, [](F x, F) { return soft_cap(x, 30.0f); });
  apply("reduce_add", words, words, [](F x, F) { return broadcast(reduce_add(mul(x, x))); });
  apply("shifts", words, words, [](F x, F) {
    const I word = as_int(x);
    return add(add(shift_left<5>(word), shift_right<7>(word)), add(shift_right_signed<9>(word), shift_right<0>(word)));
  });
  apply("nibbles", words, words, [](F x, F) {
    return sub(add(nibble<0>(as_int(x)), mul(nibble<3>(as_int(x)), broadcast(16.0f))), nibble<7>(as_int(x)));
  });
  apply("float4 0", words, words, [](F x, F) { return float4<0>(as_int(x)); });
  apply("float4 6", words, words, [](F x, F) { return float4<6>(as_int(x)); });
  apply("float4 7", words, words, [](F x, F) { return float4<7>(as_int(x)); });
  apply("lookup_bytes", words, words, [](F x, F) {
    alignas(16) static constexpr uint8_t kTable[16] = {3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 97, 93, 238, 46, 26, 43};
    return lookup_bytes(kTable, bit_and(as_int(x), broadcast_int(0x0f0f0f0f)));
  });
}

// Functions that read or write other types than float32 and 32-bit integers.
void compare_memory() {
  std::vector<uint16_t> halves(1 << 16);
  std::iota(halves.begin(), halves.end(), uint16_t{0});
  for (const bool is_half : {true, false}) {
    std::printf("%s", is_half ? "widen_half" : "widen");
    for (size_t i = 0; i < halves.size(); i += kLanes) print(is_half ? widen_half(&halves[i]) : widen(&halves[i]));
    std::printf("\n");
  }
  uint8_t bytes[256];
  std::iota(bytes, bytes + 256, uint8_t{0});
  std::printf("bytes");
  for (int i = 0; i < 256; i += kLanes) {
    print(widen_bytes(bytes + i));
    print(widen_bytes(reinterpret_cast<const int8_t*>(bytes + i)));
    I stored = broadcast_int(0);
    store_row_bytes(&stored, to_int(widen_bytes(reinterpret_cast<const int8_t*>(bytes + i))));
    print(stored);
  }
  std::printf("\ntranspose_block");
  const Words matrix = random_words(16 * 8, 2);
  const uint8_t* rows[16];
  for (size_t i = 0; i < 16; ++i) rows[i] = reinterpret_cast<const uint8_t*>(matrix.data() + 8 * i);
  uint32_t block[16 * kTransposeWords];
  transpose_block(rows, 16, 16, reinterpret_cast<uint8_t*>(block));
  for (const uint32_t word : block) print_word(word);
  std::printf("\nupper halves");
  for (size_t i = 0; i < matrix.size(); i += kLanes) {
    I stored = broadcast_int(0);
    store_upper_halves(reinterpret_cast<uint16_t*>(&stored), load_int(matrix.data() + i));
    print(stored);
  }
  std::printf("\n");
}

void compare_all() {
  Words first, second;
  for (const uint32_t x : numbers()) {
    for (const uint32_t y : numbers()) first.push_back(x), second.push_back(y);
  }
  compare_arithmetic(first, second);
  Words words = numbers();
  for (uint32_t i = 0; i < 4096; ++i) words.push_back(bits_of((static_cast<float>(i) - 2048.0f) * 0.05f));
  compare_conversions(words);
  compare_memory();
}

}  // namespace
}  // namespace swiftspec::host

#ifdef SWIFTSPEC_X86
SWIFTSPEC_END_TARGET
#endif

int main() {
  swiftspec::host::compare_all();
  return 0;
}
