// Maps hardware threads to the lanes of a SIMD group.
//
// A lane of Metal's 8x8 matrix holds two elements, and so does a thread of mma.sync's fragment, but
// at another position. In a file that uses matrices (MSLC_PERMUTED_LANES), the lane bits are
// renumbered to make both layouts the same, so fragments need no data exchange. The renumbering
// stays inside a SIMD group, which must be full.
#pragma once

namespace mslc {

MSLC_INLINE uint hardware_lane() {
  return static_cast<uint>(__nvvm_read_ptx_sreg_laneid());
}

#ifdef MSLC_PERMUTED_LANES
constexpr bool lanes_are_permuted = true;
#else
constexpr bool lanes_are_permuted = false;
#endif

// Metal's lane bits 4, 3, 2, 1, 0 are the hardware's 4, 1, 3, 2, 0. The map is linear over XOR.
MSLC_INLINE constexpr uint lane_of_hardware(uint h) {
  if constexpr (!lanes_are_permuted) return h;
  return (h & 0x11) | (h & 2) << 2 | (h & 0xc) >> 1;
}
MSLC_INLINE constexpr uint hardware_of_lane(uint a) {
  if constexpr (!lanes_are_permuted) return a;
  return (a & 0x11) | (a & 8) >> 2 | (a & 6) << 1;
}

MSLC_INLINE uint lane_id() {
  return lane_of_hardware(hardware_lane());
}

}  // namespace mslc
