// Runs a projection of csrc/cuda lane by lane on the CPU: its tiles, its cut over CTAs and warps, its shared memory and
// its order of sums, by the functions of cuda/linear/tiles.h that the kernel calls, and an m16n8k16 written down from
// the PTX ISA. The loops follow linear.cuh, epilogue.cuh and linear.cu there.
//
//   cuda_tiles SHARED K N GROUP ROWS CLUSTERS N_LOG CLUSTER_LOG MODE < weights, x[, bias, residual] > out
//   cuda_tiles SHARED K N GROUP ONES TWOS FOURS EIGHTS
//   cuda_tiles SHARED K N GROUP FIRST HALF < weights > out
//
// The third writes outputs as rows [2 half, k] of bf16, as a library's product reads them. The second prints the tiling for a device that runs so many clusters of 1, 2, 4 and 8 at a time: strips at a time,
// CTAs of a cluster, turns, stages for 8, 16 and 32 rows, its cost by the model in ns, and what the cut of a device with
// 132, 66, 32 and 16 would cost on this one.
//
// SHARED are the bytes of shared memory that a CTA may have. GROUP 0 is bf16. N_LOG and CLUSTER_LOG are a cut, -1 the tiling's own. stdin: int4 codes, scales and zeros, or the
// bf16 matrix; then x [rows, k] bf16. MODE logits: out is float32 [rows, n]. Otherwise it is bf16, bias [n] float32 and
// residual [rows, n] bf16 follow x: plain adds both, sum the same by way of LL lines, swiglu the bias alone. Leaves
// with 1 and one line when something does not fit.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "cuda/linear/expand.h"
#include "cuda/linear/lane_epilogue.h"
#include "cuda/linear/repack.h"

using namespace swiftspec::cuda;
using namespace swiftspec::cuda::tiles;
using swiftspec::fragment::c_column;

namespace {

void require(bool ok, const char* what) {
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

float half_of(uint32_t word, int e) { return e == 0 ? low(word) : high(word); }

// d += a b by all lanes of a warp: A 16 x 16, B 16 x 8, D 16 x 8.
void mma(WarpSums& d, const std::array<Words4, 32>& a, const std::array<std::array<uint32_t, 2>, 32>& b) {
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
  Carve carve;
  int rows, rows8, clusters;
  std::vector<uint32_t> weights;
  std::vector<uint16_t> x;
  std::string mode;
  swiftspec::cuda::Outputs to;
};

struct Cta {
  std::vector<uint8_t> shared;
  std::array<std::vector<WarpSums>, kWarps> sums;  // [fragment * rows8 + j] of each warp
  std::array<Walk, kWarps> fetched;

  template <class T>
  T& at(int offset, int64_t index) {
    const size_t place = static_cast<size_t>(offset) + static_cast<size_t>(index) * sizeof(T);
    require(place + sizeof(T) <= shared.size(), "outside of the shared memory");
    return *reinterpret_cast<T*>(shared.data() + place);
  }
};

void stage(const Launch& l, Cta& cta, int64_t first, int blocks) {
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
        std::memcpy(&cta.at<Words4>(l.carve.x, x_piece(block + b, l.rows8, j, lane)), piece, sizeof piece);
      }
    }
    if (l.tiling.group == 0) continue;
    for (int lane = 0; lane < 32; lane += 4) {
      const float total = (sums[lane] + sums[lane + 1]) + (sums[lane + 2] + sums[lane + 3]);
      cta.at<float>(l.carve.sums, (block >> log) * 8 * l.rows8 + x_row(j, lane)) = total;
    }
  }
}

// Both steps of a block for one fragment and eight rows.
void multiply_block(const Launch& l, Cta& cta, const uint32_t* tile, int tile_block, int block, int f, int j,
                    WarpSums& d) {
  for (int odd = 0; odd < 2; ++odd) {
    std::array<Words4, 32> a;
    std::array<std::array<uint32_t, 2>, 32> b;
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int step = 2 * block + odd;
        a[lane][i] = l.tiling.group != 0 ? expand(tile[code_word(step, lane, f)], i)
                                         : tile[dense_word(step, lane, f, i)];
      }
      const Words4 piece = cta.at<Words4>(l.carve.x, x_piece(tile_block + block, l.rows8, j, lane));
      b[lane] = {piece[2 * odd], piece[2 * odd + 1]};
    }
    mma(d, a, b);
  }
}

void fold_group(const Launch& l, Cta& cta, const uint32_t* tile, int tile_in_chunk, int group, int f, int j,
                WarpSums& sums, WarpSums& products) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * j + c_column(lane, i);
      const float x_sum =
          cta.at<float>(l.carve.sums, (tile_in_chunk * l.tiling.groups() + group) * 8 * l.rows8 + row);
      const uint32_t word = tile[group_words(group, lane) + 2 * f + i / 2];
      sums[lane][i] = fold(sums[lane][i], products[lane][i], word, x_sum);
    }
  }
  products = {};
}

void multiply_tile(const Launch& l, Cta& cta, const uint32_t* tile, int tile_in_chunk, int warp) {
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

void multiply(const Launch& l, Cta& cta, int rank, int turn) {
  const int first = l.tiling.first_tile(rank), range = l.tiling.range(rank);
  for (auto& sums : cta.sums) sums.assign(2 * l.rows8, {});
  for (int begin = 0; begin < range; begin += l.carve.chunk_tiles) {
    const int here = std::min(l.carve.chunk_tiles, range - begin);
    stage(l, cta, static_cast<int64_t>(first + begin) * l.tiling.tile_k, here * l.tiling.tile_k / kBlock);
    for (int warp = 0; warp < kWarps; ++warp) {
      for (int tile = l.tiling.share_of(warp); tile < here; tile += l.tiling.warps_k()) {
        Walk& walk = cta.fetched[warp];
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

void join(const Launch& l, Cta& cta, int buffer) {
  const int share = l.tiling.warps_k(), strip_units = l.rows8 * 2 * 32;
  const int joined = l.carve.joined + buffer * l.carve.joined_bytes, to = share > 1 ? l.carve.partial : joined;
  for (int warp = 0; warp < kWarps; ++warp) {
    for (int i = 0; i < 2 * l.rows8 * 32; ++i) {
      const int lane = i % 32, f = i / 32 % 2, j = i / 64;
      cta.at<Float4>(to, partial_at(warp, l.rows8, j, f, lane)) = cta.sums[warp][f * l.rows8 + j][lane];
    }
  }
  for (int i = 0; share > 1 && i < strip_units << l.tiling.n_log; ++i) {
    const int from = i / strip_units * share * strip_units + i % strip_units;
    Float4 total = cta.at<Float4>(l.carve.partial, from);
    for (int warp = 1; warp < share; ++warp) {
      for (int c = 0; c < 4; ++c) total[c] += cta.at<Float4>(l.carve.partial, from + warp * strip_units)[c];
    }
    cta.at<Float4>(joined, i) = total;
  }
}

Unit read_unit(const Launch& l, std::vector<Cta>& ctas, int buffer, int first_strip, int strip, int j, int lane) {
  Unit unit{strip, j, {}};
  for (int f = 0; f < 2; ++f) {
    float sums[4] = {};
    for (Cta& cta : ctas) {
      const int place = partial_at(strip - first_strip, l.rows8, j, f, lane);
      const Float4 next = cta.at<Float4>(l.carve.joined + buffer * l.carve.joined_bytes, place);
      for (int c = 0; c < 4; ++c) sums[c] = &cta == ctas.data() ? next[c] : sums[c] + next[c];
    }
    set_sums(unit, f, sums);
  }
  return unit;
}

void finish(const Launch& l, std::vector<Cta>& ctas, int buffer, int turn, std::set<int64_t>& lines) {
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

void run(Launch& l) {
  std::set<int64_t> lines;
  for (int cluster = 0; cluster < l.clusters; ++cluster) {
    std::vector<Cta> ctas(static_cast<size_t>(l.tiling.cluster()));
    for (int rank = 0; rank < l.tiling.cluster(); ++rank) {
      ctas[rank].shared.assign(static_cast<size_t>(l.carve.total), 0xff);  // NaN
      for (int w = 0; w < kWarps; ++w) ctas[rank].fetched[w] = walk_of(l.tiling, cluster, l.clusters, rank, w);
    }
    int count = 0;
    for (int turn = cluster; turn < l.tiling.turns(); turn += l.clusters, ++count) {
      for (int rank = 0; rank < l.tiling.cluster(); ++rank) {
        multiply(l, ctas[rank], rank, turn);
        join(l, ctas[rank], count % 2);
      }
      finish(l, ctas, count % 2, turn, lines);
    }
    for (Cta& cta : ctas) {
      for (const Walk& walk : cta.fetched) require(walk.done(), "a tile was fetched and not used");
    }
  }
  require(static_cast<int64_t>(lines.size()) == ll_lines(l.tiling, l.rows), "lines that nobody sends");
}

void read_weights(Launch& l) {
  const int64_t k = l.tiling.k, n = l.tiling.n, group = l.tiling.group;
  l.weights.resize(static_cast<size_t>(l.tiling.bytes() / 4));
  if (group == 0) {
    const auto matrix = read<uint16_t>(n * k);
    for (size_t i = 0; i < l.weights.size(); ++i) {
      l.weights[i] = bf16_word(l.tiling, matrix.data(), static_cast<int64_t>(i));
    }
    return;
  }
  const auto codes = read<uint32_t>(k * n / 8);
  const auto scales = read<float>(k / group * n);
  const auto zeros = read<uint32_t>(k / group * n / 8);
  const Int4Source source{codes.data(), scales.data(), zeros.data()};
  for (size_t i = 0; i < l.weights.size(); ++i) l.weights[i] = int4_word(l.tiling, source, static_cast<int64_t>(i));
}

}  // namespace

// What the warps of a launch ask for ahead is all that there is, once, in whole lines.
void check_slices(int64_t bytes) {
  for (const int64_t parts : {1, 8, 1056, 100000}) {
    int64_t next = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const Slice slice = slice_of(bytes, slice_bytes(bytes, parts), part);
      require(slice.first == next && slice.bytes >= 0 && slice.bytes % 128 == 0, "slices with gaps, or of broken lines");
      next += slice.bytes;
    }
    require(next == bytes, "slices of something else");
  }
}

// Writes some strips as rows of bf16, each element once.
void write_rows(const Launch& l, int64_t first, int64_t half) {
  const Strips strips = strips_of(first, half);
  std::vector<Eight> out(static_cast<size_t>(2 * half * l.tiling.k / 8), Eight{{~0u, ~0u, ~0u, ~0u}});
  const auto expand = l.tiling.group != 0 ? expand_tile<true> : expand_tile<false>;
  for (int i = 0; i < 32 * strips.tiles(l.tiling); ++i) {
    expand(l.tiling, l.weights.data(), strips, i / 32, i % 32, reinterpret_cast<uint16_t*>(out.data()));
  }
  std::fwrite(out.data(), sizeof(Eight), out.size(), stdout);
}

// As device.cu would find it.
swiftspec::cuda::Device device_of(int shared, int ones, int twos, int fours, int eights) {
  return {90, shared, (shared + 1024) / 2 - 1024, 50 << 20, {ones, twos, fours, eights}};
}

int main(int argc, char** argv) {
  require(argc == 7 || argc == 9 || argc == 10, "six or eight numbers, or eight and a mode");
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  const int64_t k = std::atoll(argv[2]), n = std::atoll(argv[3]);
  const int group = number(4);
  const swiftspec::cuda::Device usual = device_of(number(1), 132, 66, 32, 16);
  if (argc == 7) {
    Launch l{tiling_for(k, n, group, usual), {}, 0, 0, 0, {}, {}, "", {}};
    read_weights(l);
    write_rows(l, number(5), number(6));
    return 0;
  }
  if (argc == 9) {
    const auto device = device_of(number(1), number(5), number(6), number(7), number(8));
    const Tiling t = tiling_for(k, n, group, device);
    require(t.n == n && has_room(t, device), "no tiling");
    for (const int64_t bytes : {int64_t{0}, int64_t{t.tile_bytes}, t.bytes(), ahead_bytes(device)}) check_slices(bytes);
    std::printf("%d %d %d", t.warps_n(), t.cluster(), t.turns());
    for (const int rows8 : {1, 2, 4}) {
      const Carve c = carve(t, rows8, device);
      require(c.total <= device.shared, "more shared memory than there is");
      std::printf(" %d", c.stages);
    }
    const bool clusters = device.at_once[3] > 0;
    const Tiling other = clusters ? tiling_for(k, n, group, usual) : t;
    std::printf(" %lld %lld\n", static_cast<long long>(cost(t, device)), static_cast<long long>(cost(other, device)));
    return 0;
  }
  const int rows = number(5), clusters = number(6);
  Launch l{tiling_for(k, n, group, usual), {}, rows, rows <= 8 ? 1 : rows <= 16 ? 2 : 4, 0, {}, {}, argv[9], {}};
  if (number(7) >= 0) l.tiling = cut(shape(k, n, group), number(7), number(8));
  l.clusters = std::min(clusters, l.tiling.turns());
  l.carve = carve(l.tiling, l.rows8, usual);
  if (!has_room(l.tiling, usual)) return 2;
  require(l.carve.stages >= 1 && l.carve.total <= usual.shared, "no room");
  read_weights(l);
  l.x = read<uint16_t>(rows * k);
  const bool logits = l.mode == "logits", swiglu = l.mode == "swiglu";
  const auto bias = read<float>(logits ? 0 : n);
  const auto residual = read<uint16_t>(logits ? 0 : rows * n);
  std::vector<float> wide(static_cast<size_t>(logits ? rows * n : 0), std::nanf(""));
  std::vector<uint16_t> narrow(static_cast<size_t>(logits ? 0 : rows * n / (swiglu ? 2 : 1)), 0xffff);
  l.to = {logits ? nullptr : bias.data(), logits || swiglu ? nullptr : residual.data(), logits ? nullptr : narrow.data(),
          logits ? wide.data() : nullptr, swiglu, rows};
  run(l);
  if (logits) {
    std::fwrite(wide.data(), sizeof(float), wide.size(), stdout);
  } else {
    std::fwrite(narrow.data(), sizeof(uint16_t), narrow.size(), stdout);
  }
}
