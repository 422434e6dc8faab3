// The PTX target: a SIMD group is a warp, a threadgroup is a thread block.
//
// Functions that exchange data wait for all lanes (mask 0xffffffff), so every thread of the SIMD
// group that has not returned from the kernel must reach them. Threads that have returned, or that
// a ragged threadgroup never had, do not take part.
#pragma once

#include "deferred_ptx.h"
#include "lanes_ptx.h"

enum { MSLC_SCOPE_SIMDGROUP, MSLC_SCOPE_THREADGROUP };

namespace mslc {
namespace approx {
MSLC_INLINE float exp2(float x) {
  return __nvvm_ex2_approx_f(x);
}
MSLC_INLINE float rsqrt(float x) {
  return __nvvm_rsqrt_approx_f(x);
}
}  // namespace approx

// For Metal's fast:: functions: one or two instructions that flush subnormal results to zero.
namespace fast {
MSLC_INLINE float exp2(float x) {
  return __nvvm_ex2_approx_ftz_f(x);
}
MSLC_INLINE float divide(float x, float y) {
  return __nvvm_div_approx_ftz_f(x, y);
}
}  // namespace fast
}  // namespace mslc

#include "../gpu/atomic_gpu.h"
#include "../gpu/exchange_gpu.h"
#include "../gpu/trigonometry_gpu.h"
#include "copy_ptx.h"
#include "matrix_ptx.h"
#include "pairs_ptx.h"
#include "product_ptx.h"
#include "resident_ptx.h"

namespace mslc {

constexpr uint all_lanes = 0xffffffffu;

// Only the simulator stops endless kernels.
MSLC_INLINE void step() {}

MSLC_INLINE void barrier(int scope, metal::mem_flags, const Site*) {
  if (scope == MSLC_SCOPE_THREADGROUP)
    __asm__ volatile("bar.sync 0;" ::: "memory");
  else
    __asm__ volatile("bar.warp.sync 0xffffffff;" ::: "memory");
}

// ---- shuffle

template <class T>
MSLC_INLINE T shuffle(T value, uint source, const Site*) {
  const int from = static_cast<int>(hardware_of_lane(source % simd_width));
  return exchange_words(value, [=](uint word) {
    return static_cast<uint>(__nvvm_shfl_sync_idx_i32(all_lanes, static_cast<int>(word), from, 31));
  });
}

// Returns the value of the lane whose number differs in the bits of `mask`.
template <uint Mask, class T>
MSLC_INLINE T shuffle_across(T value) {
  return exchange_words(value, [](uint word) {
    return static_cast<uint>(
        __nvvm_shfl_sync_bfly_i32(all_lanes, static_cast<int>(word), hardware_of_lane(Mask), 31));
  });
}

// ---- votes

MSLC_INLINE uint hardware_ballot(bool value) {
  return static_cast<uint>(__nvvm_vote_ballot_sync(all_lanes, value));
}

// Swaps the votes of two sets of lanes: those with bit Low set and High clear (given by `low`), and
// those with High set and Low clear.
template <uint High, uint Low>
MSLC_INLINE uint swap_lane_bits(uint votes, uint low) {
  const uint differs = (votes ^ votes >> (High - Low)) & low;
  return votes ^ differs ^ differs << (High - Low);
}

MSLC_INLINE uint ballot(bool value, const Site* = nullptr) {
  const uint votes = hardware_ballot(value);
  if constexpr (!lanes_are_permuted) return votes;
  // Applies lane_of_hardware to all lanes at once.
  return swap_lane_bits<4, 2>(swap_lane_bits<8, 2>(votes, 0x00cc00ccu), 0x0c0c0c0cu);
}
MSLC_INLINE bool any(bool value, const Site* = nullptr) {
  return hardware_ballot(value) != 0;
}

// ---- reductions

// For missing lanes: combines the values one by one, in lane order.
template <class Op, uint Width, class T>
MSLC_INLINE T reduce_some(T value, uint live, const Site* site) {
  const uint base = lane_id() & ~(Width - 1);
  T total = value;
  bool first = true;
#pragma clang loop unroll(disable)
  for (uint i = 0; i < Width; ++i) {
    const T other = shuffle(value, base + i, site);
    if ((live >> hardware_of_lane(base + i) & 1) == 0) continue;
    total = first ? other : T(Op::apply(total, other));
    first = false;
  }
  return total;
}

template <class Op, uint Width, uint Mask, class T>
MSLC_INLINE T reduce_across(T value) {
  if constexpr (Mask == 0) {
    return value;
  } else {
    return reduce_across<Op, Width, Mask / 2>(T(Op::apply(value, shuffle_across<Mask>(value))));
  }
}

// Sums the components of a vector. In the first steps, a lane keeps half of its components and gets
// the other half of theirs, so that each step has one exchange and not one per component. The order
// of the sums, and so the bits, are those of reduce_across.
template <uint Mask, uint N, class T>
MSLC_INLINE T sum_of_components(const T (&values)[N], uint lane) {
  if constexpr (N == 1) {
    return reduce_across<Add, 2 * Mask, Mask>(values[0]);
  } else {
    const bool upper = (lane & Mask) != 0;
    T kept[N / 2];
    for (uint i = 0; i < N / 2; ++i) {
      const T given = upper ? values[i] : values[i + N / 2];
      kept[i] = (upper ? values[i + N / 2] : values[i]) + shuffle_across<Mask>(given);
    }
    return sum_of_components<Mask / 2>(kept, lane);
  }
}

template <uint Width, class T>
MSLC_INLINE T sum_across(T value, const Site* site) {
  constexpr uint N = length_of<T>;
  const uint lane = lane_id();
  ElementOf<T> values[N];
  for (uint i = 0; i < N; ++i) values[i] = value[i];
  const ElementOf<T> sum = sum_of_components<Width / 2>(values, lane);
  for (uint i = 0; i < N; ++i)
    value[i] = shuffle(sum, (lane & ~(Width - 1)) + i * (Width / N), site);
  return value;
}

template <class Op, uint Width, class T>
MSLC_INLINE T reduce(T value, const Site* site) {
  const uint live = hardware_ballot(true);
  if (live == all_lanes) [[likely]] {
    if constexpr (__is_same(Op, Add) && Width == simd_width &&
                  (length_of<T> == 2 || length_of<T> == 4))
      return sum_across<Width>(value, site);
    else
      return reduce_across<Op, Width, Width / 2>(value);
  }
  return reduce_some<Op, Width>(value, live, site);
}

template <class Op, uint Width, bool Inclusive, class T>
MSLC_INLINE T scan_some(T value, uint live, const Site* site) {
  const uint lane = lane_id(), base = lane & ~(Width - 1);
  T total = Op::template identity<T>();
#pragma clang loop unroll(disable)
  for (uint i = 0; i < Width; ++i) {
    const T other = shuffle(value, base + i, site);
    const bool taken = Inclusive ? base + i <= lane : base + i < lane;
    if (taken && (live >> hardware_of_lane(base + i) & 1) != 0) total = T(Op::apply(total, other));
  }
  return total;
}

template <class Op, uint Width, bool Inclusive, class T>
MSLC_INLINE T scan(T value, const Site* site) {
  const uint live = hardware_ballot(true);
  if (live != all_lanes) [[unlikely]]
    return scan_some<Op, Width, Inclusive>(value, live, site);
  const uint lane = lane_id(), position = lane & (Width - 1);
  for (uint delta = 1; delta < Width; delta *= 2) {
    const T other = shuffle(value, lane - delta, site);
    if (position >= delta) value = T(Op::apply(other, value));
  }
  if constexpr (Inclusive) return value;
  const T other = shuffle(value, lane - 1, site);
  return position == 0 ? Op::template identity<T>() : other;
}

}  // namespace mslc
