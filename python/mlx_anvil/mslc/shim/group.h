// Common parts of SIMD groups and quad groups: functions of a group of `Width` neighbouring lanes,
// and the macro that defines their Metal names.
//
// Every function that exchanges data takes its call site as a hidden last argument; see target.h.
// Vectors are exchanged whole, because the primitives move any trivially copyable type.
#pragma once

#include "relational.h"

namespace mslc {

// The unsigned type whose bits `and`, `or` and `xor` combine for a real or integer number.
template <class T>
using BitsOf =
    metal::conditional_t<sizeof(T) == 1,
                         uchar,
                         metal::conditional_t<sizeof(T) == 2,
                                              ushort,
                                              metal::conditional_t<sizeof(T) == 4, uint, ulong>>>;

// max and min of vectors work per component.
struct VectorMax {
  static constexpr bool is_max = true;
  template <class T>
  static T apply(T a, T b) {
    return metal::max(a, b);
  }
};
struct VectorMin {
  static constexpr bool is_max = false;
  template <class T>
  static T apply(T a, T b) {
    return metal::min(a, b);
  }
};

// The result of a ballot: bit i is the vote of the group's lane i.
template <uint Width>
class Vote {
 public:
  using vote_t = ulong;
  static constexpr vote_t everyone = (1ul << Width) - 1;
  explicit constexpr Vote(vote_t votes = 0) : votes_(votes & everyone) {}
  constexpr explicit operator vote_t() const { return votes_; }
  constexpr bool all() const { return votes_ == everyone; }
  constexpr bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
};

template <uint Width>
struct Group {
  static MSLC_INLINE uint base() {
    if constexpr (Width == simd_width) return 0;
    return lane_id() & ~(Width - 1);
  }
  static MSLC_INLINE uint position() { return lane_id() & (Width - 1); }
  // Returns the lane at a position in this group, modulo its size.
  static MSLC_INLINE uint lane_at(uint position) {
    if constexpr (Width == simd_width) return position % simd_width;
    return base() + position % Width;
  }

  // ---- shuffles

  template <class T>
  static MSLC_INLINE T shuffle(T value, ushort lane, const Site* site) {
    return mslc::shuffle(value, lane_at(lane), site);
  }
  template <class T>
  static MSLC_INLINE T broadcast(T value, ushort lane, const Site* site) {
    if constexpr (Width == simd_width) return mslc::broadcast(value, lane_at(lane), site);
    return mslc::shuffle(value, lane_at(lane), site);
  }
  template <class T>
  static MSLC_INLINE T shuffle_xor(T value, ushort mask, const Site* site) {
    return mslc::shuffle_xor(value, mask & (Width - 1), site);
  }
  template <class T>
  static MSLC_INLINE T shuffle_rotate_down(T value, ushort delta, const Site* site) {
    return mslc::shuffle(value, lane_at(lane_id() + delta), site);
  }
  template <class T>
  static MSLC_INLINE T shuffle_rotate_up(T value, ushort delta, const Site* site) {
    return mslc::shuffle(value, lane_at(lane_id() - delta), site);
  }
  // Lanes whose source is outside the group keep their value.
  template <class T>
  static MSLC_INLINE T shuffle_down(T value, ushort delta, const Site* site) {
    return mslc::shuffle_down<Width>(value, delta, site);
  }
  template <class T>
  static MSLC_INLINE T shuffle_up(T value, ushort delta, const Site* site) {
    return mslc::shuffle_up<Width>(value, delta, site);
  }
  // Splits the group into pieces of `modulo` lanes. Values from beyond a piece come from `fill`.
  template <class T>
  static MSLC_INLINE T
  shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo, const Site* site) {
    const uint lane = lane_id();
    const bool beyond = lane % modulo + delta >= modulo;
    const uint source = beyond ? lane + delta - modulo : lane + delta;
    T own = mslc::shuffle(value, source, site), filled = mslc::shuffle(fill, source, site);
    return beyond ? filled : own;
  }
  template <class T>
  static MSLC_INLINE T
  shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo, const Site* site) {
    const uint lane = lane_id();
    const bool beyond = lane % modulo < delta;
    const uint source = beyond ? lane + modulo - delta : lane - delta;
    T own = mslc::shuffle(value, source, site), filled = mslc::shuffle(fill, source, site);
    return beyond ? filled : own;
  }
  template <class T>
  static MSLC_INLINE T broadcast_first(T value, const Site* site) {
    if constexpr (Width == simd_width) return mslc::broadcast(value, first_active(site), site);
    return mslc::shuffle(value, first_active(site), site);
  }

  // ---- reductions and scans

  template <class Op, class T>
  static MSLC_INLINE T reduce(T value, const Site* site) {
    return mslc::reduce<Op, Width>(value, site);
  }
  template <class Op, class T>
  static MSLC_INLINE T reduce_bits(T value, const Site* site) {
    if constexpr (is_real<T> && !is_vector<T>)
      return __builtin_bit_cast(T, reduce<Op>(__builtin_bit_cast(BitsOf<T>, value), site));
    else
      return reduce<Op>(value, site);
  }
  template <class Op, bool Inclusive, class T>
  static MSLC_INLINE T scan(T value, const Site* site) {
    return mslc::scan<Op, Width, Inclusive>(value, site);
  }

  // ---- votes

  static MSLC_INLINE uint ballot(bool value, const Site* site) {
    return mslc::ballot(value, site) >> base() & static_cast<uint>(Vote<Width>::everyone);
  }
  static MSLC_INLINE bool any(bool value, const Site* site) {
    if constexpr (Width == simd_width)
      return mslc::any(value, site);
    else
      return ballot(value, site) != 0;
  }
  static MSLC_INLINE uint first_active(const Site* site) {
    return base() + static_cast<uint>(__builtin_ctz(ballot(true, site)));
  }
};

}  // namespace mslc

#define MSLC_GROUP_OF_VALUE(name, ...)     \
  template <class T>                       \
  MSLC_INLINE T name(T value, MSLC_SITE) { \
    return __VA_ARGS__(value, site);       \
  }
#define MSLC_GROUP_OF_LANE(prefix, width, function)                    \
  template <class T>                                                   \
  MSLC_INLINE T prefix##_##function(T value, ushort lane, MSLC_SITE) { \
    return ::mslc::Group<width>::function(value, lane, site);          \
  }
#define MSLC_GROUP_OF_FILL(prefix, width, function)                                            \
  template <class T>                                                                           \
  MSLC_INLINE T prefix##_##function(T value, T fill, ushort delta, MSLC_SITE) {                \
    return ::mslc::Group<width>::function(value, fill, delta, width, site);                    \
  }                                                                                            \
  template <class T>                                                                           \
  MSLC_INLINE T prefix##_##function(T value, T fill, ushort delta, ushort modulo, MSLC_SITE) { \
    return ::mslc::Group<width>::function(value, fill, delta, modulo, site);                   \
  }

// Defines all functions of one kind of group: simd_sum, quad_sum and so on.
#define MSLC_GROUP_FUNCTIONS(prefix, width)                                             \
  using prefix##_vote = ::mslc::Vote<width>;                                            \
  MSLC_GROUP_OF_LANE(prefix, width, shuffle)                                            \
  MSLC_GROUP_OF_LANE(prefix, width, broadcast)                                          \
  MSLC_GROUP_OF_LANE(prefix, width, shuffle_xor)                                        \
  MSLC_GROUP_OF_LANE(prefix, width, shuffle_down)                                       \
  MSLC_GROUP_OF_LANE(prefix, width, shuffle_up)                                         \
  MSLC_GROUP_OF_LANE(prefix, width, shuffle_rotate_down)                                \
  MSLC_GROUP_OF_LANE(prefix, width, shuffle_rotate_up)                                  \
  MSLC_GROUP_OF_FILL(prefix, width, shuffle_and_fill_down)                              \
  MSLC_GROUP_OF_FILL(prefix, width, shuffle_and_fill_up)                                \
  MSLC_GROUP_OF_VALUE(prefix##_broadcast_first, ::mslc::Group<width>::broadcast_first)  \
  MSLC_GROUP_OF_VALUE(prefix##_sum, ::mslc::Group<width>::reduce<::mslc::Add>)          \
  MSLC_GROUP_OF_VALUE(prefix##_product, ::mslc::Group<width>::reduce<::mslc::Multiply>) \
  MSLC_GROUP_OF_VALUE(prefix##_max, ::mslc::Group<width>::reduce<::mslc::VectorMax>)    \
  MSLC_GROUP_OF_VALUE(prefix##_min, ::mslc::Group<width>::reduce<::mslc::VectorMin>)    \
  MSLC_GROUP_OF_VALUE(prefix##_and, ::mslc::Group<width>::reduce_bits<::mslc::And>)     \
  MSLC_GROUP_OF_VALUE(prefix##_or, ::mslc::Group<width>::reduce_bits<::mslc::Or>)       \
  MSLC_GROUP_OF_VALUE(prefix##_xor, ::mslc::Group<width>::reduce_bits<::mslc::Xor>)     \
  MSLC_GROUP_OF_VALUE(prefix##_prefix_inclusive_sum,                                    \
                      ::mslc::Group<width>::scan<::mslc::Add, true>)                    \
  MSLC_GROUP_OF_VALUE(prefix##_prefix_exclusive_sum,                                    \
                      ::mslc::Group<width>::scan<::mslc::Add, false>)                   \
  MSLC_GROUP_OF_VALUE(prefix##_prefix_inclusive_product,                                \
                      ::mslc::Group<width>::scan<::mslc::Multiply, true>)               \
  MSLC_GROUP_OF_VALUE(prefix##_prefix_exclusive_product,                                \
                      ::mslc::Group<width>::scan<::mslc::Multiply, false>)              \
  MSLC_INLINE prefix##_vote prefix##_active_threads_mask(MSLC_SITE) {                   \
    return prefix##_vote(::mslc::Group<width>::ballot(true, site));                     \
  }                                                                                     \
  MSLC_INLINE prefix##_vote prefix##_ballot(bool value, MSLC_SITE) {                    \
    return prefix##_vote(::mslc::Group<width>::ballot(value, site));                    \
  }                                                                                     \
  MSLC_INLINE bool prefix##_any(bool value, MSLC_SITE) {                                \
    return ::mslc::Group<width>::any(value, site);                                      \
  }                                                                                     \
  MSLC_INLINE bool prefix##_all(bool value, MSLC_SITE) {                                \
    return !::mslc::Group<width>::any(!value, site);                                    \
  }                                                                                     \
  MSLC_INLINE bool prefix##_is_first(MSLC_SITE) {                                       \
    return ::mslc::Group<width>::first_active(site) == ::mslc::lane_id();               \
  }                                                                                     \
  /* Helper threads exist in fragment functions only. */                                \
  MSLC_INLINE bool prefix##_is_helper_thread() {                                        \
    return false;                                                                       \
  }
