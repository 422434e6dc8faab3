// gated_delta and ssd_scan by chunks of 64 steps: products of matrices in place of steps in a row.
// What the kernels of a chunk share: products, and tiles in threadgroup memory.
//
// With gamma[i] the product of g up to step i of the chunk, and G[i][j] that from j + 1 to i:
//   A = beta[i] G[i][j] (k[i] . k[j]) below the diagonal       P = G[i][j] (q[i] . k[j]) up to it
//   U = (I + A)^-1 beta (V - gamma K S^T)                      the changes of all steps
//   Y = gamma Q S^T + P U                                      S = gamma[63] S + U^T (G[63][.] K)
// ssd_scan does not correct: U = beta V. It adds skip V to Y. docs/linear_attention.md derives it.
// G is multiplied up, never divided, so that g may be 0. With a decay per channel, gamma and
// G[i][j] are vectors, and the products of k and q are sums over channels with them inside
// (channels.h).
//
// A step that does not exist, or is padding, has k = q = v = beta = 0 and g = 1.
#pragma once

#include "metal/common/reg_tile.h"
#include "metal/gated_delta/chunk_sizes.h"
#include "metal/gated_delta/state.h"

constant bool keys_are_vectors [[function_constant(13)]];    // rows of q and k, of 16 bytes
constant bool values_are_vectors [[function_constant(14)]];  // those of v and y
constant bool keeps_products [[function_constant(15)]];      // of pairs of steps, for gradients

// How matrices are multiplied: as float32, or, for matrix units of 16 bits, as pairs of bfloat16
// whose sum has 16 bits of the float32 number. k, q and v are exact in either.
template <typename T, bool kPairs>
struct ChunkNumbers {
  using Weight = float;  // of matrices between kernels
  enum { kPlanes = 1 };
};
template <typename T>
struct ChunkNumbers<T, true> {
  using Weight = T;
  enum { kPlanes = 2 };  // high and low parts
};

// A right operand as float32.
template <typename Right>
struct Widened {
  using Element = float;
  enum { kInOrder = Right::kInOrder };

  Right right;

  METAL_FUNC Fragment<float> block(int i, int n) const thread {
    const Pair<typename Right::Element> pair = elements_of(right.block(i, n));
    return fragment_of<float>(float(pair.x), float(pair.y));
  }
};

template <typename T>
METAL_FUNC float4 floats_of(metal::vec<T, 4> x) {
  return float4(float(x.x), float(x.y), float(x.z), float(x.w));
}

template <typename T>
METAL_FUNC float2 floats_of_pair(Pair<T> pair) {
  return float2(float(pair.x), float(pair.y));
}
// By their bits: compilers round both numbers of a pair at once if nothing uses one of them.
METAL_FUNC float2 floats_of_pair(Pair<bfloat> pair) {
  const uint bits = as_type<uint>(pair);
  return float2(as_type<float>(bits << 16), as_type<float>(bits & 0xffff0000u));
}

// The low parts of numbers whose high parts are `high`.
template <typename T, int kRows, int kColumns>
METAL_FUNC RegTile<T, kRows, kColumns> low_parts(
    const thread RegTile<float, kRows, kColumns>& whole,
    const thread RegTile<T, kRows, kColumns>& high) {
  RegTile<T, kRows, kColumns> low;
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kRows / 8 * (kColumns / 8); ++f) {
    const int i = f / (kColumns / 8), n = f % (kColumns / 8);
    const float2 part = floats_of_pair(elements_of(high.fragments[i][n]));
    low.fragments[i][n] = fragment_of<T>(elements_of(whole.fragments[i][n]) - part);
  }
  return low;
}

// ---- transposed transfers: columns of the tile are rows in device memory

template <typename T, int kSize = sizeof(T)>
struct TransposedPairs {
  // `to`: the row of the lane's first element. Rows [0, rows) and columns [0, columns) exist.
  static METAL_FUNC void store(device T* to,
                               int,
                               int rows,
                               int columns,
                               int column,
                               float2 own,
                               FragmentPlace place,
                               bool vectors) {
    const Pair<T> pair = elements_of(transposed(fragment_of<T>(own), place));
    if (rows > 0) {
      store_pair(to, column + place.column, columns, float2(float(pair.x), float(pair.y)), vectors,
                 /*full=*/false);
    }
  }
  static METAL_FUNC int row_of(FragmentPlace place) { return place.row; }
};

template <typename T>
struct TransposedPairs<T, 4> {
  static METAL_FUNC void store(device T* to,
                               int stride,
                               int rows,
                               int columns,
                               int column,
                               float2 own,
                               FragmentPlace place,
                               bool) {
    const int at = column + place.row;
    if (rows > 0 && at < columns) {
      to[at] = own.x;
    }
    if (rows > 1 && at < columns) {
      to[stride + at] = own.y;
    }
  }
  static METAL_FUNC int row_of(FragmentPlace place) { return place.column; }
};

// One address, which goes from row to row: a compiler would keep one for each in registers.
template <typename T, int kRows, int kColumns>
METAL_FUNC void store_transposed_rows(const thread RegTile<float, kRows, kColumns>& tile,
                                      device T* to,
                                      long stride,
                                      int rows,
                                      int columns,
                                      FragmentPlace place,
                                      bool vectors) {
  using Pairs = TransposedPairs<T>;
  const int step = int(stride), first = Pairs::row_of(place);
  to += first * step;
  rows -= first;
  MLX_ANVIL_UNROLL
  for (int n = 0; n < kColumns / 8; ++n) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRows / 8; ++i) {
      Pairs::store(to, step, rows, columns, 8 * i, elements_of(tile.fragments[i][n]), place,
                   vectors);
    }
    to += 8 * step;
    rows -= 8;
  }
}

// ---- a chunk

struct ChunkPlace {
  int first;   // step
  int steps;   // that change the state; at most kChunk
  int exists;  // steps that y has
  long index;  // among the chunks of all heads

  METAL_FUNC bool is_padding() const thread { return steps <= 0; }
};

METAL_FUNC int chunks_of(int steps) {
  return (steps + kChunk - 1) / kChunk;
}

METAL_FUNC ChunkPlace
chunk_place(constant GatedDeltaParams& params, int steps, int batch, int head, int chunk) {
  ChunkPlace place;
  place.first = chunk * kChunk;
  place.steps = metal::min(int(kChunk), steps - place.first);
  place.exists = metal::min(int(kChunk), params.length - place.first);
  place.index = (long(batch) * params.value_heads + head) * chunks_of(params.length) + chunk;
  return place;
}

// The chunk's rows of all rows of a head, from the first column of a panel on.
template <typename T>
METAL_FUNC Rows<T> chunk_rows(Rows<T> all, ChunkPlace chunk, int panel) {
  return {all.data + chunk.first * all.row_stride + panel * kPanel, all.row_stride, 1, chunk.steps,
          all.columns - panel * kPanel};
}

// All rows of the gradient of y of a head.
template <typename T>
METAL_FUNC Rows<T> rows_of_d_y(constant GatedDeltaParams& params,
                               const device T* d_y,
                               int batch,
                               int head) {
  return {d_y + batch * params.d_y_strides[0] + head * params.d_y_strides[2], params.d_y_strides[1],
          1, params.length, params.value_dim};
}

// Writes zeros to the columns of steps that do not count. A product with zero would keep NaN.
template <int kRows, int kColumns>
METAL_FUNC void clear_columns_from(thread RegTile<float, kRows, kColumns>& tile,
                                   int first,
                                   FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kRows / 8 * (kColumns / 8); ++f) {
    const int i = f / (kColumns / 8), n = f % (kColumns / 8);
    const int column = 8 * n + place.column;
    const float2 pair = elements_of(tile.fragments[i][n]);
    tile.fragments[i][n] =
        fragment_of<float>(column < first ? pair.x : 0.0f, column + 1 < first ? pair.y : 0.0f);
  }
}

// The same for rows.
template <int kRows, int kColumns>
METAL_FUNC void clear_rows_from(thread RegTile<float, kRows, kColumns>& tile,
                                int first,
                                FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kRows / 8 * (kColumns / 8); ++f) {
    const int i = f / (kColumns / 8), n = f % (kColumns / 8);
    if (8 * i + place.row >= first) {
      tile.fragments[i][n] = fragment_of<float>(0.0f, 0.0f);
    }
  }
}

// Multiplies each column by its factor.
template <int kRows, int kColumns>
METAL_FUNC void scale_columns(thread RegTile<float, kRows, kColumns>& tile,
                              const threadgroup float* factors,
                              FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int n = 0; n < kColumns / 8; ++n) {
    const float2 factor =
        *reinterpret_cast<const threadgroup float2*>(factors + 8 * n + place.column);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRows / 8; ++i) {
      tile.fragments[i][n] = fragment_of<float>(elements_of(tile.fragments[i][n]) * factor);
    }
  }
}

template <int kRows, int kColumns>
METAL_FUNC void scale_columns(thread RegTile<float, kRows, kColumns>& tile,
                              const threadgroup float* factors,
                              const threadgroup float* more,
                              FragmentPlace place) {
  scale_columns(tile, factors, place);
  scale_columns(tile, more, place);
}

template <int kRows, int kColumns>
METAL_FUNC void scale_rows(thread RegTile<float, kRows, kColumns>& tile,
                           const threadgroup float* factors,
                           FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRows / 8; ++i) {
    tile.scale_row(i, factors[8 * i + place.row]);
  }
}
