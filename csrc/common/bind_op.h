// Registers an op's Python functions with the module, so that no file has to list the ops.
// csrc/bindings.cpp calls bind_all().
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

// Each op's python.cpp defines one at namespace scope:
//
//   const BindOp bind_norm([](nb::module_& m) { m.def("rms_norm", ...); });
class BindOp {
 public:
  using Bind = void (*)(nanobind::module_& m);

  explicit BindOp(Bind bind) : bind_(bind), next_(first_) { first_ = this; }

  static void bind_all(nanobind::module_& m) {
    for (const BindOp* op = first_; op; op = op->next_) {
      op->bind_(m);
    }
  }

 private:
  // constinit: static objects are constructed in no fixed order, and this must precede all of them.
  static inline constinit const BindOp* first_ = nullptr;

  Bind bind_;
  const BindOp* next_;
};

}  // namespace mlx_anvil
