// mla_decode as an attention forward (flash_attention/simd/forward.h). Keys are the left operand of
// scores^T = keys q^T, so that a tile is packed as it is, and only the few scores are transposed.
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
  static constexpr bool kMultiplies = true;
  // Values are packed as the product with keys reads them too, unless words are pairs of keys.
  static constexpr bool kSharesLatent = kWords == Words::kFloat32;

  LatentKeyValues(Arena& arena, const Args& args, const AttentionRows& rows, AttentionTile tile)
      : args_(args),
        rows_(rows),
        rank_(args.sizes.v_head_dim),
        latent_words_(word_count<kWords>(rank_)),
        rope_words_(word_count<kWords>(args.rope_dim)),
        q_(arena.take_panels(round_up(latent_words_, kLanes) + round_up(rope_words_, kLanes),
                             tile.rows)),
        latent_keys_(arena.take_panels(kSharesLatent ? 0 : tile.keys, latent_words_)),
        rope_keys_(arena.take_panels(tile.keys, rope_words_)),
        products_(arena.take_panels(round_up(tile.keys, kLanes), kBandRows)) {}

  // As a right operand.
  template <Words kWordsOfQueries>
  void pack_queries(Panels) const {
    pack_queries(args_.q, rank_, q_);
    pack_queries(args_.q_rope, args_.rope_dim, rope_queries());
  }

  void read(KeyRange tile) {
    latent_ = rows_of<T>(args_.k, rows_.batch, 0, tile.begin);
    rope_ = rows_of<T>(args_.k_rope, rows_.batch, 0, tile.begin);
    count_ = tile.end - tile.begin;
  }

  void pack(Panels, Panels v) {
    pack_right<kWords>(latent_, count_, rank_, v);
    if constexpr (kSharesLatent) {
      latent_keys_ = v;
    } else {
      pack_left<kWords>(latent_, count_, rank_, latent_keys_, 0);
    }
    pack_left<kWords>(rope_, count_, args_.rope_dim, rope_keys_, 0);
  }

  // `first` starts a panel of q.
  void multiply(int64_t first, int64_t count, float factor, Panels s) const {
    for (int64_t r = 0; r < count; r += kPanel) {
      const int64_t panel = (first + r) / kPanel, rows = smaller(count - r, kPanel);
      for (int64_t key = 0; key < count_; key += kTileRows) {
        const int64_t keys = smaller(kTileRows, count_ - key);
        float* const to = products_.at(key, r / kPanel);
        const float one = 1.0f;
        MLX_ANVIL_ISA_NAMESPACE::multiply<kWords, Accumulate::kNone>(
            left_rows(latent_keys_, key, 0), q_.at(0, panel), keys, rows, latent_words_, to, &one);
        MLX_ANVIL_ISA_NAMESPACE::multiply<kWords, Accumulate::kAdd>(left_rows(rope_keys_, key, 0),
                                                                    rope_queries().at(0, panel),
                                                                    keys, rows, rope_words_, to);
      }
    }
    for (int64_t r = 0; r < count; r += kLanes) {
      for (int64_t key = 0; key < count_; key += kLanes) {
        f32v x[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          x[i] = load_lanes(products_.at(key + i, r / kPanel) + r % kPanel);
        }
        transpose(x);
        for (int64_t i = 0; i < smaller(kLanes, s.rows - r); ++i) {
          store_lanes(s.at(r + i, key / kPanel) + key % kPanel, x[i] * factor);
        }
      }
    }
  }

 private:
  Panels rope_queries() const { return {q_.at(round_up(latent_words_, kLanes), 0), q_.rows}; }

  void pack_queries(const AttentionView& view, int64_t columns, Panels to) const {
    const auto row = [&](int64_t r) {
      return rows_of<T>(view, rows_.batch, head_of(rows_, r), query_of(rows_, r)).data;
    };
    pack_rows_transposed<kWords>(row, view.strides[3], row_count(rows_), columns, to);
  }

  const Args& args_;
  const AttentionRows& rows_;
  const int64_t rank_;
  const int64_t latent_words_, rope_words_;  // of a row: words of the latent, of the rope part
  const Panels q_;                           // both parts, each padded to whole vectors
  Panels latent_keys_;
  const Panels rope_keys_;
  const Panels products_;  // keys x rows
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
