// Compares the variants of a projection's kernels (csrc/cuda/linear/tiling.h) on the emulated GPU: for every tiling of the
// shape that is not kRing, the results must have the bits of kRing with the same split.
//
//   variants K N GROUP ROWS SEED [MULTIPROCESSORS]
//
// Weights, inputs, norms, biases and residuals are random. The launch in front of each projection writes its inputs.
// Prints the number of results that were compared. Exits with 1 and one line if bits differ or the emulated GPU finds a
// fault.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/linear/candidates.h"
#include "cuda/linear/tiles.h"
#include "kernels_cuda.h"
#include "simt/machine.h"

namespace swiftspec::cuda {

// Kernels that are not part of this program.
void prepare_large_m(const Device&) {}
void prepare_prefill(const Device&) {}

}  // namespace swiftspec::cuda

namespace {

using namespace swiftspec::cuda;
using tiles::Tiling;

struct Operands {
  int64_t k, n, rows;
  std::vector<uint8_t> weights;
  std::vector<uint16_t> source, x, norm, residual;
  std::vector<float> bias;
  std::vector<int64_t> order;  // rows of the source
};

uint16_t bf16_of(float value) { return static_cast<uint16_t>(tiles::pair_of(value, 0)); }

const uint8_t* aligned(const std::vector<uint8_t>& bytes) {
  return bytes.data() + (-reinterpret_cast<uintptr_t>(bytes.data()) & 127);
}

Operands random_operands(int64_t k, int64_t n, int group, int64_t rows, uint32_t seed) {
  std::mt19937 dice(seed);
  std::normal_distribution<float> normal;
  Operands o{k, n, rows, {}, {}, {}, {}, {}, {}, {}};
  const Tiling t = tiles::shape(k, n, group);
  o.weights.resize(static_cast<size_t>(t.bytes() + 128));
  auto* words = reinterpret_cast<uint32_t*>(const_cast<uint8_t*>(aligned(o.weights)));
  for (int64_t i = 0; i < t.bytes() / 4; ++i) {
    const bool code = i % (t.tile_bytes / 4) < tiles::kCodeWords;
    words[i] = code ? dice() : tiles::pack_group(0.01f + 0.01f * static_cast<float>(dice() % 100) / 100, dice() % 16);
  }
  const auto fill = [&](std::vector<uint16_t>& to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to.push_back(bf16_of(normal(dice)));
  };
  fill(o.source, rows * k), fill(o.norm, k), fill(o.residual, rows * n);
  o.x.resize(static_cast<size_t>(rows * k));
  for (int64_t i = 0; i < n; ++i) o.bias.push_back(normal(dice));
  for (int64_t row = 0; row < rows; ++row) o.order.push_back(rows - 1 - row);
  return o;
}

// The results of four projections, as models have them: QKV, gate and up, O, and the LM head.
std::vector<std::vector<uint8_t>> results(Operands& o, const Tiling& tiling) {
  const Device& device = device_info();
  const Weights plain{device, tiling, aligned(o.weights), nullptr}, biased{device, tiling, aligned(o.weights), o.bias.data()};
  std::vector<std::vector<uint8_t>> found;
  for (int op = 0; op < 4; ++op) {
    const bool residual = op == 2, logits = op == 3, swiglu = op == 1;
    std::vector<uint8_t> out(static_cast<size_t>(o.rows * o.n * (logits ? 4 : 2) / (swiglu ? 2 : 1)), 0xff);
    std::fill(o.x.begin(), o.x.end(), uint16_t{0xffff});  // NaN, until the launch in front has ended
    embed(o.order.data(), o.source.data(), o.rows, 2 * o.k, o.x.data(), nullptr);
    linear({op == 1 ? &plain : &biased, o.x.data(), residual ? nullptr : o.norm.data(), 1e-5f,
            residual ? o.residual.data() : nullptr, logits ? nullptr : out.data(),
            logits ? reinterpret_cast<float*>(out.data()) : nullptr, swiglu, nullptr, o.rows},
           nullptr);
    simt::Machine::get().finish();
    found.push_back(std::move(out));
  }
  return found;
}

int compare(int64_t k, int64_t n, int group, int64_t rows, uint32_t seed) {
  Operands o = random_operands(k, n, group, rows, seed);
  prepare_linear(device_info());
  int compared = 0;
  std::map<std::pair<int, int>, std::vector<std::vector<uint8_t>>> rings;  // by split
  std::set<std::tuple<int, int, int, int>> known;  // of kDirect, the number of blocks per multiprocessor is that of kRing
  for (const Tiling& tiling : tiles::all_tilings(k, n, group, device_info())) {
    if (tiling.variant == tiles::kRing) continue;
    const int blocks = tiling.variant == tiles::kDirect ? 0 : tiling.blocks_per_sm;
    if (!known.insert({tiling.cluster(), tiling.warps_k(), tiling.block_strips, blocks}).second) continue;
    Tiling ring = tiling;
    ring.variant = tiles::kRing;
    auto& want = rings[{tiling.cluster(), tiling.warps_k()}];
    if (want.empty()) want = results(o, ring);
    const auto got = results(o, tiling);
    for (size_t op = 0; op < want.size(); ++op, ++compared) {
      if (got[op] == want[op]) continue;
      std::printf("variant %d, cluster %d, %d warps, %d strips: result %zu differs\n", tiling.variant, tiling.cluster(),
                  tiling.warps_k(), tiling.block_strips, op);
      return -1;
    }
  }
  return compared;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6 && argc != 7) return 2;
  simt::Machine& machine = simt::Machine::get();
  if (argc == 7) machine.parts = {static_cast<unsigned>(std::atoi(argv[6]))};
  const auto seed = static_cast<uint32_t>(std::atoi(argv[5]));
  machine.seed(seed);
  machine.queues = true;
  try {
    const int compared = compare(std::atoll(argv[1]), std::atoll(argv[2]), std::atoi(argv[3]), std::atoll(argv[4]), seed);
    if (compared < 0) return 1;
    std::printf("%d\n", compared);
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
