// rope on the CPU: tables of cosines and sines, and the rotation by them. metal/rope/rope.h uses
// the same formulas.
#include <type_traits>

#include "common/simd/simd.h"
#include "rope/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// ---- angles -------------------------------------------------------------------------------------

struct SinCos {
  f32v sin, cos;
};

// Sine and cosine of a fraction of a turn, given times 2^32. A `half_turn` of 2^31 negates the
// sine. The rest after the nearest quarter turn is at most an eighth of a turn, for which a short
// polynomial is accurate to float32.
inline SinCos sin_cos_of_turn(u32v turn, uint32_t half_turn, f32v defect) {
  const i32v rest = bits_as<i32v>(turn << 2) >> 2;
  const f32v x = __builtin_convertvector(rest, f32v) * 0x1.921fb6p-30f + defect;  // 2 pi / 2^32
  const f32v z = x * x;
  const f32v sin = x + x * (z * (-0.166666552f + z * (0.008332178f + z * -0.000195172339f)));
  const f32v cos =
      1.0f - 0.5f * z + z * z * (0.0416666456f + z * (-0.00138873665f + z * 2.44383791e-05f));
  // Each quarter turn maps (sin, cos) to (cos, -sin). The upper two bits count the quarter turns.
  const u32v quarter = turn + 0x20000000u;
  const auto odd = (quarter & 0x40000000u) != 0u;
  const u32v minus_sin = (quarter + half_turn) & 0x80000000u;
  const u32v minus_cos = (quarter + 0x40000000u) & 0x80000000u;
  return {bits_as<f32v>(bits_as<u32v>(odd ? cos : sin) ^ minus_sin),
          bits_as<f32v>(bits_as<u32v>(odd ? sin : cos) ^ minus_cos)};
}

// 64-bit lanes; a register holds half as many.
using u64v = uint64_t __attribute__((vector_size(sizeof(u32v))));

// The upper halves of the lanes of a and b.
template <int... kLane>
inline u32v upper_halves(u64v a, u64v b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(bits_as<u32v>(a), bits_as<u32v>(b), (2 * kLane + 1)...);
}

// Each further position adds the turns per position. That is exact, since whole turns overflow, and
// needs no 64-bit product.
void fill_angles(const RopeAngles& angles, float* to) {
  const uint32_t half_turn = angles.inverse ? 0x80000000u : 0u;
  for (int64_t j = 0; j < angles.padded; j += kLanes) {
    const u64v first_step = load_bits<u64v>(angles.turns + j);
    const u64v second_step = load_bits<u64v>(angles.turns + j + kLanes / 2);
    const f32v defect = load_lanes(angles.defects + j);
    u64v first = first_step * angles.position, second = second_step * angles.position;
    float* cos = to + j;
    for (int64_t l = 0; l < angles.count; ++l, cos += 2 * angles.padded) {
      const u32v turn = upper_halves(first, second, std::make_integer_sequence<int, kLanes>());
      const SinCos of_turn = sin_cos_of_turn(turn, half_turn, defect);
      store_lanes(cos, of_turn.cos);
      store_lanes(cos + angles.padded, of_turn.sin);
      first += first_step;
      second += second_step;
    }
  }
}

// ---- rotation -----------------------------------------------------------------------------------

struct Pair {
  f32v a, b;
};

inline Pair rotate(Pair x, f32v cos, f32v sin) {
  return {x.a * cos - x.b * sin, x.a * sin + x.b * cos};
}

// Rotates one block of each half of a row, for pairs (j, j + pairs).
template <class T, bool kStream>
inline void rotate_apart(
    const T* a, const T* b, T* out_a, T* out_b, const float* cos, const float* sin) {
  const Block x = load_block(a), y = load_block(b);
  const Pair first = rotate({x.first, y.first}, load_lanes(cos), load_lanes(sin));
  const Pair second =
      rotate({x.second, y.second}, load_lanes(cos + kLanes), load_lanes(sin + kLanes));
  store_block<kStream>(out_a, Block{first.a, second.a});
  store_block<kStream>(out_b, Block{first.b, second.b});
}

// Splits a block into even and odd elements, and joins them again. A bfloat16 block already is
// split.
template <class T, int... kLane>
inline Pair split_pairs(Block x, std::integer_sequence<int, kLane...>) {
  if constexpr (std::is_same_v<T, bf16>) {
    return {x.first, x.second};
  } else {
    return {__builtin_shufflevector(x.first, x.second, 2 * kLane...),
            __builtin_shufflevector(x.first, x.second, 2 * kLane + 1 ...)};
  }
}
template <class T, int... kLane>
inline Block join_pairs(Pair x, std::integer_sequence<int, kLane...>) {
  if constexpr (std::is_same_v<T, bf16>) {
    return {x.a, x.b};
  } else {
    return {__builtin_shufflevector(x.a, x.b, (kLane / 2 + kLane % 2 * kLanes)...),
            __builtin_shufflevector(x.a, x.b, (kLane / 2 + kLane % 2 * kLanes + kLanes / 2)...)};
  }
}

// Rotates kLanes adjacent pairs.
template <class T, bool kStream>
inline void rotate_neighbours(const T* in, T* out, const float* cos, const float* sin) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  const Pair x = split_pairs<T>(load_block(in), kAll);
  store_block<kStream>(out, join_pairs<T>(rotate(x, load_lanes(cos), load_lanes(sin)), kAll));
}

// Up to a block of elements, gathered at any step into a dense block.
template <class T>
struct DenseBlock {
  T elements[kBlock] = {};

  DenseBlock() = default;
  DenseBlock(const T* from, int64_t step, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      elements[i] = from[i * step];
    }
  }
  void store(T* to, int64_t count) const { std::memcpy(to, elements, count * sizeof(T)); }
};

template <class T>
inline void copy_rest(const RopeRows& rows, const T* in, T* out) {
  const int64_t first = 2 * rows.pairs;
  if (first == rows.head_dim || in == out) {
    return;
  }
  if (rows.column_step == 1) {
    std::memcpy(out + first, in + first, (rows.head_dim - first) * sizeof(T));
    return;
  }
  for (int64_t i = first; i < rows.head_dim; ++i) {
    out[i] = in[i * rows.column_step];
  }
}

// Prefetch distance, applied to the rows of every head: each head's share of a run is too short for
// the hardware prefetcher to detect a stream.
inline constexpr int64_t kPrefetchBytes = 1024;

template <class T>
inline void prefetch_block(const T* from) {
  constexpr int64_t kLine = 64, kBytes = kBlock * sizeof(T);
  for (int64_t byte = 0; byte < kBytes; byte += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + byte);
  }
}

// Rotates a row of whole blocks. Rows are written one after another: streaming stores get slower
// the more rows they alternate between.
template <class T, bool kTraditional, bool kStream>
inline void rotate_blocks(const T* in, T* out, int64_t pairs, const float* cos, const float* sin) {
  constexpr int64_t kAhead = kPrefetchBytes / static_cast<int64_t>(sizeof(T));
  for (int64_t j = 0; j < pairs; j += kBlock) {
    if constexpr (kTraditional) {
      for (int64_t i = j; i < j + kBlock; i += kLanes) {
        prefetch_block(in + kAhead + 2 * i);
        rotate_neighbours<T, kStream>(in + 2 * i, out + 2 * i, cos + i, sin + i);
      }
    } else {
      prefetch_block(in + kAhead + j);
      prefetch_block(in + kAhead + pairs + j);
      rotate_apart<T, kStream>(in + j, in + pairs + j, out + j, out + pairs + j, cos + j, sin + j);
    }
  }
}

// Rotates a row of any length and column stride.
template <class T, bool kTraditional>
void rotate_pieces(
    const T* in, T* out, int64_t step, int64_t pairs, const float* cos, const float* sin) {
  constexpr int64_t kPairs = kTraditional ? kLanes : kBlock;  // per block
  for (int64_t j = 0; j < pairs; j += kPairs) {
    const int64_t count = pairs - j < kPairs ? pairs - j : kPairs;
    if constexpr (kTraditional) {
      const DenseBlock<T> dense(in + 2 * j * step, step, 2 * count);
      DenseBlock<T> rotated;
      rotate_neighbours<T, false>(dense.elements, rotated.elements, cos + j, sin + j);
      rotated.store(out + 2 * j, 2 * count);
    } else {
      const T* const a = in + j * step;
      const DenseBlock<T> dense_a(a, step, count), dense_b(a + pairs * step, step, count);
      DenseBlock<T> out_a, out_b;
      rotate_apart<T, false>(dense_a.elements, dense_b.elements, out_a.elements, out_b.elements,
                             cos + j, sin + j);
      out_a.store(out + j, count);
      out_b.store(out + pairs + j, count);
    }
  }
}

// Calls body(in, out, cosines, sines) for every row: all heads of a position, then the next
// position.
template <class T, class Body>
inline void for_each_row(const RopeRows& rows, Body body) {
  const T* in = static_cast<const T*>(rows.in);
  T* out = static_cast<T*>(rows.out);
  const float* angles = rows.angles;
  for (int64_t l = 0; l < rows.count; ++l) {
    const T* head_in = in;
    T* head_out = out;
    for (int64_t head = 0; head < rows.heads; ++head) {
      body(head_in, head_out, angles, angles + rows.padded);
      copy_rest(rows, head_in, head_out);
      head_in += rows.head_step;
      head_out += rows.out_head_step;
    }
    in += rows.row_step;
    out += rows.head_dim;
    angles += 2 * rows.padded;
  }
}

template <class T, bool kTraditional, bool kStream>
void rotate_rows_of_blocks(const RopeRows& rows) {
  for_each_row<T>(rows, [&](const T* in, T* out, const float* cos, const float* sin) {
    rotate_blocks<T, kTraditional, kStream>(in, out, rows.pairs, cos, sin);
  });
}

template <class T, bool kTraditional>
void rotate_rows(const RopeRows& rows) {
  if (rows.column_step != 1 || rows.pairs % kBlock != 0) {
    for_each_row<T>(rows, [&](const T* in, T* out, const float* cos, const float* sin) {
      rotate_pieces<T, kTraditional>(in, out, rows.column_step, rows.pairs, cos, sin);
    });
  } else if (rows.stream && rows.head_dim % kBlock == 0 &&
             reinterpret_cast<uintptr_t>(rows.out) % sizeof(f32v) == 0) {
    rotate_rows_of_blocks<T, kTraditional, true>(rows);
  } else {
    rotate_rows_of_blocks<T, kTraditional, false>(rows);
  }
}

template <class T>
void rotate_rows_of(const RopeRows& rows) {
  rows.traditional ? rotate_rows<T, true>(rows) : rotate_rows<T, false>(rows);
}

}  // namespace

constinit const RopeKernels rope_kernels_table = {
    .block = kBlock,
    .angles = fill_angles,
    .rotate_float32 = rotate_rows_of<float>,
    .rotate_float16 = rotate_rows_of<f16>,
    .rotate_bfloat16 = rotate_rows_of<bf16>,
    .finish_streaming = finish_streaming,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
