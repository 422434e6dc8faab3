# -DMLX_ANVIL_SANITIZE=ON builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer.
# tools/sanitize.py runs the tests against such a build.
option(MLX_ANVIL_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)

function(mlx_anvil_sanitize target)
  if(MLX_ANVIL_SANITIZE)
    # -O1: optimising instrumented kernels takes minutes a file. With fused multiply-add all the same (GCC's option; it
    # is what the accuracy tests of the kernels count on).
    target_compile_options(${target} PRIVATE
      -O1 $<$<CXX_COMPILER_ID:GNU>:-fexpensive-optimizations> -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g)
    target_link_options(${target} PRIVATE -fsanitize=address,undefined)
  endif()
endfunction()
