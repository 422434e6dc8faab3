# The module is written by the build (cmake/BuildInfo.cmake).
MLX_VERSION: str
NANOBIND_TAG: str
COMPILER: str
TARGET: str
BUILD_TYPE: str
METAL: bool
WHY_NO_METALLIB: str
