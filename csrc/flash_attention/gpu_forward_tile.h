// A kernel of the attention forward (metal/flash_attention/tiles.h), and the choice among a list.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

#include "common/kernel_name.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

struct ForwardTile {
  const char* pass;
  const char* dtype;
  int head_dim;
  int v_head_dim;
  int rows;
  int threads;
  int memory;  // bytes that the launch sets

  KernelName kernel() const {
    return {"flash_attention_", pass, "_", dtype, "_d", head_dim, "v", v_head_dim};
  }
};

// Returns null if no tile supports heads of this size.
inline const ForwardTile* first_that_holds(std::span<const ForwardTile> tiles,
                                           std::string_view dtype,
                                           const AttentionSizes& sizes) {
  const auto tile = std::find_if(tiles.begin(), tiles.end(), [&](const ForwardTile& tile) {
    return dtype == tile.dtype && sizes.head_dim <= tile.head_dim &&
           sizes.v_head_dim <= tile.v_head_dim;
  });
  return tile == tiles.end() ? nullptr : &*tile;
}

// Bytes of two tiles of 16-bit keys and two of values.
constexpr int memory_of_group_tile(int head_dim, int v_head_dim, int keys) {
  return 2 * 2 * keys * (head_dim + v_head_dim);
}

}  // namespace mlx_anvil
