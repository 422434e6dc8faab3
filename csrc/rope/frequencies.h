// Turns per position of each pair, in the kernels' fixed-point format (problem.h).
#pragma once

#include <cstdint>
#include <vector>

namespace mlx_anvil {

struct RopeFrequencies {
  double base;   // ignored if freqs are given
  double scale;  // of positions

  bool operator==(const RopeFrequencies&) const = default;
};

// Returns the turns per position times 2^64, modulo 2^64, one per pair. The last few results are
// cached: every layer of a model requests the same ones, and for a single position computing them
// takes longer than the rotation.
std::vector<uint64_t> rope_turns(const RopeFrequencies& frequencies, int64_t pairs);

// Returns 0 if `turns` is not finite.
uint64_t rope_fixed_point(double turns);

// position * (this / freqs[j]) is the angle in turns.
double rope_turns_over_freqs(const RopeFrequencies& frequencies);

}  // namespace mlx_anvil
