// Launches the Metal kernels of moe_permute and moe_combine.
#include "moe/gpu.h"

#include <algorithm>
#include <bit>

#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "metal/moe/params.h"

namespace mlx_anvil {

namespace {

constexpr const char* kFolder = "moe";

// Indices as in metal/moe.
enum Constant : uint32_t {
  kRowsAreVectors,
  kHasWeights,
  kWeightsAreFloat32,
  kHasResidual,
  kHasShared,
  kHasGate,
  kGateIsFloat32,
};

constexpr int64_t kPackBytes = 16;
constexpr int64_t kMostRowsOfGrid = 65535;

// Must match metal/moe.
constexpr int64_t kLanes = 32;
constexpr int64_t kItemsOfSort = 8, kOffsetsOfPermute = 4;
constexpr uint32_t kSortThreads = 256, kPermuteThreads = 128, kPlaceThreads = 256;
constexpr int64_t kTokensOfBackward = 4;
constexpr uint32_t kBackwardThreads = 128;

// At most this many pairs are sorted in one launch, in which each pair counts those before it. More
// are counted in blocks.
constexpr int64_t kMostFewPairs = 1024;
constexpr int64_t kLeastBlock = 256, kMostBlocks = 256;

// Threads that share a token's columns. Few tokens spread over more cores.
constexpr int64_t kMostRowThreads = 256, kMostRowThreadsOfFew = 64, kFewTokens = 32;

uint32_t grid_rows(int64_t count) {
  return static_cast<uint32_t>(std::min(count, kMostRowsOfGrid));
}

uint32_t narrow(int64_t x) {
  return static_cast<uint32_t>(x);
}

void launch_with(KernelLaunch& request,
                 const void* params,
                 size_t params_size,
                 Extent grid,
                 uint32_t threads,
                 const mx::Stream& stream) {
  request.params = params;
  request.params_size = params_size;
  request.grid = grid;
  request.threadgroup = {threads, 1, 1};
  launch(request, stream);
}

// ---- sorts --------------------------------------------------------------------------------------

// The outputs of a sort, in the order of bindings. An empty array may have no memory.
KernelOutputs sort_outputs(Arrays& outputs, bool rows) {
  KernelOutputs bound;
  for (size_t i = 0; i < (rows ? 5 : 4); ++i) {
    bound.push_back(outputs[i].size() > 0 ? &outputs[i] : &outputs[0]);
  }
  return bound;
}

MoeSortParams sort_params(const MoeSizes& sizes, int64_t experts, const mx::array& ids) {
  MoeSortParams params{};
  params.batches = narrow(sizes.batches);
  params.pairs = narrow(sizes.pairs());
  params.chosen = narrow(sizes.chosen);
  params.experts = narrow(experts);
  params.ids_are_signed = ids.dtype() == mx::int32;
  params.expert_bits = narrow(std::bit_width(narrow(experts - 1)));
  const int64_t block = round_up(ceil_div(sizes.pairs(), kMostBlocks), kLanes);
  params.block = narrow(std::max(kLeastBlock, block));
  params.blocks = narrow(ceil_div(sizes.pairs(), params.block));
  return params;
}

void sort_few(const MoeSortParams& params,
              const mx::array& ids,
              Arrays& outputs,
              const mx::Stream& stream) {
  const int64_t items = int64_t{params.pairs} + params.experts + 1;
  KernelLaunch request{};
  request.kernel = &kernel_named(kFolder, {"moe_sort_few_", kItemsOfSort}, {});
  request.inputs = {ids.size() > 0 ? &ids : &outputs[0]};
  request.outputs = sort_outputs(outputs, false);
  launch_with(request, &params, sizeof(params),
              {narrow(ceil_div(items, kItemsOfSort)), grid_rows(params.batches), 1}, kSortThreads,
              stream);
}

void permute_few(MoeSortParams params,
                 const mx::array& ids,
                 const mx::array& x,
                 Arrays& outputs,
                 const mx::Stream& stream) {
  const int64_t offsets = ceil_div(int64_t{params.experts} + 1, kOffsetsOfPermute);
  params.columns = narrow(x.shape(-1));
  KernelLaunch request{};
  request.kernel =
      &kernel_named(kFolder, {"moe_permute_few_", static_cast<int64_t>(x.itemsize()) * 8},
                    {{kRowsAreVectors, rows_are_vectors({&x, &outputs[4]}, kPackBytes)}});
  request.inputs = {&ids, &x};
  request.outputs = sort_outputs(outputs, true);
  launch_with(request, &params, sizeof(params),
              {narrow(params.pairs + offsets), grid_rows(params.batches), 1}, kPermuteThreads,
              stream);
}

void sort_many(const MoeSortParams& params,
               const mx::array& ids,
               Arrays& outputs,
               const mx::Stream& stream) {
  const auto experts = static_cast<int>(params.experts);
  Scratch counts({static_cast<int>(params.batches), static_cast<int>(params.blocks), experts},
                 mx::uint32, stream);
  const Extent grid = {params.blocks, grid_rows(params.batches), 1};
  // Metal's threadgroup memory comes in multiples of 16 bytes.
  const uint32_t memory = narrow(round_up(params.experts * int64_t{sizeof(uint32_t)}, 16));
  KernelLaunch count{};
  count.kernel = &kernel_named(kFolder, {"moe_count_", kLanes}, {});
  count.inputs = {&ids};
  count.outputs = {counts.get()};
  count.temporaries = {&counts};
  count.threadgroup_memory = {memory};
  launch_with(count, &params, sizeof(params), grid, narrow(kLanes), stream);
  KernelLaunch place{};
  place.kernel = &kernel_named(kFolder, {"moe_place_", kPlaceThreads}, {});
  place.inputs = {&ids, counts.get()};
  place.outputs = sort_outputs(outputs, false);
  place.temporaries = {&counts};
  place.threadgroup_memory = {memory};
  launch_with(place, &params, sizeof(params), grid, kPlaceThreads, stream);
}

// ---- rows ---------------------------------------------------------------------------------------

int64_t tokens_of(const MoeSizes& sizes) {
  return sizes.batches * sizes.tokens;
}

MoeRowParams row_params(const MoeSizes& sizes) {
  MoeRowParams params{};
  params.tokens = narrow(tokens_of(sizes));
  params.tokens_per_batch = narrow(sizes.tokens);
  params.chosen = narrow(sizes.chosen);
  params.pairs = narrow(sizes.pairs());
  params.columns = narrow(sizes.columns);
  return params;
}

// A thread for each pack of a token's columns.
void launch_rows(KernelLaunch& request,
                 const MoeSizes& sizes,
                 const mx::array& rows,
                 const mx::Stream& stream) {
  const MoeRowParams params = row_params(sizes);
  const int64_t packs = ceil_div(sizes.columns, kPackBytes / static_cast<int64_t>(rows.itemsize()));
  const int64_t most = tokens_of(sizes) < kFewTokens ? kMostRowThreadsOfFew : kMostRowThreads;
  const int64_t threads = std::min(most, round_up(packs, kLanes));
  launch_with(request, &params, sizeof(params),
              {narrow(ceil_div(packs, threads)), grid_rows(tokens_of(sizes)), 1}, narrow(threads),
              stream);
}

bool is_float32(const std::optional<mx::array>& x) {
  return x && x->dtype() == mx::float32;
}

const mx::array* or_other(const std::optional<mx::array>& x, const mx::array& other) {
  return x && x->size() > 0 ? &*x : &other;
}

// True if all rows are whole, aligned packs.
bool are_vectors(std::initializer_list<const mx::array*> arrays) {
  return rows_are_vectors(arrays, kPackBytes);
}

}  // namespace

void moe_permute_gpu(const MoeSizes& sizes,
                     int64_t experts,
                     const mx::array& ids,
                     const mx::array& x,
                     Arrays& outputs,
                     const mx::Stream& stream) {
  if (sizes.batches == 0) {
    return;
  }
  const MoeSortParams params = sort_params(sizes, experts, ids);
  const bool has_rows = outputs[4].size() > 0;
  if (sizes.pairs() > kMostFewPairs) {
    sort_many(params, ids, outputs, stream);
  } else if (has_rows) {
    return permute_few(params, ids, x, outputs, stream);
  } else {
    sort_few(params, ids, outputs, stream);
  }
  if (has_rows) {
    moe_spread_gpu(sizes, x, outputs[2], outputs[4], stream);
  }
}

void moe_spread_gpu(const MoeSizes& sizes,
                    const mx::array& x,
                    const mx::array& inverse,
                    mx::array& rows,
                    const mx::Stream& stream) {
  if (rows.size() == 0) {
    return;
  }
  KernelLaunch request{};
  request.kernel = &kernel_named(kFolder, {"moe_spread_", dtype_name(x)},
                                 {{kRowsAreVectors, are_vectors({&x, &rows})}});
  request.inputs = {&x, &inverse};
  request.outputs = {&rows};
  launch_rows(request, sizes, x, stream);
}

void moe_combine_gpu(const MoeSizes& sizes,
                     const MoeCombineArrays& arrays,
                     mx::array& out,
                     const mx::Stream& stream) {
  if (out.size() == 0) {
    return;
  }
  const bool has_pairs = sizes.chosen > 0;
  const mx::array& other = has_pairs ? arrays.y : out;  // in place of an absent or empty one
  const mx::array *const residual = or_other(arrays.residual, other), *const shared = or_other(
                                                                          arrays.shared, other);
  KernelLaunch request{};
  request.kernel = &kernel_named(kFolder, {"moe_combine_", dtype_name(out)},
                                 {{kRowsAreVectors, are_vectors({&other, residual, shared, &out})},
                                  {kHasWeights, arrays.weights.has_value()},
                                  {kWeightsAreFloat32, is_float32(arrays.weights)},
                                  {kHasResidual, arrays.residual.has_value()},
                                  {kHasShared, arrays.shared.has_value()},
                                  {kHasGate, arrays.shared_gate.has_value()},
                                  {kGateIsFloat32, is_float32(arrays.shared_gate)}});
  request.inputs = {
      &other, has_pairs ? &arrays.inverse : &other, or_other(arrays.weights, other), residual,
      shared, or_other(arrays.shared_gate, other)};
  request.outputs = {&out};
  launch_rows(request, sizes, out, stream);
}

void moe_backward_gpu(const MoeSizes& sizes,
                      const mx::array& d_out,
                      const MoeCombineArrays& arrays,
                      Arrays& outputs,
                      const mx::Stream& stream) {
  const bool has_weights = arrays.weights.has_value(), has_gate = arrays.shared_gate.has_value();
  if (tokens_of(sizes) == 0) {
    return;
  }
  const auto or_first = [&](mx::array* x) { return x->size() > 0 ? x : &outputs.back(); };
  mx::array* const d_y = or_first(&outputs[0]);
  mx::array* const d_weights = has_weights ? or_first(&outputs[1]) : d_y;
  mx::array* const d_shared = has_gate ? or_first(&outputs[outputs.size() - 2]) : d_y;
  const mx::array& other = d_out.size() > 0 ? d_out : arrays.y;
  const mx::array* const y = arrays.y.size() > 0 ? &arrays.y : &other;
  KernelLaunch request{};
  request.kernel = &kernel_named(
      kFolder, {"moe_backward_", dtype_name(d_out)},
      {{kRowsAreVectors, are_vectors({&other, y, or_other(arrays.shared, other), d_y, d_shared})},
       {kHasWeights, has_weights},
       {kWeightsAreFloat32, is_float32(arrays.weights)},
       {kHasGate, has_gate},
       {kGateIsFloat32, is_float32(arrays.shared_gate)}});
  request.inputs = {&other,
                    y,
                    &arrays.inverse,
                    or_other(arrays.weights, other),
                    or_other(arrays.shared, other),
                    or_other(arrays.shared_gate, other)};
  request.outputs = {d_y, d_weights, d_shared, has_gate ? &outputs.back() : d_y};
  const MoeRowParams params = row_params(sizes);
  launch_with(request, &params, sizeof(params), linear_grid(tokens_of(sizes), kTokensOfBackward),
              kBackwardThreads, stream);
}

}  // namespace mlx_anvil
