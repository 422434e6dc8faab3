#include "common/python_support.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#ifdef MLX_ANVIL_CUDA
#include "common/cuda_module.h"
#endif
#include "common/block.h"
#include "common/errors.h"
#include "common/freed_memory.h"
#include "common/huge_pages.h"
#include "common/isa.h"
#include "common/kernel_source.h"
#include "common/launch.h"
#include "common/parallel.h"
#include "common/plan.h"
#include "common/probe.h"
#include "common/python_calls.h"
#include "common/python_tuning.h"
#include "common/simulate.h"
#include "common/trace.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_anvil {

namespace {

std::vector<std::string> isa_names(bool (*wanted)(Isa)) {
  std::vector<std::string> names;
  for (Isa isa : kAllIsas) {
    if (wanted(isa)) {
      names.push_back(isa_name(isa));
    }
  }
  return names;
}

void set_isa(const std::string& name) {
  for (Isa isa : kAllIsas) {
    if (name == isa_name(isa) && set_current_isa(isa)) {
      return;
    }
  }
  throw nb::value_error(("[set_isa] " + name + " is not supported on this machine.").c_str());
}

using FloatVector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Converts a Python exception to an error with the same text, which the evaluation raises.
template <class Call>
auto call_python(const std::string& op, const char* callee, Call call) {
  nb::gil_scoped_acquire lock;
  try {
    return call();
  } catch (nb::python_error& error) {
    const nb::str text(error.value());
    throw_internal_error(op, std::string(callee) + ": " + text.c_str());
  }
}

void set_toolchain(nb::callable compile, nb::callable describe, nb::callable keep_profile) {
  // Kept for the life of the process: an evaluation may need them during interpreter shutdown.
  const nb::handle to_compile = compile.release();
  const nb::handle to_describe = describe.release();
  const nb::handle to_keep_profile = keep_profile.release();
  SimulatorToolchain toolchain;
  toolchain.compile = [to_compile](const Kernel& kernel, SimulatorChecks checks) {
    return call_python(kernel.op(), "the simulator's compiler", [&] {
      nb::dict values;
      for (const FunctionConstant& constant : kernel.constants()) {
        values[nb::int_(constant.index)] = nb::bool_(constant.value);
      }
      return nb::cast<std::string>(
          to_compile(kernel.op(), kernel.name(), values, checks.checked, checks.profiled));
    });
  };
  toolchain.describe = [to_describe](const std::string& path, const void* report) {
    return call_python("simulate", "the simulator's compiler", [&] {
      return nb::cast<std::string>(to_describe(path, reinterpret_cast<uintptr_t>(report)));
    });
  };
  toolchain.keep_profile = [to_keep_profile](const Kernel& kernel, const std::string& path,
                                             const void* report, const void* profile,
                                             uint64_t profiles) {
    call_python(kernel.op(), "the simulator's profile", [&] {
      to_keep_profile(path, kernel.name(), reinterpret_cast<uintptr_t>(report),
                      reinterpret_cast<uintptr_t>(profile), profiles);
    });
  };
  set_simulator_toolchain(std::move(toolchain));
}

#ifdef MLX_ANVIL_CUDA
void set_modules(nb::callable ptx, nb::callable cubin) {
  const nb::handle to_ptx = ptx.release();  // kept, as in set_toolchain()
  const nb::handle to_cubin = cubin.release();
  CudaModules modules;
  modules.ptx = [to_ptx](const Kernel& kernel) {
    return call_python(kernel.op(), "the kernels' PTX",
                       [&] { return nb::cast<std::string>(to_ptx(kernel.op(), kernel.name())); });
  };
  modules.cubin = [to_cubin](const Kernel& kernel, ComputeCapability device) {
    return call_python(kernel.op(), "the kernels' cubins", [&] {
      const auto found = nb::cast<nb::tuple>(
          to_cubin(kernel.op(), kernel.pipeline_key(), device.major, device.minor));
      const auto image = nb::cast<nb::bytes>(found[1]);
      return Cubin{nb::cast<std::string>(found[0]), std::string(image.c_str(), image.size())};
    });
  };
  set_cuda_modules(std::move(modules));
}
#endif

void bind_gpu(nb::module_& m) {
  m.def("_has_metal", [] {
#ifdef MLX_ANVIL_METAL
    return true;
#else
    return false;
#endif
  });
  m.def("_has_cuda", [] {
#ifdef MLX_ANVIL_CUDA
    return true;
#else
    return false;
#endif
  });
  m.def("_why_no_gpu", [] {  // empty if kernels can be launched
    std::string why_not;
    return can_launch(mx::Device::gpu, &why_not) ? std::string() : why_not;
  });
  m.def(
      "_set_cuda_modules",
      []([[maybe_unused]] nb::callable ptx, [[maybe_unused]] nb::callable cubin) {
#ifdef MLX_ANVIL_CUDA
        set_modules(std::move(ptx), std::move(cubin));
#endif
      },
      "ptx"_a, "cubin"_a,
      nb::sig("def _set_cuda_modules(ptx: typing.Callable[[str, str], str], "
              "cubin: typing.Callable[[str, str, int, int], tuple[str, bytes]]) -> None"));
}

// For the tests: launches with a temporary that is also held elsewhere, as the "array" itself or as
// a "view" of its memory.
void launch_with_held_temporary(const std::string& held) {
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  const Scratch temporary({4}, mx::float32, stream);
  mx::array holder(mx::Shape{4}, mx::float32, nullptr, {});
  if (held == "array") {
    holder = *temporary;
  } else {
    holder.copy_shared_buffer(*temporary);
  }
  KernelLaunch request{};
  request.kernel = &kernel_named("silu_gate", {"silu_gate_forward_float32_flat"}, {});
  request.temporaries = {&temporary};
  launch(request, stream);
}

void bind_simulate(nb::module_& m) {
  m.def("_set_simulator_toolchain", &set_toolchain, "compile"_a, "describe"_a, "keep_profile"_a,
        nb::sig("def _set_simulator_toolchain(compile: typing.Callable[[str, str, dict[int | str, "
                "object], bool, bool], str], "
                "describe: typing.Callable[[str, int], str], "
                "keep_profile: typing.Callable[[str, str, int, int, int], None]) -> None"));
  m.def("_launch_with_held_temporary", &launch_with_held_temporary, "held"_a);
}

void bind_trace(nb::module_& m) {
  nb::class_<TraceEvent>(m, "_TraceEvent")
      .def_prop_ro("is_fallback",
                   [](const TraceEvent& e) { return e.kind == TraceEvent::Kind::kFallback; })
      .def_ro("op", &TraceEvent::op)
      .def_ro("kernel", &TraceEvent::kernel)
      .def_ro("device", &TraceEvent::device)
      .def_ro("grid", &TraceEvent::grid)
      .def_ro("threadgroup", &TraceEvent::threadgroup)
      .def_ro("reason", &TraceEvent::reason)
      .def_ro("bindings", &TraceEvent::bindings)
      .def_ro("noted", &TraceEvent::noted)
      .def_prop_ro("began", [](const TraceEvent& e) { return e.span ? e.span->begin.load() : 0; })
      .def_prop_ro("ended", [](const TraceEvent& e) { return e.span ? e.span->end.load() : 0; });
  nb::class_<TraceLog>(m, "_TraceLog")
      .def_ro("entered", &TraceLog::entered)
      .def("events", &TraceLog::events);
  // For patched ops: their Python code falls back to the original.
  m.def("_note_fallback", &note_fallback, "op"_a, "reason"_a);
  m.def("_fallback_count", [] { return last_fallback().count; });
  m.def("_last_fallback", [] { return std::tuple(last_fallback().op, last_fallback().reason); });
}

void bind_blocks(nb::module_& m) {
  nb::class_<Block>(m, "_Block").def_prop_ro("log", [](const Block& block) { return block.log; });
  m.def("_enter_trace", [] { return enter_block(Block::Kind::kTrace); });
  m.def("_enter_strict", [] { return enter_block(Block::Kind::kStrict); });
  m.def("_enter_composed", [] { return enter_block(Block::Kind::kComposed); });
  m.def(
      "_enter_simulate",
      [](bool checked, uint64_t seed, bool matrix_units, bool group_products,
         std::pair<std::string, std::string> chip, uint64_t profiles) {
        return enter_block(Block::Kind::kSimulate,
                           {.on = true,
                            .checks = {.checked = checked, .profiled = profiles != 0},
                            .seed = seed,
                            .matrix_units = matrix_units,
                            .group_products = group_products,
                            .apple = apple_gpu(chip.first, chip.second),
                            .profiles = profiles});
      },
      "checked"_a, "seed"_a, "matrix_units"_a, "group_products"_a, "chip"_a, "profiles"_a);
  m.def("_leave_block", &leave_block, "block"_a);
}

Probe::Map probe_named(const std::string& name) {
  const Probe& all = probe();
  const std::pair<const char*, Probe::Map> named[] = {
      {"exp", all.exp},
      {"exp_nonpositive", all.exp_nonpositive},
      {"exp_nonpositive_float16", all.exp_nonpositive_float16},
      {"exp_nonpositive_bfloat16", all.exp_nonpositive_bfloat16},
      {"exp2_bounded", all.exp2_bounded},
      {"exp2_bounded_float16", all.exp2_bounded_float16},
      {"tanh", all.tanh},
      {"float16", all.through_float16},
      {"bfloat16", all.through_bfloat16},
  };
  for (const auto& [known, function] : named) {
    if (name == known) {
      return function;
    }
  }
  throw nb::value_error(("[_probe] unknown function " + name + ".").c_str());
}

// Copies on all threads. `stream` selects streaming stores; otherwise memcpy() decides.
void copy(FloatVector from, FloatVector to, bool stream) {
  constexpr int64_t kUnit = 4096;
  const int64_t count = static_cast<int64_t>(from.size());
  const float* source = from.data();
  float* target = to.data();
  nb::gil_scoped_release release;
  parallel_for((count + kUnit - 1) / kUnit, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kUnit;
    const int64_t n = std::min(end * kUnit, count) - first;
    if (stream) {
      probe().stream_copy(source + first, target + first, n);
    } else {
      std::memcpy(target + first, source + first, n * sizeof(float));
    }
  });
}

// Reads on all threads.
void read(FloatVector from) {
  constexpr int64_t kUnit = 4096;
  const int64_t count = static_cast<int64_t>(from.size());
  const float* source = from.data();
  nb::gil_scoped_release release;
  parallel_for((count + kUnit - 1) / kUnit, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kUnit;
    // volatile: the compiler must not remove the read.
    [[maybe_unused]] volatile const float kept =
        probe().read(source + first, std::min(end * kUnit, count) - first);
  });
}

void require_same_size(const FloatVector& x, const FloatVector& out) {
  if (x.size() != out.size()) {
    throw nb::value_error("[probe] both arrays must have the same size.");
  }
}

void bind_probe(nb::module_& m) {
  m.def(
      "_probe",
      [](const std::string& name, FloatVector x, FloatVector out) {
        require_same_size(x, out);
        probe_named(name)(x.data(), out.data(), static_cast<int64_t>(x.size()));
      },
      "name"_a, "x"_a, "out"_a);
  m.def(
      "_copy",
      [](FloatVector from, FloatVector to, bool stream) {
        require_same_size(from, to);
        copy(from, to, stream);
      },
      "from_"_a, "to"_a, "stream"_a);
  m.def("_read", &read, "from_"_a);
}

void bind_plan(nb::module_& m) {
  nb::class_<PlannedKernel>(m, "_PlannedKernel")
      .def_prop_ro("name",
                   [](const PlannedKernel& planned) { return planned.kernel->pipeline_key(); })
      .def("build", &build_pipeline, nb::call_guard<nb::gil_scoped_release>());
  m.def("_plan_kernels", &plan_kernels, "outputs"_a);
}

}  // namespace

void bind_support(nb::module_& m) {
  bind_calls(m);
  bind_trace(m);
  bind_blocks(m);
  bind_simulate(m);
  bind_tuning(m);
  m.def("_supported_isas", [] { return isa_names(isa_supported); });
  m.def("_left_out_isas", [] { return isa_names(isa_left_out); });
  m.def("_current_isa", [] { return std::string(isa_name(current_isa())); });
  m.def("_set_isa", &set_isa, "name"_a);
  m.def("_max_threads", &max_threads);
  m.def("_available_memory", &available_memory);
  m.def("_use_huge_pages", &use_huge_pages, "arrays"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("_kernel_names", &kernel_names, "op"_a);
  m.def("_op_source", &op_source, "op"_a);
  m.def("_kernel_source", &kernel_source, "name"_a);
  m.def("_metal_file_names", &metal_file_names);
  m.def("_file_source", &file_source, "path"_a);
  bind_gpu(m);
  bind_plan(m);
  bind_probe(m);
}

}  // namespace mlx_anvil
