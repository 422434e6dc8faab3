// The Python `with` blocks that ops react to: trace(), strict(), simulate() and composed(). A block
// applies to the thread or asyncio task that entered it, and to tasks that copy its context.
#pragma once

#include <atomic>
#include <memory>

#include "common/simulate.h"
#include "common/trace.h"

namespace mlx_anvil {

struct Block {
  enum class Kind { kTrace, kStrict, kSimulate, kComposed };

  const Kind kind;
  const SimulationMode simulation;      // simulate() only
  const std::shared_ptr<TraceLog> log;  // trace() only
  const std::shared_ptr<Block> outer;
  // A copied context still refers to the block after the block has ended.
  std::atomic<bool> open{true};
};

using BlockPointer = std::shared_ptr<Block>;

// Callers must hold the GIL.
BlockPointer enter_block(Block::Kind kind, const SimulationMode& simulation = {});
void leave_block(const BlockPointer& block);

namespace detail {
inline std::atomic<int> open_blocks{0};
// Returns the innermost open block of the calling context. Acquires the GIL.
BlockPointer innermost_block();
}  // namespace detail

// The process almost never has an open block. This check then avoids a call into Python.
inline bool any_block() {
  return detail::open_blocks.load(std::memory_order_relaxed) != 0;
}

inline BlockPointer innermost_block() {
  return any_block() ? detail::innermost_block() : nullptr;
}

// Returns the first open block among `block` and those around it, or null. The second overload also
// requires `kind`.
BlockPointer first_open(BlockPointer block);
BlockPointer first_open(BlockPointer block, Block::Kind kind);

inline bool inside_block(Block::Kind kind) {
  return any_block() && first_open(innermost_block(), kind) != nullptr;
}

// Returns true inside `composed()`, where every op is built as a graph of MLX ops.
inline bool composing() {
  return inside_block(Block::Kind::kComposed);
}

}  // namespace mlx_anvil
