// Dispatch of CPU kernels to MLX's CPU streams, used by the primitives.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "common/isa.h"
#include "common/primitive.h"
#include "common/trace.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_anvil {

using SharedSpan = std::shared_ptr<const KernelSpan>;

// The span of a kernel that ran on the calling thread. Null outside trace().
inline SharedSpan span_since(int64_t begin) {
  if (!tracing()) {
    return nullptr;
  }
  auto span = std::make_shared<KernelSpan>();
  span->begin = begin;
  span->end = trace_clock();
  return span;
}

// Dispatches work() to a CPU stream. Inside trace(), returns when it runs; outside, null.
template <class Work>
SharedSpan dispatch_to_cpu(mx::cpu::CommandEncoder& encoder, Work work) {
  if (!tracing()) {
    encoder.dispatch(std::move(work));
    return nullptr;
  }
  auto span = std::make_shared<KernelSpan>();
  encoder.dispatch([span, work = std::move(work)]() mutable {
    span->begin = trace_clock();
    work();
    span->end = trace_clock();
  });
  return span;
}

// Records a CPU kernel for trace(). `kernel()` returns its name and runs only inside trace().
template <class KernelName>
void record_on_cpu(const FusedPrimitive& primitive, KernelName kernel, SharedSpan span = nullptr) {
  if (tracing()) {
    const std::string device = std::string("cpu (") + isa_name(current_isa()) + ")";
    record({TraceEvent::Kind::kKernel,
            primitive.op(),
            kernel(),
            device,
            {},
            {},
            "",
            {},
            std::move(span)});
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
  SharedSpan span = dispatch_to_cpu(encoder, std::move(work));
  record_on_cpu(primitive, kernel, std::move(span));
}

}  // namespace mlx_anvil
