#include "flash_attention/plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include "common/checks.h"
#include "common/errors.h"
#include "flash_attention/pages.h"
#include "flash_attention/sequences.h"

namespace mlx_anvil {

namespace {

int count_of(const char* name, int value) {
  if (value < 0) {
    throw_value_error(kAttentionPlan, std::string(name) + " is " + std::to_string(value) +
                                          "; allowed: at least 0.");
  }
  return value;
}

// The keys of a call, which pages or kv_len tell.
int keys_of(std::optional<int> kv_len,
            const std::optional<mx::array>& block_table,
            std::optional<int> page_size) {
  if (!block_table) {
    if (!kv_len || page_size) {
      throw_value_error(kAttentionPlan,
                        "without block_table, kv_len is needed and page_size is not; allowed: "
                        "kv_len, or block_table and page_size.");
    }
    return count_of("kv_len", *kv_len);
  }
  if (kv_len || !page_size) {
    throw_value_error(
        kAttentionPlan,
        "with block_table, page_size is needed and kv_len is not; allowed: kv_len, or "
        "block_table and page_size.");
  }
  return block_table->shape(1) * count_of("page_size", *page_size);
}

int batch_of(const AttentionLengths& lengths) {
  for (const auto* x : {&lengths.keys, &lengths.queries, &lengths.starts}) {
    if (*x && (*x)->ndim() == 1) {
      return (*x)->shape(0);
    }
  }
  return 1;  // packed, or an error of the lengths
}

}  // namespace

std::shared_ptr<AttentionPlan> attention_plan(int q_len,
                                              std::optional<int> kv_len,
                                              const AttentionLengths& lengths,
                                              const std::optional<mx::array>& block_table,
                                              std::optional<int> page_size,
                                              mx::StreamOrDevice stream) {
  const mx::Stream s = require_stream(kAttentionPlan, stream);
  const int batch = batch_of(lengths);
  if (block_table) {
    check_table(kAttentionPlan, *block_table, lengths, batch);
  }
  const int keys = keys_of(kv_len, block_table, page_size);
  // Their shapes count alone.
  const mx::array q({batch, 1, count_of("q_len", q_len), 1}, mx::float32, nullptr, {});
  const mx::array k({batch, 1, keys, 1}, mx::float32, nullptr, {});
  std::optional<mx::array> sequences = checked_sequences(kAttentionPlan, lengths, q, k, s);
  if (!sequences) {
    throw_value_error(kAttentionPlan,
                      "no lengths are given; allowed: lengths and q_lengths, or cu_seqlens_q and "
                      "cu_seqlens_k.");
  }
  AttentionPlan plan{.lengths = lengths,
                     .block_table = block_table,
                     .batch = batch,
                     .q_len = q_len,
                     .kv_len = keys,
                     .sequences = *std::move(sequences),
                     .pages = std::nullopt,
                     .used_pages = std::nullopt};
  if (block_table) {
    plan.pages = page_ids(*block_table, s);
    for_each_page_in_use(
        *block_table, *lengths.keys, *page_size, s, [&](int64_t, int64_t, int64_t page) {
          auto& used = plan.used_pages;
          used = used ? std::pair(std::min(used->first, page), std::max(used->second, page))
                      : std::pair(page, page);
        });
  }
  return std::make_shared<AttentionPlan>(std::move(plan));
}

void check_plan(const AttentionPlan& plan,
                const mx::array& q,
                const mx::array& k_rows,
                int page_count) {
  const auto mismatch = [](const std::string& of_plan, const std::string& of_call) {
    throw_value_error(kFlashAttention, "plan is for " + of_plan + " and the call has " + of_call +
                                           "; allowed: a plan for the call's arrays.");
  };
  const auto text = [](int batch, int queries, int keys) {
    return "batch " + std::to_string(batch) + ", " + std::to_string(queries) + " queries and " +
           std::to_string(keys) + " keys";
  };
  if (q.shape(0) != plan.batch || q.shape(2) != plan.q_len || k_rows.shape(2) != plan.kv_len) {
    mismatch(text(plan.batch, plan.q_len, plan.kv_len),
             text(q.shape(0), q.shape(2), k_rows.shape(2)));
  }
  const auto& used = plan.used_pages;
  if (used && (used->first < 0 || used->second >= page_count)) {
    mismatch("pages " + std::to_string(used->first) + " to " + std::to_string(used->second),
             std::to_string(page_count) + " pages");
  }
}

}  // namespace mlx_anvil
