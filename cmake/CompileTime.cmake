# Shortens a build from scratch, as `pip install` makes it: host code spends most of its compile time in MLX's headers
# and in templates of the standard library. A developer's build compiles one file after an edit, and shows a missing
# #include.
if(SKBUILD_STATE STREQUAL "editable")
  set(MLX_ANVIL_UNITY_DEFAULT OFF)
else()
  set(MLX_ANVIL_UNITY_DEFAULT ON)
endif()
option(MLX_ANVIL_UNITY "Compile the host code of a folder as one file" ${MLX_ANVIL_UNITY_DEFAULT})
option(MLX_ANVIL_PRECOMPILE "Precompile headers, and compile nanobind as one file" ${MLX_ANVIL_UNITY_DEFAULT})

# GCC collects garbage from 128 MB on. Templates need several times as much, and collecting takes a tenth of the time.
# A compilation takes up to 1 GB.
add_compile_options("$<$<CXX_COMPILER_ID:GNU>:SHELL:--param=ggc-min-heapsize=1000000 --param=ggc-min-expand=100>")

# For host code: `target`'s own and nanobind's library.
function(mlx_anvil_save_compile_time target)
  if(MLX_ANVIL_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE <mlx/mlx.h> <mlx/primitives.h> <nanobind/nanobind.h>)
    set_target_properties(nanobind-static PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  endif()
  if(NOT MLX_ANVIL_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "/csrc/.*\\.cpp$")
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(GET folder FILENAME group)
    # Many files in several groups: one that takes long is compiled last, while other cores wait.
    math(EXPR part "${count_of_${group}} + 0")
    math(EXPR count_of_${group} "${part} + 1")
    math(EXPR part "${part} / 16")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group}_${part})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

# For kernels, of which each file stays a compilation of its own: what is inlined where is part of their results.
function(mlx_anvil_precompile_kernel_headers library)
  if(MLX_ANVIL_PRECOMPILE)
    target_precompile_headers(${library} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/csrc/common/simd/math.h)
  endif()
endfunction()
