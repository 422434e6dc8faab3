// The findings of one launch, collected from all workers.
#pragma once

#include <pthread.h>

#include "abi.h"

namespace mslc {

// Thread-safe. Repeated findings of the same kind at the same position are counted, not listed
// again.
class Findings {
 public:
  explicit Findings(mslc_report* report) : report_(report) {}
  void add(const mslc_finding& finding);

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  mslc_report* report_;
};

}  // namespace mslc
