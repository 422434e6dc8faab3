// CPU kernels are compiled once per instruction set, each time into a namespace of its own, and one
// build is chosen when the library is first used. cmake/CpuKernels.cmake has the same list.
//
// A kernel file (csrc/<op>/cpu.cpp) includes only headers without library code that the compiler
// may leave out of line (no containers, no MLX): the linker keeps one copy of such a function, and
// that copy must not be one compiled for an instruction set which this machine lacks.
#pragma once

namespace mlx_anvil {

#if defined(__x86_64__) || defined(_M_X64)
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };
inline constexpr Isa kAllIsas[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};
#else
enum class Isa { kBaseline };  // arm64: NEON
inline constexpr Isa kAllIsas[] = {Isa::kBaseline};
#endif

// This machine has its instructions, and this build its kernels.
bool isa_supported(Isa isa);

// This machine has its instructions, but this build lacks its kernels (MLX_ANVIL_ISAS of CMake).
bool isa_left_out(Isa isa);

// The best that both this machine and this build have. The environment variable MLX_ANVIL_ISA, one
// of the names below, chooses another, for tests and comparisons.
Isa current_isa();

// Makes `current_isa()` give `isa`; false when this machine lacks it.
bool set_current_isa(Isa isa);

// "baseline", "avx2", "avx512", "avx512_bf16"
const char* isa_name(Isa isa);

// Declares `const Table <name>_table` in the namespace of every build, and `const Table& <name>()`,
// which gives that of `current_isa()`. Kernel files define theirs in MLX_ANVIL_ISA_NAMESPACE.
#define MLX_ANVIL_DECLARE_TABLE(isa, Table, name) \
  namespace isa_##isa {                           \
    extern const Table name##_table;              \
  }

// Most builds leave some out (cmake/CpuKernels.cmake): MLX_ANVIL_HAS_... are 0 or 1.
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
    const Table* const tables[] = {&isa_baseline::name##_table,                                    \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_AVX2, avx2, name),                \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_AVX512, avx512, name),            \
                                   MLX_ANVIL_TABLE(MLX_ANVIL_HAS_AVX512_BF16, avx512_bf16, name)}; \
    return *tables[static_cast<int>(current_isa())];                                               \
  }
#else
#define MLX_ANVIL_DECLARE_KERNELS(Table, name)   \
  MLX_ANVIL_DECLARE_TABLE(baseline, Table, name) \
  inline const Table& name() {                   \
    return isa_baseline::name##_table;           \
  }
#endif

}  // namespace mlx_anvil
