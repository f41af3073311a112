// The matrix tiles of AMX: eight registers of up to 16 rows of 64 bytes. Assembly, because GCC's intrinsics take the
// number of a register as a literal only, not as a template argument. Included inside the target region and the
// namespace of an ISA level. Tests include a header with the same functions in plain C++ instead.

// Sets the shapes of all registers: accumulators (0 to 3) and left operands (4 and 5) of `rows` rows, right operands (6
// and 7) of sixteen outputs. `row_bytes`: of a row of a left operand, a quarter of it being the rows of a right one.
// Until `release_tiles` other code on this thread must not use tiles.
inline void configure_tiles(int rows, int row_bytes) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? row_bytes : 64);
    shapes.rows[i] = static_cast<uint8_t>(i < 6 ? rows : row_bytes / 4);
  }
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}

// Returns the registers to their initial state, which the kernel need not save at a context switch.
inline void release_tiles() { asm volatile("tilerelease"); }

template <int Tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

// Loads rows that are `stride` bytes apart.
template <int Tile>
inline void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}

// Stores rows of sixteen sums, `stride` bytes apart.
template <int Tile>
inline void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}

// Adds to each 32-bit integer of `Sum` the products of the signed bytes of a row of `Left` and a column of `Right`,
// whose rows hold four consecutive bytes of each column.
template <int Sum, int Left, int Right>
inline void multiply_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Left), "i"(Right));
}

// The same for pairs of bfloat16 numbers and sums in float32. Products of even and of odd inputs are summed separately,
// and then added to the sum.
template <int Sum, int Left, int Right>
inline void multiply_bf16_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Left), "i"(Right));
}
