// Events for trace() and strict(): every kernel launch, and every fallback to a graph of MLX ops
// with its reason. MLX evaluates a graph on the calling thread, which is inside the block (see
// block.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace mlx_anvil {

// Nanoseconds of a clock that never goes back.
int64_t trace_clock();

// When a kernel began and ended on a CPU stream, by trace_clock(); 0 before that.
struct KernelSpan {
  std::atomic<int64_t> begin{0};
  std::atomic<int64_t> end{0};
};

struct TraceEvent {
  enum class Kind { kKernel, kFallback };
  Kind kind;
  std::string op;
  std::string kernel;  // empty for a fallback
  std::string device;  // "cpu (avx512)", "metal", "cuda (sm_90)", "simulator"; empty for a fallback
  std::array<uint32_t, 3> grid{};          // threadgroups; zero on the CPU
  std::array<uint32_t, 3> threadgroup{};   // threads; zero on the CPU
  std::string reason;                      // why this route was taken; may be empty for a kernel
  std::vector<std::string> bindings = {};  // of a GPU kernel, in order; see mlx_anvil.trace
  std::shared_ptr<const KernelSpan> span = {};  // of a CPU kernel; else null
  int64_t noted = trace_clock();                // when it was launched or fell back
};

// Events of one `with trace():` block. Any thread may read them while the log grows.
class TraceLog {
 public:
  void add(const TraceEvent& event);
  std::vector<TraceEvent> events() const;

  const int64_t entered = trace_clock();

 private:
  mutable std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

// Returns true if the calling context is inside trace(). Usually false, so callers build event
// texts only if it is true.
bool tracing();
// Blocks nest: each block receives the events of the blocks inside it.
void record(const TraceEvent& event);

// Call this before an op is replaced by a graph of MLX ops. Records the reason, or throws inside
// strict().
void note_fallback(const std::string& op, const std::string& reason);

// Suppresses fallback notes, because building a planned graph again would note them twice.
class FallbacksUnnoted {
 public:
  FallbacksUnnoted();
  ~FallbacksUnnoted();
  FallbacksUnnoted(const FallbacksUnnoted&) = delete;
  FallbacksUnnoted& operator=(const FallbacksUnnoted&) = delete;
};

// The number of fallbacks on this thread, and the last one. Patched modules read it at every call,
// because they prefer the original module to a graph of MLX ops.
struct LastFallback {
  uint64_t count = 0;
  std::string op;
  std::string reason;
};
const LastFallback& last_fallback();

// Call this if an op runs MLX's own fused kernel, `kernel`, because it is faster. This is not a
// fallback: strict() allows it. `device`: as in TraceEvent.
void note_mlx_kernel(const std::string& op,
                     const std::string& kernel,
                     const std::string& reason,
                     const std::string& device = "cuda");

}  // namespace mlx_anvil
