/*
 * Compiles one kernel of a SPIR-V file with Mesa's compiler for Apple GPUs, and prints what the machine code needs as
 * one line of JSON. AGX_MESA_DEBUG=shaders,internal makes Mesa print the code before that line.
 *
 *    agx_stats FILE.spv ENTRY THREADS_X THREADS_Y THREADS_Z UNIFORMS
 *
 * THREADS is the largest threadgroup; Mesa spills if its registers would not fit. The entry takes no parameters: the
 * kernel's arguments lie in the first UNIFORMS 16-bit uniform registers, which it reads with nir_load_preamble.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agx_compile.h"
#include "agx_nir.h"
#include "compiler/glsl_types.h"
#include "compiler/nir/nir.h"
#include "compiler/nir/nir_builder.h"
#include "compiler/spirv/nir_spirv.h"

#define ALL_MEMORY                                                             \
   (nir_var_shader_temp | nir_var_function_temp | nir_var_mem_shared |         \
    nir_var_mem_global | nir_var_mem_constant)

static uint32_t *
read_words(const char *path, size_t *count)
{
   FILE *file = fopen(path, "rb");
   if (!file)
      return NULL;
   fseek(file, 0, SEEK_END);
   long bytes = ftell(file);
   rewind(file);
   uint32_t *words = malloc(bytes);
   *count = fread(words, 4, bytes / 4, file);
   fclose(file);
   return words;
}

/* The shim numbers reductions itself, because Mesa's numbers change with its version; see shim/agx/target_agx.h. */
static const nir_op reductions[] = {
   nir_op_fadd, nir_op_iadd, nir_op_fmul, nir_op_imul, nir_op_fmax, nir_op_imax, nir_op_umax,
   nir_op_fmin, nir_op_imin, nir_op_umin, nir_op_iand, nir_op_ior,  nir_op_ixor,
};

/* Turns the shim's numbers into Mesa's. A barrier's number tells if it is the whole threadgroup's. */
static bool
translate_numbers(nir_builder *b, nir_intrinsic_instr *intr, void *data)
{
   switch (intr->intrinsic) {
   case nir_intrinsic_reduce:
   case nir_intrinsic_inclusive_scan:
   case nir_intrinsic_exclusive_scan:
      nir_intrinsic_set_reduction_op(intr, reductions[nir_intrinsic_reduction_op(intr)]);
      return true;
   case nir_intrinsic_barrier: {
      bool whole = nir_intrinsic_execution_scope(intr);
      mesa_scope scope = whole ? SCOPE_WORKGROUP : SCOPE_SUBGROUP;
      nir_intrinsic_set_execution_scope(intr, scope);
      nir_intrinsic_set_memory_scope(intr, scope);
      nir_intrinsic_set_memory_semantics(intr, NIR_MEMORY_ACQ_REL);
      nir_intrinsic_set_memory_modes(intr, nir_var_mem_shared | nir_var_mem_global);
      return true;
   }
   default:
      return false;
   }
}

/* Mesa has one instruction for a relative shuffle, but uses it for nothing: it makes general shuffles of all of them.
 * This leaves those by a constant distance, which the edited code generator takes; see mesa.patch.
 */
static bool
lower_variable_shuffle(nir_builder *b, nir_intrinsic_instr *intr, void *data)
{
   nir_op op;
   switch (intr->intrinsic) {
   case nir_intrinsic_shuffle_xor:
      op = nir_op_ixor;
      break;
   case nir_intrinsic_shuffle_up:
      op = nir_op_isub;
      break;
   case nir_intrinsic_shuffle_down:
      op = nir_op_iadd;
      break;
   default:
      return false;
   }
   if (nir_src_is_const(intr->src[1]))
      return false;
   b->cursor = nir_before_instr(&intr->instr);
   nir_def *lane = nir_load_subgroup_invocation(b);
   nir_def *source = nir_build_alu2(b, op, lane, intr->src[1].ssa);
   nir_def_replace(&intr->def, nir_shuffle(b, intr->src[0].ssa, source));
   return true;
}

static void
optimize(nir_shader *nir)
{
   bool progress;
   do {
      progress = false;
      NIR_PASS(progress, nir, nir_split_var_copies);
      NIR_PASS(progress, nir, nir_split_struct_vars, nir_var_function_temp);
      NIR_PASS(progress, nir, nir_lower_var_copies);
      NIR_PASS(progress, nir, nir_lower_vars_to_ssa);
      NIR_PASS(progress, nir, nir_copy_prop);
      NIR_PASS(progress, nir, nir_opt_remove_phis);
      NIR_PASS(progress, nir, nir_lower_phis_to_scalar, true);
      NIR_PASS(progress, nir, nir_opt_dce);
      NIR_PASS(progress, nir, nir_opt_dead_cf);
      NIR_PASS(progress, nir, nir_opt_cse);
      NIR_PASS(progress, nir, nir_opt_peephole_select, 64, false, true);
      NIR_PASS(progress, nir, nir_opt_phi_precision);
      NIR_PASS(progress, nir, nir_opt_algebraic);
      NIR_PASS(progress, nir, nir_opt_constant_folding);
      NIR_PASS(progress, nir, nir_opt_deref);
      NIR_PASS(progress, nir, nir_opt_copy_prop_vars);
      NIR_PASS(progress, nir, nir_opt_undef);
      NIR_PASS(progress, nir, nir_lower_undef_to_zero);
      NIR_PASS(progress, nir, nir_opt_shrink_vectors, true);
      NIR_PASS(progress, nir, nir_opt_loop_unroll);
   } while (progress);
}

/* One function, whose variables are registers or explicit memory. The order follows Mesa's own asahi_clc. */
static nir_shader *
read_kernel(const uint32_t *words, size_t count, const char *entry)
{
   const struct spirv_to_nir_options options = {
      .environment = NIR_SPIRV_OPENCL,
      .shared_addr_format = nir_address_format_62bit_generic,
      .global_addr_format = nir_address_format_62bit_generic,
      .temp_addr_format = nir_address_format_62bit_generic,
      .constant_addr_format = nir_address_format_64bit_global,
   };
   nir_shader *nir = spirv_to_nir(words, count, NULL, 0, MESA_SHADER_KERNEL, entry, &options, &agx_nir_options);
   if (!nir)
      return NULL;
   nir_validate_shader(nir, "after spirv_to_nir");

   NIR_PASS(_, nir, nir_lower_system_values);
   NIR_PASS(_, nir, nir_lower_calls_to_builtins);
   NIR_PASS(_, nir, nir_shader_intrinsics_pass, translate_numbers, nir_metadata_all, NULL);
   nir_lower_compute_system_values_options system_values = {.global_id_is_32bit = true};
   NIR_PASS(_, nir, nir_lower_compute_system_values, &system_values);

   NIR_PASS(_, nir, nir_lower_variable_initializers, nir_var_function_temp);
   NIR_PASS(_, nir, nir_lower_returns);
   NIR_PASS(_, nir, nir_inline_functions);
   nir_remove_non_entrypoints(nir);
   NIR_PASS(_, nir, nir_copy_prop);
   NIR_PASS(_, nir, nir_opt_deref);
   nir_lower_constant_to_temp(nir);
   NIR_PASS(_, nir, nir_lower_variable_initializers, ~0);

   /* clang reads and writes vectors of three as four. */
   NIR_PASS(_, nir, nir_lower_vec3_to_vec4, ALL_MEMORY);
   NIR_PASS(_, nir, nir_lower_vars_to_explicit_types,
            nir_var_uniform | (ALL_MEMORY & ~nir_var_mem_constant), glsl_get_cl_type_size_align);
   optimize(nir);
   NIR_PASS(_, nir, nir_remove_dead_variables, nir_var_all, NULL);
   nir->info.shared_size = nir->scratch_size = 0; /* what is left of them is laid out again */
   NIR_PASS(_, nir, nir_lower_vars_to_explicit_types, ALL_MEMORY, glsl_get_cl_type_size_align);
   NIR_PASS(_, nir, nir_lower_memcpy);
   NIR_PASS(_, nir, nir_lower_explicit_io, nir_var_mem_constant, nir_address_format_64bit_global);
   NIR_PASS(_, nir, nir_lower_explicit_io, nir_var_mem_shared, nir_address_format_62bit_generic);
   NIR_PASS(_, nir, nir_lower_convert_alu_types, NULL);
   NIR_PASS(_, nir, nir_opt_if, 0);
   NIR_PASS(_, nir, nir_opt_idiv_const, 16);
   NIR_PASS(_, nir, nir_shader_intrinsics_pass, lower_variable_shuffle, nir_metadata_control_flow, NULL);
   optimize(nir);

   bool progress;
   do {
      progress = false;
      NIR_PASS(progress, nir, nir_opt_loop);
   } while (progress);
   return nir;
}

static void
keep_message(void *text, unsigned *id, enum util_debug_type type, const char *format, va_list arguments)
{
   vsnprintf(text, 512, format, arguments);
}

int
main(int argc, char **argv)
{
   if (argc != 7) {
      fprintf(stderr, "usage: %s FILE.spv ENTRY THREADS_X THREADS_Y THREADS_Z UNIFORMS\n", argv[0]);
      return 2;
   }
   size_t count = 0;
   uint32_t *words = read_words(argv[1], &count);
   if (!words) {
      perror(argv[1]);
      return 2;
   }
   glsl_type_singleton_init_or_ref();
   nir_shader *nir = read_kernel(words, count, argv[2]);
   if (!nir) {
      fprintf(stderr, "%s has no entry '%s' that Mesa can read\n", argv[1], argv[2]);
      return 1;
   }
   nir->info.stage = MESA_SHADER_COMPUTE;
   nir->info.workgroup_size_variable = false;
   for (unsigned i = 0; i < 3; ++i)
      nir->info.workgroup_size[i] = atoi(argv[3 + i]);
   agx_preprocess_nir(nir, NULL);

   /* Mesa links helpers from a library of its own; a kernel calls none of them. */
   const nir_shader *library = nir_shader_clone(NULL, nir);
   char message[512] = "";
   struct util_debug_callback debug = {.debug_message = keep_message, .data = message};
   struct agx_shader_key key = {
      .libagx = library,
      .has_scratch = true,
      .promote_constants = true,
      .reserved_preamble = atoi(argv[6]),
   };
   struct agx_shader_part part;
   agx_compile_shader_nir(nir, &key, &debug, &part);

   const struct agx_shader_info *info = &part.info;
   unsigned threads = agx_occupancy_for_register_count(info->nr_gprs - 1).max_threads;
   printf("{\"interface\": 1, \"half_registers\": %u, \"threads\": %u, \"threadgroup_bytes\": %u, \"uniform_halves\": %u, "
          "\"code_bytes\": %u, \"message\": \"%s\"}\n",
          info->nr_gprs, threads, info->local_size, info->push_count, info->main_size, message);
   glsl_type_singleton_decref();
   return 0;
}
