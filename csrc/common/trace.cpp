#include "common/trace.h"

#include <chrono>

#include "common/block.h"
#include "common/errors.h"

namespace mlx_anvil {

namespace {
thread_local int unnoted_depth = 0;
thread_local LastFallback last;
}  // namespace

int64_t trace_clock() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void TraceLog::add(const TraceEvent& event) {
  std::lock_guard lock(mutex_);
  events_.push_back(event);
}

std::vector<TraceEvent> TraceLog::events() const {
  std::lock_guard lock(mutex_);
  return events_;
}

bool tracing() {
  return inside_block(Block::Kind::kTrace);
}

void record(const TraceEvent& event) {
  for (BlockPointer block = innermost_block(); block; block = block->outer) {
    if (block->open && block->log) {
      block->log->add(event);
    }
  }
}

FallbacksUnnoted::FallbacksUnnoted() {
  ++unnoted_depth;
}

FallbacksUnnoted::~FallbacksUnnoted() {
  --unnoted_depth;
}

void note_fallback(const std::string& op, const std::string& reason) {
  if (unnoted_depth > 0) {
    return;
  }
  if (inside_block(Block::Kind::kStrict)) {
    throw_internal_error(op, "strict(): no fused kernel for this call: " + reason + ".");
  }
  last = {last.count + 1, op, reason};
  if (tracing()) {
    record({TraceEvent::Kind::kFallback, op, "", "", {}, {}, reason});
  }
}

const LastFallback& last_fallback() {
  return last;
}

void note_mlx_kernel(const std::string& op,
                     const std::string& kernel,
                     const std::string& reason,
                     const std::string& device) {
  if (unnoted_depth == 0 && tracing()) {
    record({TraceEvent::Kind::kKernel, op, kernel, device, {}, {}, reason});
  }
}

}  // namespace mlx_anvil
