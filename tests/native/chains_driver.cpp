// Runs the verification of chains on a CPU, in a build with sanitizers (test_cuda_chains.py). Reads a problem from
// stdin, runs the clusters of a launch one after the other in a shuffled order, twice, and writes accepted, counts and
// bonus tokens to stdout. Exits with 1 if the second launch differs or the scratch is not zero afterwards.
#include "cuda/chains/verify.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

using namespace swiftspec;

namespace {

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

template <class T>
std::vector<T> take(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  require(values.empty() || std::fread(values.data(), sizeof(T), values.size(), stdin) == values.size(), "too short");
  return values;
}

template <class T>
void give(const std::vector<T>& values) {
  if (!values.empty()) std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

struct Header {
  int64_t batch, steps, vocab, padded, draft, keys, bias, wide, seed;
};

// As verify_chains_kernel.
template <class T>
void cluster(const chains::VerifyChainsArgs& a, int64_t request, int64_t position) {
  const auto found = std::make_unique<chains::ClusterResult[]>(chains::kBlocks);  // uninitialised but for padding
  const auto memory = [&](int i) { return &found[static_cast<size_t>(i)]; };
  const auto each = [&](auto act) {
    for (int block = chains::kBlocks - 1; block >= 0; --block) {
      for (int index = 0; index < chains::kWarps; ++index) act(block, index);
      chains::reduce_warps(*memory(block));
    }
  };
  each([&](int block, int index) { chains::scan<T>(a, request, position, block, index, *memory(block)); });
  chains::ClusterResult& first = *memory(0);
  a.marks[request * (a.steps + 1) + position] = chains::mark<T>(a, request, position, chains::reduce_blocks(memory));
  first.last = ++a.arrived[request] == chains::positions(a);
  if (!first.last) return;
  a.arrived[request] = 0;
  chains::count_accepted(a, request, first);
  if (a.draft.data == nullptr) return;
  each([&](int block, int index) { chains::scan_bonus<T>(a, request, first, block, index, *memory(block)); });
  a.bonus[request] = chains::token_of(chains::reduce_blocks(memory).best);
}

template <class T>
void launch(const chains::VerifyChainsArgs& a, std::mt19937& dice) {
  std::vector<int64_t> order(static_cast<size_t>(a.batch * chains::positions(a)));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), dice);
  for (const int64_t i : order) cluster<T>(a, i / chains::positions(a), i % chains::positions(a));
}

template <class T>
int run(const Header& h) {
  const auto target = take<T>(h.batch * (h.steps + 1) * h.padded);
  const auto draft = take<T>(h.draft != 0 ? h.batch * h.steps * h.padded : 0);
  const auto tokens = take<int64_t>(h.batch * h.steps);
  const auto uniforms = take<float>(h.draft != 0 ? h.batch * h.steps : 0);
  const auto keys = take<uint32_t>(h.keys != 0 ? h.batch * (h.steps + 1) : 0);
  const float temperature = take<float>(1).front();
  const auto bias = take<float>(h.bias != 0 ? h.vocab : 0);
  std::vector<chains::PositionMark> marks(static_cast<size_t>(h.batch * (h.steps + 1)), {NAN, NAN, -7, -7});
  std::vector<uint32_t> arrived(static_cast<size_t>(h.batch), 0);
  std::vector<uint8_t> accepted[2];
  std::vector<int64_t> count[2], bonus[2];
  const T none{};
  std::mt19937 dice(static_cast<uint32_t>(h.seed));
  for (int i = 0; i < 2; ++i) {
    accepted[i].assign(tokens.size(), 7);
    count[i].assign(static_cast<size_t>(h.batch), -7);
    bonus[i].assign(static_cast<size_t>(h.batch), -7);
    const void* drafted = h.draft == 0 ? nullptr : draft.empty() ? &none : draft.data();
    const chains::VerifyChainsArgs args{{target.data(), (h.steps + 1) * h.padded, h.padded},
                                        {drafted, h.steps * h.padded, h.padded},
                                        h.bias != 0 ? bias.data() : nullptr,
                                        temperature,
                                        tokens.data(),
                                        uniforms.data(),
                                        h.keys != 0 ? keys.data() : nullptr,
                                        marks.data(),
                                        arrived.data(),
                                        accepted[i].data(),
                                        count[i].data(),
                                        bonus[i].data(),
                                        h.batch,
                                        h.steps,
                                        h.vocab,
                                        sizeof(T) == 4};
    launch<T>(args, dice);
    for (const uint32_t waiting : arrived) require(waiting == 0, "the scratch is not as it was");
  }
  require(accepted[0] == accepted[1] && count[0] == count[1] && bonus[0] == bonus[1], "two launches differ");
  give(accepted[0]);
  give(count[0]);
  give(bonus[0]);
  return 0;
}

}  // namespace

int main() {
  const Header h = take<Header>(1).front();
  return h.wide != 0 ? run<float>(h) : run<uint16_t>(h);
}
