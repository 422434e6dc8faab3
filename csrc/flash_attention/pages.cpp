#include "flash_attention/pages.h"

#include <bit>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/integers.h"
#include "common/simulate.h"

namespace mlx_anvil {

namespace {

bool is_of_sequences(const mx::array& lengths, const mx::array& table) {
  return lengths.ndim() == 1 && lengths.shape(0) == table.shape(0) &&
         mx::issubdtype(lengths.dtype(), mx::integer);
}

// Throws for an id out of range among the pages that a sequence uses, if the host can read them.
void require_page_ids(const mx::array& table,
                      const mx::array& lengths,
                      const mx::array& cache,
                      const mx::Stream& s) {
  for_each_page_in_use(
      table, lengths, cache.shape(2), s, [&](int64_t row, int64_t column, int64_t page) {
        if (page < 0 || page >= cache.shape(0)) {
          throw_value_error(kFlashAttention,
                            "block_table[" + std::to_string(row) + ", " + std::to_string(column) +
                                "] is " + std::to_string(page) + " and k has " +
                                std::to_string(cache.shape(0)) + " pages; allowed: 0 to " +
                                std::to_string(cache.shape(0) - 1) +
                                " for each page that lengths needs.");
        }
      });
}

// Zeros past the last row of each sequence.
mx::array only_in_use(const mx::array& rows, const mx::array& lengths, mx::Stream s) {
  const mx::array last = mx::reshape(ids_in_32_bits(lengths, s), {-1, 1, 1, 1}, s);
  const mx::array positions =
      mx::reshape(mx::arange(rows.shape(2), last.dtype(), s), {1, 1, -1, 1}, s);
  return mx::where(mx::less(positions, last, s), rows, mx::array(0, rows.dtype()), s);
}

// The number of keys of each sequence of a padded batch.
mx::array key_counts(const mx::array& sequences, mx::Stream s) {
  const int at = static_cast<int>(AttentionSequenceColumn::kKeys);
  return mx::flatten(mx::slice(sequences, {0, at}, {sequences.shape(0), at + 1}, s), s);
}

}  // namespace

void for_each_page_in_use(const mx::array& table,
                          const mx::array& lengths,
                          int page_size,
                          const mx::Stream& s,
                          const std::function<void(int64_t, int64_t, int64_t)>& use) {
  if (!is_of_sequences(lengths, table) || page_size == 0) {
    return;  // either an error of `lengths`, or there are no keys
  }
  std::vector<int64_t> in_use;
  for_each_readable(lengths, s, [&](int64_t length, int64_t) {
    in_use.push_back(ceil_div(length, static_cast<int64_t>(page_size)));
  });
  if (in_use.empty()) {
    return;
  }
  const int64_t columns = table.shape(1);
  int64_t at = 0;
  for_each_readable(table, s, [&](int64_t page, int64_t) {
    const int64_t row = at / columns;
    const int64_t column = at++ % columns;
    if (column < in_use[static_cast<size_t>(row)]) {
      use(row, column, page);
    }
  });
}

void check_table(const char* op,
                 const mx::array& table,
                 const AttentionLengths& lengths,
                 std::optional<int> batch) {
  if (!lengths.keys) {
    throw_value_error(op,
                      "block_table is given without lengths; allowed: both, lengths with the "
                      "number of keys of each sequence.");
  }
  if (lengths.starts) {
    throw_value_error(
        op,
        "starts is given with block_table; allowed: one of them, since the pages of a "
        "sequence start with its first key.");
  }
  require_integers(op, {"block_table", table});
  if (table.ndim() != 2 || (batch && table.shape(0) != *batch)) {
    throw_value_error(op, shape_text("block_table", table) +
                              "; allowed: [batch, pages_per_sequence], (" +
                              (batch ? std::to_string(*batch) : "batch") + ", any).");
  }
}

void check_pages(const mx::array& table,
                 const mx::array& q,
                 const AttentionOptions& options,
                 const std::vector<NamedArray>& caches,
                 const mx::Stream& s) {
  check_table(kFlashAttention, table, options.lengths,
              q.ndim() == 4 ? std::optional(q.shape(0)) : std::nullopt);
  for (const NamedArray& x : caches) {
    if (x.value.ndim() != 4) {
      throw_value_error(kFlashAttention,
                        shape_text(x.name, x.value) +
                            "; allowed with block_table: rank 4, [pages, heads, page_size, ...].");
    }
    for (const int axis : {0, 1, 2}) {
      if (x.value.shape(axis) != caches[0].value.shape(axis)) {
        throw_value_error(kFlashAttention, shape_text(caches[0].name, caches[0].value) + " and " +
                                               shape_text(x.name, x.value) +
                                               "; allowed with block_table: the same pages, heads "
                                               "and page_size.");
      }
    }
  }
  if (!options.plan) {  // which has read them
    require_page_ids(table, *options.lengths.keys, caches[0].value, s);
  }
}

mx::array shape_of_rows(const mx::array& cache, const mx::array& table) {
  mx::Shape shape = cache.shape();
  shape[0] = table.shape(0);
  shape[2] = table.shape(1) * cache.shape(2);
  return mx::array(std::move(shape), cache.dtype(), nullptr, {});
}

bool reads_pages(
    const mx::array& cache, const mx::array& table, int q_len, int head_dim, mx::Stream s) {
  if (cache.size() == 0 || table.size() == 0) {
    return false;
  }
  return !for_gpu(s) || (suits_gpu_decode(q_len, head_dim) &&
                         std::has_single_bit(static_cast<uint32_t>(cache.shape(2))));
}

mx::array page_ids(const mx::array& table, mx::Stream s) {
  if (table.dtype() == mx::int32) {
    return table;
  }
  const mx::array ids = ids_in_32_bits(table, s);
  const mx::array last(std::numeric_limits<int32_t>::max(), ids.dtype());
  return mx::astype(mx::minimum(ids, last, s), mx::int32, s);
}

mx::array gather_pages(const mx::array& cache, const mx::array& table, mx::Stream s) {
  mx::Shape shape = cache.shape();
  shape[0] = table.shape(0);
  shape[2] = table.shape(1) * cache.shape(2);
  if (cache.size() == 0 || table.size() == 0) {
    return mx::zeros(shape, cache.dtype(), s);
  }
  const mx::array ids = ids_in_32_bits(table, s);
  const auto like = [&](int value) { return mx::array(value, ids.dtype()); };
  const mx::array pages =
      mx::expand_dims(mx::clip(ids, like(0), like(cache.shape(0) - 1), s), 1, s);
  const mx::array heads =
      mx::reshape(mx::arange(cache.shape(1), ids.dtype(), s), {1, cache.shape(1), 1}, s);
  mx::Shape page = cache.shape();
  page[0] = page[1] = 1;
  // [batch, kv_heads, pages_per_sequence, 1, 1, page_size, ...]: one copy, in the order needed
  return mx::reshape(mx::gather(cache, {pages, heads}, {0, 1}, page, s), shape, s);
}

mx::array gather_rows(const mx::array& cache,
                      const mx::array& table,
                      const mx::array& lengths,
                      mx::Stream s) {
  const mx::array rows = gather_pages(cache, table, s);
  return for_gpu(s) ? only_in_use(rows, lengths, s) : rows;
}

ContiguousAttention without_pages(const AttentionConfig& config,
                                  const AttentionInputs& in,
                                  mx::Stream s) {
  ContiguousAttention call{config, in};
  call.config.is_paged = false;
  const mx::array lengths = key_counts(*in.sequences, s);
  call.in.k = gather_rows(in.k, *in.pages, lengths, s);
  call.in.v = gather_rows(in.v, *in.pages, lengths, s);
  call.in.pages = std::nullopt;
  return call;
}

// ---- quantized keys and values ------------------------------------------------------------------

QuantizedMatrix gather_pages(const QuantizedMatrix& cache, const mx::array& table, mx::Stream s) {
  const auto rows = [&](const mx::array& x) { return gather_pages(x, table, s); };
  return {rows(cache.w), rows(cache.scales),
          cache.biases ? std::optional(rows(*cache.biases)) : std::nullopt};
}

QuantizedMatrix gather_rows(const QuantizedMatrix& cache,
                            const mx::array& table,
                            const mx::array& lengths,
                            mx::Stream s) {
  const auto rows = [&](const mx::array& x) { return gather_rows(x, table, lengths, s); };
  return {gather_pages(cache.w, table, s),  // codes are finite
          rows(cache.scales), cache.biases ? std::optional(rows(*cache.biases)) : std::nullopt};
}

QuantizedAttentionInputs without_pages(const QuantizedAttentionInputs& in, mx::Stream s) {
  QuantizedAttentionInputs own = in;
  const mx::array lengths = key_counts(*in.sequences, s);
  own.k = gather_rows(in.k, *in.pages, lengths, s);
  own.v = gather_rows(in.v, *in.pages, lengths, s);
  own.pages = std::nullopt;
  return own;
}

std::vector<NamedArray> arrays_of_pages(const QuantizedMatrix& k, const QuantizedMatrix& v) {
  std::vector<NamedArray> parts = {
      {"k w", k.w}, {"k scales", k.scales}, {"v w", v.w}, {"v scales", v.scales}};
  if (k.biases) {
    parts.push_back({"k biases", *k.biases});
  }
  if (v.biases) {
    parts.push_back({"v biases", *v.biases});
  }
  return parts;
}

}  // namespace mlx_anvil
