#include "common/python_calls.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <utility>

#include "common/errors.h"

namespace mlx_anvil {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Set once, and kept for the life of the process.
PyObject* explain_function = nullptr;

// Replaces the TypeError of a call by one with the text that the Python function returns, if any.
void replace_error(PyObject* function, PyObject* const* args, size_t count, PyObject* names) {
  nb::python_error error;  // takes the error from the interpreter
  try {
    nb::list positional;
    for (size_t i = 0; i < count; ++i) {
      positional.append(nb::handle(args[i]));
    }
    nb::dict named;
    const size_t named_count = names ? nb::len(nb::handle(names)) : 0;
    for (size_t i = 0; i < named_count; ++i) {
      named[nb::handle(names)[i]] = nb::handle(args[count + i]);
    }
    const nb::object text = nb::handle(explain_function)(nb::handle(function), positional, named,
                                                         nb::str(error.value()));
    if (!text.is_none()) {
      PyErr_SetString(PyExc_TypeError, nb::cast<std::string>(text).c_str());
      return;
    }
  } catch (...) {  // the explanation failed: the first error says more
  }
  error.restore();
}

// nanobind calls a function through the pointer of Python's vectorcall protocol. It points to one
// of a few dispatchers. Ours calls one of them, so a call that succeeds pays for one jump.
constexpr size_t kMaxDispatchers = 8;
std::array<vectorcallfunc, kMaxDispatchers> dispatchers{};

template <size_t index>
PyObject* dispatch(PyObject* function, PyObject* const* args, size_t flags, PyObject* names) {
  PyObject* const result = dispatchers[index](function, args, flags, names);
  if (!result && PyErr_ExceptionMatches(PyExc_TypeError)) {
    replace_error(function, args, flags & ~PY_VECTORCALL_ARGUMENTS_OFFSET, names);
  }
  return result;
}

template <size_t... indices>
constexpr std::array<vectorcallfunc, sizeof...(indices)> all_dispatches(
    std::index_sequence<indices...>) {
  return {dispatch<indices>...};
}

constexpr auto kDispatches = all_dispatches(std::make_index_sequence<kMaxDispatchers>());

void explain_calls_of(nb::handle function) {
  const Py_ssize_t offset = Py_TYPE(function.ptr())->tp_vectorcall_offset;
  auto& pointer =
      *reinterpret_cast<vectorcallfunc*>(reinterpret_cast<char*>(function.ptr()) + offset);
  if (std::find(kDispatches.begin(), kDispatches.end(), pointer) != kDispatches.end()) {
    return;
  }
  for (size_t i = 0; i < kMaxDispatchers; ++i) {
    if (!dispatchers[i] || dispatchers[i] == pointer) {
      dispatchers[i] = pointer;
      pointer = kDispatches[i];
      return;
    }
  }
  throw_internal_error("import", "nanobind has more dispatchers than expected.");
}

}  // namespace

void bind_calls(nb::module_& m) {
  m.def(
      "_explain_calls",
      [](nb::handle functions, nb::object explain) {
        explain_function = explain.release().ptr();
        for (nb::handle function : functions) {
          explain_calls_of(function);
        }
      },
      "functions"_a, "explain"_a,
      nb::sig("def _explain_calls(functions: typing.Sequence[object], explain: typing.Callable["
              "[typing.Any, list[object], dict[str, object], str], str | None]) -> None"));
}

}  // namespace mlx_anvil
