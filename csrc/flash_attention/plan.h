// What a call derives from lengths and pages alone, made once for all layers of a step.
#pragma once

#include <memory>

#include "flash_attention/flash_attention.h"

namespace mlx_anvil {

inline constexpr const char* kAttentionPlan = "attention_plan";  // in messages

struct AttentionPlan {
  AttentionLengths lengths;
  std::optional<mx::array> block_table;
  int batch, q_len, kv_len;
  mx::array sequences;             // int32 [sequences, 5] (sequences.h)
  std::optional<mx::array> pages;  // the table as kernels read it (pages.h)
  // The smallest and the largest page in use, if the host could read them.
  std::optional<std::pair<int64_t, int64_t>> used_pages;
};

// With a table, the keys are its columns times `page_size`; otherwise there are `kv_len`.
std::shared_ptr<AttentionPlan> attention_plan(int q_len,
                                              std::optional<int> kv_len,
                                              const AttentionLengths& lengths,
                                              const std::optional<mx::array>& block_table,
                                              std::optional<int> page_size,
                                              mx::StreamOrDevice stream);

// Throws unless the plan is for a call of these arrays. `k_rows` has the shape of contiguous keys;
// of pages, there are `page_count`.
void check_plan(const AttentionPlan& plan,
                const mx::array& q,
                const mx::array& k_rows,
                int page_count);

}  // namespace mlx_anvil
