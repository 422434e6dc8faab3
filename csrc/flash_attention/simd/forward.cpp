// The attention forward over keys and values of the operands' dtype.
#include "flash_attention/simd/forward.h"

#include "flash_attention/simd/stream.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Keys or values of one kv head.
template <class T>
class PlainTile {
 public:
  // Of pages, a decode lists the addresses of a tile's rows, and a prefill copies these.
  PlainTile(Arena& arena,
            const AttentionForwardArgs& args,
            const AttentionView& view,
            const AttentionRows& rows,
            int64_t columns,
            AttentionTile tile)
      : args_(args), view_(view), rows_(rows), columns_(columns) {
    if (args.pages.ids && tile.streamed) {
      ahead_ = smaller(rows_ahead(columns * static_cast<int64_t>(sizeof(T))), tile.keys);
      list_ = arena.take<const T*>(tile.keys + ahead_);
    } else if (args.pages.ids) {
      copy_ = arena.take<T>(tile.keys * columns);
    }
  }

  void read(KeyRange tile) {
    const T* const data = static_cast<const T*>(view_.data);
    if (list_) {
      list_rows(args_, rows_, data, view_.strides, tile, ahead_, list_);
    } else if (copy_) {
      for_each_run(args_, rows_.batch, tile,
                   [&](int64_t key, int64_t count, int64_t page, int64_t row) {
                     copy(rows_of<T>(view_, page, rows_.kv_head, row), count, key - tile.begin);
                   });
      source_ = {copy_, columns_, 1};
    } else {
      source_ = rows_of<T>(view_, rows_.batch, rows_.kv_head, tile.begin);
    }
  }

  // For a prefill.
  Source<T> source() const { return source_; }
  int64_t columns() const { return columns_; }

  // Calls action(rows) with rows as stream.h reads them.
  template <class Action>
  void with_rows(Action action) const {
    if (list_) {
      action(ListedStream<T>{list_, view_.strides[3], columns_, ahead_});
    } else {
      action(Stream<T>{source_, columns_});
    }
  }

 private:
  void copy(Source<T> from, int64_t count, int64_t to_row) {
    for (int64_t r = 0; r < count; ++r) {
      T* const to = copy_ + (to_row + r) * columns_;
      if (from.column_stride == 1) {
        std::memcpy(to, from.at(r), columns_ * sizeof(T));
      } else {
        for (int64_t c = 0; c < columns_; ++c) {
          to[c] = from.at(r)[c * from.column_stride];
        }
      }
    }
  }

  const AttentionForwardArgs& args_;
  const AttentionView& view_;
  const AttentionRows& rows_;
  const int64_t columns_;
  Source<T> source_ = {};
  const T** list_ = nullptr;
  T* copy_ = nullptr;
  int64_t ahead_ = 0;
};

// Keys and values in memory, packed or read in place (see forward.h).
template <class T>
class PlainKeyValues {
 public:
  using Args = AttentionForwardArgs;

  PlainKeyValues(Arena& arena, const Args& args, const AttentionRows& rows, AttentionTile tile)
      : args_(args),
        rows_(rows),
        k_(arena, args, args.k, rows, args.sizes.head_dim, tile),
        v_(arena, args, args.v, rows, args.sizes.v_head_dim, tile) {}

  static constexpr bool kStreams = true;
  static constexpr bool kMultiplies = false;

  template <Words kWords>
  void pack_queries(Panels q) const {
    pack_left_block<kWords, T>(args_.q, rows_, args_.sizes.head_dim, q);
  }
  void set_queries(Panels, int64_t) {}

  void read(KeyRange tile) {
    k_.read(tile);
    v_.read(tile);
    count_ = tile.end - tile.begin;
  }

  void pack(Panels k, Panels v) const {
    pack_right_transposed<kWordsOf<T>>(k_.source(), count_, k_.columns(), k);
    pack_right<kWordsOf<T>>(v_.source(), count_, v_.columns(), v);
  }

  template <int kRows>
  void scores(int64_t begin, int64_t end, float factor, Panels q, Panels s) const {
    k_.with_rows([&](const auto& rows) { stream_scores<kRows>(rows, begin, end, factor, q, s); });
  }

  template <int kRows>
  void add_values(int64_t begin, int64_t end, Panels p, const float* factors, Panels out) const {
    v_.with_rows(
        [&](const auto& rows) { stream_values<kRows>(rows, begin, end, p, factors, out); });
  }

 private:
  const Args& args_;
  const AttentionRows& rows_;
  PlainTile<T> k_, v_;
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
