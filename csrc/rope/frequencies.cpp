#include "rope/frequencies.h"

#include <cmath>
#include <numbers>

namespace mlx_anvil {

uint64_t rope_fixed_point(double turns) {
  const double fraction = turns - std::floor(turns);
  // Rounding may leave a tiny negative number with a whole turn, which is none.
  return fraction >= 0.0 && fraction < 1.0 ? static_cast<uint64_t>(fraction * 0x1p64) : 0;
}

double rope_turns_over_freqs(const RopeFrequencies& frequencies) {
  return frequencies.scale / (2.0 * std::numbers::pi);
}

std::vector<uint64_t> rope_turns(const RopeFrequencies& frequencies, int64_t pairs) {
  const double first = rope_turns_over_freqs(frequencies);
  const double octaves = -std::log2(frequencies.base) / static_cast<double>(pairs);
  std::vector<uint64_t> turns(static_cast<size_t>(pairs));
  for (int64_t j = 0; j < pairs; ++j) {
    turns[j] = rope_fixed_point(first * std::exp2(octaves * static_cast<double>(j)));
  }
  return turns;
}

}  // namespace mlx_anvil
