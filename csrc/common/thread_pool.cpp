#include "common/thread_pool.h"

#if defined(__linux__)

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <ctime>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mlx_anvil {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// ---- waiting ------------------------------------------------------------------------------------

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int threads) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

void pause_thread() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Waking a thread takes the kernel up to 50 us, so threads spin for a while on an idle machine. If
// other processes need the cores, spinning would block the very threads that it waits for. Threads
// then sleep at once.
constexpr auto kSpin = microseconds(100);

// The machine counts as busy after one of our threads was preempted for at least this long while
// running. It stays busy for a multiple of that time.
constexpr auto kMinPreemption = microseconds(300);
constexpr int kBusyTimes = 20;
constexpr auto kBusyAtMost = milliseconds(1000);

// On a busy machine a caller starts alone, and calls in other threads only for work that takes
// longer than the last preemption did, within these limits. A preempted helper delays the caller by
// about as long. With a lower priority than the other processes', preemptions last tens of ms.
constexpr auto kAloneAtLeast = milliseconds(2), kAloneAtMost = milliseconds(100);

class Busy {
 public:
  bool now() const {
    return Clock::now().time_since_epoch().count() < until_.load(std::memory_order_relaxed);
  }

  void notice(std::chrono::nanoseconds preemption) {
    if (preemption < kMinPreemption) {
      return;
    }
    const auto until =
        Clock::now() + std::min<std::chrono::nanoseconds>(kBusyTimes * preemption, kBusyAtMost);
    until_.store(until.time_since_epoch().count(), std::memory_order_relaxed);
    alone_.store(std::clamp<std::chrono::nanoseconds>(preemption, kAloneAtLeast, kAloneAtMost),
                 std::memory_order_relaxed);
  }

  // How long a caller works before it calls in other threads.
  std::chrono::nanoseconds alone() const { return alone_.load(std::memory_order_relaxed); }

 private:
  std::atomic<Clock::rep> until_{0};
  std::atomic<std::chrono::nanoseconds> alone_{kAloneAtLeast};
};

// Measures preemption: the difference between wall time and the thread's CPU time.
class Preemption {
 public:
  void restart() {
    wall_ = Clock::now().time_since_epoch();
    running_ = running();
  }

  // Time preempted since the last restart(); restarts. The thread must not have slept in between.
  std::chrono::nanoseconds elapsed() {
    const std::chrono::nanoseconds wall = wall_, ran = running_;
    restart();
    return (wall_ - wall) - (running_ - ran);
  }

 private:
  static std::chrono::nanoseconds running() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  }

  std::chrono::nanoseconds wall_{}, running_{};
};

// Spins until `ready()` returns true. Returns false once this machine's spin time is over.
// `between()` runs about once a microsecond.
template <class Ready, class Between>
bool spin_until(const Busy& busy, Ready ready, Between between) {
  if (busy.now()) {
    return ready();
  }
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 24; ++i) {
      if (ready()) {
        return true;
      }
      pause_thread();
    }
    between();
  } while (Clock::now() < end);
  return ready();
}

// ---- jobs ---------------------------------------------------------------------------------------

// One call of run_on_pool(). Jobs have fixed slots, so that a thread may inspect one that has
// ended. `body` belongs to the caller and is read only by a thread that has taken an index.
class alignas(64) Job {
 public:
  // Called by the caller. Returns false if the slot is in use.
  bool claim(int64_t count, int helpers, const std::function<void(int64_t)>& body) {
    uint32_t free = 0;
    if (!users_.compare_exchange_strong(free, 1, std::memory_order_acquire)) {
      return false;
    }
    count_.store(count, std::memory_order_relaxed);
    body_ = &body;
    users_allowed_.store(static_cast<uint32_t>(helpers) + 1, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    return true;
  }

  // Called by the caller. Pool threads may join from now on.
  void open() { users_.fetch_or(kOpen, std::memory_order_release); }

  // Called by a pool thread. Joins if the job is open and accepts another thread. If the job ends
  // before the exchange and another starts in its slot, the thread joins that one.
  bool join() {
    uint32_t users = users_.load(std::memory_order_acquire);
    while ((users & kOpen) && (users & ~kOpen) < users_allowed_.load(std::memory_order_relaxed) &&
           next_.load(std::memory_order_relaxed) < count_.load(std::memory_order_relaxed)) {
      if (users_.compare_exchange_weak(users, users + 1, std::memory_order_acquire)) {
        return true;
      }
    }
    return false;
  }

  // Takes indices until none are left (returns true) or until the deadline (returns false).
  bool work(Clock::time_point until = Clock::time_point::max()) {
    const int64_t count = count_.load(std::memory_order_relaxed);
    while (until == Clock::time_point::max() || Clock::now() < until) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) {
        return true;
      }
      (*body_)(i);
      const uint32_t before = done_.fetch_add(1, std::memory_order_acq_rel);
      if (before == (kSleeping | static_cast<uint32_t>(count - 1))) {
        futex_wake(done_, 1);
      }
    }
    return false;
  }

  // Called by the caller. No thread joins from now on. Returns when all indices are done.
  void finish(const Busy& busy) {
    users_.fetch_and(~kOpen, std::memory_order_relaxed);
    const uint32_t all = static_cast<uint32_t>(count_.load(std::memory_order_relaxed));
    const auto is_done = [&] {
      return (done_.load(std::memory_order_acquire) & ~kSleeping) == all;
    };
    if (is_done() || spin_until(busy, is_done, [] {})) {
      return;
    }
    uint32_t done = done_.fetch_or(kSleeping, std::memory_order_acq_rel) | kSleeping;
    while ((done & ~kSleeping) != all) {
      futex_wait(done_, done);
      done = done_.load(std::memory_order_acquire);
    }
  }

  void leave() { users_.fetch_sub(1, std::memory_order_release); }

 private:
  static constexpr uint32_t kOpen = uint32_t{1} << 31, kSleeping = uint32_t{1} << 31;

  std::atomic<uint32_t> users_{0};  // threads that use this slot, and kOpen
  std::atomic<uint32_t> users_allowed_{0};
  std::atomic<int64_t> count_{0};
  const std::function<void(int64_t)>* body_ = nullptr;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> done_{0};  // completed indices, and kSleeping
};

// ---- threads ------------------------------------------------------------------------------------

class Pool {
 public:
  void run(int64_t count, int helpers, const std::function<void(int64_t)>& body) {
    Job* const job = count <= INT_MAX ? claim(count, helpers, body) : nullptr;
    if (!job) {
      for (int64_t i = 0; i < count; ++i) {
        body(i);
      }
      return;
    }
    if (!busy_.now() || !job->work(Clock::now() + busy_.alone())) {
      job->open();
      call(helpers);
      job->work();
    }
    job->finish(busy_);
    job->leave();
  }

 private:
  // A caller that finds every slot taken works alone: enough threads are busy then.
  static constexpr int kJobs = 16;

  Job* claim(int64_t count, int helpers, const std::function<void(int64_t)>& body) {
    for (Job& job : jobs_) {
      if (job.claim(count, helpers, body)) {
        return &job;
      }
    }
    return nullptr;
  }

  void call(int helpers) {
    grow(helpers);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    const int asleep = asleep_.load(std::memory_order_seq_cst);
    if (asleep > 0) {
      futex_wake(epoch_, std::min(asleep, helpers));
    }
  }

  void grow(int helpers) {
    int threads = threads_.load(std::memory_order_relaxed);
    while (threads < helpers) {
      if (threads_.compare_exchange_weak(threads, threads + 1, std::memory_order_relaxed)) {
        start_thread();
      }
    }
  }

  // Blocks signals, which belong to the program's threads. If no thread can be created, the caller
  // works alone.
  void start_thread() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread thread([this] { serve(); });
      pthread_setname_np(thread.native_handle(), "mlx-anvil");
      thread.detach();
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void serve() {
    Preemption preemption;
    preemption.restart();
    for (;;) {
      const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
      if (help()) {
        continue;
      }
      busy_.notice(preemption.elapsed());
      const auto has_new_job = [&] { return epoch_.load(std::memory_order_seq_cst) != epoch; };
      // Yields, because the program's own thread may wait for this core: it wakes up when a call
      // is done.
      if (!spin_until(busy_, has_new_job, sched_yield)) {
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        futex_wait(epoch_, epoch);  // returns at once if a job has been published since
        asleep_.fetch_sub(1, std::memory_order_relaxed);
      }
      preemption.restart();
    }
  }

  bool help() {
    for (Job& job : jobs_) {
      if (job.join()) {
        job.work();
        job.leave();
        return true;
      }
    }
    return false;
  }

  Job jobs_[kJobs];
  alignas(64) std::atomic<uint32_t> epoch_{0};  // incremented for every job
  std::atomic<int> asleep_{0};
  std::atomic<int> threads_{0};
  Busy busy_;
};

// Never destroyed, because threads may use it during process exit. A forked child has none of the
// threads and creates its own pool.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (!existing) {
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });
    (void)registered;
    Pool* const made = new Pool;
    if (current_pool.compare_exchange_strong(existing, made)) {
      return *made;
    }
    delete made;
  }
  return *existing;
}

}  // namespace

void run_on_pool(int64_t count, int helpers, const std::function<void(int64_t)>& body) {
  pool().run(count, helpers, body);
}

}  // namespace mlx_anvil

#endif
