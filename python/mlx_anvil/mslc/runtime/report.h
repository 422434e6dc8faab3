// Findings of one launch, gathered from all workers.
#pragma once

#include <pthread.h>

#include "abi.h"

namespace mslc {

// Thread-safe. A place that is hit again (same kind, same place in the source) is counted, not
// listed twice.
class Findings {
 public:
  explicit Findings(mslc_report* report) : report_(report) {}
  void add(const mslc_finding& finding);

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  mslc_report* report_;
};

}  // namespace mslc
