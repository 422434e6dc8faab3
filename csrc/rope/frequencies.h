// How fast pairs turn, as the kernels want it: see problem.h.
#pragma once

#include <cstdint>
#include <vector>

namespace mlx_anvil {

struct RopeFrequencies {
  double base;   // used where there are no freqs
  double scale;  // of positions

  bool operator==(const RopeFrequencies&) const = default;
};

// Turns per position times 2^64, modulo 2^64, of as many frequencies as there are pairs. The last
// few are remembered: a model asks for the same ones in every layer, and for a single position they
// take longer than the rotation.
std::vector<uint64_t> rope_turns(const RopeFrequencies& frequencies, int64_t pairs);

// 0 where `turns` is not finite.
uint64_t rope_fixed_point(double turns);

// Positions times this, over an entry of freqs, are turns.
double rope_turns_over_freqs(const RopeFrequencies& frequencies);

}  // namespace mlx_anvil
