// Dispatch of CPU kernels to MLX's CPU streams, used by the primitives.
#pragma once

#include <string>
#include <utility>

#include "common/isa.h"
#include "common/primitive.h"
#include "common/trace.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_anvil {

// Records a CPU kernel for trace(). `kernel()` returns its name and runs only inside trace().
template <class KernelName>
void record_on_cpu(const FusedPrimitive& primitive, KernelName kernel) {
  if (tracing()) {
    const std::string device = std::string("cpu (") + isa_name(current_isa()) + ")";
    record({TraceEvent::Kind::kKernel, primitive.op(), kernel(), device, {}, {}, ""});
  }
}

// Registers all arrays, runs `work()` on the primitive's stream, and records it for trace().
template <class Work, class KernelName>
void run_on_cpu(FusedPrimitive& primitive,
                const Arrays& inputs,
                Arrays& outputs,
                Work work,
                KernelName kernel) {
  auto& encoder = mx::cpu::get_command_encoder(primitive.stream());
  for (const mx::array& input : inputs) {
    encoder.set_input_array(input);
  }
  for (mx::array& output : outputs) {
    encoder.set_output_array(output);
  }
  encoder.dispatch(std::move(work));
  record_on_cpu(primitive, kernel);
}

}  // namespace mlx_anvil
