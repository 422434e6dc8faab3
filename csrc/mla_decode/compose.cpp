#include "mla_decode/compose.h"

#include "flash_attention/compose.h"

namespace mlx_anvil {

// Attention of one kv head, whose keys and values are the latent.
Arrays compose_mla(const AttentionConfig& config, const MlaInputs& in, mx::Stream s) {
  const mx::array latent = mx::astype(in.latent, mx::float32, s);
  return compose_attention(config, {in.q_nope, latent, latent, in.mask, in.sinks, in.sequences}, s,
                           SecondPart{in.q_rope, in.k_rope});
}

}  // namespace mlx_anvil
