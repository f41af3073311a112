// Times projections on an emulated H100 with a clock (simt/clock.h).
//
//   clocked tilings K N GROUP EACH   prints rows of tilings (candidates.h), one per line, and their estimate: all of kRing
//                                    that fit if EACH is 0, else the default and EACH candidates of each variant
//   clocked cost NAME                prints a cost of simt/clock.h
//   clocked times [COST=VALUE ...]   reads lines "K N GROUP ROWS NORMED SWIGLU VARIANT CTAS WARPS STRIPS BLOCKS" and prints
//                                    for each the microseconds of a launch, and those from the start of a warp to the
//                                    points of cuda/stamps.h (median over the warps; -1: none)
//
// Only a part of the GPU is emulated: 8 SMs, or 16 if clusters have 8 blocks, with as many work units (turns of a cluster) as keep the number of full
// rounds and the share of the last one, and with the part of the memory's bandwidth that corresponds to the work. A launch
// is one of a chain, of which the last counts.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/linear/candidates.h"
#include "cuda/stamps.h"
#include "kernels_cuda.h"
#include "simt/clock.h"

namespace swiftspec::cuda {

// Kernels that are not part of this program.
void prepare_large_m(const Device&) {}
void prepare_prefill(const Device&) {}

}  // namespace swiftspec::cuda

namespace {

using namespace swiftspec::cuda;
using tiles::Tiling;

constexpr size_t kLaunches = 3;
constexpr int kH100 = 132;  // SMs
constexpr int64_t kRecords = 1 << 15;  // warps of all launches

std::vector<uint8_t> device_memory;

// Device of the measurements; clusters of 4 and 8 as the fit of tiling.h assumes.
Device h100() {
  return {.arch = 90, .shared = 232448, .half_shared = 115712, .l2 = 50 << 20, .max_clusters = {kH100, 66, 32, 15},
          .max_paired_clusters = {2 * kH100, kH100, 62, 30}};
}

Device part_of_h100(int sms) {
  Device d = h100();
  for (int log = 0; log < 4; ++log) d.max_clusters[log] = sms >> log, d.max_paired_clusters[log] = 2 * sms >> log;
  return d;
}

struct Case {
  int64_t k, n, group, rows;
  bool normed, swiglu;
  Tiling tiling;
};

int log_of(int power) { return __builtin_ctz(static_cast<unsigned>(power)); }

Tiling tiling_of(int64_t k, int64_t n, int group, int variant, int ctas, int warps, int strips, int blocks) {
  Tiling t = tiles::with_split(tiles::shape(k, n, group), 3 - log_of(warps), log_of(ctas), blocks);
  t.variant = variant, t.block_strips = variant == tiles::kDirect ? strips : 0;
  return t;
}

// Clusters that run at a time.
int64_t places(const Tiling& t, const Device& device) {
  if (t.variant != tiles::kDirect) return tiles::concurrent_clusters(t, 1, device);
  const int by_shared = (2 * device.half_shared + 2048) / (tiles::direct_smem_layout(t).total + 1024);
  return int64_t{std::min(by_shared, 16 / t.warps_k())} * device.max_clusters[t.cluster_log];
}

int64_t units(const Tiling& t) {
  return t.variant == tiles::kDirect ? tiles::direct_blocks(t) / t.cluster() : t.turns();
}

// The units of the part: as many full rounds, and a last one of the same share, but at least one unit.
int64_t units_of_part(int64_t whole, int64_t places, int64_t places_of_part) {
  const int64_t full = (whole - 1) / places;
  const double share = static_cast<double>(whole - full * places) / static_cast<double>(places);
  return full * places_of_part + std::max(std::lround(share * static_cast<double>(places_of_part)), 1L);
}

// Medians of the last launch.
std::vector<double> since_start(const std::vector<uint64_t>& records, const stamps::Recorder::Entry& launch) {
  std::vector<double> found;
  for (int point = 0; point < stamps::kPoints; ++point) {
    std::vector<double> us;
    for (int64_t warp = launch.first; warp < launch.first + launch.warps; ++warp) {
      const uint64_t* record = records.data() + warp * stamps::kRecordWords;
      if (record[point] != 0) us.push_back(static_cast<double>(record[point] - record[stamps::kStart]) / 1000);
    }
    std::sort(us.begin(), us.end());
    found.push_back(us.empty() ? -1 : us[us.size() / 2]);
  }
  return found;
}

// The time of a launch, then since_start.
std::vector<double> microseconds(const Case& c, const simt::Costs& costs) {
  const int sms = c.tiling.cluster() == 8 ? 16 : 8;
  const Device device = part_of_h100(sms);
  const int64_t whole = units(c.tiling), part = units_of_part(whole, places(c.tiling, h100()), places(c.tiling, device));
  const int64_t each = tiles::kStrip * (c.tiling.variant == tiles::kDirect ? c.tiling.block_strips : c.tiling.warps_n());
  const Tiling& t = c.tiling;
  const Tiling tiling = tiling_of(t.k, part * each, t.group, t.variant, t.cluster(), t.warps_k(), t.block_strips,
                                  t.blocks_per_sm);
  simt::Machine& machine = simt::Machine::get();
  machine.parts = {static_cast<unsigned>(sms)};
  machine.clock = std::make_shared<simt::Clock>(static_cast<unsigned>(sms));
  machine.clock->costs = costs;
  machine.clock->costs.memory *= static_cast<double>(part) / static_cast<double>(whole);
  const size_t x = static_cast<size_t>(c.rows * t.k * 2), out = static_cast<size_t>(c.rows * tiling.n * 4);
  device_memory.assign(static_cast<size_t>(tiling.bytes()) + 2 * x + 2 * out + 4096, 0);
  uint8_t* at = device_memory.data() + (-reinterpret_cast<uintptr_t>(device_memory.data()) & 127);
  const auto take = [&](size_t bytes) { return std::exchange(at, at + (bytes + 127) / 128 * 128); };
  const Weights weights{device, tiling, take(static_cast<size_t>(tiling.bytes())), nullptr};
  const uint8_t *inputs = take(x), *norm = take(x), *residual = take(out);
  const LinearArgs args{&weights, inputs, c.normed ? norm : nullptr, 1e-5f, c.normed ? nullptr : residual, take(out),
                        nullptr, c.swiglu, nullptr, c.rows};
  std::vector<uint64_t> records(kRecords * stamps::kRecordWords);
  stamps::Recorder::get().start(records.data(), kRecords);
  for (size_t i = 0; i < kLaunches; ++i) linear(args, nullptr);
  machine.finish();
  std::vector<double> found = since_start(records, stamps::Recorder::get().stop().back());
  const std::vector<double>& ends = machine.clock->ends;
  found.insert(found.begin(), (ends.back() - ends.at(kLaunches - 2)) / (1000 * simt::Clock::kGhz));
  return found;
}

void print_tilings(int64_t k, int64_t n, int group, int each) {
  const Device device = h100();
  const auto all = each == 0 ? tiles::all_tilings(k, n, group, device) : tiles::candidates(k, n, group, device, each);
  for (const Tiling& t : all) {
    if (each == 0 && t.variant != tiles::kRing) continue;
    const auto [variant, ctas, warps, strips, blocks] = tiles::row_of(t);
    const int64_t ns = variant == tiles::kRing     ? tiles::launch_ns(t, 1, device)
                       : variant == tiles::kDirect ? tiles::direct_ns(t, device)
                                                   : tiles::stream_ns(t, device);
    std::printf("%d %d %d %d %d %ld\n", variant, ctas, warps, strips, blocks, static_cast<long>(ns));
  }
}

void time_cases(const std::vector<std::string>& settings) {
  simt::Costs costs;
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    const std::string name = setting.substr(0, equals);
    double* cost = costs.named(name);
    if (cost == nullptr) throw std::runtime_error("no cost " + name);
    *cost = std::stod(setting.substr(equals + 1));
  }
  prepare_linear(h100());
  simt::Machine::get().queues = true;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    Case c{};
    int variant = 0, ctas = 0, warps = 0, strips = 0, blocks = 0;
    words >> c.k >> c.n >> c.group >> c.rows >> c.normed >> c.swiglu >> variant >> ctas >> warps >> strips >> blocks;
    if (!words) throw std::runtime_error("not a case: " + line);
    c.tiling = tiling_of(c.k, c.n, static_cast<int>(c.group), variant, ctas, warps, strips, blocks);
    for (const double us : microseconds(c, costs)) std::printf("%.4f ", us);
    std::printf("\n");
    std::fflush(stdout);
  }
}

void access(const void* at, size_t bytes, bool stores) {
  simt::Machine& machine = simt::Machine::get();
  if (!machine.clock || !machine.runs()) return;
  simt::Thread& thread = machine.self();
  const auto* p = static_cast<const uint8_t*>(at);
  const auto inside = [&](const uint8_t* from, size_t size) { return p >= from && p < from + size; };
  const bool shared = inside(thread.block->dynamic.get(), thread.block->shared_bytes);
  if (!shared && !inside(device_memory.data(), device_memory.size())) return;
  if (stores) return machine.clock->store(thread, bytes);
  if (shared) return machine.clock->load(thread, bytes, machine.clock->costs.shared);
  machine.clock->load_device(thread, p, bytes);
}

}  // namespace

// The kernels record stamps, and are compiled with the memory instrumentation of ThreadSanitizer, which calls these.
extern "C" {
#define SWIFTSPEC_ACCESS(size)                                       \
  void __tsan_read##size(void* at) { access(at, size, false); }      \
  void __tsan_write##size(void* at) { access(at, size, true); }      \
  void __tsan_unaligned_read##size(void* at) { access(at, size, false); } \
  void __tsan_unaligned_write##size(void* at) { access(at, size, true); }
SWIFTSPEC_ACCESS(1)
SWIFTSPEC_ACCESS(2)
SWIFTSPEC_ACCESS(4)
SWIFTSPEC_ACCESS(8)
SWIFTSPEC_ACCESS(16)
void __tsan_read_range(void* at, size_t bytes) { access(at, bytes, false); }
void __tsan_write_range(void* at, size_t bytes) { access(at, bytes, true); }
void __tsan_init() {}
// only of launches that sum over ranks, which this program has none of
uint64_t __tsan_atomic64_load(const uint64_t*, int) { std::abort(); }
void __tsan_atomic64_store(uint64_t*, uint64_t, int) { std::abort(); }
uint32_t __tsan_atomic32_fetch_add(uint32_t*, uint32_t, int) { std::abort(); }
}

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 5 && words[0] == "tilings") {
      print_tilings(std::stoll(words[1]), std::stoll(words[2]), std::stoi(words[3]), std::stoi(words[4]));
    } else if (words.size() == 2 && words[0] == "cost") {
      simt::Costs costs;
      const double* found = costs.named(words[1]);
      if (found == nullptr) return 2;
      std::printf("%g\n", *found);
    } else if (!words.empty() && words[0] == "times") {
      time_cases({words.begin() + 1, words.end()});
    } else {
      return 2;
    }
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
