// <metal_simdgroup> and the barriers.
//
// Every function that exchanges data takes the place of its call as a hidden last argument; see
// target.h. Vectors are exchanged whole: the primitives move any trivially copyable type.
#pragma once

#include "relational.h"

namespace mslc {

// The bits of a real or whole number, on which and, or and xor act.
template <class T>
using BitsOf =
    metal::conditional_t<sizeof(T) == 1,
                         uchar,
                         metal::conditional_t<sizeof(T) == 2,
                                              ushort,
                                              metal::conditional_t<sizeof(T) == 4, uint, ulong>>>;

template <class Op, uint Width, class T>
MSLC_INLINE T reduce_bits(T value, const Site* site) {
  if constexpr (is_real<T> && !is_vector<T>)
    return __builtin_bit_cast(T, reduce<Op, Width>(__builtin_bit_cast(BitsOf<T>, value), site));
  else
    return reduce<Op, Width>(value, site);
}

// max and min of vectors act on components.
struct VectorMax {
  template <class T>
  static T apply(T a, T b) {
    return metal::max(a, b);
  }
};
struct VectorMin {
  template <class T>
  static T apply(T a, T b) {
    return metal::min(a, b);
  }
};

template <uint Width>
MSLC_INLINE uint group_base() {
  return lane_id() & ~(Width - 1);
}

// A shuffle whose source may lie outside the group of `Width` lanes: those lanes keep their value.
template <uint Width, class T>
MSLC_INLINE T shuffle_inside(T value, int position, const Site* site) {
  const uint lane = lane_id();
  const bool inside = position >= 0 && position < static_cast<int>(Width);
  return shuffle(value, inside ? group_base<Width>() + static_cast<uint>(position) : lane, site);
}

template <uint Width>
MSLC_INLINE int position_in_group() {
  return static_cast<int>(lane_id() & (Width - 1));
}

// shuffle_and_fill: the group is cut into pieces of `modulo` lanes; what comes from beyond the
// piece is taken from `fill` instead.
template <uint Width, class T>
MSLC_INLINE T shuffle_and_fill_down(T value, T fill, uint delta, uint modulo, const Site* site) {
  const uint lane = lane_id();
  const bool beyond = (lane % modulo) + delta >= modulo;
  const uint source = beyond ? lane + delta - modulo : lane + delta;
  T own = shuffle(value, source, site), filled = shuffle(fill, source, site);
  return beyond ? filled : own;
}
template <uint Width, class T>
MSLC_INLINE T shuffle_and_fill_up(T value, T fill, uint delta, uint modulo, const Site* site) {
  const uint lane = lane_id();
  const bool beyond = (lane % modulo) < delta;
  const uint source = beyond ? lane + modulo - delta : lane - delta;
  T own = shuffle(value, source, site), filled = shuffle(fill, source, site);
  return beyond ? filled : own;
}

MSLC_INLINE bool is_lowest_active(uint active) {
  return static_cast<uint>(__builtin_ctz(active)) == lane_id();
}

}  // namespace mslc

namespace metal {

MSLC_INLINE void threadgroup_barrier(mem_flags flags, MSLC_SITE) {
  mslc::barrier(MSLC_SCOPE_THREADGROUP, flags, site);
}
MSLC_INLINE void simdgroup_barrier(mem_flags flags, MSLC_SITE) {
  mslc::barrier(MSLC_SCOPE_SIMDGROUP, flags, site);
}

// simd_active_threads_mask() and simd_ballot() give this.
class simd_vote {
 public:
  using vote_t = ulong;
  constexpr simd_vote(vote_t votes = 0) : votes_(votes) {}
  constexpr explicit operator vote_t() const { return votes_; }
  constexpr bool all() const { return votes_ == 0xffffffffu; }
  constexpr bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
};

// ---- SIMD group
// ----------------------------------------------------------------------------------

template <class T>
MSLC_INLINE T simd_shuffle(T value, ushort lane, MSLC_SITE) {
  return mslc::shuffle(value, lane, site);
}
template <class T>
MSLC_INLINE T simd_broadcast(T value, ushort lane, MSLC_SITE) {
  return mslc::shuffle(value, lane, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_xor(T value, ushort mask, MSLC_SITE) {
  return mslc::shuffle(value, mslc::lane_id() ^ mask, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_down(T value, ushort delta, MSLC_SITE) {
  return mslc::shuffle_inside<32>(value, mslc::position_in_group<32>() + delta, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_up(T value, ushort delta, MSLC_SITE) {
  return mslc::shuffle_inside<32>(value, mslc::position_in_group<32>() - delta, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_rotate_down(T value, ushort delta, MSLC_SITE) {
  return mslc::shuffle(value, (mslc::lane_id() + delta) % 32, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_rotate_up(T value, ushort delta, MSLC_SITE) {
  return mslc::shuffle(value, (mslc::lane_id() - delta) % 32, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_and_fill_down(T value, T fill, ushort delta, MSLC_SITE) {
  return mslc::shuffle_and_fill_down<32>(value, fill, delta, 32, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo, MSLC_SITE) {
  return mslc::shuffle_and_fill_down<32>(value, fill, delta, modulo, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_and_fill_up(T value, T fill, ushort delta, MSLC_SITE) {
  return mslc::shuffle_and_fill_up<32>(value, fill, delta, 32, site);
}
template <class T>
MSLC_INLINE T simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo, MSLC_SITE) {
  return mslc::shuffle_and_fill_up<32>(value, fill, delta, modulo, site);
}
template <class T>
MSLC_INLINE T simd_broadcast_first(T value, MSLC_SITE) {
  return mslc::shuffle(value, __builtin_ctz(mslc::ballot(true, site)), site);
}

template <class T>
MSLC_INLINE T simd_sum(T value, MSLC_SITE) {
  return mslc::reduce<mslc::Add, 32>(value, site);
}
template <class T>
MSLC_INLINE T simd_product(T value, MSLC_SITE) {
  return mslc::reduce<mslc::Multiply, 32>(value, site);
}
template <class T>
MSLC_INLINE T simd_max(T value, MSLC_SITE) {
  return mslc::reduce<mslc::VectorMax, 32>(value, site);
}
template <class T>
MSLC_INLINE T simd_min(T value, MSLC_SITE) {
  return mslc::reduce<mslc::VectorMin, 32>(value, site);
}
template <class T>
MSLC_INLINE T simd_and(T value, MSLC_SITE) {
  return mslc::reduce_bits<mslc::And, 32>(value, site);
}
template <class T>
MSLC_INLINE T simd_or(T value, MSLC_SITE) {
  return mslc::reduce_bits<mslc::Or, 32>(value, site);
}
template <class T>
MSLC_INLINE T simd_xor(T value, MSLC_SITE) {
  return mslc::reduce_bits<mslc::Xor, 32>(value, site);
}
template <class T>
MSLC_INLINE T simd_prefix_inclusive_sum(T value, MSLC_SITE) {
  return mslc::scan<mslc::Add, 32, true>(value, site);
}
template <class T>
MSLC_INLINE T simd_prefix_exclusive_sum(T value, MSLC_SITE) {
  return mslc::scan<mslc::Add, 32, false>(value, site);
}
template <class T>
MSLC_INLINE T simd_prefix_inclusive_product(T value, MSLC_SITE) {
  return mslc::scan<mslc::Multiply, 32, true>(value, site);
}
template <class T>
MSLC_INLINE T simd_prefix_exclusive_product(T value, MSLC_SITE) {
  return mslc::scan<mslc::Multiply, 32, false>(value, site);
}

MSLC_INLINE simd_vote simd_active_threads_mask(MSLC_SITE) {
  return mslc::ballot(true, site);
}
MSLC_INLINE simd_vote simd_ballot(bool value, MSLC_SITE) {
  return mslc::ballot(value, site);
}
MSLC_INLINE bool simd_any(bool value, MSLC_SITE) {
  return mslc::ballot(value, site) != 0;
}
MSLC_INLINE bool simd_all(bool value, MSLC_SITE) {
  return mslc::ballot(!value, site) == 0;
}
MSLC_INLINE bool simd_is_first(MSLC_SITE) {
  return mslc::is_lowest_active(mslc::ballot(true, site));
}
MSLC_INLINE bool simd_is_helper_thread() {
  return false;
}

// ---- the compiler's own names, which MLX's bfloat overloads are built on
// --------------------------

MSLC_INLINE ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return static_cast<ushort>(mslc::lane_id());
}
MSLC_INLINE ushort __metal_get_simdgroup_size(ushort) {
  return 32;
}

#define MSLC_INTERNAL_SIMD(name)                        \
  template <class T, class... Rest>                     \
  MSLC_INLINE T __metal_##name(T value, Rest... rest) { \
    return name(value, rest...);                        \
  }
MSLC_INTERNAL_SIMD(simd_broadcast)
MSLC_INTERNAL_SIMD(simd_shuffle)
MSLC_INTERNAL_SIMD(simd_shuffle_xor)
MSLC_INTERNAL_SIMD(simd_shuffle_up)
MSLC_INTERNAL_SIMD(simd_shuffle_down)
MSLC_INTERNAL_SIMD(simd_shuffle_rotate_up)
MSLC_INTERNAL_SIMD(simd_shuffle_rotate_down)
MSLC_INTERNAL_SIMD(simd_sum)
MSLC_INTERNAL_SIMD(simd_product)
MSLC_INTERNAL_SIMD(simd_max)
MSLC_INTERNAL_SIMD(simd_min)
MSLC_INTERNAL_SIMD(simd_xor)
MSLC_INTERNAL_SIMD(simd_prefix_inclusive_sum)
MSLC_INTERNAL_SIMD(simd_prefix_exclusive_sum)
MSLC_INTERNAL_SIMD(simd_prefix_inclusive_product)
MSLC_INTERNAL_SIMD(simd_prefix_exclusive_product)
#undef MSLC_INTERNAL_SIMD
template <class T>
MSLC_INLINE T __metal_simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo) {
  return simd_shuffle_and_fill_up(value, fill, delta, modulo);
}
template <class T>
MSLC_INLINE T __metal_simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo) {
  return simd_shuffle_and_fill_down(value, fill, delta, modulo);
}

}  // namespace metal
