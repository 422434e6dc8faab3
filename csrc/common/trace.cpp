#include "common/trace.h"

#include <algorithm>

#include "common/errors.h"

namespace mlx_anvil {

namespace {
thread_local std::vector<std::shared_ptr<TraceLog>> open_logs;
thread_local int strict_depth = 0;
thread_local int unnoted_depth = 0;
thread_local LastFallback last;
}  // namespace

void TraceLog::add(const TraceEvent& event) {
  std::lock_guard lock(mutex_);
  events_.push_back(event);
}

std::vector<TraceEvent> TraceLog::events() const {
  std::lock_guard lock(mutex_);
  return events_;
}

std::shared_ptr<TraceLog> begin_trace() {
  return open_logs.emplace_back(std::make_shared<TraceLog>());
}

void end_trace(const std::shared_ptr<TraceLog>& log) {
  std::erase(open_logs, log);
}

bool tracing() {
  return !open_logs.empty();
}

void record(const TraceEvent& event) {
  for (const auto& log : open_logs) {
    log->add(event);
  }
}

void begin_strict() {
  ++strict_depth;
}

void end_strict() {
  strict_depth = std::max(0, strict_depth - 1);
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
  if (strict_depth > 0) {
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

void note_mlx_kernel(const std::string& op, const std::string& kernel, const std::string& reason) {
  if (unnoted_depth == 0 && tracing()) {
    record({TraceEvent::Kind::kKernel, op, kernel, "cuda", {}, {}, reason});
  }
}

}  // namespace mlx_anvil
