// The only interface of the ops to a GPU. An op's eval_gpu_kernels allocates its outputs, chooses a
// variant, fills a KernelLaunch and calls launch(). The backends (launch_<backend>.cpp) are the
// only files that know Metal, CUDA or the simulator.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/device_traits.h"
#include "common/inline_vector.h"
#include "common/kernel_name.h"
#include "common/scratch.h"
#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// A kernel together with the function constants that specialise it: made once and kept, see
// kernel_named().
class Kernel {
 public:
  // `op` names the folder under metal/ that holds the kernel.
  Kernel(std::string op, std::string name, std::vector<FunctionConstant> constants = {});

  const std::string& op() const { return op_; }
  const std::string& name() const { return name_; }
  const std::vector<FunctionConstant>& constants() const { return constants_; }

  // Unique over name and constants: what a pipeline is cached by.
  const std::string& pipeline_key() const { return pipeline_key_; }

 private:
  std::string op_;
  std::string name_;
  std::vector<FunctionConstant> constants_;
  std::string pipeline_key_;
};

// The kernel of this name and these constants, made when it is first asked for and kept.
const Kernel& kernel_named(const char* op,
                           const KernelName& name,
                           const FunctionConstants& constants);

struct Extent {
  uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;
};

// What a backend tells of a pipeline, by the names that `python -m mlx_anvil report` prints.
using PipelineFacts = std::map<std::string, uint64_t>;

using KernelInputs = InlineVector<const mx::array*, 16>;
using KernelOutputs = InlineVector<mx::array*, 8>;
using KernelTemporaries = InlineVector<const Scratch*, 4>;

// Bindings are numbered inputs first, then outputs, then the params. Array pointers and params must
// live until launch() returns.
struct KernelLaunch {
  const Kernel* kernel;
  KernelInputs inputs;
  KernelOutputs outputs;
  const void* params = nullptr;
  size_t params_size = 0;
  Extent grid;                                   // threadgroups
  Extent threadgroup;                            // threads
  InlineVector<uint32_t, 4> threadgroup_memory;  // bytes of each [[threadgroup(i)]] argument
  KernelTemporaries temporaries;                 // those of the arrays that are this call's own
};

// Encodes the kernel on `stream` and records it for `trace()`. Throws where no backend serves it,
// and where somebody else holds a temporary.
void launch(const KernelLaunch& launch, const mx::Stream& stream);

// Keeps arrays until all that `stream` was given so far has run. Later kernels do not wait for
// them, so they must be arrays that nobody else holds.
void keep_until_done(std::vector<mx::array> arrays, const mx::Stream& stream);

// Whether launch() can serve `device`; if not, why (for the text of a fallback).
bool can_launch(const mx::Device& device, std::string* why_not);

// Whether it would on MLX's CUDA backend, some of whose own kernels are faster.
bool launches_on_cuda(const mx::Device& device);

// One group of threads per `per_threadgroup` work items, folded into two dimensions so that neither
// passes what a grid may have; a kernel's linear index is y * grid.x + x.
Extent linear_grid(int64_t items, int64_t per_threadgroup);

#ifdef MLX_ANVIL_METAL
void launch_metal(const KernelLaunch& launch, const mx::Stream& stream);
void keep_until_done_metal(std::vector<mx::array> arrays, const mx::Stream& stream);
PipelineFacts build_metal(const Kernel& kernel, const mx::Device& device);
#endif

#ifdef MLX_ANVIL_CUDA
void launch_cuda(const KernelLaunch& launch, const mx::Stream& stream);
void keep_until_done_cuda(std::vector<mx::array> arrays, const mx::Stream& stream);
PipelineFacts build_cuda(const Kernel& kernel, const mx::Device& device);
bool can_launch_cuda(const mx::Device& device, std::string* why_not);
DeviceTraits cuda_traits(const mx::Device& device);

// What trace() says of where a kernel that was launched there runs: "cuda (sm_90)" where it was
// loaded as a cubin of that architecture, "cuda" where the driver assembled its PTX.
std::string cuda_device_text(const Kernel& kernel, const mx::Device& device);
#endif

}  // namespace mlx_anvil
