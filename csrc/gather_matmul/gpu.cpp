// Launches the kernels of gathered products: metal/gather_matmul.
#include "gather_matmul/gpu.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "common/allocate.h"
#include "gather_matmul/gpu_request.h"
#include "quantized_matmul/gpu.h"

namespace mlx_anvil {

namespace {

constexpr const char* kFolder = "gather_matmul";

// Function constants beside those of gpu_support.h, as numbered in the kernels.
enum GatherConstant : uint32_t {
  kPairsAreInTable = 6,  // pair_tile.h
  kPairsHaveOneRow,
  kLeftsAreGiven,
  kGatesHaveVectors,  // gated_results.h
  kUpsHaveVectors,
};

constexpr int64_t kDenseColumns = 16;  // dense_format.h
constexpr int64_t kMostGridRows = 65535;
constexpr uint32_t kTableThreads = 1024;
constexpr int64_t kSumPackBytes = 16, kMostSumThreads = 256;  // of gather_sum_pairs

// Tiles, at most. Unsorted pairs in the table have more, which threadgroups take in turn.
int64_t tile_count(const GatherRequest& request, const GatherChoice& choice) {
  const GatherSizes& sizes = request.sizes;
  return choice.in_table ? std::min(sizes.pairs, ceil_div(sizes.pairs, choice.rows) + sizes.experts)
                         : sizes.pairs * ceil_div(sizes.rows, choice.rows);
}

// Returns the table of tiles that table.metal makes.
Scratch table_of(const GatherRequest& request, const GatherChoice& choice, int64_t tiles) {
  GatherTableParams params{};
  params.pairs = static_cast<int32_t>(request.sizes.pairs);
  params.experts = static_cast<int32_t>(request.sizes.experts);
  // A threadgroup's last place is past the last tile, and it reads the next entry too.
  params.entries = static_cast<int32_t>(request.sizes.pairs + tiles + 1);
  params.rows = static_cast<int32_t>(choice.rows);
  Scratch table({params.entries, 2}, mx::int32, request.stream);
  KernelLaunch launched{};
  launched.kernel = &kernel_named(kFolder, {"gather_table"}, {});
  launched.inputs = {&request.ids.rhs};
  launched.outputs = {table.get()};
  launched.params = &params;
  launched.params_size = sizeof(params);
  launched.threadgroup = {kTableThreads, 1, 1};
  launched.temporaries = {&table};
  launch(launched, request.stream);
  return table;
}

GatherGemmParams params_of(const GatherRequest& request,
                           const GatherChoice& choice,
                           int64_t tiles) {
  const GatherSizes& sizes = request.sizes;
  const int64_t group = request.format ? request.format->group : kDenseColumns;
  GatherGemmParams params{};
  QuantizedParams& product = params.gather.product;
  product.rows = static_cast<int32_t>(sizes.rows);
  product.columns = static_cast<int32_t>(sizes.columns);
  product.outputs = static_cast<int32_t>(sizes.outputs);
  product.group_shift = std::countr_zero(static_cast<uint32_t>(group));
  product.activation = static_cast<int32_t>(request.activation.activation);
  product.limit = request.activation.limit;
  params.gather.pairs = static_cast<int32_t>(sizes.pairs);
  params.gather.experts = static_cast<int32_t>(sizes.experts);
  params.gather.lefts = static_cast<int32_t>(sizes.lefts);
  params.gather.pairs_per_left = static_cast<int32_t>(sizes.pairs / sizes.lefts);
  params.gather.tiles = static_cast<int32_t>(tiles);
  params.gather.row_blocks = static_cast<int32_t>(ceil_div(sizes.rows, choice.rows));
  params.gemm.columns = product.columns;
  params.gemm.outputs = product.outputs;
  params.gemm.group_shift = product.group_shift;
  params.gemm.factor_bytes = static_cast<int32_t>(choice.factor_bytes);
  return params;
}

const Kernel& kernel_of(const GatherRequest& request, const GatherChoice& choice) {
  const QuantizedFormat* const format = request.format;
  const bool transposed = request.is_transposed(), gated = request.is_gated();
  const char* const dtype = dtype_name(request.x);
  const KernelName::Piece mode = format ? mode_name(format->kind) : "dense";
  const KernelName::Piece bits = format ? bits_in_name(*format) : "";
  FunctionConstants constants = {{kPairsAreInTable, choice.in_table},
                                 {kPairsHaveOneRow, request.sizes.rows == 1},
                                 {kLeftsAreGiven, request.ids.lhs.has_value()}};
  if (gated) {
    constants.add({{kGatesHaveVectors, request.vectors[0] != nullptr},
                   {kUpsHaveVectors, request.vectors[1] != nullptr}});
  }
  if (choice.kernel == GatherKernel::kFewMatrix) {
    constants.add({{kRowsAreVectors, true}, {kXIsStaged, choice.stages_x}});
    return kernel_named(
        kFolder,
        {gated ? "gather_few_matrix_gated_" : "gather_few_matrix_", dtype, "_g", format->group,
         "_n", choice.columns * static_cast<int64_t>(request.matrices.size()), "s",
         choice.simdgroups},
        constants);
  }
  const bool steps_are_whole = request.terms() % choice.step == 0;
  if (choice.is_gemm()) {
    constants.add({{kStepsAreWhole, steps_are_whole}});
    const char* const group = choice.kernel == GatherKernel::kGemmGroup ? "group_" : "";
    return kernel_named(
        kFolder,
        {"gather_gemm_", group, gated ? "gated_" : "", dtype, "_", mode, bits, "_r", choice.rows},
        constants);
  }
  const bool words = std::all_of(
      request.matrices.begin(), request.matrices.end(), [&](const QuantizedWeightArrays& m) {
        return format ? words_are_vectors(*format, *m.w) : rows_are_vectors({m.w});
      });
  const bool few = choice.kernel == GatherKernel::kFew;
  constants.add({{kRowsAreVectors, words && (!few || rows_are_vectors({&request.x}))},
                 {kTilesAreVectors, rows_are_vectors({&request.x, &request.out})},
                 {kStepsAreWhole, steps_are_whole}});
  if (few) {
    constants.add({{kColumnsAreShared, false}});
    return kernel_named(
        kFolder, {gated ? "gather_few_gated_" : "gather_few_", dtype, "_", mode, bits}, constants);
  }
  return kernel_named(kFolder,
                      {gated        ? "gather_tiles_gated_"
                       : transposed ? "gather_tiles_transposed_"
                                    : "gather_tiles_plain_",
                       dtype, "_", mode, bits},
                      constants);
}

void launch_gather(const GatherRequest& request) {
  request.out.set_data(allocate(request.out.nbytes(), request.stream));
  const GatherChoice choice = choose_gather(request);
  const int64_t tiles = tile_count(request, choice);
  std::optional<Scratch> table;
  if (choice.in_table) {
    table.emplace(table_of(request, choice, tiles));
  }
  const mx::array& x = request.x;
  const GatherGemmParams params = params_of(request, choice, tiles);
  KernelLaunch launched{};
  launched.kernel = &kernel_of(request, choice);
  launched.inputs = {&x};
  for (const QuantizedWeightArrays& m : request.matrices) {
    launched.inputs.append({m.w, m.scales ? m.scales : &x, m.biases ? m.biases : &x});
  }
  for (const mx::array* vectors : request.vectors) {
    launched.inputs.push_back(vectors ? vectors : &x);
  }
  launched.inputs.append({request.ids.lhs ? &*request.ids.lhs : &request.ids.rhs, &request.ids.rhs,
                          table ? table->get() : &request.ids.rhs});
  launched.outputs = {&request.out};
  launched.params = &params;
  launched.params_size = choice.is_gemm() ? sizeof(params) : sizeof(params.gather);
  launched.grid = {static_cast<uint32_t>(ceil_div(request.results(), choice.columns)),
                   static_cast<uint32_t>(std::min(tiles, kMostGridRows)),
                   static_cast<uint32_t>(ceil_div(tiles, kMostGridRows))};
  launched.threadgroup = {static_cast<uint32_t>(choice.threads), 1, 1};
  if (choice.memory > 0) {
    launched.threadgroup_memory = {static_cast<uint32_t>(choice.memory)};
  }
  if (table) {
    launched.temporaries = {&*table};
  }
  launch(launched, request.stream);
}

}  // namespace

bool can_launch_gather(const GatherSizes& sizes, const mx::Stream& stream, std::string* why_not) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (std::max({sizes.pairs * 2, sizes.lefts * sizes.rows, sizes.pairs * sizes.rows}) > kMost / 2 ||
      sizes.experts > kMost / 2) {
    *why_not = "the kernels take at most 2^29 pairs, 2^30 experts, and 2^30 rows";
    return false;
  }
  // Offsets within one matrix are 32 bits.
  QuantizedSizes of_pair;
  of_pair.rows = sizes.rows;
  of_pair.columns = sizes.columns;
  of_pair.outputs = sizes.outputs;
  return can_launch_quantized(of_pair, stream, why_not);
}

bool can_launch_gather_dense(const GatherSizes& sizes,
                             const mx::Stream& stream,
                             std::string* why_not) {
  if (sizes.columns % kDenseColumns != 0) {
    *why_not = "the kernels take rows of w of a multiple of 16 columns";
    return false;
  }
  return can_launch_gather(sizes, stream, why_not);
}

void gather_quantized_matmul_gpu(const QuantizedFormat& format,
                                 const GatherSizes& sizes,
                                 QuantizedProduct product,
                                 const mx::array& x,
                                 const QuantizedWeightArrays& weights,
                                 const PairIds& ids,
                                 mx::array& out,
                                 const mx::Stream& stream) {
  launch_gather({sizes, product, &format, x, {weights}, {}, {}, ids, out, stream});
}

void gather_quantized_swiglu_gpu(const QuantizedFormat& format,
                                 const GatherSizes& sizes,
                                 const mx::array& x,
                                 const QuantizedWeightArrays& gate,
                                 const QuantizedWeightArrays& up,
                                 const mx::array* gate_bias,
                                 const mx::array* up_bias,
                                 const GateOptions& activation,
                                 const PairIds& ids,
                                 mx::array& out,
                                 const mx::Stream& stream) {
  launch_gather({sizes,
                 QuantizedProduct::kTransposed,
                 &format,
                 x,
                 {gate, up},
                 {gate_bias, up_bias},
                 activation,
                 ids,
                 out,
                 stream});
}

void gather_matmul_gpu(const GatherSizes& sizes,
                       QuantizedProduct product,
                       const mx::array& x,
                       const mx::array& w,
                       const PairIds& ids,
                       mx::array& out,
                       const mx::Stream& stream) {
  const QuantizedWeightArrays weights = {&w, nullptr, nullptr};
  launch_gather({sizes, product, nullptr, x, {weights}, {}, {}, ids, out, stream});
}

void sum_pairs_gpu(const mx::array& x,
                   const mx::array& order,
                   const mx::array& sorted,
                   mx::array& out,
                   const mx::Stream& stream) {
  out.set_data(allocate(out.nbytes(), stream));
  GatherSumParams params{};
  params.pairs = static_cast<int32_t>(sorted.size());
  params.ids = out.shape(0);
  params.columns = static_cast<int64_t>(out.size()) / params.ids;
  const int64_t row_bytes = params.columns * static_cast<int64_t>(out.itemsize());
  const int64_t packs = ceil_div(row_bytes, kSumPackBytes);
  const int64_t threads = std::min(kMostSumThreads, round_up(packs, 32));
  KernelLaunch launched{};
  launched.kernel = &kernel_named(kFolder, {"gather_sum_pairs_", dtype_name(x)},
                                  {{kRowsAreVectors, rows_are_vectors({&x, &out}, kSumPackBytes)}});
  launched.inputs = {&x, &order, &sorted};
  launched.outputs = {&out};
  launched.params = &params;
  launched.params_size = sizeof(params);
  launched.grid = {static_cast<uint32_t>(ceil_div(packs, threads)),
                   static_cast<uint32_t>(std::min<int64_t>(params.ids, kMostGridRows)), 1};
  launched.threadgroup = {static_cast<uint32_t>(threads), 1, 1};
  launch(launched, stream);
}

}  // namespace mlx_anvil
