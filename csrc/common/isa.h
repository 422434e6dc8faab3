// Runtime selection of an instruction set. Each CPU kernel is compiled once per instruction set,
// each time into its own namespace. The best build is chosen on first use. cmake/CpuKernels.cmake
// has the same list.
//
// A kernel file (csrc/<op>/simd/*.cpp) must not include headers whose functions the compiler may
// emit out of line (containers, MLX). The linker keeps one copy of such a function, and that copy
// could use instructions that this machine lacks.
#pragma once

namespace mlx_anvil {

#if defined(__x86_64__) || defined(_M_X64)
// kAmx has the build of kAvx512Bf16, in which some kernels use tiles if it is the current one.
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };
inline constexpr Isa kAllIsas[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16,
                                   Isa::kAmx};
#elif defined(__APPLE__)
// The baseline is an M1, which has NEON and sdot.
enum class Isa { kBaseline, kI8mm };
inline constexpr Isa kAllIsas[] = {Isa::kBaseline, Isa::kI8mm};
#else
// 64-bit Arm: NEON; sdot; smmla and bfdot.
enum class Isa { kBaseline, kDotprod, kI8mm };
inline constexpr Isa kAllIsas[] = {Isa::kBaseline, Isa::kDotprod, Isa::kI8mm};
#endif

// The instruction set whose build has the kernels of `isa`.
constexpr Isa build_of(Isa isa) {
#if defined(__x86_64__) || defined(_M_X64)
  if (isa == Isa::kAmx) {
    return Isa::kAvx512Bf16;
  }
#endif
  return isa;
}

// Returns true if this machine has the instructions and this build has the kernels.
bool isa_supported(Isa isa);

// Returns true if this machine has the instructions, but this build lacks the kernels (CMake's
// MLX_ANVIL_ISAS).
bool isa_left_out(Isa isa);

// The best instruction set that machine and build support. The environment variable MLX_ANVIL_ISA
// selects another by its name below, for tests and comparisons.
Isa current_isa();

// Returns true if kernels multiply by the tile registers of AMX.
inline bool uses_tiles() {
#if defined(__x86_64__) || defined(_M_X64)
  return current_isa() == Isa::kAmx;
#else
  return false;
#endif
}

// Makes current_isa() return `isa`. Returns false if the machine does not support it.
bool set_current_isa(Isa isa);

// "baseline"; "avx2", "avx512", "avx512_bf16", "amx"; "dotprod", "i8mm"
const char* isa_name(Isa isa);

// Declares `const Table <name>_table` in each build's namespace, and `const Table& <name>()`, which
// returns the table of current_isa(). Kernel files define theirs in MLX_ANVIL_ISA_NAMESPACE.
#define MLX_ANVIL_DECLARE_TABLE(isa, Table, name) \
  namespace isa_##isa {                           \
    extern const Table name##_table;              \
  }

// Most builds omit some instruction sets (cmake/CpuKernels.cmake): MLX_ANVIL_HAS_... are 0 or 1.
#define MLX_ANVIL_TABLE_IF_1(isa, name) &isa_##isa::name##_table
#define MLX_ANVIL_TABLE_IF_0(isa, name) nullptr
#define MLX_ANVIL_TABLE_PASTED(has, isa, name) MLX_ANVIL_TABLE_IF_##has(isa, name)
#define MLX_ANVIL_TABLE(has, isa, name) MLX_ANVIL_TABLE_PASTED(has, isa, name)

#if defined(__x86_64__) || defined(_M_X64)
#define MLX_ANVIL_DECLARE_KERNELS(Table, name)                                                     \
  MLX_ANVIL_DECLARE_TABLE(baseline, Table, name)                                                   \
  MLX_ANVIL_DECLARE_TABLE(avx2, Table, name)                                                       \
  MLX_ANVIL_DECLARE_TABLE(avx512, Table, name)                                                     \
  MLX_ANVIL_DECLARE_TABLE(avx512_bf16, Table, name)                                                \
  inline const Table& name() {                                                                     \
    const Table* const tables[] = {MLX_ANVIL_TABLE(MLX_ANVIL_HAS_BASELINE, baseline, name),        \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_AVX2, avx2, name),                \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_AVX512, avx512, name),            \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_AVX512_BF16, avx512_bf16, name),  \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_AVX512_BF16, avx512_bf16, name)}; \
    return *tables[static_cast<int>(current_isa())];                                               \
  }
#elif defined(__APPLE__)
#define MLX_ANVIL_DECLARE_KERNELS(Table, name)                                              \
  MLX_ANVIL_DECLARE_TABLE(baseline, Table, name)                                            \
  MLX_ANVIL_DECLARE_TABLE(i8mm, Table, name)                                                \
  inline const Table& name() {                                                              \
    const Table* const tables[] = {MLX_ANVIL_TABLE(MLX_ANVIL_HAS_BASELINE, baseline, name), \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_I8MM, i8mm, name)};        \
    return *tables[static_cast<int>(current_isa())];                                        \
  }
#else
#define MLX_ANVIL_DECLARE_KERNELS(Table, name)                                              \
  MLX_ANVIL_DECLARE_TABLE(baseline, Table, name)                                            \
  MLX_ANVIL_DECLARE_TABLE(dotprod, Table, name)                                             \
  MLX_ANVIL_DECLARE_TABLE(i8mm, Table, name)                                                \
  inline const Table& name() {                                                              \
    const Table* const tables[] = {MLX_ANVIL_TABLE(MLX_ANVIL_HAS_BASELINE, baseline, name), \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_DOTPROD, dotprod, name),   \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_I8MM, i8mm, name)};        \
    return *tables[static_cast<int>(current_isa())];                                        \
  }
#endif

}  // namespace mlx_anvil
