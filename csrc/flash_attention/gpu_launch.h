// What the launches of all attention kernels share.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>

#include "common/checks.h"
#include "common/launch.h"
#include "flash_attention/gpu.h"
#include "metal/flash_attention/params.h"

namespace mlx_anvil {

// Numbers of the function constants, as in metal/flash_attention/*.h.
enum AttentionConstant : uint32_t {
  kVectorLoads = 0,
  kHasBoolMask = 1,
  kHasAdditiveMask = 2,
  kHasSinks = 3,
  kHasSoftcap = 4,
  kStoreLse = 5,
  kHasDLse = 6,
  kStoreDMask = 7,
};

// A specialisation of a kernel of this op, made once.
const Kernel& attention_kernel(const std::string& name, std::vector<FunctionConstant> constants);

// The heads that have kernels of their own; others run in the next larger one.
struct HeadTile {
  int head_dim;
  int v_head_dim;
  std::string name() const;  // "d64", "d192_128"
};

HeadTile head_tile(const AttentionSizes& sizes);

std::string kernel_name(const char* variant, mx::Dtype dtype, const std::string& tile);

// Sizes, scale, window and the strides of the operands.
AttentionParams attention_params(const AttentionConfig& config,
                                 const AttentionSizes& sizes,
                                 const AttentionArrays& arrays);

void set_strides(int64_t* to, const mx::array* x);

// Whether rows may be moved 16 bytes at a time: dense, aligned, whole packs.
bool rows_are_vectors(std::initializer_list<const mx::array*> arrays);

// The constants of the scores: those that every kernel which forms scores has.
std::vector<FunctionConstant> score_constants(const AttentionConfig& config, bool vector_loads);

// An array that only this call uses.
mx::array temporary(const mx::Shape& shape, mx::Dtype dtype, const mx::Device& device);

constexpr uint32_t groups_of(int64_t items, int64_t size) {
  return static_cast<uint32_t>((items + size - 1) / size);
}

}  // namespace mlx_anvil
