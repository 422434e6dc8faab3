// Parameters, function constants and grids shared by the launches of forward and backward.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "common/device_traits.h"
#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/gpu.h"
#include "metal/flash_attention/params.h"

namespace mlx_anvil {

// Indices as in metal/flash_attention/scores.h.
enum class AttentionConstant : uint32_t {
  kBand,
  kSoftcap,
  kBoolMask,
  kAdditiveMask,
  kSinks,
  kVectors,
  kStoresLse,
  kHasDLse,          // backward only
  kStoresDMask,      // backward only
  kHeadsAreAlongX,   // forward and backward: metal/flash_attention/grid.h
  kHeadsFillTile,    // forward and backward
  kRagged,           // metal/flash_attention/ragged.h
  kPacked,           // likewise
  kPaged,            // decode: metal/flash_attention/pages.h
  kPagesHoldEights,  // likewise, with matrix products
  kPartsAreFixed,    // decode without matrix products: metal/flash_attention/decode_row.h
};

// Elements from a row to the next at which offsets within a tile fit 32 bits.
inline constexpr int64_t kFarthestRow = int64_t{1} << 22;

// Constants of individual kernels start at this index.
inline constexpr uint32_t kFirstOwnConstant = 16;

// True if a causal mask or a window hides keys.
bool has_band(const AttentionConfig& config);

AttentionParams attention_params(const AttentionConfig& config,
                                 const AttentionSizes& sizes,
                                 const AttentionInputs& in);

// Returns true if the kernels may move the rows of q, k, v and `others` as vectors.
bool moves_vectors(const AttentionInputs& in, std::initializer_list<const mx::array*> others);

// Constants of all attention kernels. `vectors` is the result of moves_vectors().
FunctionConstants attention_constants(const AttentionConfig& config,
                                      bool vectors,
                                      bool stores_lse = false);

inline FunctionConstant heads_fill_tile(const AttentionSizes& sizes, int head_dim, int v_head_dim) {
  return {static_cast<uint32_t>(AttentionConstant::kHeadsFillTile),
          sizes.head_dim == head_dim && sizes.v_head_dim == v_head_dim};
}

// Returns how many sequences each batch of a packed batch has, otherwise 0.
int64_t packed_sequences(const AttentionConfig& config,
                         const AttentionSizes& sizes,
                         const std::optional<mx::array>& sequences);

// Returns the number of blocks of `rows` queries or keys for each head. In a packed batch a block
// has rows of one sequence (metal/flash_attention/ragged.h).
constexpr int64_t blocks_of_rows(int64_t length, int64_t rows, int64_t packed_sequences) {
  return packed_sequences > 0 ? length / rows + packed_sequences + 2 : ceil_div(length, rows);
}

// A grid over row blocks. Every head has the same number of blocks.
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

// Bindings 0 to 4 of forward and decode. q replaces an absent mask or absent sinks.
KernelInputs attention_inputs(const AttentionInputs& in);

// The table of a ragged batch and the pages, as kernels bind them.
const mx::array& sequences_or_q(const AttentionInputs& in);
const mx::array& pages_or_q(const AttentionInputs& in);
void add_ragged_constants(FunctionConstants& constants, const AttentionConfig& config);

// Copies the first kRank strides.
template <size_t kRank>
void copy_strides(int64_t (&to)[kRank], const mx::array& x) {
  std::copy_n(x.strides().begin(), kRank, to);
}

// Returns the kernel of this name with these constants. Creates it on first use and keeps it.
const Kernel& attention_kernel(const KernelName& name, const FunctionConstants& constants);

// For tiles in threadgroup memory that the launch sets: bytes of a row of 16-bit numbers, as
// TileRow spaces them.
constexpr int row_bytes_of_tile(int columns) {
  constexpr int kPadding = 8;
  return 2 * (columns + kPadding);
}

// Resident threadgroups per multiprocessor, for which the tiles of GPUs with matrix units are made.
constexpr int64_t kMatrixThreadgroups = 2;

// Returns true if that many threadgroups with this memory fit a multiprocessor.
bool fits_multiprocessor(int64_t threadgroup_memory, const DeviceTraits& traits);

// True if the call is one for products of four SIMD groups. `rows` are those that blocks are made
// of: fewer leave most of a block without any.
inline bool suits_group_products(const AttentionConfig& config,
                                 int64_t rows,
                                 const DeviceTraits& traits) {
  constexpr int64_t kMostForSmallerBlocks = 64;
  return traits.group_products && config.mask == AttentionMask::kNone &&
         rows > kMostForSmallerBlocks;
}

}  // namespace mlx_anvil
