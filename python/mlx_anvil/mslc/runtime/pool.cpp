#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "placement.h"

namespace mslc {
namespace {

// A host thread that sleeps until it gets a launch to help with.
struct Helper {
  Worker* worker = nullptr;
  pthread_t thread;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
  Launch* launch = nullptr;  // set by the launching thread, cleared by the helper
  Helper* next = nullptr;
};

struct Pool {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pid_t process = getpid();
  Worker* idle_workers = nullptr;
  Helper* idle_helpers = nullptr;
};

Pool pool;

class Lock {
 public:
  explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
  ~Lock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t& mutex_;
};

Worker* acquire_worker() {
  {
    Lock lock(pool.mutex);
    if (Worker* worker = pool.idle_workers) {
      pool.idle_workers = worker->next_idle;
      return worker;
    }
  }
  return create<Worker>();
}

void release_worker(Worker* worker) {
  Lock lock(pool.mutex);
  worker->next_idle = pool.idle_workers;
  pool.idle_workers = worker;
}

void* helper_main(void* argument) {
  Helper& helper = *static_cast<Helper*>(argument);
  for (;;) {
    pthread_mutex_lock(&helper.mutex);
    while (!helper.launch) pthread_cond_wait(&helper.changed, &helper.mutex);
    Launch* launch = helper.launch;
    pthread_mutex_unlock(&helper.mutex);
    helper.worker->run(*launch);
    Lock lock(helper.mutex);
    helper.launch = nullptr;
    pthread_cond_broadcast(&helper.changed);
  }
}

// Returns null if the system has no more threads. The launch then continues with fewer.
Helper* acquire_helper() {
  {
    Lock lock(pool.mutex);
    if (Helper* helper = pool.idle_helpers) {
      pool.idle_helpers = helper->next;
      return helper;
    }
  }
  auto* helper = create<Helper>();
  helper->worker = create<Worker>();
  if (pthread_create(&helper->thread, nullptr, helper_main, helper)) return nullptr;
  pthread_detach(helper->thread);
  return helper;
}

// A forked child has no helper threads, and a lock may have been held during the fork.
void forget_after_fork() {
  if (pool.process != getpid()) new (Here{&pool}) Pool();
}

void add(Counters& total, const Counters& one) {
  total.threadgroups += one.threadgroups;
  total.barriers += one.barriers;
  total.collectives += one.collectives;
  total.divergent_collectives += one.divergent_collectives;
  if (one.threadgroup_memory > total.threadgroup_memory)
    total.threadgroup_memory = one.threadgroup_memory;
}

}  // namespace

unsigned available_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (!sched_getaffinity(0, sizeof set, &set)) return static_cast<unsigned>(CPU_COUNT(&set));
#endif
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  return cores > 0 ? static_cast<unsigned>(cores) : 1;
}

Counters run_on_workers(Launch& launch, unsigned threads) {
  forget_after_fork();
  if (!threads) threads = available_cores();
  if (threads > launch.threadgroup_count) threads = static_cast<unsigned>(launch.threadgroup_count);
  Helper* helpers = nullptr;
  for (unsigned i = 1; i < threads; ++i) {
    Helper* helper = acquire_helper();
    if (!helper) break;
    helper->next = helpers;
    helpers = helper;
    Lock lock(helper->mutex);
    helper->launch = &launch;
    pthread_cond_broadcast(&helper->changed);
  }
  Worker* worker = acquire_worker();
  worker->run(launch);
  Counters total = worker->counters();
  release_worker(worker);
  while (Helper* helper = helpers) {
    pthread_mutex_lock(&helper->mutex);
    while (helper->launch) pthread_cond_wait(&helper->changed, &helper->mutex);
    pthread_mutex_unlock(&helper->mutex);
    add(total, helper->worker->counters());
    helpers = helper->next;
    Lock lock(pool.mutex);
    helper->next = pool.idle_helpers;
    pool.idle_helpers = helper;
  }
  return total;
}

}  // namespace mslc
