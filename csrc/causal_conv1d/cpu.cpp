#include "causal_conv1d/cpu.h"

#include <algorithm>

#include "causal_conv1d/simd/kernels.h"
#include "common/aligned_floats.h"
#include "common/integers.h"
#include "common/parallel.h"
#include "common/sum_rows.h"
#include "common/thread_scratch.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kGrain = 32768;      // minimum elements per thread, as for the norms
constexpr int64_t kChunk = 512;        // channels of a piece, whose weights stay in the L1 cache
constexpr int64_t kForwardRows = 32;   // of a tile
constexpr int64_t kBackwardRows = 64;  // of a tile, which computes width - 1 outputs twice
constexpr int64_t kMostRunsOfGroup = 64;

// A call as pieces. They do not depend on the number of threads, so neither do sums over them.
struct Pieces {
  int64_t tile_rows, tiles_per_batch;
  int64_t runs_per_group, tiles_per_run, tiles_per_group;
  int64_t chunks, count;

  Pieces(const ConvProblem& problem, int64_t rows, int64_t most_rows, int64_t most_runs)
      : tile_rows(std::clamp<int64_t>(rows, 1, most_rows)),
        tiles_per_batch(std::max<int64_t>(1, ceil_div(rows, tile_rows))),
        tiles_per_group(problem.batch_per_group() * tiles_per_batch),
        chunks(ceil_div(problem.channels, kChunk)) {
    // Widening the weights costs as much as a few rows.
    const int64_t rows_of_grain = kGrain / std::min(kChunk, problem.channels);
    tiles_per_run = std::max(ceil_div(rows_of_grain, tile_rows),
                             ceil_div(std::max<int64_t>(1, tiles_per_group), most_runs));
    runs_per_group = std::max<int64_t>(1, ceil_div(tiles_per_group, tiles_per_run));
    count = problem.groups * runs_per_group * chunks;
  }

  int64_t run(int64_t piece) const { return piece / chunks; }
  int64_t group(int64_t piece) const { return run(piece) / runs_per_group; }

  ConvPiece operator()(int64_t piece, int64_t channels) const {
    const int64_t first = run(piece) % runs_per_group * tiles_per_run;
    const int64_t of_group = group(piece) * tiles_per_group;
    const int64_t channel = piece % chunks * kChunk;
    return {of_group + first, of_group + std::min(first + tiles_per_run, tiles_per_group),
            tiles_per_batch,  tile_rows,
            channel,          std::min(channel + kChunk, channels)};
  }

  // Pieces that pay for waking a thread. A decode reads its weights and state too.
  int64_t grain(const ConvProblem& problem) const {
    const int64_t rows = tiles_per_run * tile_rows + 2 * problem.width;
    return std::max<int64_t>(1, kGrain / (rows * std::min(kChunk, problem.channels)));
  }
};

// Memory of one piece for weights, or for sums.
int64_t floats_of_chunk(const ConvProblem& problem) {
  return round_up(std::min(kChunk, problem.channels), conv_vector_kernels().block) *
         (problem.width + 1);
}

}  // namespace

void conv_forward_cpu(const ConvForwardArgs& args) {
  const ConvProblem& problem = args.of;
  const Pieces pieces(problem, problem.length, kForwardRows, problem.batch * problem.length + 1);
  const auto widen = conv_vector_kernels()[problem].widen;
  const ConvForwardKernel kernel = conv_forward_kernels()[problem];
  parallel_for(pieces.count, pieces.grain(problem), [&](int64_t begin, int64_t end) {
    auto* const weights =
        static_cast<float*>(thread_scratch(floats_of_chunk(problem) * int64_t{sizeof(float)}));
    for (int64_t i = begin; i < end; ++i) {
      const ConvPiece piece = pieces(i, problem.channels);
      widen(problem, pieces.group(i), piece.first_channel, piece.last_channel, weights);
      kernel(args, piece, weights);
    }
  });
}

void conv_backward_cpu(const ConvBackwardArgs& args) {
  const ConvProblem& problem = args.of;
  const Pieces pieces(problem, problem.length + problem.width - 1, kBackwardRows, kMostRunsOfGroup);
  const ConvVectorKernels& vectors = conv_vector_kernels()[problem];
  const ConvBackwardKernel kernel = conv_backward_kernels()[problem];
  const int64_t per_channel = problem.width + 1, of_chunk = floats_of_chunk(problem);
  const int64_t of_run = round_up(problem.channels, conv_vector_kernels().block) * per_channel;
  const bool has_sums = args.d_weight != nullptr;
  const AlignedFloats parts(has_sums ? problem.groups * pieces.runs_per_group * of_run : 0);
  parallel_for(pieces.count, pieces.grain(problem), [&](int64_t begin, int64_t end) {
    auto* const weights =
        static_cast<float*>(thread_scratch(2 * of_chunk * int64_t{sizeof(float)}));
    float* const lost = has_sums ? weights + of_chunk : nullptr;
    for (int64_t i = begin; i < end; ++i) {
      const ConvPiece piece = pieces(i, problem.channels);
      float* const sums =
          has_sums ? parts.get() + pieces.run(i) * of_run + piece.first_channel * per_channel
                   : nullptr;
      if (has_sums) {
        const int64_t channels =
            round_up(piece.last_channel - piece.first_channel, conv_vector_kernels().block);
        std::fill_n(sums, channels * per_channel, 0.0f);
        std::fill_n(lost, channels * per_channel, 0.0f);
      }
      vectors.widen(problem, pieces.group(i), piece.first_channel, piece.last_channel, weights);
      kernel(args, piece, weights, sums, lost);
    }
  });
  if (has_sums) {
    const AlignedFloats totals(problem.groups * of_run);
    sum_rows({.outer = problem.groups,
              .rows = pieces.runs_per_group,
              .inner = of_run,
              .in = parts.get(),
              .out = totals.get(),
              .in_dtype = KernelDtype::kFloat32,
              .out_dtype = KernelDtype::kFloat32});
    for (int64_t group = 0; group < problem.groups; ++group) {
      vectors.narrow(args, group, totals.get() + group * of_run);
    }
  }
}

}  // namespace mlx_anvil
