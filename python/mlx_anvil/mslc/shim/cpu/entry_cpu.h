// Looks up a kernel's arguments on the CPU.
#pragma once

namespace mslc {

// Returns a kernel argument bound by index: a pointer, or a reference to its target.
template <class P>
MSLC_INLINE P from_address(void* address) {
  if constexpr (__is_pointer(P))
    return (P)(ulong)address;
  else
    return *(__remove_reference_t(P)*)(ulong)address;
}

template <int Index>
struct Buffer {
  template <class P>
  static MSLC_INLINE P get(const mslc_thread& self) {
    return from_address<P>(self.group->buffers[Index]);
  }
};

template <int Index>
struct ThreadgroupBuffer {
  template <class P>
  static MSLC_INLINE P get(const mslc_thread& self) {
    return from_address<P>(self.group->threadgroup_buffers[Index]);
  }
};

template <class Value>
struct Builtin {
  template <class P>
  static MSLC_INLINE P get(const mslc_thread& self) {
    return as_parameter<P>(Value::of(self, *self.group));
  }
};

#define MSLC_BUILTIN(name, ...)                                                       \
  struct name : Builtin<name> {                                                       \
    static MSLC_INLINE mslc_size of([[maybe_unused]] const mslc_thread& self,         \
                                    [[maybe_unused]] const mslc_threadgroup& group) { \
      return {__VA_ARGS__};                                                           \
    }                                                                                 \
  };

// Names match the attributes.
namespace builtin {
MSLC_BUILTIN(thread_position_in_grid,
             group.position.x* group.dispatch_size.x + self.position.x,
             group.position.y* group.dispatch_size.y + self.position.y,
             group.position.z* group.dispatch_size.z + self.position.z)
MSLC_BUILTIN(threads_per_grid,
             group.threads_per_grid.x,
             group.threads_per_grid.y,
             group.threads_per_grid.z)
MSLC_BUILTIN(thread_position_in_threadgroup, self.position.x, self.position.y, self.position.z)
MSLC_BUILTIN(threads_per_threadgroup, group.size.x, group.size.y, group.size.z)
MSLC_BUILTIN(dispatch_threads_per_threadgroup,
             group.dispatch_size.x,
             group.dispatch_size.y,
             group.dispatch_size.z)
MSLC_BUILTIN(threadgroup_position_in_grid, group.position.x, group.position.y, group.position.z)
MSLC_BUILTIN(threadgroups_per_grid, group.grid.x, group.grid.y, group.grid.z)
MSLC_BUILTIN(grid_size,
             group.threads_per_grid.x,
             group.threads_per_grid.y,
             group.threads_per_grid.z)
MSLC_BUILTIN(grid_origin, 0, 0, 0)
MSLC_BUILTIN(thread_index_in_threadgroup, self.index, 0, 0)
MSLC_BUILTIN(thread_index_in_simdgroup, self.index % 32, 0, 0)
MSLC_BUILTIN(simdgroup_index_in_threadgroup, self.index / 32, 0, 0)
MSLC_BUILTIN(thread_index_in_quadgroup, self.index % 4, 0, 0)
MSLC_BUILTIN(quadgroup_index_in_threadgroup, self.index / 4, 0, 0)
MSLC_BUILTIN(threads_per_simdgroup, 32, 0, 0)
MSLC_BUILTIN(thread_execution_width, 32, 0, 0)
MSLC_BUILTIN(simdgroups_per_threadgroup, group.simdgroups, 0, 0)
MSLC_BUILTIN(dispatch_simdgroups_per_threadgroup,
             (group.dispatch_size.x * group.dispatch_size.y * group.dispatch_size.z + 31) / 32,
             0,
             0)
MSLC_BUILTIN(quadgroups_per_threadgroup, (group.size.x * group.size.y * group.size.z + 3) / 4, 0, 0)
MSLC_BUILTIN(dispatch_quadgroups_per_threadgroup,
             (group.dispatch_size.x * group.dispatch_size.y * group.dispatch_size.z + 3) / 4,
             0,
             0)
}  // namespace builtin
#undef MSLC_BUILTIN

template <class... Parameter>
struct Entry {
  template <class... P>
  static MSLC_INLINE void run(void (*kernel)(P...), const mslc_thread& self) {
    static_assert(sizeof...(P) == sizeof...(Parameter));
    kernel(Parameter::template get<P>(self)...);
  }
};

}  // namespace mslc
