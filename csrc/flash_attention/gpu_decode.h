// Launches of decode kernels, and of the kernel that combines parts of the keys.
#pragma once

#include "common/launch.h"
#include "flash_attention/gpu.h"
#include "flash_attention/gpu_decode_plan.h"
#include "flash_attention/gpu_params.h"
#include "metal/flash_attention/params.h"

namespace mlx_anvil {

// Attention of up to kDecodeRows queries.
void attention_decode_gpu(const AttentionConfig& config,
                          const AttentionSizes& sizes,
                          const AttentionForwardArrays& arrays,
                          const mx::Stream& stream);

// What a decode of either kind of keys writes, and what its last kernel reads again.
struct DecodeResults {
  mx::array* out;
  mx::array* lse;          // null: not wanted
  const mx::array* sinks;  // null: none
};

// Sets the pages of keys and values, if these are in pages.
void fill_pages(AttentionForwardParams& params, const AttentionInputs& in);

// Plans a call, and sets the parts of the keys.
DecodePlan plan_decode(DecodeKeys kind,
                       const AttentionConfig& config,
                       const mx::array& q,
                       const AttentionSizes& sizes,
                       AttentionForwardParams& params,
                       const mx::Stream& stream);

// Function constants of a decode kernel.
FunctionConstants decode_constants(const AttentionConfig& config,
                                   const AttentionSizes& sizes,
                                   const AttentionForwardParams& params,
                                   const DecodePlan& plan,
                                   bool vectors,
                                   bool stores_lse);

// Index of a function constant, as in metal/flash_attention/decode_row.h.
inline constexpr uint32_t kKeysAreInParts = kFirstOwnConstant;

// The number of keys that at least one query sees.
int64_t visible_keys(const AttentionParams& params);

// Launches a kernel that leaves `params.parts` parts, and then the one that combines these if they
// are several. The request has all but the outputs.
void launch_in_parts(KernelLaunch request,
                     const AttentionConfig& config,
                     const AttentionSizes& sizes,
                     const AttentionForwardParams& params,
                     const DecodeResults& results,
                     const mx::Stream& stream);

// Launches the kernel of the plan, and another if it leaves parts. The request has the inputs and
// the params, which begin with `params`.
void launch_decode(KernelLaunch request,
                   const AttentionConfig& config,
                   const AttentionSizes& sizes,
                   const DecodePlan& plan,
                   const FunctionConstants& constants,
                   const AttentionForwardParams& params,
                   const DecodeResults& results,
                   const mx::Stream& stream);

}  // namespace mlx_anvil
