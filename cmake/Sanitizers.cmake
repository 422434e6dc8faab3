# -DMLX_ANVIL_SANITIZE=ON builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer.
# tools/sanitize.py runs the tests against such a build.
option(MLX_ANVIL_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
set(MLX_ANVIL_SANITIZED_ISAS baseline CACHE STRING
  "Instruction sets that such a build has kernels for, baseline among them: all would take a quarter of an hour to compile")

# Optimising instrumented kernels takes minutes a file. With fused multiply-add all the same (GCC's option; it is what
# the accuracy tests of the kernels count on).
set(MLX_ANVIL_SANITIZER_OPTIMISATION -O1 $<$<CXX_COMPILER_ID:GNU>:-fexpensive-optimizations>)

function(mlx_anvil_sanitize target)
  if(MLX_ANVIL_SANITIZE)
    # Without UBSan's checks of every pointer, which double the time of compilation: AddressSanitizer sees what such a
    # pointer would read or write.
    target_compile_options(${target} PRIVATE
      ${MLX_ANVIL_SANITIZER_OPTIMISATION} -fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow
      -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1)
    target_link_options(${target} PRIVATE -fsanitize=address,undefined)
  endif()
endfunction()

# MLX's headers are a third of the time that host code takes to compile. Not in other builds, which would no longer show that
# a file includes too little.
function(mlx_anvil_precompile_headers target)
  if(MLX_ANVIL_SANITIZE)
    target_precompile_headers(${target} PRIVATE <mlx/mlx.h>)
  endif()
endfunction()
