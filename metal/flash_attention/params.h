// Parameters of the attention kernels, shared by the host (C++) and the kernels (MSL). The fields
// are plain 32- and 64-bit numbers in an order without padding, so that both compilers lay them out
// alike.
//
// Bindings. Forward:          q k v mask sinks sequences | out lse | params
//           decode:           q k v mask sinks sequences pages | out lse | params
//           decode in parts:  q k v mask sinks sequences pages | partial_out partial_sums | params
// With quantized keys and values, `w scales biases` stands for each of k and v.
// The host binds q or out in place of absent arrays.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// Parameters of every attention kernel. Strides are in elements: [batch, head, row, column].
struct AttentionParams {
  int64_t q_strides[4];
  int64_t k_strides[4];
  int64_t v_strides[4];
  int64_t mask_strides[4];
  int64_t sinks_strides[2];  // [batch, head]

  int32_t q_heads;
  int32_t kv_heads;
  int32_t group;  // query heads per kv head
  int32_t q_len;
  int32_t kv_len;
  int32_t head_dim;
  int32_t v_head_dim;

  // Query i sees keys i + band_low to i + band_high, both inclusive. The host clamps limits beyond
  // the keys, so that adding a position cannot overflow.
  int32_t band_low;
  int32_t band_high;

  // Scores are in units of log2, so a factor of log2(e) is folded in: score = (q . k) *
  // score_scale. With softcap, score = softcap * tanh((q . k) * score_scale), and the factor is in
  // softcap instead.
  float score_scale;
  float softcap;
  float scale;  // scale as passed by the caller
};

struct AttentionForwardParams {
  AttentionParams common;
  int64_t out_strides[3];  // [batch, head, row]; the columns are contiguous
  int32_t parts;           // parts of the keys, in decode
  int32_t keys_per_part;   // at least as many, in a ragged batch
  int32_t page_shift;      // of a cache in pages (pages.h): log2 of the page size
  int32_t pages_per_sequence;
  int32_t last_page;
  int32_t unused;
};

// Of quantized keys or values. Strides are in elements: [batch, head, row].
struct AttentionCodesParams {
  int64_t scales_strides[3];
  int64_t biases_strides[3];
  int32_t bits;
  int32_t group_shift;  // log2 of the group size
};

// The strides of k and v count words of codes.
struct AttentionQuantizedParams {
  AttentionForwardParams forward;
  AttentionCodesParams keys;
  AttentionCodesParams values;
};

struct AttentionBackwardParams {
  AttentionParams common;
  int64_t out_strides[4];
  int64_t d_out_strides[4];
  int64_t d_lse_strides[3];  // [batch, head, row]
  int64_t d_q_strides[3];    // outputs: [batch, head, row]; the columns are contiguous
  int64_t d_k_strides[3];
  int64_t d_v_strides[3];

  // The chunk that a launch works on, where weights are stored (stored_weights.h).
  int32_t first_head;   // of batch * q_heads
  int32_t first_row;    // of the queries, as the grid counts them (ragged.h)
  int32_t rows;         // likewise; both are multiples of kChunkRows
  int32_t stored_keys;  // of a row; a multiple of kStoredRows

  int32_t sequences;  // of a batch, if these are packed
  int32_t unused;
};

// Weights are stored, and read, in squares of this size at positions that are multiples of it.
enum { kStoredRows = 32 };
// Chunks start at multiples of it, and so do the sequences of a packed batch (ragged.h).
enum { kChunkRows = 64 };

static_assert(sizeof(AttentionParams) == 8 * 18 + 4 * 12, "same layout in C++ and MSL");
static_assert(sizeof(AttentionForwardParams) == sizeof(AttentionParams) + 8 * 6,
              "same layout in C++ and MSL");
static_assert(sizeof(AttentionCodesParams) == 8 * 7, "same layout in C++ and MSL");
static_assert(sizeof(AttentionQuantizedParams) ==
                  sizeof(AttentionForwardParams) + 2 * sizeof(AttentionCodesParams),
              "same layout in C++ and MSL");
static_assert(sizeof(AttentionBackwardParams) == sizeof(AttentionParams) + 8 * 23,
              "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif
