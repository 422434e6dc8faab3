/* Kernels have no textures. Mesa's own file for them needs LLVM, clang and libclc to build. */
#include "compiler/nir/nir.h"

#include "agx_nir.h"

bool
agx_nir_lower_texture_early(nir_shader *shader, bool support_lod_bias)
{
   return false;
}

bool
agx_nir_lower_texture(nir_shader *shader)
{
   return false;
}

bool
agx_nir_lower_multisampled_image_store(nir_shader *shader)
{
   return false;
}
