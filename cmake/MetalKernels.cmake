# Metal kernels are shipped twice: as a metallib, built on a Mac with Apple's compiler, and as source inside the
# extension. Without a metallib, MLX compiles the source at run time, kernel by kernel. The simulator and the tests use
# the source too. For MLX's CUDA backend, the kernels are compiled to PTX.
include(MetalCompiler)  # mlx_anvil_probe_metal, MLX_ANVIL_METAL_OPTIONS

file(GLOB MLX_ANVIL_METAL_HEADERS CONFIGURE_DEPENDS metal/*/*.h)
file(GLOB MLX_ANVIL_METAL_SOURCES CONFIGURE_DEPENDS metal/*/*.metal)
# A file that is added or removed makes the output old, whatever its own date.
set(MLX_ANVIL_METAL_LIST ${CMAKE_CURRENT_BINARY_DIR}/metal_files.txt)
file(CONFIGURE OUTPUT ${MLX_ANVIL_METAL_LIST} CONTENT "${MLX_ANVIL_METAL_HEADERS};${MLX_ANVIL_METAL_SOURCES}\n" @ONLY)

function(mlx_anvil_embed_metal target)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/metal_source.cpp)
  set(script ${CMAKE_CURRENT_SOURCE_DIR}/tools/embed_metal.py)
  set(visible "")
  if(MLX_BUILD_METAL)
    set(visible --apple)  # leaves out the kernels for other GPUs
  endif()
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${Python_EXECUTABLE} ${script} --root ${CMAKE_CURRENT_SOURCE_DIR} --output ${output}
            --compiler ${CMAKE_CXX_COMPILER} ${visible}
    DEPENDS ${script} ${MLX_ANVIL_METAL_LIST} ${MLX_ANVIL_METAL_SOURCES} ${MLX_ANVIL_METAL_HEADERS}
    COMMENT "Embedding Metal kernels"
    VERBATIM)
  target_sources(${target} PRIVATE ${output})
endfunction()

set(MLX_ANVIL_METALLIB AUTO CACHE STRING "Compile the kernels to a metallib: AUTO (where Apple's compiler works), ON, OFF")
set_property(CACHE MLX_ANVIL_METALLIB PROPERTY STRINGS AUTO ON OFF)

# Builds and installs the metallib, or sets MLX_ANVIL_WHY_NO_METALLIB to one line and prints it.
function(mlx_anvil_add_metallib target)
  set(why "")
  if(CMAKE_CROSSCOMPILING)
    set(why "built on another system")
  elseif(MLX_ANVIL_METALLIB STREQUAL "AUTO" OR MLX_ANVIL_METALLIB)
    mlx_anvil_probe_metal(why)
  else()
    set(why "MLX_ANVIL_METALLIB is OFF")
  endif()
  set(MLX_ANVIL_WHY_NO_METALLIB "${why}" PARENT_SCOPE)
  if(NOT why STREQUAL "")
    set(advice "for a metallib, install Xcode, run `xcodebuild -downloadComponent MetalToolchain`, and install this package again")
    if(MLX_ANVIL_METALLIB STREQUAL "AUTO" OR NOT MLX_ANVIL_METALLIB)
      message(STATUS "Metal kernels are shipped as source, which MLX compiles at their first launch: ${why}; ${advice}")
    else()
      message(FATAL_ERROR "MLX_ANVIL_METALLIB is ${MLX_ANVIL_METALLIB}, and ${why}; ${advice}")
    endif()
    return()
  endif()
  mlx_build_metallib(
    TARGET mlx_anvil_metallib
    TITLE mlx_anvil
    SOURCES ${MLX_ANVIL_METAL_SOURCES}
    INCLUDE_DIRS ${CMAKE_CURRENT_SOURCE_DIR}
    DEPS ${MLX_ANVIL_METAL_HEADERS}
    OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
    COMPILE_OPTIONS ${MLX_ANVIL_METAL_OPTIONS})
  add_dependencies(${target} mlx_anvil_metallib)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/mlx_anvil.metallib DESTINATION mlx_anvil)
endfunction()

# Needs mslc's compiler (pip install ziglang) and adds 3 MB to the package. Meant for wheels that support CUDA.
option(MLX_ANVIL_PTX "Compile the kernels to PTX for MLX's CUDA backend" OFF)
# Needs ptxas as well (pip install nvidia-cuda-nvcc) and adds 2 MB.
option(MLX_ANVIL_CUBIN "Assemble the kernels of tools/cubins.txt for some architectures; with MLX_ANVIL_PTX" OFF)

function(mlx_anvil_add_ptx target)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/ptx)
  set(script ${CMAKE_CURRENT_SOURCE_DIR}/tools/build_ptx.py)
  set(format ${CMAKE_CURRENT_SOURCE_DIR}/python/mlx_anvil/_kernel_files.py)
  file(GLOB_RECURSE compiler CONFIGURE_DEPENDS python/mlx_anvil/mslc/*.py python/mlx_anvil/mslc/shim/*.h)
  add_custom_command(
    OUTPUT ${output}/built
    COMMAND ${Python_EXECUTABLE} ${script} --root ${CMAKE_CURRENT_SOURCE_DIR} --output ${output}
    COMMAND ${CMAKE_COMMAND} -E touch ${output}/built
    DEPENDS ${script} ${format} ${compiler} ${MLX_ANVIL_METAL_SOURCES} ${MLX_ANVIL_METAL_HEADERS}
    COMMENT "Compiling Metal kernels to PTX"
    VERBATIM)
  add_custom_target(mlx_anvil_ptx DEPENDS ${output}/built)
  add_dependencies(${target} mlx_anvil_ptx)
  install(DIRECTORY ${output} DESTINATION mlx_anvil FILES_MATCHING PATTERN "*.ptx.xz")
endfunction()

# Call after mlx_anvil_add_ptx, whose output it assembles.
function(mlx_anvil_add_cubins target)
  set(ptx ${CMAKE_CURRENT_BINARY_DIR}/ptx)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/cubin)
  set(script ${CMAKE_CURRENT_SOURCE_DIR}/tools/build_cubins.py)
  set(list ${CMAKE_CURRENT_SOURCE_DIR}/tools/cubins.txt)
  add_custom_command(
    OUTPUT ${output}/built
    COMMAND ${Python_EXECUTABLE} ${script} --root ${CMAKE_CURRENT_SOURCE_DIR} --ptx ${ptx} --output ${output}
    COMMAND ${CMAKE_COMMAND} -E touch ${output}/built
    DEPENDS ${script} ${list} ${ptx}/built
    COMMENT "Assembling kernels that models launch"
    VERBATIM)
  add_custom_target(mlx_anvil_cubins DEPENDS ${output}/built)
  add_dependencies(mlx_anvil_cubins mlx_anvil_ptx)
  add_dependencies(${target} mlx_anvil_cubins)
  install(DIRECTORY ${output} DESTINATION mlx_anvil FILES_MATCHING PATTERN "*.tar.xz")
endfunction()
