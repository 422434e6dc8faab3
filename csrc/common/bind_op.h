// Lets an op add its Python functions to the module: no file lists the ops.
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
  // Constructors of static objects run in no fixed order: this is initialised before any of them.
  static inline constinit const BindOp* first_ = nullptr;

  Bind bind_;
  const BindOp* next_;
};

}  // namespace mlx_anvil
