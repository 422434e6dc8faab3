#include "quantized_head/gpu.h"

#include <algorithm>
#include <string>

#include "common/launch.h"
#include "metal/quantized_head/params.h"
#include "quantized_matmul/gpu_support.h"

namespace mlx_anvil {

namespace {

constexpr const char* kFolder = "quantized_head";
constexpr uint32_t kIsLast = 2;  // function constant of best.h
constexpr uint32_t kMergeThreads = 256;

// Candidates in threadgroup memory: 16 KiB, so that two threadgroups fit on an Apple GPU core.
constexpr int64_t kMostSlots = 2048;
// Minimum rows of w per threadgroup, absolute and as a multiple of those kept, so that there are
// few candidates compared with logits.
constexpr int64_t kFewestSlots = 64;
constexpr int64_t kSlotsOfKept = 4;

// Rows of x up to which logits are stored: 64 MB for a vocabulary of 2^18 in 16 bits.
constexpr int64_t kMostRowsOfLogits = 128;

struct Outputs {
  mx::array& indices;
  mx::array& values;
};

// One pass of either kernel: the best of `blocks` blocks for each row of x.
struct Pass {
  BestParams best;
  int64_t rows;    // rows of x
  int64_t blocks;  // 1 in the last pass

  FunctionConstant is_last() const { return {kIsLast, blocks == 1}; }

  // Candidates per row for the next pass.
  int64_t candidates() const { return blocks * best.run; }

  Scratch candidate_array(const mx::Stream& stream) const {
    const mx::Shape shape = {static_cast<int>(rows), static_cast<int>(candidates())};
    return Scratch(shape, mx::uint64, stream);
  }
};

void add_outputs(KernelLaunch& request, Scratch* candidates, Outputs outputs) {
  request.outputs = {&outputs.indices, &outputs.values,
                     candidates ? candidates->get() : &outputs.values};
  if (candidates) {
    request.temporaries.push_back(candidates);
  }
}

uint32_t slot_bytes(int64_t slots) {
  return static_cast<uint32_t>(slots * sizeof(uint64_t));
}

// `before` holds candidates or, if `of_logits`, logits.
void launch_merge(const Pass& pass,
                  bool of_logits,
                  const Scratch& before,
                  Scratch* candidates,
                  Outputs outputs,
                  const mx::Stream& stream) {
  KernelLaunch request{};
  request.kernel = &kernel_named(
      kFolder,
      {of_logits ? "quantized_head_logits_" : "quantized_head_merge_", dtype_name(outputs.values)},
      {{kRowsAreVectors, false}, {kColumnsAreShared, false}, pass.is_last()});
  request.inputs = {before.get()};
  request.temporaries = {&before};
  add_outputs(request, candidates, outputs);
  request.params = &pass.best;
  request.params_size = sizeof(pass.best);
  request.grid = {static_cast<uint32_t>(pass.blocks), static_cast<uint32_t>(pass.rows), 1};
  request.threadgroup = {kMergeThreads, 1, 1};
  request.threadgroup_memory = {slot_bytes(pass.best.slots)};
  launch(request, stream);
}

// Reduces `count` candidates or logits of each row until one block is left.
void merge(Pass pass,
           int64_t count,
           bool of_logits,
           Scratch before,
           Outputs outputs,
           const mx::Stream& stream) {
  while (true) {
    pass.best.candidates = static_cast<int32_t>(count);
    // Metal allocates threadgroup memory in units of 16 bytes, two slots.
    pass.best.slots = static_cast<int32_t>(std::clamp<int64_t>(kernel_rows(count), 2, kMostSlots));
    pass.blocks = ceil_div(count, pass.best.slots);
    if (pass.blocks == 1) {
      launch_merge(pass, of_logits, before, nullptr, outputs, stream);
      return;
    }
    Scratch fewer = pass.candidate_array(stream);
    launch_merge(pass, of_logits, before, &fewer, outputs, stream);
    before = std::move(fewer);
    count = pass.candidates();
    of_logits = false;
  }
}

}  // namespace

void quantized_head_gpu(const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const mx::array& x,
                        const QuantizedWeightArrays& weights,
                        mx::array& indices,
                        mx::array& values,
                        const mx::Stream& stream) {
  const Outputs outputs{indices, values};
  Pass pass{};
  pass.best.kept = indices.shape(-1);
  const int64_t run = static_cast<int64_t>(kernel_rows(pass.best.kept));
  pass.best.run = static_cast<int32_t>(run);
  pass.rows = sizes.rows;
  // The kernels with matrix products store logits. These take little memory beside w.
  const bool by_tiles = suits_quantized_tiles(sizes, stream) && sizes.rows <= kMostRowsOfLogits;
  if (by_tiles || (sizes.rows <= kQuantizedGemvRows &&
                   gemv_takes_matrix_units(format, sizes, x, weights, stream))) {
    Scratch logits({static_cast<int>(sizes.rows), static_cast<int>(sizes.outputs)}, x.dtype(),
                   stream);
    const auto product = by_tiles ? quantized_tiles_gpu : quantized_gemv_gpu;
    product(format, sizes, x, weights, *logits, stream);
    merge(pass, sizes.outputs, /*of_logits=*/true, std::move(logits), outputs, stream);
    return;
  }
  const int64_t slots = std::max(kFewestSlots, kSlotsOfKept * run);
  // Splits rows of x over several threadgroups per block of w, rather than use fewer slots per row.
  const int64_t rows =
      std::min({kernel_rows(sizes.rows), int64_t{kQuantizedGemvRows}, kMostSlots / slots});
  pass.best.slots = static_cast<int32_t>(slots);
  pass.blocks = ceil_div(sizes.outputs, slots);

  const QuantizedHeadParams params{params_of(format, sizes), pass.best};
  const bool vectors = words_are_vectors(format, *weights.w) && rows_are_vectors({&x});
  std::optional<Scratch> candidates;
  if (pass.blocks > 1) {
    candidates = pass.candidate_array(stream);
  }
  KernelLaunch request{};
  request.kernel = &kernel_named(kFolder,
                                 {"quantized_head_", dtype_name(x), "_", mode_name(format.kind),
                                  bits_in_name(format), "_r", rows},
                                 {{kRowsAreVectors, vectors},
                                  {kColumnsAreShared, gemv_shares_columns(sizes.outputs, stream)},
                                  pass.is_last()});
  request.inputs = {&x, weights.w, weights.scales, weights.biases ? weights.biases : &x};
  add_outputs(request, candidates ? &*candidates : nullptr, outputs);
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(pass.blocks),
                  static_cast<uint32_t>(ceil_div(sizes.rows, rows)), 1};
  request.threadgroup = {kGemvThreads, 1, 1};
  request.threadgroup_memory = {slot_bytes(slots * rows)};
  launch(request, stream);
  if (candidates) {
    merge(pass, pass.candidates(), /*of_logits=*/false, std::move(*candidates), outputs, stream);
  }
}

}  // namespace mlx_anvil
