// The layout of Apple's 8x8 matrices, for targets that are free to choose: a lane holds two
// neighbouring elements of one row. PTX has a layout of its own (ptx/matrix_ptx.h).
#pragma once

namespace mslc {

// Row and column of a lane's first element.
MSLC_INLINE constexpr uint matrix_row(uint lane) {
  return (lane / 4 & 4) + lane / 2 % 4;
}
MSLC_INLINE constexpr uint matrix_column(uint lane) {
  return (lane / 4 & 2) * 2 + lane % 2 * 2;
}

template <class T>
constexpr bool transposes_in_registers = false;
template <class T>
MSLC_INLINE bool load_rows(metal::vec<T, 2>&, const threadgroup T*, ulong, bool) {
  return false;
}

}  // namespace mslc
