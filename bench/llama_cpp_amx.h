// Three of GCC 12's intrinsics for tiles do not say that they read memory. llama.cpp built with
// them ends with a segmentation fault in its first product. To build it with these instead:
//
//   CXXFLAGS="-include $PWD/bench/llama_cpp_amx.h" pip install --no-cache-dir llama-cpp-python
#pragma once

#if defined(__AMX_TILE__) && defined(__cplusplus)
#include <immintrin.h>

inline void load_tile_config(const void* config) {
  asm volatile("ldtilecfg %0" : : "m"(*static_cast<const char (*)[64]>(config)));
}
#undef _tile_loadconfig
#define _tile_loadconfig(config) load_tile_config(config)

// `tile` may be a macro, which is replaced before it becomes text.
#define LOAD_TILE(instruction, tile, from, row_bytes)                                   \
  asm volatile(instruction " (%0,%1,1), %%tmm" #tile                                    \
               :                                                                        \
               : "r"(static_cast<const void*>(from)), "r"(static_cast<long>(row_bytes)) \
               : "memory")
#undef _tile_loadd
#define _tile_loadd(tile, from, row_bytes) LOAD_TILE("tileloadd", tile, from, row_bytes)
#undef _tile_stream_loadd
#define _tile_stream_loadd(tile, from, row_bytes) LOAD_TILE("tileloaddt1", tile, from, row_bytes)
#endif
