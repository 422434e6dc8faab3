// CPU driver: blocks of heads and queries, split keys and threads.
#include "mla_decode/cpu.h"

#include <vector>

#include "flash_attention/cpu_forward.h"
#include "mla_decode/simd/kernels.h"

namespace mlx_anvil {

namespace {

// Tiles that stay in L2: packing a tile of keys pays for itself over many rows.
AttentionTile mla_tile(const AttentionSizes&, int64_t) {
  constexpr int64_t kRows = 128, kKeys = 64;
  return {kRows, kKeys};
}

constexpr ForwardPolicy kMlaPolicy = {
    .tile = mla_tile, .most_queries_of_split = 16, .least_keys_of_split = 256};

}  // namespace

// The lengths of a padded batch: sequence i has batch i, from the first row on.
std::vector<MlaArgs> calls_of(const MlaArgs& args) {
  const std::vector<AttentionForwardArgs> bases =
      calls_of(static_cast<const AttentionForwardArgs&>(args));
  std::vector<MlaArgs> calls(bases.size(), args);
  for (size_t i = 0; i < bases.size(); ++i) {
    static_cast<AttentionForwardArgs&>(calls[i]) = bases[i];
    for (AttentionView* view : {&calls[i].q_rope, &calls[i].k_rope}) {
      const int64_t bytes = static_cast<int64_t>(i) * view->strides[0] * element_size(args.dtype);
      view->data = static_cast<const char*>(view->data) + bytes;
    }
  }
  return calls;
}

void mla_decode_cpu(const MlaArgs& args) {
  forward_cpu(mla_kernels()[args.dtype], kMlaPolicy, args);
}

}  // namespace mlx_anvil
