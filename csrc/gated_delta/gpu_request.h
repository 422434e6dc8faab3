// What launches of the Metal kernels of gated_delta and ssd_scan have in common.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "common/errors.h"
#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "gated_delta/primitive.h"
#include "metal/gated_delta/params.h"
#include "metal/gated_delta/tiles.h"

namespace mlx_anvil {

// Indices as in metal/gated_delta/state.h, chunk.h, forward.metal and
// chunk_prepare.metal.
enum DeltaConstant : uint32_t {
  kRowsAreAligned,
  kColumnsAreFull,
  kHasState,
  kHasLengths,
  kReturnsStates,
  kNormalizes,
  kGIsFloat32,
  kBetaIsFloat32,
  kGIsPerChannel,
  kKeepsStates,
  kCorrects,
  kHasSkip,
  kIsGated,
  kKeysAreVectors,
  kValuesAreVectors,
  kKeepsProducts,
  kTakesOneStep,
  kRowsAreFull,
};

inline constexpr int64_t kMostBatches = 65535;  // limit of a grid's z dimension
inline constexpr int64_t kLeastChunk = 16;      // steps

struct DeltaTile {
  int key_dim, lanes, backward_lanes, backward_simdgroups;

  int64_t rows() const { return kDeltaSimdgroups * (32 / lanes); }
  int64_t backward_rows() const { return backward_simdgroups * (32 / backward_lanes); }
};

inline const DeltaTile& tile_of(int64_t key_dim) {
#define TILE(key_dim, lanes, backward_lanes, simdgroups) \
  {key_dim, lanes, backward_lanes, simdgroups},
  static constexpr DeltaTile kTiles[] = {MLX_ANVIL_DELTA_TILES(TILE)};
#undef TILE
  const auto found = std::find_if(std::begin(kTiles), std::end(kTiles),
                                  [&](const DeltaTile& tile) { return key_dim <= tile.key_dim; });
  if (found == std::end(kTiles)) {
    throw_internal_error(kGatedDelta, "no kernel for this key dim.");
  }
  return *found;
}

// Steps of a chunk: the states at the ends of chunks and those of one chunk take the least memory
// together if there are as many of both.
inline int64_t chunk_of(int64_t length) {
  int64_t chunk = kLeastChunk;
  while (chunk * chunk < length) {
    chunk *= 2;
  }
  return chunk;
}

struct DeltaRequest {
  const GatedDeltaConfig& config;
  const GatedDeltaInputs& in;
  const mx::Stream& stream;
  const DeltaSizes sizes = sizes_of(in);
  const DeltaTile& tile = tile_of(sizes.key_dim);

  GatedDeltaParams params() const {
    GatedDeltaParams params{};
    const auto copy = [](const mx::array& x, int64_t* to) {
      std::copy_n(x.strides().begin(), 3, to);
    };
    copy(in.q, params.q_strides);
    copy(in.k, params.k_strides);
    copy(in.v, params.v_strides);
    copy(in.g, params.g_strides);
    copy(in.beta, params.beta_strides);
    if (in.skip) {
      copy(*in.skip, params.skip_strides);
    }
    if (in.gate) {
      copy(*in.gate, params.gate_strides);
    }
    params.batch = static_cast<int32_t>(sizes.batch);
    params.length = static_cast<int32_t>(sizes.length);
    params.key_heads = static_cast<int32_t>(sizes.key_heads);
    params.value_heads = static_cast<int32_t>(sizes.value_heads);
    params.group = static_cast<int32_t>(sizes.group());
    params.key_dim = static_cast<int32_t>(sizes.key_dim);
    params.value_dim = static_cast<int32_t>(sizes.value_dim);
    params.positions = static_cast<int32_t>(sizes.positions);
    params.positions_step = in.positions && in.positions->shape(0) > 1 ? params.positions : 0;
    params.steps = params.length;
    params.chunk = static_cast<int32_t>(chunk_of(sizes.length));
    params.blocks = static_cast<int32_t>(ceil_div(sizes.value_dim, tile.backward_rows()));
    params.eps = config.eps;
    params.q_scale = config.q_scale;
    return params;
  }

  // `states`: further arrays of states.
  FunctionConstants constants(std::initializer_list<const mx::array*> states) const {
    const auto is_aligned = [](const mx::array& x) {
      return rows_are_vectors({&x}, static_cast<int>(4 * x.itemsize()));
    };
    const bool per_channel = sizes.is_per_channel;
    const bool aligned = is_aligned(in.q) && is_aligned(in.k) &&
                         (!per_channel || is_aligned(in.g)) &&
                         (!in.state || is_aligned(*in.state)) &&
                         std::all_of(states.begin(), states.end(),
                                     [&](const mx::array* x) { return is_aligned(*x); });
    return {{kRowsAreAligned, aligned},
            {kColumnsAreFull, sizes.key_dim == tile.key_dim},
            {kHasState, config.has_state},
            {kHasLengths, config.has_lengths},
            {kReturnsStates, config.returns_states},
            {kNormalizes, config.normalizes},
            {kGIsFloat32, in.g.dtype() == mx::float32},
            {kBetaIsFloat32, in.beta.dtype() == mx::float32},
            {kGIsPerChannel, per_channel},
            {kCorrects, config.corrects},
            {kHasSkip, config.has_skip},
            {kIsGated, config.has_gate}};
  }

  // Binds q in place of an absent array.
  const mx::array* or_q(const std::optional<mx::array>& x) const { return x ? &*x : &in.q; }

  KernelInputs operands() const {
    return {&in.q,
            &in.k,
            &in.v,
            &in.g,
            &in.beta,
            or_q(in.state),
            or_q(in.lengths),
            or_q(in.positions),
            or_q(in.skip),
            or_q(in.gate)};
  }

  Extent grid(int64_t rows) const {
    return {static_cast<uint32_t>(ceil_div(sizes.value_dim, rows)),
            static_cast<uint32_t>(sizes.value_heads), batches()};
  }
  uint32_t batches() const { return static_cast<uint32_t>(std::min(sizes.batch, kMostBatches)); }

  KernelLaunch launch_of(const char* variant,
                         const FunctionConstants& constants,
                         const GatedDeltaParams& params) const {
    KernelLaunch request{};
    request.kernel = &kernel_named(
        kGatedDelta, {"gated_delta_", variant, "_", dtype_name(in.q), "_k", tile.key_dim},
        constants);
    request.params = &params;
    request.params_size = sizeof(params);
    return request;
  }

  // Numbers of a part (metal/gated_delta/parts.h).
  int64_t part_size() const {
    return (sizes.is_per_channel ? 3 : 2) * sizes.key_dim + kDeltaPartNumbers;
  }

  // Adds up the parts of the gradients of q, k, g and beta.
  void sum(const GatedDeltaParams& params, const Scratch& parts, Arrays& outputs) const {
    KernelLaunch sum{};
    sum.kernel = &kernel_named(kGatedDelta, {"gated_delta_sum_", dtype_name(in.q)},
                               {{kNormalizes, config.normalizes},
                                {kGIsPerChannel, sizes.is_per_channel},
                                {kHasSkip, config.has_skip},
                                {kKeysAreVectors, rows_are_vectors({&in.q, &in.k})}});
    sum.inputs = {&in.q, &in.k, parts.get()};
    sum.outputs = {&outputs[0], &outputs[1], &outputs[3], &outputs[4],
                   &outputs[config.has_skip ? config.skip_at() : 4]};
    sum.params = &params;
    sum.params_size = sizeof(params);
    sum.grid = {static_cast<uint32_t>(
                    ceil_div(params.steps * sizes.key_heads, int64_t{kDeltaSumSimdgroups})),
                1, batches()};
    sum.threadgroup = {32 * kDeltaSumSimdgroups, 1, 1};
    sum.temporaries = {&parts};
    launch(sum, stream);
  }

  void forward(const GatedDeltaParams& params,
               FunctionConstants constants,
               bool keeps_states,
               const KernelOutputs& outputs,
               const Scratch* kept = nullptr) const {
    constants.add({{kKeepsStates, keeps_states},
                   {kRowsAreFull, sizes.value_dim % tile.rows() == 0},
                   {kTakesOneStep, params.steps == 1 && sizes.batch == batches()}});
    KernelLaunch request = launch_of("forward", constants, params);
    request.inputs = operands();
    request.outputs = outputs;
    request.grid = grid(tile.rows());
    request.threadgroup = {32 * kDeltaSimdgroups, 1, 1};
    if (kept) {
      request.temporaries = {kept};
    }
    launch(request, stream);
  }
};

}  // namespace mlx_anvil
