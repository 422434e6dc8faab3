// The same computation as mla_decode.metal, for GPUs whose matrix units multiply for four SIMD
// groups at once (metal/common/group_product.h). Takes 16-bit types, rows that are vectors, and no
// mask array.
//
// Kernels: mla_decode_matrix_group_<dtype>_d<rank>.
// Grid: (blocks of 64 rows, parts of the keys, batch). Threadgroup: 256 x 1 x 1. Each four SIMD
// groups have all rows, half of the keys of a tile and half of the columns of the output.
// Threadgroup memory 0: the queries, two tiles of keys and the weights.
// Bindings and function constants: as for mla_decode.metal.
//
//   start S = q k^T of the first tile
//   for each tile of keys of this part:
//     wait for S; cap, mask; exchange maxima; P = 2^(S - m), in threadgroup memory
//     rescale out; start out += P latent, and S = q k^T of the next tile
//     wait for out: copy the tile after the next into its place
//   exchange sums; store as mla_decode.metal does
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/group_product.h"
#include "metal/common/kernel.h"
#include "metal/flash_attention/decode_row.h"
#include "metal/flash_attention/forward.h"
#include "metal/mla_decode/finish.h"
#include "metal/mla_decode/params.h"
#include "metal/mla_decode/tiles.h"

enum { kGroupThreads = 256 };

// Latents, and to the right of them the rope parts: 64 rows in threadgroup memory.
template <typename T, int kRank>
struct LatentTile {
  enum { kRows = kMlaGroupRows, kColumns = kRank + kMlaRopeDim };
  enum { kCopied = 256 };  // columns at a time
  using Tile = SwizzledTile<T, kRows, kColumns>;
  static_assert(kRank % kCopied == 0, "whole panels");

  // Starts to copy rows from the first on, and moves on to those after them.
  METAL_FUNC static void copy_next(threadgroup T* to,
                                   thread Rows<T>& latents,
                                   thread Rows<T>& ropes,
                                   uint thread_index) {
    MLX_ANVIL_UNROLL
    for (int column = 0; column < kRank; column += kCopied) {
      const Rows<T> part = {latents.data + column, latents.row_stride, latents.column_stride,
                            latents.rows, latents.columns - column};
      SwizzledTile<T, kRows, kCopied>::template start_copies<kGroupThreads>(
          to + Tile::unit_at(0, column), part, thread_index);
    }
    SwizzledTile<T, kRows, kMlaRopeDim>::template start_copies<kGroupThreads>(
        to + Tile::unit_at(0, kRank), ropes, thread_index);
    end_copies();
    advance<kRows>(latents, true);
    advance<kRows>(ropes, true);
  }
};

template <typename T>
struct MlaScore {
  constant AttentionParams* params;

  METAL_FUNC float operator()(int, int, float product) const thread {
    return CappedScore<T>(*params, product).score;
  }
};

template <typename T, int kRank>
[[kernel, max_total_threads_per_threadgroup(kGroupThreads)]] void mla_decode_group(
    const device T* q_nope [[buffer(0)]],
    const device T* q_rope [[buffer(1)]],
    const device T* latent [[buffer(2)]],
    const device T* k_rope [[buffer(3)]],
    const device uchar* mask [[buffer(4)]],
    const device float* sinks [[buffer(5)]],
    device T* out [[buffer(6)]],
    device float* lse [[buffer(7)]],
    constant MlaParams& params [[buffer(8)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Latents = LatentTile<T, kRank>;
  using Tile = typename Latents::Tile;
  enum { kRows = kMlaGroupRows, kKeys = kMlaGroupRows, kHalves = 2 };
  enum { kOwnKeys = kKeys / kHalves, kOwnColumns = kRank / kHalves, kRowFragments = 2 };
  using Weights = SwizzledTile<T, kRows, kKeys>;
  using Keys = TransposedSwizzledOperand<T, kKeys, kRank + kMlaRopeDim>;
  using Values = SwizzledOperand<T, kKeys, kOwnColumns>;
  threadgroup float exchanged[kHalves][kRows];

  threadgroup T* const queries = reinterpret_cast<threadgroup T*>(memory);
  threadgroup T* const tiles = queries + Tile::kSize;
  threadgroup T* const weights = tiles + 2 * Tile::kSize;
  constant AttentionForwardParams& forward = params.forward;
  constant AttentionParams& common = forward.common;
  const FragmentPlace place = fragment_place(lane);
  const int batch = group.z, first_row = group.x * kRows;
  const int row_count = common.group * common.q_len;
  const int half_index = simdgroup / 4, first_key = half_index * kOwnKeys;
  const int own_row = 16 * (simdgroup % 4) + place.row;  // of the lane's first fragments

  // The queries, one unit of 16 bytes at a time: heads and queries are any strides apart.
  enum { kUnit = Tile::kUnit, kUnits = int(Latents::kColumns) / kUnit };
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRows * kUnits / kGroupThreads; ++i) {
    const int at = i * kGroupThreads + thread_index;
    const int r = at / kUnits, column = at % kUnits * kUnit;
    const DecodeRow row = decode_row(common, batch, 0, first_row + r);
    const bool of_latent = column < kRank;
    const int from = of_latent ? column : column - kRank;
    const device T* source =
        of_latent ? q_nope + batch * common.q_strides[0] + row.head * common.q_strides[1] +
                        row.query * common.q_strides[2]
                  : q_rope + batch * params.q_rope_strides[0] +
                        row.head * params.q_rope_strides[1] + row.query * params.q_rope_strides[2];
    start_copy(reinterpret_cast<threadgroup uint4*>(queries + Tile::unit_at(r, column)),
               reinterpret_cast<const device uint4*>(source + from),
               from < (of_latent ? common.v_head_dim : int(params.rope_dim)));
  }

  const KeyRange visible = visible_keys(common, 0, common.q_len - 1);
  const int part_begin = visible.begin + group.y * forward.keys_per_part;
  const int part_end = metal::min(visible.end, part_begin + forward.keys_per_part);
  Rows<T> latents = rows_from(Rows<T>{latent + batch * common.k_strides[0], common.k_strides[2],
                                      common.k_strides[3], part_end, common.v_head_dim},
                              part_begin);
  Rows<T> ropes =
      rows_from(Rows<T>{k_rope + batch * params.k_rope_strides[0], params.k_rope_strides[2],
                        params.k_rope_strides[3], part_end, int(params.rope_dim)},
                part_begin);
  Latents::copy_next(tiles, latents, ropes, thread_index);
  Latents::copy_next(tiles + Tile::kSize, latents, ropes, thread_index);

  OnlineSoftmax softmax[kRowFragments];
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    softmax[i].clear();
  }
  RegTile<float, 16, kOwnColumns> result;
  result.zero();
  RegTile<float, 16, kOwnKeys> scores;
  const SwizzledRows<T, kRows, kRank + kMlaRopeDim> q = {queries, 0, int(simdgroup % 4), place};
  wait_for_tiles<1>();
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  start_product(scores, q, Keys{tiles + Tile::unit_at(first_key, 0), place}, false);
  wait_for_products<0>(scores);

  int turn = 0;  // place of the tile whose scores are there
  for (int begin = part_begin; begin < part_end; begin += kKeys) {
    const int column = begin + first_key + place.column;
    scores.map(own_row, column, MlaScore<T>{&common});
    float factors[kRowFragments];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      if (has_band || begin + kKeys > part_end) {
        const int query = decode_row(common, batch, 0, first_row + own_row + 8 * i).query;
        SeenKeys seen = seen_keys(common, query);
        seen.count = metal::min(seen.count, uint(metal::max(part_end - seen.begin, 0)));
        scores.map_row(i, own_row, column, VisibleScore{seen});
      }
      const float highest = scores.row_max(i);
      if (place.column == 0) {
        exchanged[half_index][own_row + 8 * i] = highest;
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const int r = own_row + 8 * i;
      factors[i] = softmax[i].begin_piece(metal::fmax(exchanged[0][r], exchanged[1][r]));
      scores.map_row(i, own_row, column, SoftmaxWeight{softmax[i].base(), 1.0f, false});
      softmax[i].sum = scores.row_sum(i, softmax[i].sum);
    }
    const RegTile<T, 16, kOwnKeys> rounded = scores.template to<T>();
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kRowFragments * (kOwnKeys / 8); ++f) {
      const int i = f / (kOwnKeys / 8), n = f % (kOwnKeys / 8);
      *reinterpret_cast<threadgroup Pair<T>*>(
          weights + Weights::unit_at(own_row + 8 * i, first_key + 8 * n) + place.column) =
          elements_of(rounded.block(i, n));
    }
    scale_rows(result, factors);
    wait_for_tiles();
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    threadgroup T* const now = tiles + turn * Tile::kSize;
    turn = 1 - turn;
    start_product(result, SwizzledRows<T, kRows, kKeys>{weights, 0, int(simdgroup % 4), place},
                  Values{now + Tile::unit_at(0, half_index * kOwnColumns), place}, true);
    start_product(scores, q, Keys{tiles + turn * Tile::kSize + Tile::unit_at(first_key, 0), place},
                  false);
    wait_for_products<1>(result);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    Latents::copy_next(now, latents, ropes, thread_index);
    wait_for_products<0>(scores);
  }

  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    const float own_sum = row_sum(softmax[i].sum);
    if (place.column == 0) {
      exchanged[half_index][own_row + 8 * i] = own_sum;
    }
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int first_column = half_index * kOwnColumns, own_columns = common.v_head_dim - first_column;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    const int r = own_row + 8 * i;
    const DecodeRow row = decode_row(common, batch, 0, first_row + r);
    const bool exists = first_row + r < row_count;
    const float factor =
        finish_row(softmax[i], exchanged[0][r] + exchanged[1][r], row, group.y,
                   exists && half_index == 0 && place.column == 0, sinks, lse, forward);
    if (!keys_are_in_parts) {
      result.scale_row(i, factor);
    }
    if (exists && keys_are_in_parts) {
      const long stored = row.index(common) * forward.parts + group.y;
      result.store_row(i, reinterpret_cast<device float*>(out) + stored * common.v_head_dim,
                       first_column, common.v_head_dim, place, true);
    } else if (exists) {
      result.store_row(i, out + row.out_offset(forward), first_column, common.v_head_dim, place,
                       true);
    }
  }
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_MLA_DECODE_GROUP(dtype, type, rank) \
  MLX_ANVIL_KERNEL("mla_decode_matrix_group_" #dtype "_d" #rank, mla_decode_group<type, rank>)

MLX_ANVIL_MLA_GROUP_TILES(INSTANTIATE_MLA_DECODE_GROUP)
#endif
