// rope on the CPU: tables of cosines and sines, and the rotation by them. metal/rope/rope.h has the
// same formulas.
#include "common/panels.h"
#include "rope/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// ---- angles -------------------------------------------------------------------------------------

struct SinCos {
  f32v sin, cos;
};

// Of a fraction of a turn, times 2^32. What is left beside the nearest quarter turn is at most an
// eighth, for which a few terms are exact to float32.
inline SinCos sin_cos_of_turn(u32v turn) {
  const u32v quarter = (turn + 0x20000000u) >> 30;
  const i32v rest = bits_as<i32v>(turn - (quarter << 30));
  const f32v x = __builtin_convertvector(rest, f32v) * 0x1.921fb6p-30f;  // 2 pi / 2^32
  const f32v z = x * x;
  const f32v sin = x + x * (z * (-0.166666552f + z * (0.008332178f + z * -0.000195172339f)));
  const f32v cos =
      1.0f - 0.5f * z + z * z * (0.0416666456f + z * (-0.00138873665f + z * 2.44383791e-05f));
  // Each quarter turn takes (sin, cos) to (cos, -sin).
  const auto odd = (quarter & 1u) != 0u;
  const u32v minus_sin = (quarter & 2u) << 30, minus_cos = ((quarter + 1u) & 2u) << 30;
  return {bits_as<f32v>(bits_as<u32v>(odd ? cos : sin) ^ minus_sin),
          bits_as<f32v>(bits_as<u32v>(odd ? sin : cos) ^ minus_cos)};
}

void fill_angles(const RopeAngles& angles, float* to) {
  const float direction = angles.inverse ? -1.0f : 1.0f;
  for (int64_t l = 0; l < angles.count; ++l) {
    const auto position = static_cast<uint64_t>(angles.position + l);
    float* const cos = to + 2 * l * angles.padded;
    float* const sin = cos + angles.padded;
    for (int64_t j = 0; j < angles.padded; j += kLanes) {
      u32v turn;
      for (int lane = 0; lane < kLanes; ++lane) {
        turn[lane] = static_cast<uint32_t>((angles.turns[j + lane] * position) >> 32);
      }
      const SinCos of_turn = sin_cos_of_turn(turn);
      const f32v defect = load_lanes(angles.defects + j);
      store_lanes(cos + j, of_turn.cos + defect);
      store_lanes(sin + j, of_turn.sin * direction + defect);
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

template <bool kStream, class T>
inline void store_some(T* to, int64_t column, int64_t columns, f32v x) {
  if constexpr (kStream) {
    store_lanes<true>(to + column, x);
  } else {
    store_columns(to, column, columns, x);
  }
}

// Pairs of elements that are `pairs` apart.
template <bool kStream, class T>
inline void rotate_halves(const RopeRows& rows, const T* in, T* out, const float* cos) {
  const float* const sin = cos + rows.padded;
  const T* const in_b = in + rows.pairs * rows.column_step;
  for (int64_t j = 0; j < rows.pairs; j += kLanes) {
    const Pair x = {load_columns(in, rows.column_step, j, rows.pairs),
                    load_columns(in_b, rows.column_step, j, rows.pairs)};
    const Pair y = rotate(x, load_lanes(cos + j), load_lanes(sin + j));
    store_some<kStream>(out, j, rows.pairs, y.a);
    store_some<kStream>(out + rows.pairs, j, rows.pairs, y.b);
  }
}

// Lanes of two vectors as the elements of two vectors of pairs, and back.
template <int... kLane>
inline Pair split_pairs(f32v low, f32v high, std::integer_sequence<int, kLane...>) {
  return {__builtin_shufflevector(low, high, 2 * kLane...),
          __builtin_shufflevector(low, high, 2 * kLane + 1 ...)};
}
template <int... kLane>
inline Pair join_pairs(Pair x, std::integer_sequence<int, kLane...>) {
  return {__builtin_shufflevector(x.a, x.b, (kLane / 2 + kLane % 2 * kLanes)...),
          __builtin_shufflevector(x.a, x.b, (kLane / 2 + kLane % 2 * kLanes + kLanes / 2)...)};
}

// Pairs of neighbours.
template <bool kStream, class T>
inline void rotate_neighbours(const RopeRows& rows, const T* in, T* out, const float* cos) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  const float* const sin = cos + rows.padded;
  const int64_t columns = 2 * rows.pairs;
  for (int64_t j = 0; j < rows.pairs; j += kLanes) {
    Pair x;
    if (rows.column_step == 1 && j + kLanes <= rows.pairs) {
      x = split_pairs(load_lanes(in + 2 * j), load_lanes(in + 2 * j + kLanes), kAll);
    } else {
      x = {load_columns(in, 2 * rows.column_step, j, rows.pairs),
           load_columns(in + rows.column_step, 2 * rows.column_step, j, rows.pairs)};
    }
    const Pair y = join_pairs(rotate(x, load_lanes(cos + j), load_lanes(sin + j)), kAll);
    store_some<kStream>(out, 2 * j, columns, y.a);
    if (2 * j + kLanes < columns) {
      store_some<kStream>(out, 2 * j + kLanes, columns, y.b);
    }
  }
}

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

template <class T, bool kTraditional, bool kStream>
void rotate_rows(const RopeRows& rows) {
  const T* in = static_cast<const T*>(rows.in);
  T* out = static_cast<T*>(rows.out);
  for (int64_t l = 0; l < rows.count; ++l, in += rows.row_step, out += rows.head_dim) {
    const float* const cos = rows.angles + 2 * l * rows.padded;
    if constexpr (kTraditional) {
      rotate_neighbours<kStream>(rows, in, out, cos);
    } else {
      rotate_halves<kStream>(rows, in, out, cos);
    }
    copy_rest(rows, in, out);
  }
}

template <class T>
void rotate_rows_of(const RopeRows& rows) {
  // Whole, aligned vectors everywhere.
  const bool stream = rows.stream && rows.pairs % kLanes == 0 && rows.head_dim % kLanes == 0 &&
                      reinterpret_cast<uintptr_t>(rows.out) % (kLanes * sizeof(T)) == 0;
  if (stream) {
    rows.traditional ? rotate_rows<T, true, true>(rows) : rotate_rows<T, false, true>(rows);
    finish_streaming();
  } else {
    rows.traditional ? rotate_rows<T, true, false>(rows) : rotate_rows<T, false, false>(rows);
  }
}

}  // namespace

constinit const RopeKernels rope_kernels_table = {
    kLanes, fill_angles, rotate_rows_of<float>, rotate_rows_of<f16>, rotate_rows_of<bf16>,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
