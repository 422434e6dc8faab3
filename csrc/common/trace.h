// What `trace()` and `strict()` see: every kernel that is launched and every fall back to a graph
// of MLX ops, with its reason. MLX evaluates a graph on the thread that asks for it, which is in
// the block (see block.h).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace mlx_anvil {

struct TraceEvent {
  enum class Kind { kKernel, kFallback };
  Kind kind;
  std::string op;
  std::string kernel;  // empty for a fallback
  std::string device;  // "cpu (avx512)", "metal", "cuda (sm_90)", "simulator"; empty for a fallback
  std::array<uint32_t, 3> grid{};          // threadgroups; zero on the CPU
  std::array<uint32_t, 3> threadgroup{};   // threads; zero on the CPU
  std::string reason;                      // why this route was taken; may be empty for a kernel
  std::vector<std::string> bindings = {};  // of a GPU's kernel, in order; see mlx_anvil.trace
};

// Events of one `with trace():` block. Readable from any thread while it grows.
class TraceLog {
 public:
  void add(const TraceEvent& event);
  std::vector<TraceEvent> events() const;

 private:
  mutable std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

// Of the calling context. False almost always, so that callers build no event text that nobody
// reads.
bool tracing();
// Blocks nest: each sees the events of those inside it.
void record(const TraceEvent& event);

// To be called wherever an op is about to be replaced by a graph of MLX ops. Records the reason;
// inside `strict()` it throws instead.
void note_fallback(const std::string& op, const std::string& reason);

// A scope in which nothing is noted: a graph that was noted when it was planned is built once more.
class FallbacksUnnoted {
 public:
  FallbacksUnnoted();
  ~FallbacksUnnoted();
  FallbacksUnnoted(const FallbacksUnnoted&) = delete;
  FallbacksUnnoted& operator=(const FallbacksUnnoted&) = delete;
};

// How many there were on this thread, and the last of them: for callers that would rather keep what
// they had than a graph of MLX ops, and ask at every call.
struct LastFallback {
  uint64_t count = 0;
  std::string op;
  std::string reason;
};
const LastFallback& last_fallback();

// To be called where an op is MLX's own fused kernel, `kernel`, because that is faster. Not a
// fallback: `strict()` allows it.
void note_mlx_kernel(const std::string& op, const std::string& kernel, const std::string& reason);

}  // namespace mlx_anvil
