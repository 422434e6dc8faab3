// mla_decode as an attention forward (flash_attention/simd/forward.h): a tile of latents is packed
// twice, transposed above its rope part as keys, and as values.
#include "flash_attention/simd/forward.h"

#include "mla_decode/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
class LatentKeyValues {
 public:
  using Args = MlaArgs;
  static constexpr Words kWords = kWordsOf<T>;
  static constexpr bool kStreams = false;

  LatentKeyValues(Arena&, const Args& args, const AttentionRows& rows, AttentionTile)
      : args_(args), rows_(rows) {}

  template <Words kWordsOfQueries>
  void pack_queries(Panels q) const {
    pack_left_block<kWordsOfQueries, T>(args_.q, rows_, rank(), q);
    pack_left_block<kWordsOfQueries, T>(args_.q_rope, rows_, args_.rope_dim, q, rope_word());
  }

  template <Words kWordsOfQueries>
  int64_t depth() const {
    return rope_word() + word_count<kWordsOfQueries>(args_.rope_dim);
  }

  void read(KeyRange tile) {
    latent_ = rows_of<T>(args_.k, rows_.batch, 0, tile.begin);
    rope_ = rows_of<T>(args_.k_rope, rows_.batch, 0, tile.begin);
    count_ = tile.end - tile.begin;
  }

  void pack(Panels k, Panels v) const {
    pack_right_transposed<kWords>(latent_, count_, rank(), k);
    pack_right_transposed<kWords>(rope_, count_, args_.rope_dim, {k.at(rope_word(), 0), k.rows});
    pack_right<kWords>(latent_, count_, rank(), v);
  }

 private:
  int64_t rank() const { return args_.sizes.v_head_dim; }

  // Where the rope part starts. The words that pad the latent are 0.
  int64_t rope_word() const { return round_up(word_count<kWords>(rank()), kLanes); }

  const Args& args_;
  const AttentionRows& rows_;
  Source<T> latent_ = {}, rope_ = {};
  int64_t count_ = 0;
};

template <class T>
constexpr MlaKernels kernels() {
  return {.scratch_bytes = forward_scratch_bytes<T, LatentKeyValues<T>>,
          .forward = attention_forward<T, LatentKeyValues<T>>,
          .combine = combine<T>};
}

}  // namespace

constinit const PerDtype<MlaKernels> mla_kernels_table = {
    .float32 = kernels<float>(), .float16 = kernels<f16>(), .bfloat16 = kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
