# CPU kernels are compiled once per instruction set, each time into a namespace of its own; csrc/common/isa.h
# chooses among them at run time and has the same list.
set(MLX_ANVIL_KERNEL_FLAGS -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # Scheduling before register allocation interleaves the vectors of a block: 5 to 10% on Zen 4. The warnings are
  # about GCC's own AVX-512 headers.
  list(APPEND MLX_ANVIL_KERNEL_FLAGS -fschedule-insns -fsched-pressure -Wno-maybe-uninitialized -Wno-uninitialized)
endif()

function(mlx_anvil_add_isa target isa)
  cmake_parse_arguments(PARSE_ARGV 2 ARG "" "" "FLAGS;SOURCES")
  set(library ${target}_${isa})
  add_library(${library} OBJECT ${ARG_SOURCES})
  target_include_directories(${library} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/csrc ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_definitions(${library} PRIVATE MLX_ANVIL_ISA_NAMESPACE=isa_${isa})
  target_compile_options(${library} PRIVATE -Wall -Wextra ${MLX_ANVIL_KERNEL_FLAGS} ${ARG_FLAGS})
  mlx_anvil_sanitize_isa(${library} ${isa})
  target_link_libraries(${target} PRIVATE ${library})
endfunction()

function(mlx_anvil_add_cpu_kernels target)
  if(CMAKE_OSX_ARCHITECTURES)
    set(processor ${CMAKE_OSX_ARCHITECTURES})
  else()
    set(processor ${CMAKE_SYSTEM_PROCESSOR})
  endif()
  mlx_anvil_add_isa(${target} baseline SOURCES ${ARGN})
  if(processor MATCHES "x86_64|AMD64")
    mlx_anvil_add_isa(${target} avx2 SOURCES ${ARGN} FLAGS -mavx2 -mfma -mf16c)
    # Vectors of 512 bits are what these kernels are written in; compilers would keep to 256.
    set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512)
    mlx_anvil_add_isa(${target} avx512 SOURCES ${ARGN} FLAGS ${avx512})
    mlx_anvil_add_isa(${target} avx512_bf16 SOURCES ${ARGN} FLAGS ${avx512} -mavx512bf16 -mavx512vnni -mavx512vbmi)
  endif()
endfunction()
