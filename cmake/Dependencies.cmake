# Finds Python, and through it the matching MLX and nanobind.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

if(NOT MLX_ROOT)
  execute_process(COMMAND ${Python_EXECUTABLE} -m mlx --cmake-dir
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE MLX_ROOT COMMAND_ERROR_IS_FATAL ANY)
endif()
find_package(MLX CONFIG REQUIRED)
if(CMAKE_CROSSCOMPILING AND APPLE)
  # MLX's targets refer to Apple's frameworks by a path inside Xcode. libmlx.dylib links them itself.
  set_target_properties(mlx PROPERTIES INTERFACE_LINK_LIBRARIES "")
endif()
