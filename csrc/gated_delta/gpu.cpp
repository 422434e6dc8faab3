// Launches the Metal kernels of gated_delta and ssd_scan.
#include "gated_delta/gpu.h"

#include <algorithm>
#include <optional>

#include "gated_delta/gpu_chunk.h"
#include "gated_delta/gpu_request.h"

namespace mlx_anvil {

void gated_delta_gpu(const GatedDeltaConfig& config,
                     const GatedDeltaInputs& in,
                     Arrays& outputs,
                     const mx::Stream& stream) {
  if (outputs[1].size() == 0) {
    return;
  }
  const DeltaRequest request{config, in, stream};
  if (takes_chunks(request)) {
    launch_chunk_forward(request, outputs);
    return;
  }
  mx::array* const states = config.returns_states ? &outputs[2] : &outputs[1];
  request.forward(request.params(), request.constants({&outputs[1], states}),
                  /*keeps_states=*/false, {&outputs[0], &outputs[1], states});
}

// Chunks go backwards. What one needs of the next goes through the gradient of the state; the two
// halves of `parts` alternate, so that a chunk may overwrite no part that is still to be added up.
void gated_delta_backward_gpu(const GatedDeltaConfig& config,
                              const GatedDeltaInputs& in,
                              const Arrays& d_outputs,
                              Arrays& outputs,
                              const mx::Stream& stream) {
  const DeltaRequest request{config, in, stream};
  const DeltaSizes& sizes = request.sizes;
  if (d_outputs[1].size() == 0) {
    return;
  }
  if (takes_chunks(request) && rows_are_vectors({&d_outputs[1]})) {
    launch_chunk_backward(request, d_outputs, outputs);
    return;
  }
  GatedDeltaParams params = request.params();
  const mx::array& d_y = d_outputs[0];
  std::copy_n(d_y.strides().begin(), 3, params.d_y_strides);
  const int64_t chunk = params.chunk, chunks = std::max<int64_t>(1, ceil_div(sizes.length, chunk));
  const auto scratch = [&](int64_t rows, int64_t numbers) {
    return Scratch({static_cast<int>(std::max<int64_t>(1, rows)), static_cast<int>(numbers)},
                   mx::float32, stream);
  };
  const int64_t states = sizes.batch * sizes.value_heads;
  Scratch kept = scratch((chunks - 1) * states, sizes.state());
  Scratch before = scratch(std::min(chunk, sizes.length) * states, sizes.state());
  const int64_t part = request.part_size();
  std::optional<Scratch> parts[2];
  for (int64_t i = 0; i < std::min<int64_t>(2, chunks); ++i) {
    parts[i].emplace(scratch(chunk * states, params.blocks * part));
  }
  std::optional<Scratch> unwanted;
  if (!config.has_state) {
    unwanted.emplace(scratch(states, sizes.state()));
  }
  mx::array* const d_state = config.has_state ? &outputs[config.kState] : unwanted->get();

  const FunctionConstants constants = request.constants(
      {&d_outputs[1], d_outputs.size() > 2 ? &d_outputs[2] : &d_outputs[1], d_state});
  if (chunks > 1) {
    params.steps = static_cast<int32_t>((chunks - 1) * chunk);
    request.forward(params, constants, /*keeps_states=*/true, {&outputs[2], kept.get(), kept.get()},
                    &kept);
  }
  for (int64_t i = chunks - 1; i >= 0; --i) {
    const Scratch& own_parts = *parts[i % 2];
    params.first = static_cast<int32_t>(i * chunk);
    params.steps = static_cast<int32_t>(std::min(chunk, sizes.length - i * chunk));
    params.is_last = i == chunks - 1;
    KernelLaunch back = request.launch_of("backward", constants, params);
    back.inputs = request.operands();
    back.inputs.append({kept.get(), &d_y, &d_outputs[1],
                        d_outputs.size() > 2 ? &d_outputs[2] : &d_outputs[1],
                        params.is_last ? &d_outputs[1] : d_state});
    back.outputs = {before.get(), const_cast<mx::array*>(own_parts.get()), &outputs[2], d_state,
                    &outputs[config.has_gate ? config.gate_at() : 2]};
    back.grid = request.grid(request.tile.backward_rows());
    back.threadgroup = {static_cast<uint32_t>(32 * request.tile.backward_simdgroups), 1, 1};
    back.temporaries = {&kept, &before, &own_parts};
    if (unwanted) {
      back.temporaries.push_back(&*unwanted);
    }
    back.after = i + 1 < chunks ? &outputs[0] : nullptr;  // sums of the parts before the last
    launch(back, stream);
    if (params.steps == 0) {
      continue;
    }
    request.sum(params, own_parts, outputs);
  }
}

}  // namespace mlx_anvil
