// What the dispatches of the forward and the backward share: parameters and function constants.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "common/launch_arrays.h"
#include "flash_attention/gpu.h"
#include "metal/flash_attention/params.h"

namespace mlx_anvil {

inline constexpr const char* kAttentionOp = "flash_attention";

// As numbered in metal/flash_attention/scores.h.
enum class AttentionConstant : uint32_t {
  kBand,
  kSoftcap,
  kBoolMask,
  kAdditiveMask,
  kSinks,
  kVectors,
  kStoresLse,
  kHasDLse,         // of the backward
  kStoresDMask,     // likewise
  kHeadsAreAlongX,  // of the forward and the backward: metal/flash_attention/grid.h
};

// Each kernel's own begin here.
inline constexpr uint32_t kFirstOwnConstant = 16;

AttentionParams attention_params(const AttentionConfig& config,
                                 const AttentionSizes& sizes,
                                 const AttentionArrays& arrays);

// Of all attention kernels. `vectors`: what rows_are_vectors says is so.
FunctionConstants attention_constants(const AttentionConfig& config,
                                      bool vectors,
                                      bool stores_lse = false);

// Of blocks of rows, each head having as many.
struct AttentionGrid {
  Extent extent;
  bool heads_are_along_x;

  FunctionConstant constant() const {
    return {static_cast<uint32_t>(AttentionConstant::kHeadsAreAlongX), heads_are_along_x};
  }
};

AttentionGrid attention_grid(const AttentionConfig& config,
                             int64_t blocks,
                             int64_t heads,
                             int64_t batch,
                             const mx::Device& device);

// Bindings 0 to 4 of every kernel: where there is no mask and no sinks, q stands in.
KernelInputs attention_inputs(const AttentionArrays& arrays);

// Copies the first strides, as many as there is room for.
template <size_t kRank>
void copy_strides(int64_t (&to)[kRank], const mx::array& x) {
  std::copy_n(x.strides().begin(), kRank, to);
}

// The kernel of this name and these constants, made when it is first asked for and kept.
const Kernel& attention_kernel(const KernelName& name, const FunctionConstants& constants);

}  // namespace mlx_anvil
