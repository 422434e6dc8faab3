// Choices between kernels that are a matter of speed: which one a GPU takes, and how much work a
// thread gets. A table has the defaults; `python -m mlx_anvil tune` measures, and writes a file
// that overrides them (docs/tuning.md). Results stay within the ops' limits, whatever the choice.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/device_traits.h"

namespace mlx_anvil {

struct Choices {
  // Plain attention runs MLX's own kernel from this many queries on. 0: never.
  int64_t attention_mlx_queries = 0;
  // KiB per core for what attention's backward stores between its launches on Apple's GPUs.
  int64_t attention_stored_kb = 16 << 10;
  // Products run MLX's own kernel from this many rows on, if the format has one. 0: never.
  int64_t product_mlx_rows = 0;
  // 4-bit and 2-bit products of 2 to this many rows run MLX's own kernel; gated ones of fewer rows
  // do. 0: none.
  int64_t product_mlx_few_rows = 0;
  // Products of up to this many rows run the kernel whose SIMD groups split the summed dimension.
  int64_t product_split_rows = 32;
  // In products of up to 8 rows with fewer outputs, SIMD groups share the columns of w.
  int64_t gemv_shared_outputs = 4096;
  // A row of a norm gets SIMD groups until no thread has more elements than this.
  int64_t norm_elements = 8;

  bool operator==(const Choices&) const = default;
};

// A choice by name, as in the file: the op, a dot, what is chosen.
struct ChoiceField {
  const char* name;
  int64_t Choices::* field;
  int64_t least;
  int64_t most;
};
std::span<const ChoiceField> choice_fields();

// Why MLX's own kernel runs where a choice says so, for trace().
const char* reason_for_mlx(const DeviceTraits& traits);

// What `device` uses: the table's choices, the file's, or those that are forced.
Choices choices(const mx::Device& device);

// The name of the device in the file: "metal: Apple M4 Max".
std::string choices_key(const mx::Device& device);

// `read` returns what the file says about a device: known names and allowed values. It is called
// once per device, at the first launch that has a choice. Forgets what was read before.
using NamedChoices = std::vector<std::pair<std::string, int64_t>>;
void set_choices_file(std::function<NamedChoices(const std::string& key)> read);

// Makes all devices use the named choices, and their own for the rest. Empty: no longer.
void force_choices(const NamedChoices& named);

}  // namespace mlx_anvil
