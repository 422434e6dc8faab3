// Launches the norms' Metal kernels.
#include "norm/gpu.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "common/choices.h"
#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "norm/operands.h"

namespace mlx_anvil {

namespace {

constexpr const char* kFolder = "norm";

// Indices as in metal/norm/rows.h.
enum Constant : uint32_t {
  kPacksAreAligned,
  kRowIsShared,
  kRowIsLong,
  kHasResidual,
  kHasGate,
  kHasWeight,
  kHasBias,
  kHasDh,
  kWantsWeight,
  kWantsBias,
  kRowIsShort,
  kPacksAreWhole,
  kRegistersAreFew,
  kReadsAhead,
  kRowIsFull,
};

// Must match metal/norm/rows.h.
constexpr int64_t kSimdgroupThreads = 32;
constexpr int64_t kMostSimdgroups = 16;
constexpr int64_t kHeldElements = 16;  // of a row, per thread
constexpr size_t kPackBytes = 16;
constexpr int64_t kRowsPerThreadgroup = 8;  // if each row has one SIMD group
constexpr int64_t kMostRows = 256;          // per part, which adds them sequentially
constexpr int64_t kSumColumns = 32;         // per threadgroup of norm_sum_parts
constexpr uint32_t kSumThreads = 1024;

// What differs between GPUs.
struct Tuning {
  int64_t bytes_per_thread;  // at most; otherwise Choices::norm_elements
  // Parts and their SIMD groups per weight gradient, unless parts would exceed kMostRows.
  int64_t most_parts;
  int64_t most_simdgroups;
  int64_t least_rows;  // per part
  bool reads_ahead;
};

constexpr Tuning kAppleTuning = {32, 512, 512 * kMostSimdgroups, 4, false};
constexpr Tuning kNvidiaTuning = {32, 2048, 2048, 1, true};

Tuning tuning_of(const mx::Stream& stream) {
  return device_traits(stream.device).is_nvidia() ? kNvidiaTuning : kAppleTuning;
}

// How threads share a row. It depends only on the row's length, the dtype, the GPU and the tuning
// file, so that the result does not depend on the number of rows.
struct Team {
  int64_t simdgroups;
  bool long_row;   // longer than what its threads can hold in registers
  bool short_row;  // at most half of that

  Team(const mx::array& x, const Tuning& tuning, const mx::Stream& stream)
      : Team(x.shape(-1),
             std::min<int64_t>(choices(stream.device).norm_elements,
                               tuning.bytes_per_thread / x.itemsize())) {}
  Team(int64_t columns, int64_t elements_per_thread)
      : simdgroups(std::clamp<int64_t>(
            ceil_div(columns, kSimdgroupThreads * elements_per_thread), 1, kMostSimdgroups)),
        long_row(columns > simdgroups * kSimdgroupThreads * kHeldElements),
        short_row(columns <= simdgroups * kSimdgroupThreads * kHeldElements / 2) {}

  bool shared() const { return simdgroups > 1; }
  // True if no thread has an empty pack.
  bool is_filled_by(int64_t columns) const {
    return columns == simdgroups * kSimdgroupThreads * kHeldElements / (short_row ? 2 : 1);
  }
  int64_t teams_per_threadgroup() const { return shared() ? 1 : kRowsPerThreadgroup; }
  uint32_t threads() const {
    return static_cast<uint32_t>(kSimdgroupThreads * (shared() ? simdgroups : kRowsPerThreadgroup));
  }
};

struct Request {
  const NormConfig& config;
  const NormView& in;
  const mx::Stream& stream;
  const Tuning tuning = tuning_of(stream);
  const Team team{*in.x, tuning, stream};

  int64_t groups() const {
    const mx::array* const vector = in.vector();
    return vector && vector->ndim() == 2 ? std::max(1, vector->shape(0)) : 1;
  }

  NormParams params() const {
    const auto rows_of = [](const mx::array* x) { return x ? norm_rows_of(*x) : NormRowParams{}; };
    NormParams params{};
    params.x = norm_rows_of(*in.x);
    params.residual = rows_of(in.residual);
    params.gate = rows_of(in.gate);
    params.weight = rows_of(in.weight);
    params.bias = rows_of(in.bias);
    const int64_t columns = in.x->shape(-1), rows = static_cast<int64_t>(in.x->size()) / columns;
    params.rows = static_cast<uint32_t>(rows);
    params.columns = static_cast<uint32_t>(columns);
    params.rows_per_group = static_cast<uint32_t>(rows / groups());
    params.eps = config.eps;
    params.weight_offset = config.weight_offset;
    params.gate_is_sigmoid = config.gate_is_sigmoid;
    return params;
  }

  // Binds x in place of an absent array.
  const mx::array* or_x(const mx::array* x) const { return x ? x : in.x; }

  // few_registers and reads_ahead: what the kernel has registers for, if its packs are whole, it
  // has no gate, and all its elements have 16 bits. A row that is short needs half as many.
  void launch_kernel(const char* variant,
                     bool few_registers,
                     bool reads_ahead,
                     FunctionConstants constants,
                     const KernelInputs& inputs,
                     const KernelOutputs& outputs,
                     const NormParams& params,
                     int64_t teams,
                     const KernelTemporaries& temporaries = {}) const {
    const auto is_aligned = [](const mx::array* x) { return rows_are_vectors({x}); };
    const bool aligned = std::all_of(inputs.begin(), inputs.end(), is_aligned) &&
                         std::all_of(outputs.begin(), outputs.end(), is_aligned);
    const bool whole = aligned && params.columns % (kPackBytes / in.x->itemsize()) == 0;
    const bool simple = whole && !config.has_gate && !team.long_row;
    const mx::array& vector = in.vector() ? *in.vector() : *in.x;
    const bool narrow = in.x->itemsize() == 2 && vector.itemsize() == 2;
    constants.add({{kPacksAreAligned, aligned},
                   {kRowIsShort, team.short_row},
                   {kPacksAreWhole, whole},
                   {kRegistersAreFew, few_registers && simple && (narrow || team.short_row)},
                   {kReadsAhead, reads_ahead && tuning.reads_ahead && simple && narrow},
                   {kRowIsFull, whole && team.is_filled_by(params.columns)},
                   {kRowIsShared, team.shared()},
                   {kRowIsLong, team.long_row},
                   {kHasGate, config.has_gate},
                   {kHasWeight, config.has_weight}});
    KernelLaunch request{};
    request.kernel = &kernel_named(
        kFolder, {config.op(), "_", variant, "_", dtype_name(*in.x), "_", dtype_name(vector)},
        constants);
    request.inputs = inputs;
    request.outputs = outputs;
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = linear_grid(teams, team.teams_per_threadgroup());
    request.threadgroup = {team.threads(), 1, 1};
    request.temporaries = temporaries;
    launch(request, stream);
  }
};

struct PartialSums {
  const Scratch* parts;
  mx::array* sum;
};

// Adds up the parts of one or two sums of the same shape.
void launch_sums(const PartialSums& first,
                 const PartialSums& last,
                 int64_t groups,
                 const mx::Stream& stream) {
  const bool both = first.sum != last.sum;
  NormSumParams params{};
  params.columns = static_cast<uint32_t>(first.sum->shape(-1));
  params.parts = static_cast<uint32_t>(first.parts->get()->shape(0) / groups);
  KernelLaunch request{};
  request.kernel = &kernel_named(kFolder, {"norm_sum_parts_", dtype_name(*first.sum)}, {});
  request.inputs = {first.parts->get(), last.parts->get()};
  request.outputs = {first.sum, last.sum};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(ceil_div(params.columns, kSumColumns)),
                  static_cast<uint32_t>(groups), both ? 2u : 1u};
  request.threadgroup = {kSumThreads, 1, 1};
  request.temporaries = {first.parts};
  if (both) {
    request.temporaries.push_back(last.parts);
  }
  launch(request, stream);
}

}  // namespace

bool can_launch_norm(const mx::array& x, const mx::Stream& stream, std::string* why_not) {
  constexpr size_t kMost = std::numeric_limits<int32_t>::max();
  const size_t columns = x.shape(-1);
  if (columns > 0 && (columns > kMost / 2 || x.size() / columns > kMost)) {
    *why_not = "the kernels take at most 2^30 columns and 2^31 - 1 rows";
    return false;
  }
  return stream.device == mx::Device::cpu || can_launch(stream.device, why_not);
}

void norm_forward_gpu(const NormConfig& config,
                      const NormView& in,
                      Arrays& outputs,
                      const mx::Stream& stream) {
  const Request request{config, in, stream};
  const NormParams params = request.params();
  request.launch_kernel("forward", !config.has_residual, !config.centred,
                        {{kHasResidual, config.has_residual}, {kHasBias, config.has_bias}},
                        {in.x, request.or_x(in.residual), request.or_x(in.gate),
                         request.or_x(in.weight), request.or_x(in.bias)},
                        {&outputs[0], config.has_residual ? &outputs[1] : &outputs[0]}, params,
                        params.rows);
}

void norm_backward_gpu(const NormConfig& config,
                       const NormView& in,
                       const NormBackwardArrays& arrays,
                       const mx::Stream& stream) {
  const Request request{config, in, stream};
  NormParams params = request.params();
  params.d_y = norm_rows_of(*arrays.d_y);
  params.d_h = arrays.d_h ? norm_rows_of(*arrays.d_h) : NormRowParams{};
  const int64_t groups = request.groups();
  const bool sums = arrays.d_weight || arrays.d_bias;
  params.rows_per_part = 1;
  if (sums || request.tuning.reads_ahead) {
    const Tuning& tuning = request.tuning;
    const int64_t most =
        std::min(tuning.most_parts, tuning.most_simdgroups / request.team.simdgroups);
    const int64_t enough = std::clamp(ceil_div(params.rows, most), tuning.least_rows, kMostRows);
    params.rows_per_part = static_cast<uint32_t>(std::min<int64_t>(enough, params.rows_per_group));
  }
  params.rows_per_part = std::max<uint32_t>(1, params.rows_per_part);
  params.parts_per_group =
      static_cast<uint32_t>(ceil_div(params.rows_per_group, params.rows_per_part));
  const int64_t parts = groups * params.parts_per_group;

  std::optional<Scratch> d_weight, d_bias;
  KernelTemporaries temporaries;
  const auto make_parts = [&](std::optional<Scratch>& sums_of_parts, const mx::array* gradient) {
    if (gradient) {
      const mx::Shape shape = {static_cast<int>(parts), in.x->shape(-1)};
      temporaries.push_back(&sums_of_parts.emplace(shape, mx::float32, stream));
    }
  };
  make_parts(d_weight, arrays.d_weight);
  make_parts(d_bias, arrays.d_bias);
  if (parts > 0) {
    request.launch_kernel(
        "backward", request.team.short_row && !(arrays.d_weight && arrays.d_bias) && !arrays.d_h,
        true,
        {{kHasDh, arrays.d_h != nullptr},
         {kWantsWeight, arrays.d_weight != nullptr},
         {kWantsBias, arrays.d_bias != nullptr}},
        {in.x, request.or_x(in.gate), request.or_x(in.weight), arrays.d_y,
         arrays.d_h ? arrays.d_h : in.x},
        {arrays.d_x, arrays.d_gate ? arrays.d_gate : arrays.d_x,
         d_weight ? d_weight->get() : arrays.d_x, d_bias ? d_bias->get() : arrays.d_x},
        params, parts, temporaries);
  }
  if (sums) {
    const PartialSums of_weight = {d_weight ? &*d_weight : nullptr, arrays.d_weight};
    const PartialSums of_bias = {d_bias ? &*d_bias : nullptr, arrays.d_bias};
    launch_sums(d_weight ? of_weight : of_bias, d_bias ? of_bias : of_weight, groups, stream);
  }
}

}  // namespace mlx_anvil
