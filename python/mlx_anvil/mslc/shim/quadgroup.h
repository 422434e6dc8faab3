// <metal_quadgroup>: groups of four neighbouring lanes.
#pragma once

#include "simdgroup.h"

namespace mslc {

MSLC_INLINE uint quad_ballot(bool value, const Site* site) {
  return ballot(value, site) >> group_base<4>() & 15;
}

}  // namespace mslc

namespace metal {

class quad_vote {
 public:
  using vote_t = ulong;
  constexpr quad_vote(vote_t votes = 0) : votes_(votes) {}
  constexpr explicit operator vote_t() const { return votes_; }
  constexpr bool all() const { return votes_ == 15; }
  constexpr bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
};

template <class T>
MSLC_INLINE T quad_shuffle(T value, ushort lane, MSLC_SITE) {
  return mslc::shuffle(value, mslc::group_base<4>() + lane % 4, site);
}
template <class T>
MSLC_INLINE T quad_broadcast(T value, ushort lane, MSLC_SITE) {
  return mslc::shuffle(value, mslc::group_base<4>() + lane % 4, site);
}
template <class T>
MSLC_INLINE T quad_shuffle_xor(T value, ushort mask, MSLC_SITE) {
  return mslc::shuffle(value, mslc::lane_id() ^ (mask & 3), site);
}
template <class T>
MSLC_INLINE T quad_shuffle_down(T value, ushort delta, MSLC_SITE) {
  return mslc::shuffle_inside<4>(value, mslc::position_in_group<4>() + delta, site);
}
template <class T>
MSLC_INLINE T quad_shuffle_up(T value, ushort delta, MSLC_SITE) {
  return mslc::shuffle_inside<4>(value, mslc::position_in_group<4>() - delta, site);
}
template <class T>
MSLC_INLINE T quad_shuffle_rotate_down(T value, ushort delta, MSLC_SITE) {
  return mslc::shuffle(value, mslc::group_base<4>() + (mslc::lane_id() + delta) % 4, site);
}
template <class T>
MSLC_INLINE T quad_shuffle_rotate_up(T value, ushort delta, MSLC_SITE) {
  return mslc::shuffle(value, mslc::group_base<4>() + (mslc::lane_id() - delta) % 4, site);
}
template <class T>
MSLC_INLINE T quad_shuffle_and_fill_down(T value, T fill, ushort delta, MSLC_SITE) {
  return mslc::shuffle_and_fill_down<4>(value, fill, delta, 4, site);
}
template <class T>
MSLC_INLINE T quad_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo, MSLC_SITE) {
  return mslc::shuffle_and_fill_down<4>(value, fill, delta, modulo, site);
}
template <class T>
MSLC_INLINE T quad_shuffle_and_fill_up(T value, T fill, ushort delta, MSLC_SITE) {
  return mslc::shuffle_and_fill_up<4>(value, fill, delta, 4, site);
}
template <class T>
MSLC_INLINE T quad_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo, MSLC_SITE) {
  return mslc::shuffle_and_fill_up<4>(value, fill, delta, modulo, site);
}
template <class T>
MSLC_INLINE T quad_broadcast_first(T value, MSLC_SITE) {
  const uint active = mslc::quad_ballot(true, site);
  return mslc::shuffle(value, mslc::group_base<4>() + __builtin_ctz(active), site);
}

template <class T>
MSLC_INLINE T quad_sum(T value, MSLC_SITE) {
  return mslc::reduce<mslc::Add, 4>(value, site);
}
template <class T>
MSLC_INLINE T quad_product(T value, MSLC_SITE) {
  return mslc::reduce<mslc::Multiply, 4>(value, site);
}
template <class T>
MSLC_INLINE T quad_max(T value, MSLC_SITE) {
  return mslc::reduce<mslc::VectorMax, 4>(value, site);
}
template <class T>
MSLC_INLINE T quad_min(T value, MSLC_SITE) {
  return mslc::reduce<mslc::VectorMin, 4>(value, site);
}
template <class T>
MSLC_INLINE T quad_and(T value, MSLC_SITE) {
  return mslc::reduce_bits<mslc::And, 4>(value, site);
}
template <class T>
MSLC_INLINE T quad_or(T value, MSLC_SITE) {
  return mslc::reduce_bits<mslc::Or, 4>(value, site);
}
template <class T>
MSLC_INLINE T quad_xor(T value, MSLC_SITE) {
  return mslc::reduce_bits<mslc::Xor, 4>(value, site);
}
template <class T>
MSLC_INLINE T quad_prefix_inclusive_sum(T value, MSLC_SITE) {
  return mslc::scan<mslc::Add, 4, true>(value, site);
}
template <class T>
MSLC_INLINE T quad_prefix_exclusive_sum(T value, MSLC_SITE) {
  return mslc::scan<mslc::Add, 4, false>(value, site);
}
template <class T>
MSLC_INLINE T quad_prefix_inclusive_product(T value, MSLC_SITE) {
  return mslc::scan<mslc::Multiply, 4, true>(value, site);
}
template <class T>
MSLC_INLINE T quad_prefix_exclusive_product(T value, MSLC_SITE) {
  return mslc::scan<mslc::Multiply, 4, false>(value, site);
}

MSLC_INLINE quad_vote quad_active_threads_mask(MSLC_SITE) {
  return mslc::quad_ballot(true, site);
}
MSLC_INLINE quad_vote quad_ballot(bool value, MSLC_SITE) {
  return mslc::quad_ballot(value, site);
}
MSLC_INLINE bool quad_any(bool value, MSLC_SITE) {
  return mslc::quad_ballot(value, site) != 0;
}
MSLC_INLINE bool quad_all(bool value, MSLC_SITE) {
  return mslc::quad_ballot(!value, site) == 0;
}
MSLC_INLINE bool quad_is_first(MSLC_SITE) {
  return static_cast<uint>(__builtin_ctz(mslc::quad_ballot(true, site))) == mslc::lane_id() % 4;
}

}  // namespace metal
