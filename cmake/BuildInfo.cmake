# Records what the extension was built with, for the check on import (python/mlx_anvil/_compat.py) and for `info`. The
# compiler evaluates nanobind's tag, because it depends on the compiler's ABI.
function(mlx_anvil_nanobind_tag output)
  set(probe ${CMAKE_CURRENT_BINARY_DIR}/nanobind_tag.cpp)
  file(WRITE ${probe} "#include \"nb_internals.h\"\nMLX_ANVIL_TAG NB_INTERNALS_KEY\n")
  set(includes ${Python_INCLUDE_DIRS} ${NB_DIR}/include ${NB_DIR}/src ${NB_DIR}/ext/robin_map/include)
  list(TRANSFORM includes PREPEND -I)
  separate_arguments(flags NATIVE_COMMAND "${CMAKE_CXX_FLAGS}")
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} ${flags} -std=c++20 -E -P ${includes} ${probe}
    OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "MLX_ANVIL_TAG[^;]*" tag "${text}")
  string(REGEX REPLACE "MLX_ANVIL_TAG|[\" \n]" "" tag "${tag}")
  if(NOT tag MATCHES "_v[0-9]+")
    message(FATAL_ERROR "cannot read nanobind's ABI tag; got '${tag}'")
  endif()
  set(${output} ${tag} PARENT_SCOPE)
endfunction()

function(mlx_anvil_write_build_info file)
  mlx_anvil_nanobind_tag(tag)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "from importlib.metadata import version; print(version('mlx'))"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE mlx_version COMMAND_ERROR_IS_FATAL ANY)
  file(CONFIGURE OUTPUT ${file} @ONLY CONTENT [[
"""Written by the build: what the extension module was compiled with."""

MLX_VERSION = "@mlx_version@"
NANOBIND_TAG = "@tag@"
COMPILER = "@CMAKE_CXX_COMPILER_ID@ @CMAKE_CXX_COMPILER_VERSION@"
TARGET = "@CMAKE_SYSTEM_NAME@ @CMAKE_SYSTEM_PROCESSOR@"
BUILD_TYPE = "@CMAKE_BUILD_TYPE@"
METAL = "@MLX_BUILD_METAL@" == "ON"
WHY_NO_METALLIB = r"""@MLX_ANVIL_WHY_NO_METALLIB@"""
]])
endfunction()
