#include "flash_attention/cpu.h"

#include "flash_attention/cpu_forward.h"
#include "flash_attention/simd/kernels.h"

namespace mlx_anvil {

namespace {

constexpr ForwardPolicy kPolicy = {
    .tile = forward_tile, .most_queries_of_split = kDecodeRows, .least_keys_of_split = 512};

constexpr ForwardPolicy kRowInvariant = {.tile = row_invariant_tile,
                                         .most_queries_of_split = 0,
                                         .least_keys_of_split = 0,
                                         .keys_of_split = 2048};

const ForwardPolicy& policy(const AttentionConfig& config) {
  return config.row_invariant ? kRowInvariant : kPolicy;
}

}  // namespace

void attention_forward_cpu(const AttentionForwardArgs& args) {
  forward_cpu(attention_forward_kernels()[args.dtype], policy(args.config), args);
}

void quantized_attention_forward_cpu(const QuantizedAttentionArgs& args) {
  forward_cpu(quantized_attention_kernels()[args.dtype], policy(args.config), args);
}

}  // namespace mlx_anvil
