// Headers that the kernels of an ISA level include before the target region begins.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "common/noise.h"
#include "host/isa/aligned_vector.h"
#include "host/isa/level.h"
#include "host/ops/threads.h"
#include "kernels_host.h"
