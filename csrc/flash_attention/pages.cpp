#include "flash_attention/pages.h"

#include <string>
#include <vector>

#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/integers.h"
#include "common/shapeless.h"
#include "common/simulate.h"

namespace mlx_anvil {

namespace {

std::string shape_text(const NamedArray& x) {
  return std::string(x.name) + " has shape " + to_text(x.value.shape());
}

bool is_of_sequences(const mx::array& lengths, const mx::array& table) {
  return lengths.ndim() == 1 && lengths.shape(0) == table.shape(0) &&
         mx::issubdtype(lengths.dtype(), mx::integer);
}

// Throws for an id out of range among the pages that a sequence uses, if the host can read them.
void require_page_ids(const mx::array& table,
                      const mx::array& lengths,
                      const mx::array& cache,
                      const mx::Stream& s) {
  if (!is_of_sequences(lengths, table) || cache.shape(2) == 0) {
    return;  // either an error of `lengths`, or there are no keys
  }
  std::vector<int64_t> in_use;
  for_each_readable(lengths, s, [&](int64_t length, int64_t) {
    in_use.push_back(ceil_div(length, static_cast<int64_t>(cache.shape(2))));
  });
  if (in_use.empty()) {
    return;
  }
  const int64_t columns = table.shape(1);
  int64_t at = 0;
  for_each_readable(table, s, [&](int64_t page, int64_t) {
    const int64_t row = at / columns;
    const int64_t column = at++ % columns;
    const bool is_used = column < in_use[static_cast<size_t>(row)];
    if (is_used && (page < 0 || page >= cache.shape(0))) {
      throw_value_error(kFlashAttention,
                        "block_table[" + std::to_string(row) + ", " + std::to_string(column) +
                            "] is " + std::to_string(page) + " and k has " +
                            std::to_string(cache.shape(0)) + " pages; allowed: 0 to " +
                            std::to_string(cache.shape(0) - 1) +
                            " for each page that lengths needs.");
    }
  });
}

mx::array gathered(const mx::array& cache, const mx::array& table, mx::Stream s) {
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

// Zeros past the last row of each sequence.
mx::array only_in_use(const mx::array& rows, const mx::array& lengths, mx::Stream s) {
  const mx::array last = mx::reshape(ids_in_32_bits(lengths, s), {-1, 1, 1, 1}, s);
  const mx::array positions =
      mx::reshape(mx::arange(rows.shape(2), last.dtype(), s), {1, 1, -1, 1}, s);
  return mx::where(mx::less(positions, last, s), rows, mx::array(0, rows.dtype()), s);
}

bool must_clear(const mx::array& lengths, const mx::array& table, mx::Stream s) {
  return for_gpu(s) && is_of_sequences(lengths, table);
}

}  // namespace

void check_pages(const mx::array& table,
                 const mx::array& q,
                 const AttentionLengths& lengths,
                 const std::vector<NamedArray>& caches,
                 const mx::Stream& s) {
  if (!lengths.keys) {
    throw_value_error(kFlashAttention,
                      "block_table is given without lengths; allowed: both, lengths with the "
                      "number of keys of each sequence.");
  }
  if (!mx::issubdtype(table.dtype(), mx::integer)) {
    throw_value_error(kFlashAttention, "block_table has dtype " + to_text(table.dtype()) +
                                           "; allowed: integers, such as mx.int32.");
  }
  if (table.ndim() != 2 || (q.ndim() == 4 && table.shape(0) != q.shape(0))) {
    const std::string batch = q.ndim() == 4 ? std::to_string(q.shape(0)) : "batch";
    throw_value_error(kFlashAttention, shape_text({"block_table", table}) +
                                           "; allowed: [batch, pages_per_sequence], (" + batch +
                                           ", any).");
  }
  for (const NamedArray& x : caches) {
    if (x.value.ndim() != 4) {
      throw_value_error(
          kFlashAttention,
          shape_text(x) + "; allowed with block_table: rank 4, [pages, heads, page_size, ...].");
    }
    for (const int axis : {0, 1, 2}) {
      if (x.value.shape(axis) != caches[0].value.shape(axis)) {
        throw_value_error(kFlashAttention, shape_text(caches[0]) + " and " + shape_text(x) +
                                               "; allowed with block_table: the same pages, heads "
                                               "and page_size.");
      }
    }
  }
  require_page_ids(table, *lengths.keys, caches[0].value, s);
}

mx::array rows_of_pages(const mx::array& cache,
                        const mx::array& table,
                        const mx::array& lengths,
                        bool clears,
                        mx::Stream s) {
  const auto graph = [clears, s](const Arrays& in) -> Arrays {
    const mx::array rows = gathered(in[0], in[1], s);
    return {clears ? only_in_use(rows, in[2], s) : rows};
  };
  const Arrays inputs = {cache, table, lengths};
  return traces_shapeless({&cache, &table, &lengths})
             ? shapeless_node(kFlashAttention, s, inputs, graph)[0]
             : graph(inputs)[0];
}

std::pair<mx::array, mx::array> gather_pages(const mx::array& k,
                                             const mx::array& v,
                                             const mx::array& table,
                                             const mx::array& q,
                                             const AttentionLengths& lengths,
                                             mx::Stream s) {
  check_pages(table, q, lengths, {{"k", k}, {"v", v}}, s);
  const mx::array& keys = *lengths.keys;
  const bool clears = must_clear(keys, table, s);
  return {rows_of_pages(k, table, keys, clears, s), rows_of_pages(v, table, keys, clears, s)};
}

void gather_quantized_pages(QuantizedMatrix& k,
                            QuantizedMatrix& v,
                            const mx::array& table,
                            const mx::array& q,
                            const AttentionLengths& lengths,
                            mx::Stream s) {
  std::vector<NamedArray> parts = {
      {"k w", k.w}, {"k scales", k.scales}, {"v w", v.w}, {"v scales", v.scales}};
  if (k.biases) {
    parts.push_back({"k biases", *k.biases});
  }
  if (v.biases) {
    parts.push_back({"v biases", *v.biases});
  }
  check_pages(table, q, lengths, parts, s);
  const mx::array& keys = *lengths.keys;
  const bool clears = must_clear(keys, table, s);
  for (QuantizedMatrix* x : {&k, &v}) {
    x->w = rows_of_pages(x->w, table, keys, false, s);  // codes are finite
    x->scales = rows_of_pages(x->scales, table, keys, clears, s);
    if (x->biases) {
      x->biases = rows_of_pages(*x->biases, table, keys, clears, s);
    }
  }
}

}  // namespace mlx_anvil
