#include "rope/frequencies.h"

#include <array>
#include <cmath>
#include <numbers>

namespace mlx_anvil {

namespace {

std::vector<uint64_t> computed_turns(const RopeFrequencies& frequencies, int64_t pairs) {
  const double first = rope_turns_over_freqs(frequencies);
  const double octaves = -std::log2(frequencies.base) / static_cast<double>(pairs);
  std::vector<uint64_t> turns(static_cast<size_t>(pairs));
  for (int64_t j = 0; j < pairs; ++j) {
    turns[j] = rope_fixed_point(first * std::exp2(octaves * static_cast<double>(j)));
  }
  return turns;
}

}  // namespace

uint64_t rope_fixed_point(double turns) {
  const double fraction = turns - std::floor(turns);
  // Rounding can turn a tiny negative number into a whole turn, which counts as 0.
  return fraction >= 0.0 && fraction < 1.0 ? static_cast<uint64_t>(fraction * 0x1p64) : 0;
}

double rope_turns_over_freqs(const RopeFrequencies& frequencies) {
  return frequencies.scale / (2.0 * std::numbers::pi);
}

std::vector<uint64_t> rope_turns(const RopeFrequencies& frequencies, int64_t pairs) {
  // Cached per thread, so that no thread waits for another. Models use one or two bases.
  struct Known {
    RopeFrequencies frequencies;
    std::vector<uint64_t> turns;
  };
  thread_local std::array<Known, 4> known;
  thread_local size_t next = 0;
  for (const Known& one : known) {
    if (!one.turns.empty() && one.frequencies == frequencies &&
        static_cast<int64_t>(one.turns.size()) == pairs) {
      return one.turns;
    }
  }
  Known& oldest = known[next++ % known.size()];
  oldest = {frequencies, computed_turns(frequencies, pairs)};
  return oldest.turns;
}

}  // namespace mlx_anvil
