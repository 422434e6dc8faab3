// Keys and values in pages of a power of two rows: row j of a sequence is row j % page size of the
// page that its table names at j / page size (csrc/flash_attention/pages.h). The stride of a
// cache's first axis is that of pages.
#pragma once

#include "metal/common/tile.h"
#include "metal/flash_attention/params.h"

constant bool is_paged [[function_constant(13)]];
constant bool pages_hold_eights [[function_constant(14)]];  // of keys, from a multiple of 8 on

enum { kKeysOfLookup = 8 };

// The pages of one sequence.
struct PageTable {
  const device int* pages;
  int shift;  // log2 of the page size
  int last;   // page of the cache

  // No id leads out of the cache.
  METAL_FUNC int page(int key) const thread { return metal::clamp(pages[key >> shift], 0, last); }
  METAL_FUNC int row(int key) const thread { return key & ((1 << shift) - 1); }
};

// The pages of a block of codes. A kernel looks them up before it needs them, so that loads need
// not wait for the table. If pages do not hold eights, each row looks its own page up. Offsets, as
// in decode_matrix.h, would take four times the registers here: codes and factors, of keys and
// values.
template <int kKeys>
struct BlockPages {
  int pages[kKeys / kKeysOfLookup];

  // `begin` is a multiple of 8. A key that does not exist stands for the last one.
  METAL_FUNC void look_up(PageTable table, int begin, int end) thread {
    if (is_paged && pages_hold_eights) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeys / kKeysOfLookup; ++n) {
        pages[n] = table.page(metal::min(begin + kKeysOfLookup * n, end - 1));
      }
    }
  }

  // Returns the page of `key`, which is in the n-th eight or stands for one that is. 0 without
  // pages.
  METAL_FUNC int of(PageTable table, int n, int key) const thread {
    if (!is_paged) {
      return 0;
    }
    return pages_hold_eights ? pages[n] : table.page(key);
  }
};

METAL_FUNC PageTable pages_of_batch(const device int* pages,
                                    constant AttentionForwardParams& params,
                                    int batch) {
  if (!is_paged) {
    return PageTable();
  }
  return {pages + long(batch) * params.pages_per_sequence, params.page_shift, params.last_page};
}

// The keys or values of one head. `head` starts at page 0 if they are in pages.
template <typename T>
struct CacheRows {
  Rows<T> head;
  PageTable table;
  long page_stride;

  // The offset of a key's row in its page, and the row there. The key exists.
  METAL_FUNC long offset(int key) const thread {
    return table.page(key) * page_stride + table.row(key) * head.row_stride;
  }
  METAL_FUNC Rows<T> row(int key) const thread {
    return {head.data + offset(key), 0, head.column_stride, 1, head.columns};
  }
};

template <typename T>
METAL_FUNC CacheRows<T> cache_rows(const device T* data,
                                   constant int64_t (&strides)[4],
                                   PageTable table,
                                   int batch,
                                   int head,
                                   int rows,
                                   int columns,
                                   int first_row = 0) {
  const long first = is_paged ? 0 : batch * strides[0] + first_row * strides[2];
  return {Rows<T>{data + first + head * strides[1], strides[2], strides[3], rows, columns}, table,
          strides[0]};
}
