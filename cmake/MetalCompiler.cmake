# Tests Apple's Metal compiler by compiling and linking a kernel. No cheaper test works: the Command Line Tools have no
# Metal compiler, and without Xcode's Metal toolchain, xcrun finds a compiler that cannot compile.
set(MLX_ANVIL_METAL_OPTIONS -std=metal3.1)

# Sets `why_not` to one line that describes the failed step, or to "" if all steps work.
function(mlx_anvil_probe_metal why_not)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/metal_probe)
  set(kernel ${folder}/probe)
  file(REMOVE_RECURSE ${folder})
  file(WRITE ${kernel}.metal [=[
#include <metal_stdlib>
kernel void probe(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = metal::exp(x[i]); }
]=])
  set(metal xcrun -sdk macosx metal)
  set(version ${metal} --version)
  set(compile ${metal} ${MLX_ANVIL_METAL_OPTIONS} -c ${kernel}.metal -o ${kernel}.air)
  set(link ${metal} ${kernel}.air -o ${kernel}.metallib)
  foreach(step IN ITEMS version compile link)
    execute_process(COMMAND ${${step}} RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE errors TIMEOUT 300)
    if(NOT result STREQUAL "0")
      string(STRIP "${errors}" errors)
      string(REGEX REPLACE "\n.*" "" first "${errors}")
      if(first STREQUAL "")
        set(first "${result}")
      endif()
      set(${why_not} "xcrun -sdk macosx metal does not work (${step}): ${first}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  if(NOT EXISTS ${kernel}.metallib)
    set(${why_not} "xcrun -sdk macosx metal wrote no metallib" PARENT_SCOPE)
    return()
  endif()
  set(${why_not} "" PARENT_SCOPE)
endfunction()
