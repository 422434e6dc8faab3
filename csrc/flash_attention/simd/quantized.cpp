// The attention forward over quantized keys and values. A prefill dequantises rows while it packs a
// tile; a decode unpacks codes in registers, and multiplies them as integers if it can.
#include "flash_attention/simd/forward.h"
#include "flash_attention/simd/integer_tile.h"
#include "flash_attention/simd/quantized_rows.h"
#include "flash_attention/simd/stream.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Dequantised elements, which the products read as words of T.
template <class T>
using Dequantized = std::conditional_t<kWordsOf<T> == Words::kBf16Pairs, bf16, float>;

// Rows dequantised at a time.
constexpr int64_t kPackedRows = kPanel;

template <class T>
class QuantizedKeyValues {
 public:
  using Args = QuantizedAttentionArgs;
  static constexpr Words kWords = kWordsOf<T>;
  // 16-bit integers are too few for float32 queries.
  static constexpr bool kIntegers = kHasPairProducts && sizeof(T) == 2;

  QuantizedKeyValues(Arena& arena, const Args& args, const AttentionRows& rows, AttentionTile tile)
      : args_(args),
        rows_(rows),
        k_(arena, args, args.keys, rows, args.sizes.head_dim, tile),
        v_(arena, args, args.values, rows, args.sizes.v_head_dim, tile),
        in_integers_(kIntegers && tile.streamed),
        integer_k_(arena, k_, in_integers_ ? tile.keys : 0),
        integer_v_(arena, v_, in_integers_ ? tile.keys : 0) {
    if (in_integers_) {
      take_integers(arena, round_up(tile.rows, kTileRows));
    }
    if (!tile.streamed) {
      some_rows_ = arena.take<Dequantized<T>>(kPackedRows *
                                              larger(args.sizes.head_dim, args.sizes.v_head_dim));
    }
  }

  static constexpr bool kStreams = true;
  static constexpr bool kMultiplies = false;

  template <Words kWordsOfQueries>
  void pack_queries(Panels q) const {
    pack_left_block<kWordsOfQueries, T>(args_.q, rows_, k_.columns(), q);
  }

  void set_queries(Panels q, int64_t rows) {
    has_queries_ = in_integers_ && integer_k_.has_format() &&
                   to_integer_queries(q, rows, k_.format().bits, queries_);
  }

  void read(KeyRange tile) {
    k_.read(tile);
    v_.read(tile);
    if (in_integers_) {
      integer_k_.read();
      integer_v_.read();
    }
  }

  void pack(Panels k, Panels v) const {
    for_some_rows(k_, [&](Source<Dequantized<T>> rows, int64_t first, int64_t count) {
      pack_right_transposed<kWords>(rows, count, k_.columns(), {k.at(0, first / kPanel), k.rows});
    });
    for_some_rows(v_, [&](Source<Dequantized<T>> rows, int64_t first, int64_t count) {
      pack_right<kWords>(rows, count, v_.columns(), {v.at(word_count<kWords>(first), 0), v.rows});
    });
  }

  template <int kRows>
  void scores(int64_t begin, int64_t end, float factor, Panels q, Panels s) const {
    if constexpr (kIntegers) {
      if (has_queries_ && integer_k_.usable()) {
        with_integer_format(k_.format(), [&](auto format) {
          integer_scores<decltype(format), kRows>(k_.codes(), integer_k_.numbers(), begin, end,
                                                  factor, queries_, s);
        });
        return;
      }
    }
    k_.with_rows([&](const auto& rows) { stream_scores<kRows>(rows, begin, end, factor, q, s); });
  }

  template <int kRows>
  void add_values(int64_t begin, int64_t end, Panels p, const float* factors, Panels out) const {
    if constexpr (kIntegers) {
      bool done = false;
      if (integer_v_.usable()) {
        with_integer_format(v_.format(), [&](auto format) {
          done = integer_values<decltype(format), kRows>(v_.codes(), integer_v_.numbers(), begin,
                                                         end, p, factors, weights_, out);
        });
      }
      if (done) {
        return;
      }
    }
    v_.with_rows(
        [&](const auto& rows) { stream_values<kRows>(rows, begin, end, p, factors, out); });
  }

 private:
  // Calls pack(rows, first, count) for a tile's rows, some at a time.
  template <class Pack>
  void for_some_rows(const QuantizedTile& tile, Pack pack) const {
    tile.with_rows([&](const auto& rows) {
      for (int64_t first = 0; first < tile.count(); first += kPackedRows) {
        const int64_t count = smaller(kPackedRows, tile.count() - first);
        for (int64_t r = 0; r < count; ++r) {
          rows.write(first + r, some_rows_ + r * tile.columns());
        }
        pack(Source<Dequantized<T>>{some_rows_, tile.columns(), 1}, first, count);
      }
    });
  }

  void take_integers(Arena& arena, int64_t rows) {
    const int64_t k_groups = k_.numbers().groups, v_groups = v_.numbers().groups;
    queries_ = {arena.take<uint32_t>(rows * k_.columns() / 2), arena.take<float>(rows),
                arena.take<float>(rows * k_groups), k_.columns(), k_groups};
    // The sums are of whole vectors of words, of up to 16 codes each.
    const int64_t columns = round_up(v_.columns(), kLanes * 16);
    weights_ = {arena.take<uint32_t>(rows * kBlockKeys / 2 * v_groups + kLanes),
                arena.take<float>(rows * v_groups + kLanes),
                arena.take<float>(rows * v_groups * kLanes), arena.take<float>(rows * columns),
                arena.take<float>(rows * v_groups * kBlockKeys)};
  }

  const Args& args_;
  const AttentionRows& rows_;
  QuantizedTile k_, v_;
  const bool in_integers_;
  IntegerTile integer_k_, integer_v_;
  IntegerQueries queries_ = {};
  IntegerWeights weights_ = {};
  bool has_queries_ = false;
  Dequantized<T>* some_rows_ = nullptr;
};

template <class T>
constexpr QuantizedAttentionKernels kernels() {
  return {.scratch_bytes = forward_scratch_bytes<T, QuantizedKeyValues<T>>,
          .forward = attention_forward<T, QuantizedKeyValues<T>>,
          .combine = combine<T>};
}

}  // namespace

constinit const PerDtype<QuantizedAttentionKernels> quantized_attention_kernels_table = {
    .float32 = kernels<float>(), .float16 = kernels<f16>(), .bfloat16 = kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
