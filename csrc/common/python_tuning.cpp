#include "common/python_tuning.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <map>
#include <string>
#include <tuple>

#include "common/choices.h"
#include "common/errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_anvil {

namespace {

using ChoiceMap = std::map<std::string, int64_t>;

mx::Device device_named(const std::string& name) {
  return name == "gpu" ? mx::Device::gpu : mx::Device::cpu;
}

NamedChoices named(const ChoiceMap& values) {
  return {values.begin(), values.end()};
}

}  // namespace

void bind_tuning(nb::module_& m) {
  // Name to least and most value.
  m.def("_choice_fields", [] {
    std::map<std::string, std::tuple<int64_t, int64_t>> fields;
    for (const ChoiceField& field : choice_fields()) {
      fields[field.name] = {field.least, field.most};
    }
    return fields;
  });
  m.def(
      "_choices",
      [](const std::string& device) {
        const Choices all = choices(device_named(device));
        ChoiceMap values;
        for (const ChoiceField& field : choice_fields()) {
          values[field.name] = all.*field.field;
        }
        return values;
      },
      "device"_a);
  m.def(
      "_choices_key", [](const std::string& device) { return choices_key(device_named(device)); },
      "device"_a);
  m.def(
      "_force_choices", [](const ChoiceMap& values) { force_choices(named(values)); }, "values"_a);
  m.def(
      "_set_choices_file",
      [](nb::callable read) {
        const nb::handle to_read = read.release();  // kept: evaluations may outlive the module
        set_choices_file([to_read](const std::string& key) {
          nb::gil_scoped_acquire lock;
          try {
            return named(nb::cast<ChoiceMap>(to_read(key)));
          } catch (nb::python_error& error) {
            throw_internal_error("tune",
                                 std::string("the tuning file: ") + nb::str(error.value()).c_str());
          }
        });
      },
      "read"_a,
      nb::sig("def _set_choices_file(read: typing.Callable[[str], dict[str, int]]) -> None"));
  // For the tests: generation, class (0: unknown, 1: phone, 2 to 5: base to Ultra), cores, and
  // whether there are neural accelerators.
  m.def(
      "_apple_gpu",
      [](std::string_view architecture, std::string_view name) {
        const AppleGpu gpu = apple_gpu(architecture, name);
        return std::tuple(gpu.generation, static_cast<int>(gpu.size), gpu.cores,
                          gpu.neural_accelerators);
      },
      "architecture"_a, "name"_a);
}

}  // namespace mlx_anvil
