// Launches causal_conv1d's Metal kernels.
#include "causal_conv1d/gpu.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "metal/causal_conv1d/params.h"

namespace mlx_anvil {

namespace {

constexpr const char* kFolder = "causal_conv1d";

// Indices as in metal/causal_conv1d.
enum Constant : uint32_t {
  kChannelsAreVectors,
  kHasBias,
  kHasState,
  kHasLengths,
  kAppliesSilu,
  kWantsSums,
};

// Must match metal/causal_conv1d/rows.h and metal/common/sum_parts.h.
constexpr int64_t kChannels = 4;
constexpr int64_t kThreads = 256;
constexpr int64_t kSumColumns = 32;
constexpr uint32_t kSumThreads = 1024;

constexpr int64_t kSimdgroupThreads = 32;
constexpr int64_t kEnoughThreads = 1 << 16;
// Rows of a thread, if that leaves enough threads. It reads width - 1 more; a backward one computes
// them too.
constexpr int64_t kMostForwardRows = 32;
constexpr int64_t kMostBackwardRows = 64;
// A run of rows keeps sums of its own, width + 1 per channel. Runs get longer than
// kMostBackwardRows, up to kMostRowsOfPart, where there would be more than kMostParts of them.
constexpr int64_t kMostParts = 1024;
constexpr int64_t kMostRowsOfPart = 256;  // which a thread adds one by one

CausalConvRowParams strides_of(const mx::array* x) {
  return x ? CausalConvRowParams{x->strides(0), x->strides(1)} : CausalConvRowParams{};
}

// True if all threads have whole, aligned vectors of the dtype.
bool are_vectors(std::initializer_list<const mx::array*> arrays, const mx::array& x) {
  return rows_are_vectors(arrays, static_cast<int>(kChannels * x.itemsize()));
}

// The same for weight and bias. Buffers start at page boundaries, so only the offset matters.
bool vectors_are_aligned(const ConvView& in) {
  const auto is_aligned = [](const mx::array* x) {
    return !x || x->offset() % (kChannels * static_cast<int64_t>(x->itemsize())) == 0;
  };
  return in.x->shape(2) % kChannels == 0 && is_aligned(in.weight) && is_aligned(in.bias);
}

struct Request {
  const ConvConfig& config;
  const ConvView& in;
  const mx::Stream& stream;
  const int64_t batch = in.x->shape(0), channels = in.x->shape(2);

  int64_t threads_of_row() const { return ceil_div(channels, kChannels); }

  // Rows of a thread: few, if there are few rows.
  int64_t rows_per_run(int64_t rows, int64_t most) const {
    return std::clamp<int64_t>(threads_of_row() * batch * rows / kEnoughThreads, 1, most);
  }

  CausalConvParams params(int64_t rows, int64_t rows_per_run) const {
    CausalConvParams params{};
    params.x = strides_of(in.x);
    params.state = strides_of(in.state);
    params.batch = static_cast<uint32_t>(batch);
    params.length = static_cast<uint32_t>(in.x->shape(1));
    params.channels = static_cast<uint32_t>(channels);
    params.batch_per_group = static_cast<uint32_t>(std::max<int64_t>(1, batch / in.groups()));
    params.rows_per_run = static_cast<uint32_t>(rows_per_run);
    params.runs = static_cast<uint32_t>(std::max<int64_t>(1, ceil_div(rows, rows_per_run)));
    return params;
  }

  void launch_kernel(const char* variant,
                     FunctionConstants constants,
                     const KernelInputs& inputs,
                     const KernelOutputs& outputs,
                     const CausalConvParams& params,
                     const KernelTemporaries& temporaries) const {
    constants.add({{kHasBias, config.has_bias},
                   {kHasState, config.has_state},
                   {kHasLengths, config.has_lengths},
                   {kAppliesSilu, config.silu}});
    const int64_t across = std::min(kThreads, round_up(threads_of_row(), kSimdgroupThreads));
    KernelLaunch request{};
    request.kernel = &kernel_named(
        kFolder, {"causal_conv1d_", variant, "_", dtype_name(*in.x), "_w", in.width()}, constants);
    request.inputs = inputs;
    request.outputs = outputs;
    request.params = &params;
    request.params_size = sizeof(params);
    request.threadgroup = {static_cast<uint32_t>(across), static_cast<uint32_t>(kThreads / across),
                           1};
    request.grid = {
        static_cast<uint32_t>(ceil_div(int64_t{params.batch} * params.runs, kThreads / across)),
        static_cast<uint32_t>(ceil_div(threads_of_row(), across)), 1};
    request.temporaries = temporaries;
    launch(request, stream);
  }
};

void launch_sums(const ConvView& in,
                 const Scratch& weight_parts,
                 const Scratch& bias_parts,
                 const ConvGradients& to,
                 const mx::Stream& stream) {
  CausalConvSumParams params{};
  params.channels = static_cast<uint32_t>(in.x->shape(2));
  params.width = static_cast<uint32_t>(in.width());
  params.parts = static_cast<uint32_t>(weight_parts.get()->shape(0) / in.groups());
  KernelLaunch request{};
  request.kernel =
      &kernel_named(kFolder, {"causal_conv1d_sum_parts_", dtype_name(*to.d_weight)}, {});
  request.inputs = {weight_parts.get(), bias_parts.get()};
  request.outputs = {to.d_weight, to.d_bias ? to.d_bias : to.d_weight};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {
      static_cast<uint32_t>(ceil_div(int64_t{params.channels} * params.width, kSumColumns)),
      static_cast<uint32_t>(in.groups()), to.d_bias ? 2u : 1u};
  request.threadgroup = {kSumThreads, 1, 1};
  request.temporaries = {&weight_parts};
  if (to.d_bias) {
    request.temporaries.push_back(&bias_parts);
  }
  launch(request, stream);
}

const mx::array* or_other(const mx::array* x, const mx::array* other) {
  return x && x->size() > 0 ? x : other;
}

}  // namespace

bool can_launch_conv(const mx::array& x, const mx::Stream& stream, std::string* why_not) {
  if (stream.device == mx::Device::cpu && !simulation_mode().on) {
    return true;
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  const int64_t rows = x.shape(0) * (int64_t{x.shape(1)} + 16);
  if (rows > kMost || x.shape(2) > kMost / 32) {
    *why_not = "the kernels take at most 2^30 rows, the state's included, and 2^25 channels";
    return false;
  }
  return stream.device == mx::Device::cpu || can_launch(stream.device, why_not);
}

void conv_forward_gpu(const ConvConfig& config,
                      const ConvView& in,
                      Arrays& outputs,
                      const mx::Stream& stream) {
  const Request request{config, in, stream};
  const int64_t length = in.x->shape(1);
  const CausalConvParams params =
      request.params(length, request.rows_per_run(length, kMostForwardRows));
  const mx::array* const other = in.weight;  // in place of what is absent or empty
  const mx::array *const x = or_other(in.x, other), *const state = or_other(in.state, other);
  mx::array* const y = outputs[0].size() > 0 ? &outputs[0] : &outputs[1];
  const bool vectors =
      are_vectors({in.x, or_other(in.state, in.x), y}, *in.x) && vectors_are_aligned(in);
  request.launch_kernel(
      "forward", {{kChannelsAreVectors, vectors}},
      {x, in.weight, or_other(in.bias, other), state, or_other(in.lengths, other)},
      {y, &outputs[1]}, params, {});
}

void conv_backward_gpu(const ConvConfig& config,
                       const ConvView& in,
                       const mx::array& d_y,
                       const mx::array& d_new_state,
                       const ConvGradients& to,
                       const mx::Stream& stream) {
  const Request request{config, in, stream};
  const int64_t rows = in.x->shape(1) + in.width() - 1;
  int64_t per_run = request.rows_per_run(rows, kMostBackwardRows);
  if (to.d_weight) {
    const int64_t of_part = ceil_div(request.batch * rows, kMostParts);
    per_run = std::max(per_run, std::min(of_part, kMostRowsOfPart));
  }
  CausalConvParams params = request.params(rows, per_run);
  params.d_y = strides_of(&d_y);
  params.d_new_state = strides_of(&d_new_state);

  const int parts = static_cast<int>(request.batch * params.runs);
  const int channels = in.x->shape(2);
  std::optional<Scratch> weight_parts, bias_parts;
  KernelTemporaries temporaries;
  if (to.d_weight) {
    temporaries.push_back(
        &weight_parts.emplace(mx::Shape{parts, channels, in.width()}, mx::float32, stream));
  }
  if (to.d_bias) {
    temporaries.push_back(&bias_parts.emplace(mx::Shape{parts, channels}, mx::float32, stream));
  }
  if (parts > 0) {
    const mx::array* const other = in.weight;
    mx::array* const some = to.d_x->size() > 0 ? to.d_x : to.d_state ? to.d_state : to.d_weight;
    const bool vectors = are_vectors({in.x, or_other(in.state, in.x), &d_y, &d_new_state}, *in.x) &&
                         vectors_are_aligned(in);
    request.launch_kernel(
        "backward", {{kChannelsAreVectors, vectors}, {kWantsSums, to.d_weight != nullptr}},
        {or_other(in.x, other), in.weight, or_other(in.bias, other), or_other(in.state, other),
         or_other(in.lengths, other), or_other(&d_y, other), &d_new_state},
        {some, to.d_state ? to.d_state : some, weight_parts ? weight_parts->get() : some,
         bias_parts ? bias_parts->get() : some},
        params, temporaries);
  }
  if (to.d_weight) {
    launch_sums(in, *weight_parts, bias_parts ? *bias_parts : *weight_parts, to, stream);
  }
}

}  // namespace mlx_anvil
