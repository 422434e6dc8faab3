#include "gated_delta/gpu.h"

#include "common/errors.h"
#include "gated_delta/gated_delta.h"

namespace mlx_anvil {

void gated_delta_gpu(const GatedDeltaConfig&, const GatedDeltaInputs&, Arrays&, const mx::Stream&) {
  throw_internal_error(kGatedDelta, "no kernel yet.");
}

void gated_delta_backward_gpu(const GatedDeltaConfig&,
                              const GatedDeltaInputs&,
                              const Arrays&,
                              Arrays&,
                              const mx::Stream&) {
  throw_internal_error(kGatedDelta, "no kernel yet.");
}

}  // namespace mlx_anvil
