#include "flash_attention/gpu_decode.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "common/integers.h"

namespace mlx_anvil {

namespace {

constexpr int kCombineThreads = 128;  // as in metal/flash_attention/decode_row.h

// Short sequences have fewer parts, which then are no smaller.
constexpr int64_t kLeastKeysOfRaggedPart = 128;

void launch_combine(const AttentionConfig& config,
                    const AttentionSizes& sizes,
                    const AttentionForwardParams& params,
                    const Scratch& partial_out,
                    const Scratch& partial_sums,
                    const DecodeResults& results,
                    const mx::Stream& stream) {
  KernelLaunch request{};
  request.kernel = &attention_kernel(
      {"flash_attention_decode_combine_", dtype_name(*results.out)},
      {{static_cast<uint32_t>(AttentionConstant::kSinks), config.has_sinks},
       {static_cast<uint32_t>(AttentionConstant::kStoresLse), results.lse != nullptr}});
  request.inputs = {partial_out.get(), partial_sums.get(),
                    results.sinks ? results.sinks : partial_sums.get()};
  request.outputs = {results.out, results.lse ? results.lse : results.out};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(sizes.q_heads * sizes.q_len),
                  static_cast<uint32_t>(sizes.batch),
                  static_cast<uint32_t>(ceil_div(sizes.v_head_dim, kCombineThreads))};
  request.threadgroup = {kCombineThreads, 1, 1};
  request.temporaries = {&partial_out, &partial_sums};
  launch(request, stream);
}

}  // namespace

int64_t visible_keys(const AttentionParams& params) {
  const int64_t end =
      std::min<int64_t>(params.kv_len, int64_t{params.q_len} - 1 + params.band_high + 1);
  return std::max<int64_t>(end - std::max(0, params.band_low), 0);
}

void fill_pages(AttentionForwardParams& params, const AttentionInputs& in) {
  if (in.pages) {
    params.page_shift = std::countr_zero(static_cast<uint32_t>(in.k.shape(2)));
    params.pages_per_sequence = in.pages->shape(1);
    params.last_page = in.k.shape(0) - 1;
  }
}

DecodePlan plan_decode(DecodeKeys kind,
                       const AttentionConfig& config,
                       const mx::array& q,
                       const AttentionSizes& sizes,
                       AttentionForwardParams& params,
                       const mx::Stream& stream) {
  if (config.row_invariant) {
    const DecodePlan plan = row_invariant_plan(kind, dtype_name(q), sizes);
    params.parts = static_cast<int32_t>(plan.parts);
    params.keys_per_part = kKeysOfFixedPart;
    return plan;
  }
  const int64_t keys = visible_keys(params.common);
  const DeviceTraits traits = device_traits(stream.device);
  DecodePlan plan = decode_plan(kind, dtype_name(q), sizes, keys, traits);
  if (config.is_ragged && sizes.batch > 1) {
    plan.parts = std::max(plan.parts, parts_of_unlike_lengths(plan, sizes, keys, traits));
  }
  params.parts = static_cast<int32_t>(plan.parts);
  const int64_t keys_per_part = ceil_div(keys, plan.parts);
  params.keys_per_part = static_cast<int32_t>(
      config.is_ragged ? std::min(keys_per_part, kLeastKeysOfRaggedPart) : keys_per_part);
  return plan;
}

FunctionConstants decode_constants(const AttentionConfig& config,
                                   const AttentionSizes& sizes,
                                   const AttentionForwardParams& params,
                                   const DecodePlan& plan,
                                   bool vectors,
                                   bool stores_lse) {
  const bool in_parts = plan.parts > 1;
  FunctionConstants constants = attention_constants(config, vectors, !in_parts && stores_lse);
  add_ragged_constants(constants, config);
  constants.add({{static_cast<uint32_t>(AttentionConstant::kPaged), config.is_paged}});
  constants.add({{kKeysAreInParts, in_parts}});
  if (plan.tile->matrix_units) {
    constants.add({{static_cast<uint32_t>(AttentionConstant::kPagesHoldEights),
                    config.is_paged && params.page_shift >= 3}});
  } else {
    constants.add(
        {{static_cast<uint32_t>(AttentionConstant::kPartsAreFixed), config.row_invariant}});
    constants.add({heads_fill_tile(sizes, plan.tile->head_dim, plan.tile->head_dim)});
  }
  return constants;
}

void launch_in_parts(KernelLaunch request,
                     const AttentionConfig& config,
                     const AttentionSizes& sizes,
                     const AttentionForwardParams& params,
                     const DecodeResults& results,
                     const mx::Stream& stream) {
  if (params.parts == 1) {
    request.outputs = {results.out, results.lse ? results.lse : results.out};
    launch(request, stream);
    return;
  }
  const int all_rows = static_cast<int>(sizes.batch * sizes.q_heads * sizes.q_len);
  Scratch partial_out({all_rows, params.parts, static_cast<int>(sizes.v_head_dim)}, mx::float32,
                      stream);
  Scratch partial_sums({all_rows, params.parts, 2}, mx::float32, stream);
  request.outputs = {partial_out.get(), partial_sums.get()};
  request.temporaries = {&partial_out, &partial_sums};
  launch(request, stream);
  launch_combine(config, sizes, params, partial_out, partial_sums, results, stream);
}

void launch_decode(KernelLaunch request,
                   const AttentionConfig& config,
                   const AttentionSizes& sizes,
                   const DecodePlan& plan,
                   const FunctionConstants& constants,
                   const AttentionForwardParams& params,
                   const DecodeResults& results,
                   const mx::Stream& stream) {
  const DecodeTile& tile = *plan.tile;
  request.kernel = &attention_kernel({"flash_attention_", tile.pass, "_", dtype_name(*results.out),
                                      "_d", tile.head_dim, "r", tile.rows},
                                     constants);
  request.grid = {static_cast<uint32_t>(plan.parts),
                  static_cast<uint32_t>(sizes.kv_heads * plan.row_blocks),
                  static_cast<uint32_t>(sizes.batch)};
  request.threadgroup = {static_cast<uint32_t>(tile.threads), 1, 1};
  launch_in_parts(std::move(request), config, sizes, params, results, stream);
}

void attention_decode_gpu(const AttentionConfig& config,
                          const AttentionSizes& sizes,
                          const AttentionForwardArrays& arrays,
                          const mx::Stream& stream) {
  AttentionForwardParams params{};
  params.common = attention_params(config, sizes, arrays.in);
  copy_strides(params.out_strides, *arrays.out);
  fill_pages(params, arrays.in);
  const DecodePlan plan =
      plan_decode(DecodeKeys::kPlain, config, arrays.in.q, sizes, params, stream);

  KernelLaunch request{};
  request.inputs = attention_inputs(arrays.in);
  request.inputs.push_back(&sequences_or_q(arrays.in));
  request.inputs.push_back(&pages_or_q(arrays.in));
  request.params = &params;
  request.params_size = sizeof(params);
  const bool vectors = moves_vectors(arrays.in, {arrays.out});
  launch_decode(request, config, sizes, plan,
                decode_constants(config, sizes, params, plan, vectors, arrays.lse != nullptr),
                params, {arrays.out, arrays.lse, arrays.in.sinks ? &*arrays.in.sinks : nullptr},
                stream);
}

}  // namespace mlx_anvil
