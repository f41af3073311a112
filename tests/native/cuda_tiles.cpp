// Runs a projection of csrc/cuda on the CPU (cuda_projection.h), or prints its tiling.
//
//   cuda_tiles SHARED K N GROUP ROWS CLUSTERS N_LOG CLUSTER_LOG MODE < weights, x[, bias, residual] > out
//   cuda_tiles SHARED K N GROUP ONES TWOS FOURS EIGHTS
//   cuda_tiles SHARED K N GROUP FIRST HALF HEAD_DIM < weights > out
//
// SHARED is the number of bytes of shared memory per CTA. GROUP 0 is bf16. N_LOG and CLUSTER_LOG select a tiling, -1
// the default one. stdin: int4 codes, scales and zeros, or the bf16 matrix; then x [rows, k] bf16. MODE logits: out is
// float32 [rows, n]. Otherwise it is bf16, bias [n] float32 and residual [rows, n] bf16 follow x: plain adds both, sum
// does the same through LL lines, swiglu adds only the bias; heads64 and heads128 are plain with the tiles of a QKV
// projection with such heads.
//
// The second form prints the tiling for a device that runs ONES, TWOS, FOURS and EIGHTS clusters of 1, 2, 4 and 8
// concurrently, and twice as many if two blocks share a multiprocessor: blocks per multiprocessor, concurrent strips,
// CTAs per cluster, iterations, stages for 8, 16 and 32 rows, rows per launch if 40 and 320 are needed, its cost by the
// model in ns, and the cost on this device of the tiling for a device with 132, 66, 32 and 16. The third form writes
// outputs as rows [2 half, k] of bf16, as a library's product reads them. HEAD_DIM 0 is another projection than QKV.
//
// Exits with 1 and one line if the tiling does not fit.
#include "cuda/linear/unpack.h"
#include "cuda/linear/repack.h"
#include "cuda/linear/large_m.h"
#include "cuda_projection.h"

using namespace projection;

namespace {

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

// A lane has both elements of each rotation, and a strip lies in one head.
void check_heads(const Tiling& t, int head_dim) {
  for (int i = 0; i < static_cast<int>(t.half); ++i) {
    const int strip = i / 16, f = i % 2, r = i / 2 % 8;
    const int64_t first = output_of(t, strip, f, r), second = output_of(t, strip, f, r + 8);
    require(second - first == head_dim / 2 && first / head_dim == second / head_dim, "a rotation in two lanes");
    require(first / head_dim == output_of(t, strip, 0, 0) / head_dim, "a strip in two heads");
  }
}

// The slices that the warps of a launch prefetch cover all bytes once, in whole lines.
void check_slices(int64_t bytes) {
  for (const int64_t parts : {1, 8, 1056, 100000}) {
    int64_t next = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const Slice slice = slice_of(bytes, slice_bytes(bytes, parts), part);
      require(slice.first == next && slice.bytes >= 0 && slice.bytes % 128 == 0,
              "slices with gaps, or of broken lines");
      next += slice.bytes;
    }
    require(next == bytes, "slices of something else");
  }
}

// Writes some strips as rows of bf16, each element once.
void write_rows(const Launch& l, int64_t first, int64_t half) {
  const Strips strips = strips_of(first, half);
  std::vector<Bf16x8> out(static_cast<size_t>(2 * half * l.tiling.k / 8), Bf16x8{{~0u, ~0u, ~0u, ~0u}});
  const auto expand = l.tiling.group != 0 ? unpack_tile<true> : unpack_tile<false>;
  for (int i = 0; i < 32 * strips.tiles(l.tiling); ++i) {
    expand(l.tiling, l.weights.data(), strips, i / 32, i % 32, reinterpret_cast<uint16_t*>(out.data()));
  }
  std::fwrite(out.data(), sizeof(Bf16x8), out.size(), stdout);
}

// A launch of many rows processes every tile once, and those of a strip in the order in which warps and CTAs add sums.
void check_tile_order(const Tiling& t, int log) {
  constexpr int kClusters = 3;
  for (int cta = 0; cta < t.cluster(); ++cta) {
    std::vector<int> order;
    for (int share = 0; share < t.warps_k(); ++share) {
      for (int tile = t.first_tile(cta) + share; tile < t.first_tile(cta + 1); tile += t.warps_k())
        order.push_back(tile);
    }
    std::set<int> strips;
    for (int i = 0; i < kClusters << log && !order.empty(); ++i) {
      for (LargeMTileIterator c = large_m_tiles(t, log, i >> log, kClusters, cta, i & ((1 << log) - 1)); !c.done();) {
        require(strips.insert(c.strip).second, "two warps have one strip");
        for (const int tile : order) require(c.tile == tile, "a tile out of turn"), c.next();
      }
    }
    require(order.empty() || static_cast<int>(strips.size()) == t.strips, "a strip without a warp");
  }
}

// Every part of every tile has a separate offset, and those of a launch's slab are consecutive.
void check_parts(const Tiling& t, int rows, const Device& device) {
  const int most = large_m_parts(t, rows, device), all = total_parts(t, rows, device);
  require(rows - all * kMaxRows <= kMaxRows, "rows that no launch has");
  int64_t next = 0;
  for (int done = 0; done < all; done += most) {
    const int parts = large_m_parts(t, rows - done * kMaxRows, device);
    require(parts == std::min(most, all - done), "a launch of other parts");
    for (int tile = 0; tile < t.tiles; ++tile) {
      for (int part = done; part < done + parts; ++part, next += part_bytes(t)) {
        require(part_offset(t, most, all, part, tile) == next, "a part that is not in its slab");
      }
    }
  }
}

// The rows that one launch processes if `rows` are needed.
int wide_rows(const Tiling& t, int rows, const Device& device) {
  const int parts = large_m_parts(t, rows, device);
  if (parts == 0) return kMaxRows;
  for (const int some : {rows, rows + 8, rows + 40, rows + 300}) check_parts(t, some, device);
  const LargeMSmemLayout c = large_m_smem_layout(t, parts, device);
  require(c.total <= device.shared && c.slab_count >= 2 && c.stages >= 2, "no room for many rows");
  require(c.slabs % 128 == 0 && c.ring % 128 == 0 && slab_bytes(t, parts) % 128 == 0, "slabs that are not aligned");
  return std::min(rows, parts * kMaxRows);
}

// A projection with an RMSNorm, whose weight may lie in shared memory.
void check_norm(const Tiling& t, int rows8, const Device& device) {
  const SmemLayout plain = smem_layout(t, rows8, device), c = smem_layout(t, rows8, device, true);
  const int fewest = is_paired(t, rows8) ? kPairedStages : device.min_stages;
  int range = 0;
  for (int cta = 0; cta < t.cluster(); ++cta) range = std::max(range, t.range(cta));
  require(c.total <= device.shared && c.stages >= std::min(plain.stages, fewest), "a norm takes the ring");
  require((c.total <= device.half_shared) == (plain.total <= device.half_shared), "a norm keeps a block off");
  require(!is_paired(t, rows8) || c.total <= device.half_shared, "two blocks do not fit");
  require(c.norm_bytes == 0 || c.norm_bytes >= 2 * range * t.tile_k, "no room for the norm's weight");
  require(c.norm_barrier % 8 == 0 && c.norm % 16 == 0 && c.ring % 128 == 0, "a norm that is not aligned");
  require(c.norm_bytes == 0 || (c.norm >= c.norm_barrier + 8 && c.norm + c.norm_bytes <= c.ring), "a norm in the ring");
  require(c.chunk_tiles == plain.chunk_tiles && c.joined == plain.joined, "a norm moves the rest");
}

// The device as device.cu would report it.
Device device_of(int shared, int ones, int twos, int fours, int eights) {
  return {.arch = 90,
          .shared = shared,
          .half_shared = (shared + 1024) / 2 - 1024,
          .l2 = 50 << 20,
          .max_clusters = {ones, twos, fours, eights},
          .max_paired_clusters = {2 * ones, 2 * twos, 2 * fours, 2 * eights}};
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 8 || argc == 9 || argc == 10, "seven or eight numbers, or eight and a mode");
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  const int64_t k = std::atoll(argv[2]), n = std::atoll(argv[3]);
  const int group = number(4);
  const Device usual = device_of(number(1), 132, 66, 32, 16);
  if (argc == 8) {
    Launch l{tiling_for(k, n, group, usual), {}, 0, 0, 0, {}, {}, "", {}};
    if (number(7) != 0) l.tiling = with_heads(l.tiling, number(7));
    read_weights(l);
    write_rows(l, number(5), number(6));
    return 0;
  }
  if (argc == 9) {
    const auto device = device_of(number(1), number(5), number(6), number(7), number(8));
    const Tiling t = tiling_for(k, n, group, device);
    require(t.n == n && fits(t, device), "no tiling");
    for (const int64_t bytes : {int64_t{0}, int64_t{t.tile_bytes}, t.bytes(), prefetch_bytes(device)})
      check_slices(bytes);
    Device old = device;
    old.driver = 12030;
    require(device.has_early_launch() && !old.has_early_launch(), "early launches of an old driver");
    std::printf("%d %d %d %d", t.blocks_per_sm, t.warps_n(), t.cluster(), t.turns());
    for (const int rows8 : {1, 2, 4}) {
      const SmemLayout c = smem_layout(t, rows8, device);
      require(c.total <= device.shared, "more shared memory than there is");
      require(concurrent_clusters(t, rows8, device) >= 1, "no cluster fits");
      check_norm(t, rows8, device);
      std::printf(" %d", c.stages);
    }
    check_tile_order(t, large_m_warps_log(device));
    std::printf(" %d %d", wide_rows(t, 40, device), wide_rows(t, 320, device));
    const bool clusters = device.max_clusters[3] > 0;
    const Tiling other = clusters ? tiling_for(k, n, group, usual) : t;
    std::printf(" %lld %lld\n", static_cast<long long>(estimated_ns(t, device)),
                static_cast<long long>(estimated_ns(other, device)));
    return 0;
  }
  const int rows = number(5), clusters = number(6);
  Launch l{tiling_for(k, n, group, usual), {}, rows, rows <= 8 ? 1 : rows <= 16 ? 2 : 4, 0, {}, {}, argv[9], {}};
  if (number(7) >= 0) l.tiling = with_split(shape(k, n, group), number(7), number(8));
  if (l.mode.rfind("heads", 0) == 0) {
    const int head_dim = std::atoi(l.mode.c_str() + 5);
    l.tiling = with_heads(l.tiling, head_dim);
    check_heads(l.tiling, head_dim);
  }
  l.clusters = std::min(clusters, l.tiling.turns());
  l.smem = smem_layout(l.tiling, l.rows8, usual);
  if (!fits(l.tiling, usual)) return 2;
  require(l.smem.stages >= 1 && l.smem.total <= usual.shared, "no room");
  read_weights(l);
  l.x = read<uint16_t>(rows * k);
  const bool logits = l.mode == "logits", swiglu = l.mode == "swiglu";
  const auto bias = read<float>(logits ? 0 : n);
  const auto residual = read<uint16_t>(logits ? 0 : rows * n);
  std::vector<float> wide(static_cast<size_t>(logits ? rows * n : 0), std::nanf(""));
  std::vector<uint16_t> narrow(static_cast<size_t>(logits ? 0 : rows * n / (swiglu ? 2 : 1)), 0xffff);
  l.to = {logits ? nullptr : bias.data(),
          logits || swiglu ? nullptr : residual.data(),
          logits ? nullptr : narrow.data(),
          logits ? wide.data() : nullptr,
          swiglu,
          rows};
  run(l);
  if (logits) {
    std::fwrite(wide.data(), sizeof(float), wide.size(), stdout);
  } else {
    std::fwrite(narrow.data(), sizeof(uint16_t), narrow.size(), stdout);
  }
}
