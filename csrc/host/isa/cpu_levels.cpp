// The ISA levels, and the CPU features that each of them needs.
#include "host/isa/level.h"

#ifdef SWIFTSPEC_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace swiftspec::host {

namespace {

#ifdef SWIFTSPEC_X86

#define SWIFTSPEC_HAS(feature) (__builtin_cpu_supports(feature) != 0)

// CPUID leaf 7.1, which __builtin_cpu_supports of older compilers lacks
bool has_avxvnni_bit() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1U << 4) != 0;
}

bool has_avx2() { return SWIFTSPEC_HAS("avx2") && SWIFTSPEC_HAS("fma") && SWIFTSPEC_HAS("f16c"); }
bool has_avx_vnni() { return has_avx2() && has_avxvnni_bit(); }
bool has_avx512() {
  return has_avx2() && SWIFTSPEC_HAS("avx512f") && SWIFTSPEC_HAS("avx512bw") && SWIFTSPEC_HAS("avx512dq") &&
         SWIFTSPEC_HAS("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && SWIFTSPEC_HAS("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && SWIFTSPEC_HAS("avx512bf16"); }

// CPUID leaf 7: AMX-BF16, AMX-TILE and AMX-INT8
bool has_amx_bits() {
  constexpr unsigned kAmx = 1U << 22 | 1U << 24 | 1U << 25;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmx) == kAmx;
}

// Asks the kernel for the tile registers, which every process has to request.
bool may_use_tiles() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() { return has_avx512_bf16() && has_amx_bits() && may_use_tiles(); }

const Level kLevels[] = {{"amx", has_amx, amx_kernels},
                         {"avx512_bf16", has_avx512_bf16, avx512_bf16_kernels},
                         {"avx512_vnni", has_avx512_vnni, avx512_vnni_kernels},
                         {"avx512", has_avx512, avx512_kernels},
                         {"avx_vnni", has_avx_vnni, avx_vnni_kernels},
                         {"avx2", has_avx2, avx2_kernels},
#elif defined(SWIFTSPEC_NEON)

bool has_dotprod() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) == 0 && found != 0;
#else
  return false;
#endif
}

const Level kLevels[] = {{"neon_dotprod", has_dotprod, neon_dotprod_kernels},
                         {"neon", [] { return true; }, neon_kernels},
#else
const Level kLevels[] = {
#endif
                         {"none", [] { return true; }, [] { return Kernels{}; }}};

}  // namespace

std::span<const Level> levels() { return kLevels; }

}  // namespace swiftspec::host
