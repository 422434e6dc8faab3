// How the rows that pass by reach threadgroup memory: tile by tile of two operands, keys and values
// or queries and the gradients of their outputs.
#pragma once

#include "metal/common/tile.h"
#include "metal/flash_attention/scores.h"

// What of a tile's loads is under way at once. Each takes registers of every thread, which the
// loads wait in.
enum Staging {
  kStagesEach,      // a vector at a time
  kStagesTogether,  // all of both tiles
  kStagesAhead,     // likewise, of the next tiles while these are computed with
};

template <typename T,
          int kTileRows,
          int kFirstColumns,
          int kSecondColumns,
          int kThreads,
          Staging kStaging>
struct PassingRows {
  Rows<T> first;  // all of them
  Rows<T> second;
  threadgroup T* first_tile;
  threadgroup T* second_tile;
  uint thread_index;
  TileShare<T, kTileRows, kFirstColumns, kThreads> first_share;
  TileShare<T, kTileRows, kSecondColumns, kThreads> second_share;

  METAL_FUNC void load(int begin) thread {
    first_share.load(rows_from(first, begin), thread_index);
    second_share.load(rows_from(second, begin), thread_index);
  }

  // Before the first tiles are written, which begin there.
  METAL_FUNC void start(int begin) thread {
    if (kStaging == kStagesAhead && rows_are_vectors) {
      load(begin);
    }
  }

  // By all threads: when all are done with the tiles before, those from `begin` on are written.
  METAL_FUNC void write(int begin) thread {
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (kStaging == kStagesEach || !rows_are_vectors) {
      copy_tile<T, kTileRows, kFirstColumns, kThreads>(first_tile, rows_from(first, begin),
                                                       rows_are_vectors, thread_index);
      copy_tile<T, kTileRows, kSecondColumns, kThreads>(second_tile, rows_from(second, begin),
                                                        rows_are_vectors, thread_index);
    } else {
      if (kStaging == kStagesTogether) {
        load(begin);
      }
      first_share.store(first_tile, thread_index);
      second_share.store(second_tile, thread_index);
    }
  }

  // By all threads, which then see what was written. The tiles from `next` on follow.
  METAL_FUNC void publish(int next) thread {
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (kStaging == kStagesAhead && rows_are_vectors) {
      load(next);
    }
  }
};
