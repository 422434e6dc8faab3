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

constexpr int64_t kGrain = 32768;  // minimum elements per thread, as for the norms
constexpr int64_t kChunk = 512;    // channels of a piece, whose weights stay in the L1 cache
// Rows of a tile. Rows of a power of two lie in the same sets of the caches, which hold few.
constexpr int64_t kTileRows = 8;
constexpr int64_t kRowsOfSum = 256;  // are added up without compensation
constexpr int64_t kMostRunsOfGroup = 64;

// A call as pieces. They do not depend on the number of threads, so neither do sums over them.
struct Pieces {
  int64_t tile_rows, tiles_per_batch;
  int64_t runs_per_group, tiles_per_run, tiles_per_group;
  int64_t chunks, count;

  Pieces(const ConvProblem& problem, int64_t rows, int64_t most_runs)
      : tile_rows(std::clamp<int64_t>(rows, 1, kTileRows)),
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
  const Pieces pieces(problem, problem.length, problem.batch * problem.length + 1);
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
  const Pieces pieces(problem, problem.length + problem.width - 1, kMostRunsOfGroup);
  const ConvVectorKernels& vectors = conv_vector_kernels()[problem];
  const ConvBackwardKernel kernel = conv_backward_kernels()[problem];
  const int64_t per_channel = problem.width + 1, of_chunk = floats_of_chunk(problem);
  const int64_t of_run = round_up(problem.channels, conv_vector_kernels().block) * per_channel;
  const bool has_sums = args.d_weight != nullptr;
  const AlignedFloats parts(has_sums ? problem.groups * pieces.runs_per_group * of_run : 0);

  // Sums of few rows at a time, which are added with compensation: the error does not grow with the
  // number of rows.
  const auto add_up = [&](ConvPiece piece, float* scratch, float* sums) {
    float *const weights = scratch, *const carry = weights + of_chunk;
    float *const few = carry + of_chunk, *const lost = few + of_chunk;
    const int64_t count =
        round_up(piece.last_channel - piece.first_channel, conv_vector_kernels().block) *
        per_channel;
    std::fill_n(sums, count, 0.0f);
    std::fill_n(lost, count, 0.0f);
    const int64_t last = piece.last_tile, step = kRowsOfSum / kTileRows;
    for (; piece.first_tile < last; piece.first_tile = piece.last_tile, piece.continues = true) {
      piece.last_tile = std::min(piece.first_tile + step, last);
      std::fill_n(few, count, 0.0f);
      kernel(args, piece, weights, few, carry);
      add_compensated(few, count, sums, lost);
    }
  };
  parallel_for(pieces.count, pieces.grain(problem), [&](int64_t begin, int64_t end) {
    auto* const scratch =
        static_cast<float*>(thread_scratch(4 * of_chunk * int64_t{sizeof(float)}));
    for (int64_t i = begin; i < end; ++i) {
      const ConvPiece piece = pieces(i, problem.channels);
      vectors.widen(problem, pieces.group(i), piece.first_channel, piece.last_channel, scratch);
      if (has_sums) {
        add_up(piece, scratch,
               parts.get() + pieces.run(i) * of_run + piece.first_channel * per_channel);
      } else {
        kernel(args, piece, scratch, nullptr, scratch + of_chunk);
      }
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
