#include "common/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

namespace mlx_anvil {

namespace {

#if defined(__x86_64__) || defined(_M_X64)
constexpr bool kBuilt[] = {MLX_ANVIL_HAS_BASELINE, MLX_ANVIL_HAS_AVX2, MLX_ANVIL_HAS_AVX512,
                           MLX_ANVIL_HAS_AVX512_BF16, MLX_ANVIL_HAS_AVX512_BF16};

// Clang 16 does not know this name in __builtin_cpu_supports().
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_tiles() {
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (~edx & (kTile | kInt8)) == 0;
}

bool machine_has(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case Isa::kAvx512:
      return machine_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16:
      return machine_has(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    case Isa::kAmx:
      return machine_has(Isa::kAvx512Bf16) && has_tiles();
  }
  return false;
}
#elif defined(__APPLE__)
constexpr bool kBuilt[] = {MLX_ANVIL_HAS_BASELINE, MLX_ANVIL_HAS_I8MM};

bool has_feature(const char* name) {
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has != 0;
}

bool machine_has(Isa isa) {
  return isa == Isa::kBaseline ||
         (has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16"));
}
#else
constexpr bool kBuilt[] = {MLX_ANVIL_HAS_BASELINE, MLX_ANVIL_HAS_DOTPROD, MLX_ANVIL_HAS_I8MM};

// Linux's <asm/hwcap.h>. Old ones lack the names.
constexpr unsigned long kHasDotprod = 1ul << 20;                     // HWCAP_ASIMDDP
constexpr unsigned long kHasI8mm = 1ul << 13, kHasBf16 = 1ul << 14;  // HWCAP2_I8MM, HWCAP2_BF16

bool machine_has(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kDotprod:
      return (getauxval(AT_HWCAP) & kHasDotprod) != 0;
    case Isa::kI8mm:
      return machine_has(Isa::kDotprod) && (~getauxval(AT_HWCAP2) & (kHasI8mm | kHasBf16)) == 0;
  }
  return false;
}
#endif

// The instruction set that MLX_ANVIL_ISA names, if any. mlx_anvil/_compat.py rejects other names on
// import.
std::optional<Isa> wanted_isa() {
  const char* name = std::getenv("MLX_ANVIL_ISA");
  for (Isa isa : kAllIsas) {
    if (name && std::strcmp(name, isa_name(isa)) == 0) {
      return isa;
    }
  }
  return std::nullopt;
}

// Linux saves the tile registers only of processes that ask for it. It refuses those with a signal
// stack that is too small for them, and from then on refuses such signal stacks. So a process that
// wants a lower instruction set does not ask.
bool may_use(Isa isa) {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // Linux's <asm/prctl.h>
  return isa != Isa::kAmx || (wanted_isa().value_or(Isa::kAmx) == Isa::kAmx &&
                              syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0);
#else
  return build_of(isa) == isa;
#endif
}

Isa chosen_isa() {
  const std::optional<Isa> wanted = wanted_isa();
  if (wanted && isa_supported(*wanted)) {
    return *wanted;
  }
  Isa best = Isa::kBaseline;
  for (Isa isa : kAllIsas) {
    if (isa_supported(isa)) {
      best = isa;
    }
  }
  return best;  // _compat.py rejects a build of which nothing runs here
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa = chosen_isa();
  return isa;
}

}  // namespace

bool isa_supported(Isa isa) {
  return kBuilt[static_cast<int>(isa)] && machine_has(isa) && may_use(isa);
}

bool isa_left_out(Isa isa) {
  return !kBuilt[static_cast<int>(isa)] && machine_has(isa);
}

const char* isa_name(Isa isa) {
#if defined(__x86_64__) || defined(_M_X64)
  static constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx"};
#elif defined(__APPLE__)
  static constexpr const char* kNames[] = {"baseline", "i8mm"};
#else
  static constexpr const char* kNames[] = {"baseline", "dotprod", "i8mm"};
#endif
  return kNames[static_cast<int>(isa)];
}

Isa current_isa() {
  return chosen().load(std::memory_order_relaxed);
}

bool set_current_isa(Isa isa) {
  if (!isa_supported(isa)) {
    return false;
  }
  chosen().store(isa, std::memory_order_relaxed);
  return true;
}

}  // namespace mlx_anvil
