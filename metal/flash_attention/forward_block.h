// The rows of the attention forward that a threadgroup computes (forward.metal).
#pragma once

#include "metal/flash_attention/forward.h"
#include "metal/flash_attention/forward_call.h"

// `Passing` stages tiles of keys and values: PassingRows, or what has the same members.
template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kKeys,
          Keeping kKeeping,
          int kSimdgroups,
          typename Passing>
struct ForwardBlock {
  using GroupRows = ForwardRows<T, kHeadDim, kValueDim, kRowFragments, kKeys, kKeeping>;
  enum { kThreads = 32 * kSimdgroups, kGroupRows = 8 * kRowFragments };
  enum { kRows = kSimdgroups * kGroupRows };
  // Elements in threadgroup memory.
  enum { kOfKeys = Passing::kPlaces * Passing::kFirstSize };
  enum { kOfValues = Passing::kPlaces * Passing::kSecondSize };

  // Computes the block of rows that begins at row `first` of the sequence.
  template <typename Operand>
  METAL_FUNC static void compute(ForwardCall<T, RaggedLengths> call,
                                 int first,
                                 Operand keys,
                                 Operand values,
                                 constant AttentionForwardParams& params,
                                 threadgroup T* key_tiles,
                                 threadgroup T* value_tiles,
                                 threadgroup T* kept_queries) {
    constant AttentionParams& common = params.common;
    const RaggedLengths lengths = call.lengths;
    const int query_count = lengths.queries(common);
    const int last = metal::min(first + kRows, query_count) - 1;

    const Rows<T> queries = call.queries(common);
    const HeadMask<T> head_mask = call.head_mask(common);

    GroupRows rows;
    rows.place = fragment_place(call.lane);
    rows.first = first + call.simdgroup * kGroupRows;
    rows.begin(queries, call.sink(common));
    rows.q.template stage<kThreads>(kept_queries, queries, first, call.simdgroup,
                                    call.thread_index);

    KeyRange visible = visible_keys(common, first, last, lengths);
    if (is_ragged && last < first) {  // padding
      visible.end = visible.begin;
    }
    const KeyRange own = visible_keys(
        common, rows.first, metal::min(rows.first + kGroupRows, query_count) - 1, lengths);
    Passing passing;
    passing.first_places = key_tiles;
    passing.second_places = value_tiles;
    passing.thread_index = call.thread_index;
    passing.start(keys, values, visible.begin);
    for (int begin = visible.begin; begin < visible.end; begin += kKeys) {
      passing.take(begin, visible.end);
      if (rows.first < query_count && begin < own.end && begin + kKeys > own.begin) {
        rows.attend(passing.first_tile(), passing.second_tile(), begin, head_mask, common, lengths);
      }
    }

    call.store(rows, params);
  }
};
