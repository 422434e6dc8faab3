#include "flash_attention/sequences.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/evaluate.h"
#include "common/ids.h"
#include "common/plan.h"
#include "flash_attention/plan.h"

namespace mlx_anvil {

namespace {

// ---- checks -------------------------------------------------------------------------------------

void require_vector(
    const char* op, const char* name, const mx::array& x, int count, const std::string& allowed) {
  require_integers(op, {name, x});
  if (x.ndim() != 1 || (count >= 0 ? x.shape(0) != count : x.shape(0) < 2)) {
    throw_value_error(
        op, std::string(name) + " has shape " + to_text(x.shape()) + "; allowed: " + allowed + ".");
  }
}

// Throws unless 0 <= x[0] <= x[1] ... <= total, if the host can read it.
void require_ends(
    const char* op, const char* name, const mx::array& x, int total, const mx::Stream& s) {
  for_each_readable(x, s, [&](int64_t end, int64_t before) {
    if (end < before || end > total) {
      throw_value_error(op, std::string(name) + " has " + std::to_string(end) + " after " +
                                std::to_string(before) +
                                "; allowed: numbers that do not decrease, from 0 to " +
                                std::to_string(total) + ".");
    }
  });
}

// ---- tables -------------------------------------------------------------------------------------

mx::array all_of(int value, int count, mx::Stream s) {
  return mx::full({count}, mx::array(value), s);
}

mx::array table(const std::vector<mx::array>& columns, mx::Stream s) {
  return mx::stack(columns, 1, s);
}

mx::array padded(const char* op,
                 const AttentionLengths& lengths,
                 const mx::array& q,
                 const mx::array& k,
                 mx::Stream s) {
  const int batch = q.shape(0);
  // A decode makes such a table for each layer. The host fills in what it knows, since each op is
  // a launch of its own.
  std::vector<AttentionSequence> known(batch);
  for (int b = 0; b < batch; ++b) {
    known[b] = {b, 0, lengths.queries ? 0 : q.shape(2), 0, lengths.keys ? 0 : k.shape(2)};
  }
  constexpr int kColumns = sizeof(AttentionSequence) / sizeof(int32_t);
  mx::array table(reinterpret_cast<const int32_t*>(known.data()), {batch, kColumns}, mx::int32);
  const auto checked = [&](const char* name, const mx::array& given, int longest) {
    require_vector(op, name, given, batch,
                   "one length per batch, (" + std::to_string(batch) + ",)");
    for_each_readable(
        given, s, [&](int64_t length, int64_t) { require_inside(op, name, length, 0, longest); });
    return ids_up_to(given, longest, s);
  };
  const auto add = [&](const mx::array& numbers, const AttentionSequence& column) {
    const mx::array in_column(reinterpret_cast<const int32_t*>(&column), {1, kColumns}, mx::int32);
    table = mx::add(table, mx::multiply(mx::expand_dims(numbers, 1, s), in_column, s), s);
  };
  if (lengths.queries) {
    add(checked("q_lengths", *lengths.queries, q.shape(2)), {.queries = 1});
  }
  if (lengths.keys) {
    add(checked("lengths", *lengths.keys, k.shape(2)), {.keys = 1});
  }
  if (lengths.starts) {
    mx::array starts = checked("starts", *lengths.starts, k.shape(2));
    if (lengths.keys) {  // a start past the end leaves no keys
      starts = mx::minimum(starts, ids_up_to(*lengths.keys, k.shape(2), s), s);
    }
    add(starts, {.first_key = 1, .keys = -1});
  }
  return table;
}

mx::array packed(const char* op,
                 const AttentionLengths& lengths,
                 const mx::array& q,
                 const mx::array& k,
                 mx::Stream s) {
  if (q.shape(0) != 1) {
    throw_value_error(op, "q has shape " + to_text(q.shape()) +
                              " and cu_seqlens_q is given; allowed: a batch of 1, "
                              "[1, heads, total, head_dim].");
  }
  if (!lengths.cu_queries) {
    throw_value_error(
        op, "cu_seqlens_k is given without cu_seqlens_q; allowed: both, or cu_seqlens_q.");
  }
  require_vector(op, "cu_seqlens_q", *lengths.cu_queries, -1, "(sequences + 1,)");
  const int count = lengths.cu_queries->shape(0) - 1;
  const mx::array& cu_keys = lengths.cu_keys ? *lengths.cu_keys : *lengths.cu_queries;
  require_vector(op, "cu_seqlens_k", cu_keys, count + 1,
                 "that of cu_seqlens_q, (" + std::to_string(count + 1) + ",)");
  require_ends(op, "cu_seqlens_q", *lengths.cu_queries, q.shape(2), s);
  require_ends(op, lengths.cu_keys ? "cu_seqlens_k" : "cu_seqlens_q, which is that of k too,",
               cu_keys, k.shape(2), s);
  std::vector<mx::array> columns = {all_of(0, count, s)};
  const std::pair<const mx::array*, int> sides[2] = {{&*lengths.cu_queries, q.shape(2)},
                                                     {&cu_keys, k.shape(2)}};
  for (const auto& [cu, total] : sides) {
    // Ends that decrease would give a row to two sequences: each begins where all before it end.
    // MLX's running maximum has no forward mode.
    const mx::array ends =
        mx::cummax(mx::stop_gradient(ids_up_to(*cu, total, s), s), 0, false, true, s);
    const mx::array begin = mx::slice(ends, {0}, {count}, s);
    columns.push_back(begin);
    columns.push_back(mx::subtract(mx::slice(ends, {1}, {count + 1}, s), begin, s));
  }
  return table(columns, s);
}

// ---- the mask -----------------------------------------------------------------------------------

// The queries, or the keys, of a call: for each batch and row, both int32 [batch, rows].
struct Rows {
  mx::array sequence;  // its number, from 1 on; 0: padding
  mx::array position;  // in the sequence's keys
};

mx::array column_of(const mx::array& sequences, AttentionSequenceColumn column, mx::Stream s) {
  const int at = static_cast<int>(column);
  const mx::array numbers = mx::slice(sequences, {0, at}, {sequences.shape(0), at + 1}, s);
  return mx::expand_dims(numbers, -1, s);  // [sequences, 1, 1]
}

Rows rows_of(const mx::array& sequences, int batch, int rows, bool of_queries, mx::Stream s) {
  using Column = AttentionSequenceColumn;
  const auto column = [&](Column at) { return column_of(sequences, at, s); };
  const mx::array begin = column(of_queries ? Column::kFirstQuery : Column::kFirstKey);
  const mx::array count = column(of_queries ? Column::kQueries : Column::kKeys);
  const mx::array row = mx::arange(rows, mx::int32, s);
  const mx::array of_batch =
      mx::equal(mx::expand_dims(mx::arange(batch, mx::int32, s), 1, s), column(Column::kBatch), s);
  const mx::array place = mx::subtract(row, begin, s);
  const mx::array inside = mx::logical_and(
      of_batch,
      mx::logical_and(mx::greater_equal(place, mx::array(0), s), mx::less(place, count, s), s), s);
  // The last query is at the position of the last key.
  const mx::array position =
      of_queries
          ? mx::add(place, mx::subtract(column(Column::kKeys), column(Column::kQueries), s), s)
          : place;
  const mx::array number =
      mx::reshape(mx::arange(1, sequences.shape(0) + 1, mx::int32, s), {-1, 1, 1}, s);
  const auto only_inside = [&](const mx::array& x) {
    return mx::sum(mx::where(inside, x, mx::array(0), s), 0, false, s);
  };
  return {only_inside(number), only_inside(position)};
}

// bool [batch, 1, q_len, kv_len]
mx::array visible_pairs(const AttentionConfig& config, const AttentionInputs& in, mx::Stream s) {
  const int batch = in.q.shape(0);
  const Rows queries = rows_of(*in.sequences, batch, in.q.shape(2), true, s);
  const Rows keys = rows_of(*in.sequences, batch, in.k.shape(2), false, s);
  const auto as_column = [&](const mx::array& x) { return mx::expand_dims(x, 2, s); };
  const auto as_row = [&](const mx::array& x) { return mx::expand_dims(x, 1, s); };
  mx::array visible =
      mx::logical_and(mx::equal(as_column(queries.sequence), as_row(keys.sequence), s),
                      mx::greater(as_column(queries.sequence), mx::array(0), s), s);
  const mx::array distance =  // how far the key is to the right
      mx::subtract(as_row(keys.position), as_column(queries.position), s);
  const auto bound = [](int64_t x) {
    return mx::array(
        static_cast<int32_t>(std::min<int64_t>(x, std::numeric_limits<int32_t>::max())));
  };
  if (config.window_left < kUnboundedWindow) {
    const mx::array least = mx::negative(bound(config.window_left), s);
    visible = mx::logical_and(visible, mx::greater_equal(distance, least, s), s);
  }
  if (config.window_right < kUnboundedWindow) {
    visible = mx::logical_and(visible, mx::less_equal(distance, bound(config.window_right), s), s);
  }
  return mx::expand_dims(visible, 1, s);
}

}  // namespace

std::optional<mx::array> checked_sequences(const char* op,
                                           const AttentionLengths& lengths,
                                           const mx::array& q,
                                           const mx::array& k,
                                           mx::Stream s) {
  const bool is_padded = lengths.keys || lengths.queries || lengths.starts;
  const bool is_packed = lengths.cu_queries || lengths.cu_keys;
  if (is_padded && is_packed) {
    throw_value_error(
        op,
        "lengths and cu_seqlens are both given; allowed: lengths, q_lengths and starts of a "
        "padded batch, or cu_seqlens_q and cu_seqlens_k of a packed one.");
  }
  if (is_padded) {
    return padded(op, lengths, q, k, s);
  }
  return is_packed ? std::optional(packed(op, lengths, q, k, s)) : std::nullopt;
}

std::optional<mx::array> sequences_of_call(const AttentionOptions& options,
                                           const mx::array& q,
                                           const mx::array& k,
                                           mx::Stream s) {
  return options.plan ? options.plan->sequences
                      : checked_sequences(kFlashAttention, options.lengths, q, k, s);
}

mx::array fold_sequences(const mx::array& sequences, int batch, mx::Stream s) {
  const int count = sequences.shape(0);
  const mx::array first = mx::multiply(mx::arange(count, mx::int32, s), mx::array(batch), s);
  mx::array shift = mx::reshape(first, {-1, 1, 1}, s);  // of the batch, the first column
  shift = mx::multiply(shift, mx::array({1, 0, 0, 0, 0}, {5}, mx::int32), s);
  return mx::flatten(mx::add(sequences, shift, s), 0, 1, s);
}

MaskedAttention mask_of_sequences(const AttentionConfig& config,
                                  const AttentionInputs& in,
                                  mx::Stream s) {
  MaskedAttention masked{config, in};
  const mx::array visible = visible_pairs(config, in, s);
  if (config.mask == AttentionMask::kAdditive) {
    const mx::array hidden(-std::numeric_limits<float>::infinity(), in.mask->dtype());
    masked.in.mask = mx::where(visible, *in.mask, hidden, s);
  } else {
    masked.in.mask =
        config.mask == AttentionMask::kBool ? mx::logical_and(visible, *in.mask, s) : visible;
    masked.config.mask = AttentionMask::kBool;
  }
  masked.in.sequences = std::nullopt;
  masked.config.is_ragged = masked.config.is_packed = masked.config.has_starts = false;
  masked.config.window_left = masked.config.window_right = kUnboundedWindow;
  return masked;
}

MaskedAttention evaluated_mask_of_sequences(const AttentionConfig& config,
                                            const AttentionInputs& in,
                                            mx::Stream s) {
  Arrays leaves;
  const auto leaf = [&](std::optional<mx::array>& x) {
    if (x) {
      mx::array own(x->shape(), x->dtype(), nullptr, {});
      own.copy_shared_buffer(*x);
      leaves.push_back(own);
      x = own;
    }
  };
  AttentionInputs own = in;
  leaf(own.sequences);
  leaf(own.mask);
  MaskedAttention masked = mask_of_sequences(config, own, s);
  if (planning()) {  // MLX builds its own kernels
    masked.in.mask->set_data(planned_memory());
  } else {
    evaluate_graph({*masked.in.mask}, leaves, s);
  }
  return masked;
}

}  // namespace mlx_anvil
