// A block of query rows of the attention forward by products of four SIMD groups: the loop over
// tiles of keys and values, which come as they are (GroupTiles) or from codes (GroupCodeTiles).
#pragma once

#include "metal/flash_attention/forward_call.h"
#include "metal/flash_attention/forward_group.h"

// The block's first query is `first`. There is at least one row, of queries or padding.
template <int kHeadDim, int kValueDim, int kKeys, int kSimdgroups, typename T, typename Tiles>
METAL_FUNC void compute_group_block(ForwardCall<T, RaggedLengths> call,
                                    int first,
                                    thread Tiles& tiles,
                                    constant AttentionForwardParams& params) {
  using GroupRows = ForwardGroupRows<T, kHeadDim, kValueDim, kKeys>;
  enum { kRows = kSimdgroups * GroupRows::kRows };
  constant AttentionParams& common = params.common;
  const RaggedLengths lengths = call.lengths;
  const int last = metal::min(first + kRows, lengths.queries(common)) - 1;
  const int last_row =
      metal::min(first + kRows, lengths.rows(common)) - 1;  // of queries or padding

  GroupRows rows;
  rows.lengths = lengths;
  rows.place = fragment_place(call.lane);
  rows.first = first + call.simdgroup * GroupRows::kRows;
  rows.begin(call.queries(common), call.sink(common), common);

  const KeyRange visible = visible_keys(common, first, last, lengths);
  if (visible.begin < visible.end && (!is_ragged || first <= last)) {
    tiles.start(visible.begin);
    rows.start(tiles, visible.begin, visible.end, common);
    for (int begin = visible.begin + kKeys; begin < visible.end; begin += kKeys) {
      tiles.wait();
      if (sees_all(common, first, last_row, begin, begin + kKeys, lengths)) {
        rows.template go_on<false>(tiles, begin, visible.end, common);
      } else {
        rows.template go_on<true>(tiles, begin, visible.end, common);
      }
    }
    tiles.wait();
    rows.finish(tiles.values_before());
  }
  call.store(rows, params);
}
