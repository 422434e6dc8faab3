# What a build needs, and what to install where something is missing. CMake's own errors name variables instead.

# The oldest compilers that build without warnings. Apple's is the one of Xcode 15.
set(MLX_ANVIL_OLDEST_GNU 12)
set(MLX_ANVIL_OLDEST_Clang 16)
set(MLX_ANVIL_OLDEST_AppleClang 15)

set(MLX_ANVIL_INSTALL_COMPILER "allowed: GCC ${MLX_ANVIL_OLDEST_GNU} or later, Clang ${MLX_ANVIL_OLDEST_Clang} or \
later, Xcode ${MLX_ANVIL_OLDEST_AppleClang} or later.\n\
Debian, Ubuntu:  apt install g++\n\
Fedora:          dnf install gcc-c++\n\
macOS:           xcode-select --install\n\
Another one:     CXX=clang++-19 pip install .")

# To be called before project(), which would stop without this text.
function(mlx_anvil_require_some_compiler)
  if(CMAKE_CXX_COMPILER OR CMAKE_TOOLCHAIN_FILE OR NOT "$ENV{CXX}" STREQUAL "")
    return()
  endif()
  find_program(compiler NAMES c++ g++ clang++ NO_CACHE)
  if(NOT compiler)
    message(FATAL_ERROR "No C++ compiler is installed; ${MLX_ANVIL_INSTALL_COMPILER}")
  endif()
endfunction()

function(mlx_anvil_require_compiler id version)
  if(DEFINED MLX_ANVIL_OLDEST_${id} AND version VERSION_LESS MLX_ANVIL_OLDEST_${id})
    message(FATAL_ERROR "The C++ compiler is ${id} ${version}; ${MLX_ANVIL_INSTALL_COMPILER}")
  endif()
endfunction()

function(mlx_anvil_require_python)
  if(NOT Python_Interpreter_FOUND)
    message(FATAL_ERROR "No Python that can be used is found; allowed: 3.10 or later.")
  endif()
  if(NOT Python_Development.Module_FOUND)
    message(FATAL_ERROR "The headers of Python ${Python_VERSION} (Python.h) are not found for ${Python_EXECUTABLE}.\n\
Debian, Ubuntu:  apt install python3-dev\n\
Fedora:          dnf install python3-devel\n\
A Python of uv, pyenv, conda, Homebrew or python.org has them: delete build/ and use it.")
  endif()
endfunction()

# Sets `version` to the one that pyproject.toml pins `package` to.
function(mlx_anvil_pinned_version version package)
  file(STRINGS ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../pyproject.toml lines REGEX "\"${package}==[0-9.]+")
  list(GET lines 0 line)
  string(REGEX MATCH "==([0-9.]+)" match "${line}")
  set(${version} ${CMAKE_MATCH_1} PARENT_SCOPE)
endfunction()

# `found` is empty if the package is not installed. MLX's C++ interface belongs to one release, and types pass between
# modules of one version of nanobind only. MLX_ANVIL_ANY_MLX=1 in the environment tries others (tools/next_mlx.py).
function(mlx_anvil_require_version package found)
  mlx_anvil_pinned_version(pinned ${package})
  if(package STREQUAL "mlx" AND NOT APPLE)
    set(extra "[cpu]")
  endif()
  set(install "pip install \"${package}${extra}==${pinned}\" for ${Python_EXECUTABLE}, or leave out \
--no-build-isolation, with which pip installs it for the build.")
  if(found STREQUAL "")
    message(FATAL_ERROR "${package} is not installed; ${install}")
  endif()
  if(NOT found STREQUAL pinned AND NOT "$ENV{MLX_ANVIL_ANY_MLX}")
    message(FATAL_ERROR "${package} is ${found}; allowed: ${pinned}, or any with MLX_ANVIL_ANY_MLX=1 in the \
environment. ${install}")
  endif()
endfunction()
