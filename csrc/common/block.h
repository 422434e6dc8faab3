// The `with` blocks of Python that ops look at: `trace()`, `strict()`, `simulate()`, `composed()`.
// A block holds for the thread or asyncio task that entered it, and for those that copy its
// context.
#pragma once

#include <atomic>
#include <memory>

#include "common/simulate.h"
#include "common/trace.h"

namespace mlx_anvil {

struct Block {
  enum class Kind { kTrace, kStrict, kSimulate, kComposed };

  const Kind kind;
  const SimulationMode simulation;      // of a simulate()
  const std::shared_ptr<TraceLog> log;  // of a trace()
  const std::shared_ptr<Block> outer;
  // A copied context still has the block when it has ended.
  std::atomic<bool> open{true};
};

using BlockPointer = std::shared_ptr<Block>;

// Both with Python's lock held.
BlockPointer enter_block(Block::Kind kind, const SimulationMode& simulation = {});
void leave_block(const BlockPointer& block);

namespace detail {
inline std::atomic<int> open_blocks{0};
// The innermost open block of the calling context; takes Python's lock.
BlockPointer innermost_block();
}  // namespace detail

// Almost always there is none in the whole process, and then Python is not asked.
inline bool any_block() {
  return detail::open_blocks.load(std::memory_order_relaxed) != 0;
}

inline BlockPointer innermost_block() {
  return any_block() ? detail::innermost_block() : nullptr;
}

// `block` itself, or the first around it, that is open; of `kind` in the second. May be null.
BlockPointer first_open(BlockPointer block);
BlockPointer first_open(BlockPointer block, Block::Kind kind);

inline bool inside_block(Block::Kind kind) {
  return any_block() && first_open(innermost_block(), kind) != nullptr;
}

// Whether ops are to be graphs of MLX ops, as in `composed()`.
inline bool composing() {
  return inside_block(Block::Kind::kComposed);
}

}  // namespace mlx_anvil
