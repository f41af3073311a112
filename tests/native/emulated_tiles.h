// The functions of host/isa/tile_registers.h in plain C++, with the checks of the instructions: a register may be used
// only as its configured shape allows.

struct EmulatedTiles {
  bool configured = false;
  int row_bytes[8], rows[8];
  alignas(64) int8_t data[8][16][64];
};
inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void require_tiles(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "invalid use of tiles: %s\n", what);
  std::abort();
}

inline void configure_tiles(int rows, int row_bytes) {
  require_tiles(rows >= 1 && rows <= 16 && row_bytes >= 4 && row_bytes <= 64 && row_bytes % 4 == 0, "shape");
  EmulatedTiles& tiles = emulated_tiles();
  tiles.configured = true;
  for (int i = 0; i < 8; ++i) {
    tiles.row_bytes[i] = i == 4 || i == 5 ? row_bytes : 64;
    tiles.rows[i] = i < 6 ? rows : row_bytes / 4;
    std::memset(tiles.data[i], 0x55, sizeof tiles.data[i]);
  }
}

inline void release_tiles() { emulated_tiles().configured = false; }

inline EmulatedTiles& configured_tiles() {
  require_tiles(emulated_tiles().configured, "without a configuration");
  return emulated_tiles();
}

template <int Tile>
inline void zero_tile() {
  std::memset(configured_tiles().data[Tile], 0, sizeof EmulatedTiles::data[Tile]);
}

template <int Tile>
inline void load_tile(const void* p, int64_t stride) {
  EmulatedTiles& tiles = configured_tiles();
  for (int r = 0; r < tiles.rows[Tile]; ++r) {
    std::memcpy(tiles.data[Tile][r], static_cast<const char*>(p) + r * stride, static_cast<size_t>(tiles.row_bytes[Tile]));
  }
}

template <int Tile>
inline void store_tile(void* p, int64_t stride) {
  EmulatedTiles& tiles = configured_tiles();
  for (int r = 0; r < tiles.rows[Tile]; ++r) {
    std::memcpy(static_cast<char*>(p) + r * stride, tiles.data[Tile][r], 64);
  }
}

template <int Sum, int Left, int Right>
inline EmulatedTiles& matching_tiles() {
  EmulatedTiles& tiles = configured_tiles();
  require_tiles(tiles.rows[Sum] == tiles.rows[Left] && tiles.row_bytes[Left] == 4 * tiles.rows[Right], "operands");
  return tiles;
}

template <int Sum, int Left, int Right>
inline void multiply_tiles() {
  EmulatedTiles& tiles = matching_tiles<Sum, Left, Right>();
  for (int r = 0; r < tiles.rows[Sum]; ++r) {
    int32_t sums[16];
    std::memcpy(sums, tiles.data[Sum][r], sizeof sums);
    for (int k = 0; k < tiles.row_bytes[Left]; ++k) {
      for (int n = 0; n < 16; ++n) sums[n] += tiles.data[Left][r][k] * tiles.data[Right][k / 4][4 * n + k % 4];
    }
    std::memcpy(tiles.data[Sum][r], sums, sizeof sums);
  }
}

template <int Sum, int Left, int Right>
inline void multiply_bf16_tiles() {
  EmulatedTiles& tiles = matching_tiles<Sum, Left, Right>();
  const auto value = [](const int8_t* row, int index) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * index, sizeof bits);
    return widen_one(bits);
  };
  for (int r = 0; r < tiles.rows[Sum]; ++r) {
    float sums[16];
    std::memcpy(sums, tiles.data[Sum][r], sizeof sums);
    for (int n = 0; n < 16; ++n) {
      float even = 0.0f, odd = 0.0f;
      for (int k = 0; k < tiles.row_bytes[Left] / 2; k += 2) {
        even = std::fma(value(tiles.data[Left][r], k), value(tiles.data[Right][k / 2], 2 * n), even);
        odd = std::fma(value(tiles.data[Left][r], k + 1), value(tiles.data[Right][k / 2], 2 * n + 1), odd);
      }
      sums[n] += even + odd;
    }
    std::memcpy(tiles.data[Sum][r], sums, sizeof sums);
  }
}
