# Finds Python, and through it the matching MLX and nanobind.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
mlx_anvil_require_python()

# Sets `output` to what a package of Python prints, or to "" without it.
function(mlx_anvil_ask_package output)
  execute_process(COMMAND ${Python_EXECUTABLE} -m ${ARGN}
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    set(text "")
  endif()
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

if(NOT nanobind_ROOT)
  mlx_anvil_ask_package(nanobind_ROOT nanobind --cmake_dir)
endif()
if(nanobind_ROOT)
  find_package(nanobind CONFIG REQUIRED)
endif()
mlx_anvil_require_version(nanobind "${nanobind_VERSION}")

if(NOT MLX_ROOT)
  mlx_anvil_ask_package(MLX_ROOT mlx --cmake-dir)
endif()
if(MLX_ROOT)
  find_package(MLX CONFIG REQUIRED)
endif()
mlx_anvil_require_version(mlx "${MLX_VERSION}")
if(CMAKE_CROSSCOMPILING AND APPLE)
  # MLX's targets refer to Apple's frameworks by a path inside Xcode. libmlx.dylib links them itself.
  set_target_properties(mlx PROPERTIES INTERFACE_LINK_LIBRARIES "")
endif()
