// Attention of all heads over latents that are keys and values at once:
//   s[i, j] = cap(scale * (q_nope[i] . latent[j] + q_rope[i] . k_rope[j])) + mask[i, j]
//   lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
//   out[i]  = sum over visible j of exp(s[i, j] - lse[i]) latent[j]
//
// Kernels: mla_decode_<dtype>_d<rank>. Rows are the queries of all heads (decode_row.h).
// Grid: (blocks of 16 rows, parts of the keys, batch). Threadgroup: 32 * simdgroups x 1 x 1. Each
// simdgroup has its columns of q, of the keys and of the output; all share the scores.
// Bindings: q_nope, q_rope, latent, k_rope, mask, sinks, out, lse, params.
// Function constants: scores.h; 16: keys are in parts. Then out and lse are float32 scratch, which
// flash_attention_decode_combine merges.
// Alignment: rows as rows_are_vectors promises; otherwise none. Columns of out are contiguous.
//
//   for each block of keys of this part:
//     products^T = keys q^T over the simdgroup's columns; start loading the next keys
//     scores = sum of the simdgroups' products; cap, mask; online softmax, one score a thread
//     out = out * factors + weights latent, of the same registers as keys
//   split:     store the partial out, maximum and sum of each row
//   otherwise: add the sink; store out / sum and lse
#include "metal/common/kernel.h"
#include "metal/common/pack.h"
#include "metal/flash_attention/decode.h"
#include "metal/flash_attention/decode_row.h"
#include "metal/mla_decode/finish.h"
#include "metal/mla_decode/latent.h"
#include "metal/mla_decode/params.h"
#include "metal/mla_decode/tiles.h"

// The scores of a block: a lane has that of one key, for one row at a time.
template <typename T, int kKeys, int kSimdgroups>
struct MlaScores {
  enum { kRowsAtOnce = 32 / kKeys, kAllRows = kRowsAtOnce * kSimdgroups };
  enum { kTurns = kAllRows < kMlaRows ? kMlaRows / kAllRows : 1 };
  enum { kProductStride = kMlaRows + 2 };  // even; reads have no bank conflicts
  enum { kWeightStride = TileRow<T, kKeys>::kStride };

  struct Shared {
    float products[kSimdgroups][kKeys][kProductStride];
    alignas(16) T weights[kMlaRows][kWeightStride];
    float factors[kMlaRows];
  };

  OnlineSoftmax softmax[kTurns];  // the sum: of the lane's keys
  int first_row;                  // of the threadgroup
  int batch;
  uint simdgroup;
  uint lane;

  METAL_FUNC int key() const thread { return lane % kKeys; }
  METAL_FUNC int row(int turn) const thread {
    return turn * kAllRows + int(simdgroup) * kRowsAtOnce + int(lane) / kKeys;
  }
  METAL_FUNC DecodeRow place(constant AttentionParams& params, int turn) const thread {
    return decode_row(params, batch, 0, first_row + row(turn));
  }

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kTurns; ++t) {
      softmax[t].clear();
    }
  }

  // From products to weights, and factors of what was summed before. `end` is that of the part.
  METAL_FUNC void advance(threadgroup Shared& shared,
                          int begin,
                          int end,
                          const device uchar* mask,
                          constant AttentionParams& params) thread {
    const int j = begin + key();
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kTurns; ++t) {
      const int r = row(t);
      if (kAllRows > kMlaRows && r >= kMlaRows) {
        continue;
      }
      float dot = 0.0f;
      MLX_ANVIL_UNROLL
      for (int s = 0; s < kSimdgroups; ++s) {
        dot += shared.products[s][key()][r];
      }
      const DecodeRow own = place(params, t);
      float score = CappedScore<T>(params, dot).score;
      if (j >= end || (has_band && !sees(params, own.query, j))) {
        score = -INFINITY;
      } else if (has_bool_mask || has_additive_mask) {
        score = mask_of<T>(mask, params, batch, own.head).apply(score, own.query, j);
      }
      const float factor = softmax[t].begin_piece(over_lanes<true, 1, kKeys>(score));
      const float weight = metal::fast::exp2(score - softmax[t].base());
      softmax[t].sum += weight;
      shared.weights[r][key()] = static_cast<T>(weight);
      if (key() == 0) {
        shared.factors[r] = factor;
      }
    }
  }

  // Stores the sums of the rows, and factors of the output. `part` is that of the keys.
  METAL_FUNC void finish(threadgroup Shared& shared,
                         int part,
                         const device float* sinks,
                         device float* lse,
                         constant AttentionForwardParams& params) thread {
    constant AttentionParams& common = params.common;
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kTurns; ++t) {
      const int r = row(t);
      if (kAllRows > kMlaRows && r >= kMlaRows) {
        continue;
      }
      const bool stores = key() == 0 && first_row + r < common.group * common.q_len;
      const float factor = finish_row(softmax[t], over_lanes<false, 1, kKeys>(softmax[t].sum),
                                      place(common, t), part, stores, sinks, lse, params);
      if (key() == 0) {
        shared.factors[r] = factor;
      }
    }
  }
};

// Writes a lane's columns of a row of the output.
template <typename Columns, typename U, typename Out>
METAL_FUNC void store_columns(
    const thread Out& out, int i, device U* row, int columns, int column) {
  enum { kSize = Columns::Bytes::kSize };
  MLX_ANVIL_UNROLL
  for (int v = 0; v < Columns::kVectors; ++v) {
    float x[kSize];
    MLX_ANVIL_UNROLL
    for (int c = 0; c < kSize; ++c) {
      x[c] = elements_of(out.block(i, v * Columns::kPairs + c / 2))[c % 2];
    }
    const int first = Columns::of_vector(v, column);
    MLX_ANVIL_UNROLL
    for (int c = 0; c < kSize; c += Pack<U>::kSize) {
      if (rows_are_vectors) {
        if (first < columns) {
          Pack<U>::store(row + first + c, x + c);
        }
        continue;
      }
      MLX_ANVIL_UNROLL
      for (int e = c; e < c + Pack<U>::kSize; ++e) {
        if (first + e < columns) {
          row[first + e] = static_cast<U>(x[e]);
        }
      }
    }
  }
}

template <typename T, int kRank, int kKeys, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * kSimdgroups)]] void mla_decode(
    const device T* q_nope [[buffer(0)]],
    const device T* q_rope [[buffer(1)]],
    const device T* latent [[buffer(2)]],
    const device T* k_rope [[buffer(3)]],
    const device uchar* mask [[buffer(4)]],
    const device float* sinks [[buffer(5)]],
    device T* out [[buffer(6)]],
    device float* lse [[buffer(7)]],
    constant MlaParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kLatent = kRank / kSimdgroups, kRope = kMlaRopeDim / kSimdgroups };
  using Block = LatentBlock<T, kLatent, kRope, kKeys>;
  using Columns = typename Block::Columns;
  using Scores = MlaScores<T, kKeys, kSimdgroups>;
  threadgroup typename Scores::Shared shared;

  constant AttentionForwardParams& forward = params.forward;
  constant AttentionParams& common = forward.common;
  const FragmentPlace place = fragment_place(lane);
  const int batch = group.z, first_row = group.x * kMlaRows;
  const int row_count = common.group * common.q_len;
  const int first_latent = simdgroup * kLatent, first_rope = simdgroup * kRope;
  const int own_latent = common.v_head_dim - first_latent;
  const int own_rope = int(params.rope_dim) - first_rope;

  // Columns x rows.
  RegTile<T, kLatent + kRope, kMlaRows> q;
  MLX_ANVIL_UNROLL
  for (int e = 0; e < kMlaRows / 4; ++e) {
    const DecodeRow row =
        decode_row(common, batch, 0, first_row + e / 2 * 8 + place.column + e % 2);
    const device T* nope = q_nope + batch * common.q_strides[0] + row.head * common.q_strides[1] +
                           row.query * common.q_strides[2] + first_latent * common.q_strides[3];
    const device T* rope =
        q_rope + batch * params.q_rope_strides[0] + row.head * params.q_rope_strides[1] +
        row.query * params.q_rope_strides[2] + first_rope * params.q_rope_strides[3];
    MLX_ANVIL_UNROLL
    for (int f = 0; f < Columns::kFragments; ++f) {
      const bool of_latent = f < Columns::kLatentFragments;
      const int column = of_latent ? Columns::of_fragment(f, place.row)
                                   : 8 * (f - Columns::kLatentFragments) + place.row;
      T x = T(0);
      if (of_latent && column < own_latent) {
        x = nope[column * common.q_strides[3]];
      } else if (!of_latent && column < own_rope) {
        x = rope[column * params.q_rope_strides[3]];
      }
      q.fragments[f][e / 2].thread_elements()[e % 2] = x;
    }
  }

  const KeyRange visible = visible_keys(common, 0, common.q_len - 1);
  const int part_begin = visible.begin + group.y * forward.keys_per_part;
  const int part_end = metal::min(visible.end, part_begin + forward.keys_per_part);
  const Rows<T> latents = {
      latent + batch * common.k_strides[0] + first_latent * common.k_strides[3],
      common.k_strides[2], common.k_strides[3], part_end, own_latent};
  const Rows<T> ropes = {
      k_rope + batch * params.k_rope_strides[0] + first_rope * params.k_rope_strides[3],
      params.k_rope_strides[2], params.k_rope_strides[3], part_end, own_rope};

  Scores scores;
  scores.first_row = first_row;
  scores.batch = batch;
  scores.simdgroup = simdgroup;
  scores.lane = lane;
  scores.clear();
  RegTile<float, kMlaRows, kLatent> result;
  result.zero();
  Block keys, next;
  if (part_begin < part_end) {
    next.load(latents, ropes, part_begin, place);
  }
  for (int begin = part_begin; begin < part_end; begin += kKeys) {
    keys = next;
    if (begin + kKeys < part_end) {
      next.load(latents, ropes, begin + kKeys, place);
    }
    RegTile<float, kKeys, kMlaRows> products;
    products.zero();
    products.mma(keys, q);
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kKeys / 8 * (kMlaRows / 8); ++f) {
      const int n = f / (kMlaRows / 8), r = f % (kMlaRows / 8);
      *reinterpret_cast<threadgroup float2*>(
          &shared.products[simdgroup][8 * n + place.row][8 * r + place.column]) =
          elements_of(products.block(n, r));
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    scores.advance(shared, begin, part_end, mask, common);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    float factors[kMlaRows / 8];
    bool rescales = false;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kMlaRows / 8; ++i) {
      factors[i] = shared.factors[8 * i + place.row];
      rescales = rescales || factors[i] != 1.0f;
    }
    if (metal::simd_any(rescales)) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kMlaRows / 8; ++i) {
        result.scale_row(i, factors[i]);
      }
    }
    const SharedTile<T, Scores::kWeightStride, false, kKeys> weights = {&shared.weights[0][0],
                                                                        place};
    result.mma(weights, keys);
  }

  threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the factors have been read
  scores.finish(shared, group.y, sinks, lse, forward);
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kMlaRows / 8; ++i) {
    const int r = 8 * i + place.row;
    if (!keys_are_in_parts) {
      result.scale_row(i, shared.factors[r]);
    }
    if (first_row + r >= row_count) {
      continue;
    }
    const DecodeRow row = decode_row(common, batch, 0, first_row + r);
    if (keys_are_in_parts) {
      const long stored = row.index(common) * forward.parts + group.y;
      store_columns<Columns>(
          result, i,
          reinterpret_cast<device float*>(out) + stored * common.v_head_dim + first_latent,
          own_latent, place.column);
    } else {
      store_columns<Columns>(result, i, out + row.out_offset(forward) + first_latent, own_latent,
                             place.column);
    }
  }
}

// ---- kernels

#define INSTANTIATE_MLA_DECODE(dtype, type, rank, keys, simdgroups) \
  MLX_ANVIL_KERNEL("mla_decode_" #dtype "_d" #rank, mla_decode<type, rank, keys, simdgroups>)

MLX_ANVIL_MLA_TILES(INSTANTIATE_MLA_DECODE)
