# -DMLX_ANVIL_SANITIZE=ON builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer.
# tools/sanitize.py runs the tests against such a build.
option(MLX_ANVIL_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)

# Optimising instrumented kernels takes minutes per file. GCC's option enables fused multiply-add at -O1, which the
# accuracy tests of the kernels require.
set(MLX_ANVIL_SANITIZER_OPTIMISATION -O1 $<$<CXX_COMPILER_ID:GNU>:-fexpensive-optimizations>)

function(mlx_anvil_sanitize target)
  if(MLX_ANVIL_SANITIZE)
    # UBSan's pointer checks would double the compile time, and AddressSanitizer already checks what a bad pointer reads
    # or writes.
    target_compile_options(${target} PRIVATE
      ${MLX_ANVIL_SANITIZER_OPTIMISATION} -fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow
      -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1)
    target_link_options(${target} PRIVATE -fsanitize=address,undefined)
  endif()
endfunction()
