// The extension module.
#include <nanobind/nanobind.h>

#include "common/bind_op.h"
#include "common/python_support.h"

namespace nb = nanobind;

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // registers the types of our signatures
  mlx_anvil::bind_support(m);
  mlx_anvil::BindOp::bind_all(m);
}
