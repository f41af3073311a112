// Selection of ISA levels (host/isa/level.cpp) with levels that count their calls instead of those of cpu_levels.cpp.
// Exits with 0, or prints what is wrong.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "host/isa/level.h"

using namespace swiftspec::host;

namespace {

std::atomic<int> calls[2];  // of each level's kernel

void require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

template <int Index>
Kernels counting_kernels() {
  Kernels kernels{};
  kernels.linear_f32 = [](const LinearArgs&) { ++calls[Index]; };
  return kernels;
}

bool yes() { return true; }

const Level kLevels[] = {{"unsupported", [] { return false; }, [] { return Kernels{}; }},
                         {"first", yes, counting_kernels<0>},
                         {"second", yes, counting_kernels<1>}};

void check_selection() {
  require(std::string(level()) == "first", "the first supported level is not selected");
  require(!use_level("unsupported") && !use_level("unknown"), "a level that the CPU lacks is selected");
  linear({}, true);
  require(use_level("second"), "a supported level is not selected");
  linear({}, true);
  linear({}, true);
  require(calls[0] == 1 && calls[1] == 2, "an operator does not run at the selected level");
}

// Two callers run kernels while the level changes.
void check_changes() {
  std::atomic<int> running{2};
  const int before = calls[0] + calls[1];
  const auto call = [&] {
    for (int i = 0; i < 300; ++i) linear({}, true);
    --running;
  };
  std::thread one(call), other(call);
  for (int i = 0; running > 0; ++i) use_level(kLevels[1 + i % 2].name);
  one.join();
  other.join();
  require(calls[0] + calls[1] == before + 600, "a call runs at no level or at two");
}

}  // namespace

std::span<const Level> swiftspec::host::levels() { return kLevels; }

int main() {
  check_selection();
  check_changes();
  return 0;
}
