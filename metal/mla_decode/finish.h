// The end of a row: its sum becomes a factor of the output, or is stored for the parts to be
// merged.
#pragma once

#include "metal/common/online_softmax.h"
#include "metal/flash_attention/decode_row.h"

// `total` is the sum of all keys of the part. Returns the factor of what was summed. One lane of a
// row `stores`, unless the row is past the last.
METAL_FUNC float finish_row(OnlineSoftmax softmax,
                            float total,
                            DecodeRow row,
                            int part,
                            bool stores,
                            const device float* sinks,
                            device float* lse,
                            constant AttentionForwardParams& params) {
  constant AttentionParams& common = params.common;
  if (keys_are_in_parts) {
    if (stores) {
      const long stored = row.index(common) * params.parts + part;
      lse[2 * stored] = softmax.highest;
      lse[2 * stored + 1] = total;
    }
    return 1.0f;
  }
  float factor = 1.0f;
  if (has_sinks) {
    const float sink = row.sink(sinks, common);
    factor = softmax.begin_piece(sink);
    total = softmax.add_sink(sink, total * factor);
  }
  if (stores_lse && stores) {
    lse[row.index(common)] = softmax.log_sum_exp(total);
  }
  return factor * inverse_of_total(total);
}
