// The CPU target. A SIMD-group operation suspends the calling thread until the other lanes arrive.
// Then one call of a combine function computes the results of all lanes.
#pragma once

#include "../../runtime/abi.h"
#include "../matrix_layout.h"
#include "atomic_cpu.h"
#include "math_cpu.h"

namespace mslc {

MSLC_INLINE const mslc_site* runtime_site(const Site* site) {
  return reinterpret_cast<const mslc_site*>(site);
}

MSLC_INLINE uint lane_id() {
  return mslc_lane();
}

MSLC_INLINE __attribute__((nodebug)) void step() {
  mslc_step();
}

// `alignment` is the declaration's, if it requires more than the type.
template <class T>
MSLC_INLINE threadgroup T& threadgroup_variable(const mslc_variable* variable, uint alignment = 1) {
  return *(threadgroup T*)(ulong)mslc_threadgroup_variable(
      variable, sizeof(T), alignment > alignof(T) ? alignment : alignof(T));
}

MSLC_INLINE void barrier(int scope, metal::mem_flags fences, const Site* site) {
  mslc_barrier(scope, static_cast<uint>(fences), runtime_site(site));
}

// For functions that access the operands of other lanes, which are on those lanes' stacks.
#define MSLC_UNINSTRUMENTED __attribute__((no_sanitize("thread")))

// The result of reading an inactive lane: it must not look plausible.
template <class T>
MSLC_INLINE T poison() {
  T value;
  __builtin_memset(&value, 0xFF, sizeof value);
  return value;
}

MSLC_INLINE bool is_active(const mslc_lanes* lanes, uint lane) {
  return lanes->active >> lane & 1;
}

template <class Operand>
MSLC_INLINE Operand& operand(const mslc_lanes* lanes, uint lane) {
  return *static_cast<Operand*>(lanes->value[lane]);
}

// ---- shuffle ------------------------------------------------------------------------------------

template <class T>
struct ShuffleOperand {
  T value, result;
  uint source;
};

template <class T>
MSLC_UNINSTRUMENTED void combine_shuffle(const mslc_lanes* lanes) {
  for (uint lane = 0; lane < simd_width; ++lane) {
    if (!is_active(lanes, lane)) continue;
    auto& self = operand<ShuffleOperand<T>>(lanes, lane);
    if (is_active(lanes, self.source))
      self.result = operand<ShuffleOperand<T>>(lanes, self.source).value;
    else
      mslc_undefined_result(lanes, lane, "shuffle from a lane that is not active");
  }
}

template <class T>
MSLC_INLINE T shuffle(T value, uint source, const Site* site) {
  ShuffleOperand<T> self{value, poison<T>(), source % simd_width};
  mslc_collective(&self, combine_shuffle<T>, runtime_site(site));
  return self.result;
}

// ---- reductions ---------------------------------------------------------------------------------

// Reduces in lane order, so that the result does not depend on the order in which lanes arrive.
template <class Op, uint Width, class T>
MSLC_UNINSTRUMENTED void combine_reduce(const mslc_lanes* lanes) {
  for (uint base = 0; base < simd_width; base += Width) {
    T total{};
    bool first = true;
    for (uint lane = base; lane < base + Width; ++lane) {
      if (!is_active(lanes, lane)) continue;
      T value = operand<T>(lanes, lane);
      total = first ? value : T(Op::apply(total, value));
      first = false;
    }
    for (uint lane = base; lane < base + Width; ++lane)
      if (is_active(lanes, lane)) operand<T>(lanes, lane) = total;
  }
}

template <class Op, uint Width, class T>
MSLC_INLINE T reduce(T value, const Site* site) {
  mslc_collective(&value, combine_reduce<Op, Width, T>, runtime_site(site));
  return value;
}

template <class Op, uint Width, bool Inclusive, class T>
MSLC_UNINSTRUMENTED void combine_scan(const mslc_lanes* lanes) {
  for (uint base = 0; base < simd_width; base += Width) {
    T total = Op::template identity<T>();
    for (uint lane = base; lane < base + Width; ++lane) {
      if (!is_active(lanes, lane)) continue;
      T& self = operand<T>(lanes, lane);
      T next = T(Op::apply(total, self));
      self = Inclusive ? next : total;
      total = next;
    }
  }
}

template <class Op, uint Width, bool Inclusive, class T>
MSLC_INLINE T scan(T value, const Site* site) {
  mslc_collective(&value, combine_scan<Op, Width, Inclusive, T>, runtime_site(site));
  return value;
}

inline MSLC_UNINSTRUMENTED void combine_ballot(const mslc_lanes* lanes) {
  uint votes = 0;
  for (uint lane = 0; lane < simd_width; ++lane)
    if (is_active(lanes, lane) && operand<uint>(lanes, lane)) votes |= 1u << lane;
  for (uint lane = 0; lane < simd_width; ++lane)
    if (is_active(lanes, lane)) operand<uint>(lanes, lane) = votes;
}

MSLC_INLINE uint ballot(bool value, const Site* site) {
  uint votes = value;
  mslc_collective(&votes, combine_ballot, runtime_site(site));
  return votes;
}
MSLC_INLINE bool any(bool value, const Site* site) {
  return ballot(value, site) != 0;
}

// ---- 8x8 matrices -------------------------------------------------------------------------------

template <class D, class A, class B, class C>
struct MatrixOperand {
  metal::vec<A, 2> a;
  metal::vec<B, 2> b;
  metal::vec<C, 2> c;
  metal::vec<D, 2> d;
};

template <class D, class A, class B, class C>
MSLC_UNINSTRUMENTED void combine_matrix(const mslc_lanes* lanes) {
  count<MSLC_COUNT_MATRIX_MULTIPLY>();
  using Operand = MatrixOperand<D, A, B, C>;
  float a[8][8], b[8][8], d[8][8];
  if (lanes->active != ~0u) {
    mslc_undefined_result(lanes, static_cast<uint>(__builtin_ctz(lanes->active)),
                          "simdgroup_matrix operation without all 32 lanes");
    __builtin_memset(a, 0xFF, sizeof a);
    __builtin_memset(b, 0xFF, sizeof b);
    __builtin_memset(d, 0xFF, sizeof d);
  }
  for (uint lane = 0; lane < simd_width; ++lane) {
    if (!is_active(lanes, lane)) continue;
    const auto& self = operand<Operand>(lanes, lane);
    const uint row = matrix_row(lane), column = matrix_column(lane);
    for (uint i = 0; i < 2; ++i) {
      a[row][column + i] = static_cast<float>(self.a[i]);
      b[row][column + i] = static_cast<float>(self.b[i]);
      d[row][column + i] = static_cast<float>(self.c[i]);
    }
  }
  using Row = metal::vec<float, 8>;
  for (uint row = 0; row < 8; ++row) {
    Row sum;
    __builtin_memcpy(&sum, d[row], sizeof sum);
    for (uint k = 0; k < 8; ++k) {
      Row factor;
      __builtin_memcpy(&factor, b[k], sizeof factor);
      sum += a[row][k] * factor;
    }
    __builtin_memcpy(d[row], &sum, sizeof sum);
  }
  for (uint lane = 0; lane < simd_width; ++lane) {
    if (!is_active(lanes, lane)) continue;
    auto& self = operand<Operand>(lanes, lane);
    for (uint i = 0; i < 2; ++i)
      self.d[i] = static_cast<D>(d[matrix_row(lane)][matrix_column(lane) + i]);
  }
}

template <class D, class A, class B, class C>
MSLC_INLINE metal::vec<D, 2> matrix_multiply_accumulate(metal::vec<A, 2> a,
                                                        metal::vec<B, 2> b,
                                                        metal::vec<C, 2> c,
                                                        const Site* site) {
  MatrixOperand<D, A, B, C> self{a, b, c, {}};
  mslc_collective(&self, combine_matrix<D, A, B, C>, runtime_site(site));
  return self.d;
}

}  // namespace mslc
