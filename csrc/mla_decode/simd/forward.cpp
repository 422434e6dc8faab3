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

  LatentKeyValues(Arena& arena, const Args& args, const AttentionRows& rows, AttentionTile tile)
      : args_(args),
        rows_(rows),
        rank_(args.sizes.v_head_dim),
        rope_word_(round_up(word_count<kWords>(rank_), kPanel)),
        depth_(rope_word_ + round_up(word_count<kWords>(args.rope_dim), kLanes)),
        q_(arena.take_panels(depth_, tile.rows)),
        k_(arena.take_panels(round_up(tile.keys, kPanel), depth_)),
        products_(arena.take_panels(round_up(tile.keys, kPanel), kBandRows)) {}

  // As a right operand.
  template <Words kWordsOfQueries>
  void pack_queries(Panels) const {
    pack_queries(args_.q, rank_, 0);
    pack_queries(args_.q_rope, args_.rope_dim, rope_word_);
    for (int64_t p = 0; p < panel_count(row_count(rows_)); ++p) {
      for (int64_t w = rank_words(); w < rope_word_; ++w) {
        std::memset(q_.at(w, p), 0, kPanel * sizeof(float));
      }
    }
  }

  void read(KeyRange tile) {
    latent_ = rows_of<T>(args_.k, rows_.batch, 0, tile.begin);
    rope_ = rows_of<T>(args_.k_rope, rows_.batch, 0, tile.begin);
    count_ = tile.end - tile.begin;
  }

  void pack(Panels, Panels v) const {
    pack_left<kWords>(latent_, count_, rank_, k_, 0);
    pack_left<kWords>(rope_, count_, args_.rope_dim, {k_.at(0, rope_word_ / kPanel), k_.rows}, 0);
    for (int64_t w = rank_words(); w < rope_word_; w += kLanes) {
      for (int64_t r = 0; r < count_; ++r) {
        store_lanes(k_.at(r, w / kPanel) + w % kPanel, f32v{});
      }
    }
    pack_right<kWords>(latent_, count_, rank_, v);
  }

  // `first` starts a panel of q.
  void multiply(int64_t first, int64_t count, float factor, Panels s) const {
    for (int64_t r = 0; r < count; r += kPanel) {
      const float* queries = q_.at(0, (first + r) / kPanel);
      for (int64_t key = 0; key < count_; key += kTileRows) {
        MLX_ANVIL_ISA_NAMESPACE::multiply<kWords, Accumulate::kNone>(
            left_rows(k_, key, 0), queries, smaller(kTileRows, count_ - key),
            smaller(kPanel, count - r), depth_, products_.at(key, r / kPanel), &factor);
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
          store_lanes(s.at(r + i, key / kPanel) + key % kPanel, x[i]);
        }
      }
    }
  }

 private:
  // Of the latent's part of a row, in whole vectors.
  int64_t rank_words() const { return round_up(word_count<kWords>(rank_), kLanes); }

  void pack_queries(const AttentionView& view, int64_t columns, int64_t to_word) const {
    const auto row = [&](int64_t r) {
      return rows_of<T>(view, rows_.batch, head_of(rows_, r), query_of(rows_, r)).data;
    };
    pack_rows_transposed<kWords>(row, view.strides[3], row_count(rows_), columns,
                                 {q_.at(to_word, 0), q_.rows});
  }

  const Args& args_;
  const AttentionRows& rows_;
  const int64_t rank_;
  const int64_t rope_word_;  // where the rope part starts in a row; words that pad are 0
  const int64_t depth_;
  const Panels q_, k_;
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
