# CPU kernels are compiled once per instruction set, each time into a separate namespace. csrc/common/isa.h has the same
# list and selects one at run time.
set(MLX_ANVIL_KERNEL_OPTIMISATION -O3 CACHE STRING "Optimisation of the CPU kernels; other than -O3 for builds that never run")
set(MLX_ANVIL_KERNEL_FLAGS ${MLX_ANVIL_KERNEL_OPTIMISATION} -ffp-contract=fast -fno-math-errno -fno-trapping-math)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # Scheduling before register allocation interleaves the vectors of a block, which gains 5 to 10% on Zen 4. The
  # disabled warnings come from GCC's AVX-512 headers.
  list(APPEND MLX_ANVIL_KERNEL_FLAGS -fschedule-insns -fsched-pressure -Wno-maybe-uninitialized -Wno-uninitialized)
endif()

# MLX_ANVIL_ISAS says which of them: native, the best of this machine; runnable, those that this machine can run; all; or
# a list of names, with native or else with baseline.
# As a definition, or from the environment, which is remembered: an editable install configures again on import.
if(DEFINED ENV{MLX_ANVIL_ISAS})
  set(MLX_ANVIL_ISAS_REMEMBERED "$ENV{MLX_ANVIL_ISAS}" CACHE INTERNAL "")
endif()
if(NOT DEFINED MLX_ANVIL_ISAS)
  set(MLX_ANVIL_ISAS native)
  if(DEFINED MLX_ANVIL_ISAS_REMEMBERED)
    set(MLX_ANVIL_ISAS "${MLX_ANVIL_ISAS_REMEMBERED}")
  endif()
endif()

# Sets `isa` to the name of this machine's best, by the code that chooses at run time.
function(mlx_anvil_native_isa isa)
  set(root ${CMAKE_CURRENT_SOURCE_DIR})
  try_run(ran compiled
    SOURCES ${root}/cmake/native_isa.cpp ${root}/csrc/common/isa.cpp
    NO_CACHE
    CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${root}/csrc
    COMPILE_DEFINITIONS -DMLX_ANVIL_HAS_BASELINE=1 -DMLX_ANVIL_HAS_AVX2=1 -DMLX_ANVIL_HAS_AVX512=1 -DMLX_ANVIL_HAS_AVX512_BF16=1
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
    COMPILE_OUTPUT_VARIABLE errors RUN_OUTPUT_STDOUT_VARIABLE name)
  if(NOT compiled OR NOT ran EQUAL 0)
    message(FATAL_ERROR "cannot tell this machine's instruction set; MLX_ANVIL_ISAS=all does without: ${errors}")
  endif()
  string(STRIP "${name}" name)
  set(${isa} ${name} PARENT_SCOPE)
endfunction()

function(mlx_anvil_add_isa target isa)
  cmake_parse_arguments(PARSE_ARGV 2 ARG "" "" "FLAGS;SOURCES")
  string(TOUPPER MLX_ANVIL_HAS_${isa} has)
  if(NOT isa IN_LIST isas)
    add_compile_definitions(${has}=0)
    return()
  endif()
  add_compile_definitions(${has}=1)
  set(library ${target}_${isa})
  add_library(${library} OBJECT ${ARG_SOURCES})
  target_include_directories(${library} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/csrc ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_definitions(${library} PRIVATE MLX_ANVIL_ISA_NAMESPACE=isa_${isa})
  target_compile_options(${library} PRIVATE -Wall -Wextra ${MLX_ANVIL_KERNEL_FLAGS} ${ARG_FLAGS})
  mlx_anvil_sanitize(${library})
  mlx_anvil_precompile_kernel_headers(${library})
  target_link_libraries(${target} PRIVATE ${library})
endfunction()

function(mlx_anvil_add_cpu_kernels target)
  if(CMAKE_OSX_ARCHITECTURES)
    set(processor ${CMAKE_OSX_ARCHITECTURES})
  else()
    set(processor ${CMAKE_SYSTEM_PROCESSOR})
  endif()
  set(all baseline)
  if(processor MATCHES "x86_64|AMD64")
    list(APPEND all avx2 avx512 avx512_bf16)
  endif()
  if(MLX_ANVIL_ISAS STREQUAL "all" OR all STREQUAL "baseline" OR CMAKE_CROSSCOMPILING)
    set(isas ${all})
  elseif(MLX_ANVIL_ISAS STREQUAL "native")
    mlx_anvil_native_isa(native)
    set(isas ${native})
  elseif(MLX_ANVIL_ISAS STREQUAL "runnable")  # a machine that runs one runs those before it too
    mlx_anvil_native_isa(native)
    list(FIND all ${native} best)
    math(EXPR count "${best} + 1")
    list(SUBLIST all 0 ${count} isas)
  else()
    set(isas ${MLX_ANVIL_ISAS})
    if(native IN_LIST isas)
      mlx_anvil_native_isa(native)
      list(TRANSFORM isas REPLACE "^native$" ${native})
    else()
      list(PREPEND isas baseline)
    endif()
    foreach(isa IN LISTS isas)
      if(NOT isa IN_LIST all)
        message(FATAL_ERROR "MLX_ANVIL_ISAS has '${isa}'; allowed: native, runnable, all, or some of native;${all}")
      endif()
    endforeach()
  endif()
  list(REMOVE_DUPLICATES isas)
  message(STATUS "CPU kernels for ${isas}")
  mlx_anvil_add_isa(${target} baseline SOURCES ${ARGN})
  if(processor MATCHES "x86_64|AMD64")
    mlx_anvil_add_isa(${target} avx2 SOURCES ${ARGN} FLAGS -mavx2 -mfma -mf16c)
    # The kernels are written for vectors of 512 bits; compilers would use 256 by default.
    set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512)
    mlx_anvil_add_isa(${target} avx512 SOURCES ${ARGN} FLAGS ${avx512})
    mlx_anvil_add_isa(${target} avx512_bf16 SOURCES ${ARGN} FLAGS ${avx512} -mavx512bf16 -mavx512vnni -mavx512vbmi)
  endif()
endfunction()
