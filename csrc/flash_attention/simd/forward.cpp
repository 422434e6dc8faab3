// The attention forward over keys and values of the operands' dtype.
#include "flash_attention/simd/forward.h"

#include "flash_attention/simd/stream.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Keys and values in memory, packed or read in place (see forward.h).
template <class T>
class PlainKeyValues {
 public:
  using Args = AttentionForwardArgs;

  PlainKeyValues(Arena&, const Args& args, const AttentionRows& rows, AttentionTile)
      : args_(args), rows_(rows) {}

  static constexpr bool kStreams = true;
  static constexpr bool kMultiplies = false;

  template <Words kWords>
  void pack_queries(Panels q) const {
    pack_left_block<kWords, T>(args_.q, rows_, args_.sizes.head_dim, q);
  }
  void set_queries(Panels, int64_t) {}

  void read(KeyRange tile) {
    k_ = {rows_of<T>(args_.k, rows_.batch, rows_.kv_head, tile.begin), args_.sizes.head_dim};
    v_ = {rows_of<T>(args_.v, rows_.batch, rows_.kv_head, tile.begin), args_.sizes.v_head_dim};
    count_ = tile.end - tile.begin;
  }

  void pack(Panels k, Panels v) const {
    pack_right_transposed<kWordsOf<T>>(k_.source, count_, k_.columns, k);
    pack_right<kWordsOf<T>>(v_.source, count_, v_.columns, v);
  }

  template <int kRows>
  void scores(int64_t begin, int64_t end, float factor, Panels q, Panels s) const {
    stream_scores<kRows>(k_, begin, end, factor, q, s);
  }

  template <int kRows>
  void add_values(int64_t begin, int64_t end, Panels p, const float* factors, Panels out) const {
    stream_values<kRows>(v_, begin, end, p, factors, out);
  }

 private:
  const Args& args_;
  const AttentionRows& rows_;
  Stream<T> k_ = {}, v_ = {};
  int64_t count_ = 0;
};

template <class T>
constexpr AttentionForwardKernels kernels() {
  return {.scratch_bytes = forward_scratch_bytes<T, PlainKeyValues<T>>,
          .forward = attention_forward<T, PlainKeyValues<T>>,
          .combine = combine<T>};
}

}  // namespace

constinit const PerDtype<AttentionForwardKernels> attention_forward_kernels_table = {
    .float32 = kernels<float>(), .float16 = kernels<f16>(), .bfloat16 = kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
