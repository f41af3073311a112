// A projection of csrc/cuda lane by lane on the CPU: its tiles, its split over CTAs and warps, its shared memory and
// its order of summation, with the functions of cuda/linear/tiles.h that the kernel calls, and an m16n8k16 after the
// PTX ISA. The loops follow linear.cuh, epilogue.cuh and linear.cu there.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "cuda/linear/lane_epilogue.h"

namespace projection {

using namespace swiftspec::cuda;
using namespace swiftspec::cuda::tiles;
using swiftspec::fragment::c_column;

inline void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

template <class T>
std::vector<T> read(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (count == 0) return values;
  require(std::fread(values.data(), sizeof(T), values.size(), stdin) == values.size(), "stdin is too short");
  return values;
}

using Float4 = std::array<float, 4>;
using Words4 = std::array<uint32_t, 4>;
using WarpSums = std::array<Float4, 32>;  // of one mma, by lane

inline float half_of(uint32_t word, int e) { return e == 0 ? low(word) : high(word); }

// d += a b by all lanes of a warp: A 16 x 16, B 16 x 8, D 16 x 8.
inline void mma(WarpSums& d, const std::array<Words4, 32>& a, const std::array<std::array<uint32_t, 2>, 32>& b) {
  float A[16][16], B[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane >> 2, thread = lane & 3;
    for (int e = 0; e < 2; ++e) {
      A[group][2 * thread + e] = half_of(a[lane][0], e);
      A[group + 8][2 * thread + e] = half_of(a[lane][1], e);
      A[group][2 * thread + 8 + e] = half_of(a[lane][2], e);
      A[group + 8][2 * thread + 8 + e] = half_of(a[lane][3], e);
      B[2 * thread + e][group] = half_of(b[lane][0], e);
      B[2 * thread + 8 + e][group] = half_of(b[lane][1], e);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = (lane >> 2) + (i >= 2 ? 8 : 0), column = (lane & 3) * 2 + (i & 1);
      for (int k = 0; k < 16; ++k) d[lane][i] = std::fmaf(A[row][k], B[k][column], d[lane][i]);
    }
  }
}

struct Launch {
  Tiling tiling;
  SmemLayout smem;
  int rows, rows8, clusters;
  std::vector<uint32_t> weights;
  std::vector<uint16_t> x;
  std::string mode;
  swiftspec::cuda::Outputs to;
};

struct Cta {
  std::vector<uint8_t> shared;
  std::array<std::vector<WarpSums>, kWarps> sums;  // [fragment * rows8 + j] of each warp
  std::array<TileIterator, kWarps> fetched;

  template <class T>
  T& at(int offset, int64_t index) {
    const size_t place = static_cast<size_t>(offset) + static_cast<size_t>(index) * sizeof(T);
    require(place + sizeof(T) <= shared.size(), "outside of the shared memory");
    return *reinterpret_cast<T*>(shared.data() + place);
  }
};

inline void stage_activations(const Launch& l, Cta& cta, int64_t first, int blocks) {
  const int log = l.tiling.group != 0 ? l.tiling.group_log : 1;
  for (int unit = 0; unit < (blocks >> log) * l.rows8; ++unit) {
    const int j = unit % l.rows8, block = unit / l.rows8 << log;
    float sums[32] = {};
    for (int lane = 0; lane < 32; ++lane) {
      const int row = x_row(j, lane);
      for (int b = 0; b < 1 << log; ++b) {
        const int64_t input = first + x_input(block + b, lane);
        uint32_t piece[4] = {};
        if (row < l.rows && input < l.tiling.k) std::memcpy(piece, &l.x[row * l.tiling.k + input], sizeof piece);
        sums[lane] += sum8(piece);
        std::memcpy(&cta.at<Words4>(l.smem.x, x_piece(block + b, l.rows8, j, lane)), piece, sizeof piece);
      }
    }
    if (l.tiling.group == 0) continue;
    for (int lane = 0; lane < 32; lane += 4) {
      const float total = (sums[lane] + sums[lane + 1]) + (sums[lane + 2] + sums[lane + 3]);
      cta.at<float>(l.smem.sums, (block >> log) * 8 * l.rows8 + x_row(j, lane)) = total;
    }
  }
}

// Both steps of a block for one fragment and eight rows.
inline void multiply_block(const Launch& l, Cta& cta, const uint32_t* tile, int tile_block, int block, int f, int j,
                    WarpSums& d) {
  for (int odd = 0; odd < 2; ++odd) {
    std::array<Words4, 32> a;
    std::array<std::array<uint32_t, 2>, 32> b;
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int step = 2 * block + odd;
        a[lane][i] = l.tiling.group != 0 ? codes_to_bf16(tile[code_word(step, lane, f)], i)
                                         : tile[dense_word(step, lane, f, i)];
      }
      const Words4 piece = cta.at<Words4>(l.smem.x, x_piece(tile_block + block, l.rows8, j, lane));
      b[lane] = {piece[2 * odd], piece[2 * odd + 1]};
    }
    mma(d, a, b);
  }
}

inline void fold_group(const Launch& l, Cta& cta, const uint32_t* tile, int tile_in_chunk, int group, int f, int j,
                WarpSums& sums, WarpSums& products) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * j + c_column(lane, i);
      const float x_sum =
          cta.at<float>(l.smem.sums, (tile_in_chunk * l.tiling.groups() + group) * 8 * l.rows8 + row);
      const uint32_t word = tile[group_words(group, lane) + 2 * f + i / 2];
      sums[lane][i] = fold(sums[lane][i], products[lane][i], word, x_sum);
    }
  }
  products = {};
}

inline void multiply_tile(const Launch& l, Cta& cta, const uint32_t* tile, int tile_in_chunk, int warp) {
  const int blocks = l.tiling.tile_k / kBlock;
  for (int f = 0; f < 2; ++f) {
    for (int j = 0; j < l.rows8; ++j) {
      WarpSums& sums = cta.sums[warp][f * l.rows8 + j];
      WarpSums products{};
      for (int block = 0; block < blocks; ++block) {
        WarpSums& d = l.tiling.group != 0 ? products : sums;
        multiply_block(l, cta, tile, tile_in_chunk * blocks, block, f, j, d);
        const int group = block >> l.tiling.group_log;
        if (l.tiling.group == 0 || (block + 1) >> l.tiling.group_log == group) continue;
        fold_group(l, cta, tile, tile_in_chunk, group, f, j, sums, products);
      }
    }
  }
}

inline void multiply(const Launch& l, Cta& cta, int rank, int turn) {
  const int first = l.tiling.first_tile(rank), range = l.tiling.range(rank);
  for (auto& sums : cta.sums) sums.assign(2 * l.rows8, {});
  for (int begin = 0; begin < range; begin += l.smem.chunk_tiles) {
    const int here = std::min(l.smem.chunk_tiles, range - begin);
    stage_activations(l, cta, static_cast<int64_t>(first + begin) * l.tiling.tile_k, here * l.tiling.tile_k / kBlock);
    for (int warp = 0; warp < kWarps; ++warp) {
      for (int tile = l.tiling.share_of(warp); tile < here; tile += l.tiling.warps_k()) {
        TileIterator& walk = cta.fetched[warp];
        const int strip = (turn << l.tiling.n_log) + l.tiling.strip_of(warp);
        require(!walk.done() && walk.strip == strip && walk.tile == first + begin + tile, "another tile was fetched");
        const int64_t at = l.tiling.tile_at(walk.strip, walk.tile);
        require(at % 128 == 0 && at + l.tiling.tile_bytes <= l.tiling.bytes(), "a tile outside of the weights");
        multiply_tile(l, cta, l.weights.data() + at / 4, tile, warp);
        walk.next();
      }
    }
  }
}

inline void reduce_warps(const Launch& l, Cta& cta, int buffer) {
  const int share = l.tiling.warps_k(), strip_units = l.rows8 * 2 * 32;
  const int joined = l.smem.joined + buffer * l.smem.joined_bytes, to = share > 1 ? l.smem.partial : joined;
  for (int warp = 0; warp < kWarps; ++warp) {
    for (int i = 0; i < 2 * l.rows8 * 32; ++i) {
      const int lane = i % 32, f = i / 32 % 2, j = i / 64;
      cta.at<Float4>(to, partial_at(warp, l.rows8, j, f, lane)) = cta.sums[warp][f * l.rows8 + j][lane];
    }
  }
  for (int i = 0; share > 1 && i < strip_units << l.tiling.n_log; ++i) {
    const int from = i / strip_units * share * strip_units + i % strip_units;
    Float4 total = cta.at<Float4>(l.smem.partial, from);
    for (int warp = 1; warp < share; ++warp) {
      for (int c = 0; c < 4; ++c) total[c] += cta.at<Float4>(l.smem.partial, from + warp * strip_units)[c];
    }
    cta.at<Float4>(joined, i) = total;
  }
}

inline Unit read_unit(const Launch& l, std::vector<Cta>& ctas, int buffer, int first_strip, int strip, int j,
                      int lane) {
  Unit unit{strip, j, {}};
  for (int f = 0; f < 2; ++f) {
    float sums[4] = {};
    for (Cta& cta : ctas) {
      const int place = partial_at(strip - first_strip, l.rows8, j, f, lane);
      const Float4 next = cta.at<Float4>(l.smem.joined + buffer * l.smem.joined_bytes, place);
      for (int c = 0; c < 4; ++c) sums[c] = &cta == ctas.data() ? next[c] : sums[c] + next[c];
    }
    set_sums(unit, f, sums);
  }
  return unit;
}

inline void finish(const Launch& l, std::vector<Cta>& ctas, int buffer, int turn, std::set<int64_t>& lines) {
  const Tiling& t = l.tiling;
  const int first_strip = turn << t.n_log;
  for (int i = 0; i < (l.rows8 << t.n_log) * 32; ++i) {
    const int lane = i % 32, j = i / 32 % l.rows8, strip = first_strip + i / 32 / l.rows8;
    Unit unit = read_unit(l, ctas, buffer, first_strip, strip, j, lane);
    add_bias(t, l.to, lane, unit);
    for (int second = 0; second < 2 && has_line(t, strip, j, lane, l.rows); ++second) {
      const int64_t line = ll_line(t, strip, j, lane, second);
      require(line < ll_lines(t, l.rows) && lines.insert(line).second, "two units have one line");
      if (l.mode == "sum") set_line(unit, second, line_of(unit, second));
    }
    store_unit(t, l.to, lane, unit);
  }
}

inline void run(Launch& l) {
  std::set<int64_t> lines;
  for (int cluster = 0; cluster < l.clusters; ++cluster) {
    std::vector<Cta> ctas(static_cast<size_t>(l.tiling.cluster()));
    for (int rank = 0; rank < l.tiling.cluster(); ++rank) {
      ctas[rank].shared.assign(static_cast<size_t>(l.smem.total), 0xff);  // NaN
      for (int w = 0; w < kWarps; ++w) ctas[rank].fetched[w] = tiles_of_warp(l.tiling, cluster, l.clusters, rank, w);
    }
    int count = 0;
    for (int turn = cluster; turn < l.tiling.turns(); turn += l.clusters, ++count) {
      for (int rank = 0; rank < l.tiling.cluster(); ++rank) {
        multiply(l, ctas[rank], rank, turn);
        reduce_warps(l, ctas[rank], count % 2);
      }
      finish(l, ctas, count % 2, turn, lines);
    }
    for (Cta& cta : ctas) {
      for (const TileIterator& walk : cta.fetched) require(walk.done(), "a tile was fetched and not used");
    }
  }
  require(static_cast<int64_t>(lines.size()) == ll_lines(l.tiling, l.rows), "lines that nobody sends");
}

}  // namespace projection
