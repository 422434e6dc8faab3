#include "common/block.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <utility>

namespace nb = nanobind;

namespace mlx_anvil {

namespace {

thread_local std::optional<SimulationMode> mode_of_primitive;

// Never deleted: a context can outlive the module.
PyObject* variable() {
  static PyObject* const made = PyContextVar_New("mlx_anvil.block", nullptr);
  if (!made) {
    throw nb::python_error();
  }
  return made;
}

BlockPointer block_of_context() {
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable(), nullptr, &value) < 0) {
    throw nb::python_error();
  }
  const nb::object owned = nb::steal(value);
  return owned.is_valid() && !owned.is_none() ? nb::cast<BlockPointer>(owned) : nullptr;
}

void set_block_of_context(const BlockPointer& block) {
  const nb::object value = block ? nb::cast(block) : nb::none();
  PyObject* const token = PyContextVar_Set(variable(), value.ptr());
  if (!token) {
    throw nb::python_error();
  }
  Py_DECREF(token);
}

}  // namespace

BlockPointer enter_block(Block::Kind kind, const SimulationMode& simulation) {
  auto log = kind == Block::Kind::kTrace ? std::make_shared<TraceLog>() : nullptr;
  const BlockPointer block(
      new Block{kind, simulation, std::move(log), first_open(block_of_context())});
  set_block_of_context(block);
  ++detail::open_blocks;
  return block;
}

void leave_block(const BlockPointer& block) {
  if (!block->open.exchange(false)) {
    return;
  }
  --detail::open_blocks;
  set_block_of_context(first_open(block_of_context()));
}

BlockPointer detail::innermost_block() {
  nb::gil_scoped_acquire lock;
  return first_open(block_of_context());
}

BlockPointer first_open(BlockPointer block) {
  while (block && !block->open) {
    block = block->outer;
  }
  return block;
}

BlockPointer first_open(BlockPointer block, Block::Kind kind) {
  while (block && !(block->open && block->kind == kind)) {
    block = block->outer;
  }
  return block;
}

SimulationMode simulation_mode() {
  if (mode_of_primitive) {
    return *mode_of_primitive;
  }
  if (!any_block()) {
    return {};
  }
  const BlockPointer block = first_open(innermost_block(), Block::Kind::kSimulate);
  return block ? block->simulation : SimulationMode{};
}

SimulationScope::SimulationScope(const SimulationMode& mode)
    : before_(std::exchange(mode_of_primitive, mode)) {}

SimulationScope::~SimulationScope() {
  mode_of_primitive = before_;
}

}  // namespace mlx_anvil
