// Headers that the kernels of an ISA level include before the target region begins.
#pragma once

#include "host/isa/level.h"

#if defined(SWIFTSPEC_X86)
#include <immintrin.h>
#elif defined(SWIFTSPEC_NEON)
#include <arm_neon.h>
#endif

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
#include "host/ops/threads.h"
#include "kernels_host.h"
