// The CUDA code of sampling and KV moves, run on a CPU and compared with definitions, for a build with sanitizers
// (test_cuda_code.py). Exits with 0, or prints what differs. With an argument it converts noise bits instead.
#include "cuda/sampling/top_few.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "common/bfloat16.h"
#include "common/gumbel.h"
#include "cuda/attention/cache_ops.h"
#include "kernels_host.h"

using namespace swiftspec;

namespace {

std::mt19937 dice(5);
constexpr float kNone = -INFINITY;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Reads noise bits from stdin and writes their Gumbel noise to stdout.
int make_noise() {
  uint32_t bits;
  while (std::fread(&bits, sizeof bits, 1, stdin) == 1) {
    const float made = noise::gumbel_exact(bits);
    std::fwrite(&made, sizeof made, 1, stdout);
  }
  return 0;
}

struct Scores {
  int64_t rows, vocab;
  std::vector<float> logits, bias, noise;
  std::vector<int64_t> which;
  ScoreArgs args;

  Scores(int64_t rows_, int64_t vocab_, bool biased, bool noisy) : rows(rows_), vocab(vocab_) {
    std::normal_distribution<float> normal(0, 4);
    const auto fill = [&](std::vector<float>& x, int64_t n) {
      for (int64_t i = 0; i < n; ++i) x.push_back(std::round(normal(dice) * 64) / 64);  // coarse, to get ties
    };
    fill(logits, rows * (vocab + 3)), fill(bias, vocab), fill(noise, 2 * vocab);
    for (int64_t row = 0; row < rows; ++row) {
      which.push_back(dice() % 2);
      for (int64_t i = 0; i < 3; ++i) logits[static_cast<size_t>(row * (vocab + 3) + vocab + i)] = 1e9f;
      for (int64_t i = 0; i < vocab && row % 3 == 1; i += 2) logits[static_cast<size_t>(row * (vocab + 3) + i)] = kNone;
    }
    args = {logits.data(), biased ? bias.data() : nullptr, noisy ? noise.data() : nullptr,
            noisy ? which.data() : nullptr, biased ? 0.7f : 1.0f, noisy ? 0.6f : 1.0f, rows, vocab, vocab + 3};
  }

  // Executes the kernel for one row. For small k also the one for large k, whose results are bitwise the same.
  void run(int64_t row, int k, int64_t* tokens, float* values) const {
    if (k > sampling::kFew) return run_many(row, k, tokens, values);
    run_few(row, k, tokens, values);
    std::vector<int64_t> their_tokens(static_cast<size_t>(k));
    std::vector<float> their_values(static_cast<size_t>(k));
    run_many(row, k, their_tokens.data(), values == nullptr ? nullptr : their_values.data());
    require(std::equal(their_tokens.begin(), their_tokens.end(), tokens), "the tokens of the two kernels differ");
    if (values == nullptr) return;
    require(std::memcmp(their_values.data(), values, sizeof(float) * their_values.size()) == 0,
            "the log-probabilities of the two kernels differ");
  }

  void run_few(int64_t row, int k, int64_t* tokens, float* values) const {
    const auto blocks = std::make_unique<sampling::TopFew[]>(sampling::kBlocks);
    sampling::TopFew& all = blocks[0];
    for (int block = 0; block < sampling::kBlocks; ++block) {
      sampling::TopFew& found = blocks[static_cast<size_t>(block)];
      for (int index = 0; index < sampling::kWarps; ++index) {
        sampling::scan_few(args, row, k, block, index, values != nullptr, found);
      }
      all.block_sums[block] = sampling::add_all(found.warp_sums, sampling::kWarps);
      merge_lists(found.warps, sampling::kWarps);
      sampling::store(sampling::load(found.warps[0]), all.blocks[block]);
    }
    const sampling::LogSum sum = sampling::add_all(all.block_sums, sampling::kBlocks);
    merge_lists(all.blocks, sampling::kBlocks);
    for (int i = 0; i < k; ++i) sampling::write_child(i, all.blocks[0][i].value, all.blocks[0][i].index, sum, tokens, values);
  }

  static void merge_lists(top_k::Entry<float> (*lists)[32], int count) {
    for (int step = 1; step < count; step *= 2) {
      for (int index = 0; index < count; index += 2 * step) sampling::merge_round(lists, step, index);
    }
  }

  void run_many(int64_t row, int k, int64_t* tokens, float* values) const {
    const auto found = std::make_unique<sampling::BlockResult[]>(sampling::kBlocks);
    for (int block = 0; block < sampling::kBlocks; ++block) {
      for (int index = 0; index < sampling::kWarps; ++index) {
        sampling::scan_columns(args, row, k, block, index, values != nullptr, found[static_cast<size_t>(block)]);
      }
      sampling::reduce_warps(k, found[static_cast<size_t>(block)]);
    }
    sampling::reduce_blocks(k, [&](int i) { return &found[static_cast<size_t>(i)]; }, tokens, values);
  }

  void check(int k) const {
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<float> all;
      for (int64_t column = 0; column < vocab; ++column) all.push_back(sampling::score(args, sampling::scale_of(args), row, column));
      std::vector<int64_t> order(static_cast<size_t>(vocab)), tokens(static_cast<size_t>(k)), drawn(1);
      std::vector<float> values(static_cast<size_t>(k));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int64_t a, int64_t b) { return all[static_cast<size_t>(a)] > all[static_cast<size_t>(b)]; });
      double total = 0;
      const double top = all[static_cast<size_t>(order[0])];
      for (const float x : all) total += std::exp(x - top);
      run(row, k, tokens.data(), values.data());
      run(row, 1, drawn.data(), nullptr);
      const int64_t first = std::isfinite(all[static_cast<size_t>(order[0])]) ? order[0] : -1;
      require(drawn[0] == first, "the token drawn is not the first of the best");
      for (int i = 0; i < k; ++i) {
        const auto at = static_cast<size_t>(i);
        require(tokens[at] == order[at], "candidates are not the best, the earlier ones first");
        const double want = top == kNone ? kNone : all[static_cast<size_t>(order[at])] - top - std::log(total);
        require(values[at] <= 0 && (want == kNone ? values[at] == kNone : std::abs(values[at] - want) < 2e-5),
                "a log-probability is wrong");
      }
    }
  }
};

// Rows of which many or few columns are candidates: `run` compares the two kernels.
void check_unusual_rows() {
  for (const int64_t vocab : {900, 33000, 128256, 151936}) {
    Scores rows(7, vocab, false, vocab == 33000);
    const auto set = [&](int64_t row, auto value) {
      for (int64_t i = 0; i < vocab; ++i) rows.logits[static_cast<size_t>(row * (vocab + 3) + i)] = value(i);
    };
    set(0, [](int64_t) { return 2.5f; });                                    // all are equal
    set(1, [](int64_t i) { return static_cast<float>(i); });                 // each is better than the one before
    set(2, [](int64_t i) { return static_cast<float>(-i); });
    set(3, [](int64_t i) { return i % 32 == 7 ? 9.0f + (i % 5) : -1.0f; });  // the best are all in one lane
    set(4, [](int64_t i) { return i % 300 == 1 ? static_cast<float>(i % 7) : kNone; });
    set(5, [](int64_t i) { return i % 3 == 0 ? NAN : i % 3 == 1 ? -0.0f : 0.0f; });
    set(6, [vocab](int64_t i) { return i == vocab - 1 ? 1.0f : NAN; });
    for (const int k : {1, 3, 8, 16, 17, 32}) {
      for (int64_t row = 0; row < rows.rows; ++row) {
        int64_t tokens[sampling::kFew];
        float values[sampling::kFew];
        rows.run(row, k, tokens, values);
        if (k == 1) rows.run(row, k, tokens, nullptr);
      }
    }
  }
}

void check_scores() {
  for (const int64_t vocab : {1, 31, 64, 700, 5003, 40000}) {
    for (const int k : {1, 8, 16, 32, 33, 64}) {
      if (k <= vocab) Scores(vocab > 10000 ? 2 : 4, vocab, k > 8, k % 2 == 0).check(k);
    }
  }
  check_unusual_rows();
  Scores broken(2, 40, false, false);
  std::fill_n(broken.logits.begin(), 40, NAN);
  std::fill_n(broken.logits.begin() + 43, 40, kNone);
  for (int64_t row = 0; row < 2; ++row) {
    int64_t tokens[4];
    float values[4];
    broken.run(row, 4, tokens, values);
    for (int i = 0; i < 4; ++i) require(tokens[i] == i && values[i] == kNone, "a row without candidates");
    broken.run(row, 1, tokens, nullptr);
    require(tokens[0] == -1, "a token was drawn from a row without candidates");
  }
  for (const int64_t column : {0, 31, 700, 5002}) {
    for (const float bad : {NAN, INFINITY}) {
      Scores one(2, 5003, false, column > 100);
      one.logits[static_cast<size_t>(column)] = bad;
      int64_t tokens[2];
      for (int64_t row = 0; row < 2; ++row) one.run(row, 1, tokens + row, nullptr);
      require(tokens[0] == -1 && tokens[1] >= 0, "a logit that is not finite goes unnoticed, or spoils another row");
    }
  }
}

// Executes the kernel's steps: all chunks of a step are read before one is written.
void check_moves() {
  for (int round = 0; round < 60; ++round) {
    const int64_t capacity = 200, slot_bytes = 16 << (dice() % 5), layers = 2, heads = 2;
    const int64_t start = dice() % 20;
    std::vector<int64_t> source;
    for (int64_t slot = start; slot < capacity; ++slot) {
      if (dice() % 3 > 0) source.push_back(slot);
    }
    std::vector<uint8_t> cache(static_cast<size_t>(layers * heads * capacity * slot_bytes));
    for (uint8_t& byte : cache) byte = static_cast<uint8_t>(dice());
    auto want = cache;
    MoveArgs a{want.data(), heads * capacity * slot_bytes, layers, heads, capacity, slot_bytes, source.data(),
                     static_cast<int64_t>(source.size()), start};
    host::move_kv(a);
    constexpr int kStep = cache_ops::kThreads * cache_ops::kPiecesPerThread;
    for (int64_t slice = 0; slice < layers * heads; ++slice) {
      uint8_t* slots = cache.data() + cache_ops::slots_of(a, slice / heads, slice % heads);
      for (int base = 0; base < cache_ops::pieces(a); base += kStep) {
        std::vector<bf16::Vec8> held;
        const int end = std::min(base + kStep, cache_ops::pieces(a));
        for (int piece = base; piece < end; ++piece) {
          held.push_back(*reinterpret_cast<const bf16::Vec8*>(slots + cache_ops::from(a, piece)));
        }
        for (int piece = end - 1; piece >= base; --piece) {
          *reinterpret_cast<bf16::Vec8*>(slots + cache_ops::to(a, piece)) = held[static_cast<size_t>(piece - base)];
        }
      }
    }
    require(cache == want, "slots moved in place are not where they belong");
  }
}

}  // namespace

int main(int count, char**) {
  if (count > 1) return make_noise();
  check_scores();
  check_moves();
  return 0;
}
