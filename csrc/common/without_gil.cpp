#include "common/without_gil.h"

#include <nanobind/nanobind.h>

namespace mlx_anvil {

WithoutGil::WithoutGil() : released_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (released_) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(released_));
  }
}

}  // namespace mlx_anvil
