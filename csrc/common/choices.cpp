#include "common/choices.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "common/errors.h"
#include "common/launch.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kMany = int64_t{1} << 40;

constexpr ChoiceField kFields[] = {
    {"flash_attention.mlx_queries", &Choices::attention_mlx_queries, 0, kMany},
    {"flash_attention.stored_kb", &Choices::attention_stored_kb, 1, 1 << 20},
    {"quantized_matmul.mlx_rows", &Choices::product_mlx_rows, 0, kMany},
    {"quantized_matmul.mlx_few_rows", &Choices::product_mlx_few_rows, 0, 8},
    {"quantized_matmul.split_rows", &Choices::product_split_rows, 8, 32},
    {"quantized_gemv.shared_outputs", &Choices::gemv_shared_outputs, 0, kMany},
    {"norm.elements_per_thread", &Choices::norm_elements, 1, 16},
};

// ---- the table ----------------------------------------------------------------------------------

struct TableRow {
  bool (*is_for)(const DeviceTraits& traits);
  Choices choices;
};

// The first row that fits counts. No size of an Apple GPU (AppleGpuClass) has a row of its own yet.
constexpr TableRow kTable[] = {
    // A multiprocessor issues too few instructions for what a thread does once per row.
    {[](const DeviceTraits& traits) { return traits.is_nvidia(); }, {.norm_elements = 16}},
    // 3 to 4 times the rate of any simdgroup_matrix kernel.
    {[](const DeviceTraits& traits) { return traits.apple.neural_accelerators; },
     {.attention_mlx_queries = 9, .product_mlx_rows = 9, .product_mlx_few_rows = 4}},
    // From the M3 on, MLX has a kernel that reads w once for a few rows, about as fast as memory.
    {[](const DeviceTraits& traits) { return traits.apple.generation >= 15; },
     {.product_mlx_few_rows = 4}},
    {[](const DeviceTraits&) { return true; }, {}},
};

Choices default_choices(const DeviceTraits& traits) {
  const auto* const row =
      std::find_if(std::begin(kTable), std::end(kTable),
                   [&traits](const TableRow& each) { return each.is_for(traits); });
  return row->choices;
}

// ---- the file -----------------------------------------------------------------------------------

// Devices that may choose differently. One process has one GPU, but simulates many.
struct DeviceKey {
  bool simulated = false;
  bool matrix_units = false;
  int32_t generation = 0;
  AppleGpuClass size = AppleGpuClass::kUnknown;

  auto operator<=>(const DeviceKey&) const = default;
};

DeviceKey key_of(const mx::Device& device) {
  if (device == mx::Device::gpu) {
    return {};
  }
  const DeviceTraits traits = device_traits(device);
  return {true, traits.matrix_units, traits.apple.generation, traits.apple.size};
}

struct Known {
  std::mutex mutex;
  std::map<DeviceKey, Choices> choices;
  NamedChoices forced;
  std::function<NamedChoices(const std::string&)> read;
};

Known& known() {
  static Known* const made = new Known;  // an evaluation may need it while the process ends
  return *made;
}

void override_by(Choices& choices, const NamedChoices& named) {
  for (const auto& [name, value] : named) {
    const auto* const field =
        std::find_if(std::begin(kFields), std::end(kFields),
                     [&name = name](const ChoiceField& known) { return name == known.name; });
    if (field == std::end(kFields)) {
      throw_internal_error("tune", "unknown choice " + name + ".");
    }
    choices.*field->field = std::clamp(value, field->least, field->most);
  }
}

const char* size_text(AppleGpuClass size) {
  switch (size) {
    case AppleGpuClass::kPro:
      return " Pro";
    case AppleGpuClass::kMax:
      return " Max";
    case AppleGpuClass::kUltra:
      return " Ultra";
    default:
      return "";
  }
}

}  // namespace

std::span<const ChoiceField> choice_fields() {
  return kFields;
}

const char* reason_for_mlx(const DeviceTraits& traits) {
  return traits.apple.neural_accelerators ? "MLX's kernel uses the GPU's neural accelerators"
                                          : "MLX's kernel is faster, says the tuning file";
}

std::string choices_key(const mx::Device& device) {
  std::string key = backend_name(device);
  if (device == mx::Device::gpu) {
    const std::string name = gpu_fact("device_name");
    return key + ": " + (name.empty() ? "unknown" : name);
  }
  const DeviceTraits traits = device_traits(device);
  if (traits.matrix_units) {
    return key + ": matrix units";
  }
  const AppleGpu& gpu = traits.apple;
  return gpu.generation == 0
             ? key
             : key + ": M" + std::to_string(gpu.generation - 12) + size_text(gpu.size);
}

void set_choices_file(std::function<NamedChoices(const std::string& key)> read) {
  std::lock_guard lock(known().mutex);
  known().read = std::move(read);
  known().choices.clear();
}

void force_choices(const NamedChoices& named) {
  std::lock_guard lock(known().mutex);
  known().forced = named;
  known().choices.clear();
}

Choices choices(const mx::Device& device) {
  const DeviceKey key = key_of(device);
  std::function<NamedChoices(const std::string&)> read;
  NamedChoices forced;
  {
    std::lock_guard lock(known().mutex);
    if (const auto found = known().choices.find(key); found != known().choices.end()) {
      return found->second;
    }
    read = known().read;
    forced = known().forced;
  }
  Choices made = default_choices(device_traits(device));
  if (read) {  // calls Python, so the lock must not be held
    override_by(made, read(choices_key(device)));
  }
  override_by(made, forced);
  std::lock_guard lock(known().mutex);
  return known().choices.try_emplace(key, made).first->second;
}

}  // namespace mlx_anvil
