// Metal's positions and sizes, from those that a GPU target defines.
#pragma once

namespace mslc {

// Names match the attributes.
namespace builtin {
MSLC_INLINE Size3 single(uint value) {
  return {value, 0, 0};
}
MSLC_INLINE Size3 product(Size3 a, Size3 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z};
}
MSLC_INLINE uint volume(Size3 size) {
  return size.x * size.y * size.z;
}
MSLC_INLINE Size3 thread_position_in_grid() {
  const Size3 base = product(block_position(), block_size()), position = thread_position();
  return {base.x + position.x, base.y + position.y, base.z + position.z};
}
MSLC_INLINE Size3 threads_per_grid() {
  return product(grid_blocks(), block_size());
}
MSLC_INLINE Size3 grid_size() {
  return threads_per_grid();
}
MSLC_INLINE Size3 grid_origin() {
  return {0, 0, 0};
}
MSLC_INLINE Size3 thread_position_in_threadgroup() {
  return thread_position();
}
MSLC_INLINE Size3 threads_per_threadgroup() {
  return block_size();
}
// All threadgroups of a launch have the same size.
MSLC_INLINE Size3 dispatch_threads_per_threadgroup() {
  return block_size();
}
MSLC_INLINE Size3 threadgroup_position_in_grid() {
  return block_position();
}
MSLC_INLINE Size3 threadgroups_per_grid() {
  return grid_blocks();
}
MSLC_INLINE Size3 thread_index_in_threadgroup() {
  return single(thread_index());
}
MSLC_INLINE Size3 thread_index_in_simdgroup() {
  return single(lane_id());
}
MSLC_INLINE Size3 simdgroup_index_in_threadgroup() {
  return single(thread_index() / 32);
}
MSLC_INLINE Size3 thread_index_in_quadgroup() {
  return single(lane_id() % 4);
}
MSLC_INLINE Size3 quadgroup_index_in_threadgroup() {
  return single(thread_index() / 4);
}
MSLC_INLINE Size3 threads_per_simdgroup() {
  return single(32);
}
MSLC_INLINE Size3 thread_execution_width() {
  return single(32);
}
MSLC_INLINE Size3 simdgroups_per_threadgroup() {
  return single((volume(block_size()) + 31) / 32);
}
MSLC_INLINE Size3 dispatch_simdgroups_per_threadgroup() {
  return simdgroups_per_threadgroup();
}
MSLC_INLINE Size3 quadgroups_per_threadgroup() {
  return single((volume(block_size()) + 3) / 4);
}
MSLC_INLINE Size3 dispatch_quadgroups_per_threadgroup() {
  return quadgroups_per_threadgroup();
}
}  // namespace builtin

}  // namespace mslc
