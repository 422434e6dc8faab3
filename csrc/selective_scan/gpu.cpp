#include "selective_scan/gpu.h"

#include <optional>
#include <utility>

#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "metal/selective_scan/params.h"

namespace mlx_anvil {

namespace {

// Must match metal/selective_scan/ and metal/common/sum_parts.h.
constexpr int64_t kThreads = 256;
constexpr int64_t kLanes = 8;        // of a channel
constexpr int64_t kChunkSteps = 16;  // between kept states
constexpr int64_t kSumColumns = 32;
constexpr uint32_t kSumThreads = 1024;

FunctionConstants constants_of(const ScanConfig& config) {
  return {{0, config.has_d},
          {1, config.has_z},
          {2, config.has_state},
          {3, config.has_lengths},
          {4, config.softplus}};
}

ScanRowParams strides_of(const mx::array* x) {
  return x ? ScanRowParams{x->strides(0), x->strides(1)} : ScanRowParams{};
}

SelectiveScanParams params_of(const ScanView& in) {
  SelectiveScanParams params{};
  params.x = strides_of(in.x);
  params.dt = strides_of(in.dt);
  params.b = strides_of(in.b);
  params.c = strides_of(in.c);
  params.z = strides_of(in.z);
  params.batch = in.x->shape(0);
  params.steps = in.x->shape(1);
  params.channels = in.x->shape(2);
  params.states = in.a->shape(1);
  params.chunks = static_cast<int32_t>(ceil_div(params.steps, kChunkSteps));
  params.groups = static_cast<int32_t>(ceil_div(params.channels, kThreads / kLanes));
  return params;
}

void launch_scan(const char* variant,
                 const ScanConfig& config,
                 const SelectiveScanParams& params,
                 KernelLaunch request,
                 const mx::Stream& stream) {
  request.kernel = &kernel_named(kSelectiveScan,
                                 {"selective_scan_", variant, "_", dtype_name(*request.inputs[0])},
                                 constants_of(config));
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(params.groups), static_cast<uint32_t>(params.batch), 1};
  request.threadgroup = {static_cast<uint32_t>(kThreads), 1, 1};
  launch(request, stream);
}

// Adds up `count` arrays of as many elements as `sums`.
void launch_sums(const Scratch& parts, int64_t count, mx::array& sums, const mx::Stream& stream) {
  if (sums.size() == 0) {
    return;
  }
  const SelectiveScanSumParams params = {static_cast<uint32_t>(count),
                                         static_cast<uint32_t>(sums.size())};
  KernelLaunch request{};
  request.kernel =
      &kernel_named(kSelectiveScan, {"selective_scan_sum_parts_", dtype_name(sums)}, {});
  request.inputs = {parts.get()};
  request.outputs = {&sums};
  request.temporaries = {&parts};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(ceil_div(int64_t{params.count}, kSumColumns)), 1, 1};
  request.threadgroup = {kSumThreads, 1, 1};
  launch(request, stream);
}

}  // namespace

void scan_forward_gpu(const ScanConfig& config,
                      const Arrays& inputs,
                      mx::array& y,
                      mx::array& last_state,
                      const mx::Stream& stream) {
  if (last_state.size() == 0) {
    return;
  }
  const ScanView in(config, inputs);
  const auto or_x = [&](const mx::array* x) { return x ? x : in.x; };
  KernelLaunch request{};
  request.inputs = {in.x,           in.dt,           in.a, in.b, in.c, or_x(in.d), or_x(in.z),
                    or_x(in.state), or_x(in.lengths)};
  request.outputs = {&y, &last_state};
  launch_scan("forward", config, params_of(in), std::move(request), stream);
}

void scan_backward_gpu(const ScanConfig& config,
                       const Arrays& inputs,
                       const ScanGradients& to,
                       const mx::Stream& stream) {
  if (to.a->size() == 0) {
    return;
  }
  const ScanView in(config, inputs);
  const mx::array &d_y = inputs[config.count()], &d_last_state = inputs[config.count() + 1];
  SelectiveScanParams params = params_of(in);
  params.d_y = strides_of(&d_y);
  const auto or_x = [&](const mx::array* x) { return x ? x : in.x; };
  const auto floats = [&](std::initializer_list<int32_t> shape) {
    return Scratch(mx::Shape(shape), mx::float32, stream);
  };
  Scratch kept = floats({params.batch, params.chunks, params.channels, params.states});
  KernelLaunch keep{};
  keep.inputs = {in.x, in.dt, in.a, in.b, or_x(in.state), or_x(in.lengths)};
  keep.outputs = {kept.get()};
  keep.temporaries = {&kept};
  launch_scan("keep", config, params, std::move(keep), stream);

  // One batch has one part of d_A and of d_D. None has none: their sums are 0.
  std::optional<Scratch> of_a, of_d;
  if (params.batch != 1) {
    of_a = floats({params.batch, params.channels, params.states});
    of_d = floats({params.batch, params.channels});
  }
  Scratch of_b = floats({params.groups, params.batch, params.steps, params.states});
  Scratch of_c = floats({params.groups, params.batch, params.steps, params.states});
  KernelLaunch back{};
  back.inputs = {in.x,       in.dt,      in.a,         in.b,
                 in.c,       or_x(in.d), or_x(in.z),   or_x(in.lengths),
                 kept.get(), &d_y,       &d_last_state};
  back.outputs = {to.x,
                  to.dt,
                  to.z ? to.z : to.x,
                  to.state ? to.state : to.x,
                  of_a ? of_a->get() : to.a,
                  of_d   ? of_d->get()
                  : to.d ? to.d
                         : to.x,
                  of_b.get(),
                  of_c.get()};
  back.temporaries = {&kept, &of_b, &of_c};
  if (of_a) {
    back.temporaries.push_back(&*of_a);
    back.temporaries.push_back(&*of_d);
  }
  launch_scan("backward", config, params, std::move(back), stream);
  launch_sums(of_b, params.groups, *to.b, stream);
  launch_sums(of_c, params.groups, *to.c, stream);
  if (of_a) {
    launch_sums(*of_a, params.batch, *to.a, stream);
  }
  if (of_d && to.d) {
    launch_sums(*of_d, params.batch, *to.d, stream);
  }
}

}  // namespace mlx_anvil
