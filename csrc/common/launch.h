// The ops' only interface to a GPU. An op's eval_gpu_kernels() allocates outputs, selects a
// variant, fills a KernelLaunch and calls launch(). Only the backends (launch_<backend>.cpp) know
// Metal, CUDA or the simulator.
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

// A kernel with the function constants that specialise it. Created once and kept; see
// kernel_named().
class Kernel {
 public:
  // `op` names the folder under metal/ that contains the kernel.
  Kernel(std::string op, std::string name, std::vector<FunctionConstant> constants = {});

  const std::string& op() const { return op_; }
  const std::string& name() const { return name_; }
  const std::vector<FunctionConstant>& constants() const { return constants_; }

  // Unique per name and constants. Pipelines are cached by this key.
  const std::string& pipeline_key() const { return pipeline_key_; }

 private:
  std::string op_;
  std::string name_;
  std::vector<FunctionConstant> constants_;
  std::string pipeline_key_;
};

// Returns the kernel of this name with these constants. Creates it on first use and keeps it.
const Kernel& kernel_named(const char* op,
                           const KernelName& name,
                           const FunctionConstants& constants);

struct Extent {
  uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;
};

// What a backend reports about a pipeline, under the names that `python -m mlx_anvil report`
// prints.
using PipelineFacts = std::map<std::string, uint64_t>;

using KernelInputs = InlineVector<const mx::array*, 16>;
using KernelOutputs = InlineVector<mx::array*, 8>;
using KernelTemporaries = InlineVector<const Scratch*, 12>;

// Bindings are numbered in this order: inputs, outputs, params. Arrays and params must live until
// launch() returns.
struct KernelLaunch {
  const Kernel* kernel;
  KernelInputs inputs;
  KernelOutputs outputs;
  const void* params = nullptr;
  size_t params_size = 0;
  Extent grid;                                   // threadgroups
  Extent threadgroup;                            // threads
  InlineVector<uint32_t, 4> threadgroup_memory;  // bytes per [[threadgroup(i)]] argument
  KernelTemporaries temporaries;                 // bound arrays that only this call uses
  // CUDA: the output of a kernel that must have run, because it reads what this one overwrites.
  // MLX's encoder orders readers after writers only.
  const mx::array* after = nullptr;
};

// Encodes the kernel on `stream` and records it for trace(). Throws if no backend serves the
// device, or if anyone else holds a temporary.
void launch(const KernelLaunch& launch, const mx::Stream& stream);

// Keeps arrays alive until all work submitted to `stream` so far has run. Later kernels do not wait
// for them, so nobody else may hold them.
void keep_until_done(std::vector<mx::array> arrays, const mx::Stream& stream);

// Returns true if launch() can serve `device`. Otherwise sets the reason, which a fallback reports.
bool can_launch(const mx::Device& device, std::string* why_not);

// Returns true if launch() would use MLX's CUDA backend. Some of MLX's own kernels are faster
// there.
bool launches_on_cuda(const mx::Device& device);

// Where kernels run that are launched on `device`, as trace() shows it: "metal", "cuda",
// "simulator".
const char* backend_name(const mx::Device& device);

// Returns a grid with one threadgroup per `per_threadgroup` items, folded into two dimensions to
// stay within the limit of each. The kernel's linear index is y * grid.x + x.
Extent linear_grid(int64_t items, int64_t per_threadgroup);

#ifdef MLX_ANVIL_METAL
void launch_metal(const KernelLaunch& launch, const mx::Stream& stream);
void keep_until_done_metal(std::vector<mx::array> arrays, const mx::Stream& stream);
PipelineFacts build_metal(const Kernel& kernel, const mx::Device& device);
DeviceTraits metal_traits();
#endif

#ifdef MLX_ANVIL_CUDA
void launch_cuda(const KernelLaunch& launch, const mx::Stream& stream);
void keep_until_done_cuda(std::vector<mx::array> arrays, const mx::Stream& stream);
PipelineFacts build_cuda(const Kernel& kernel, const mx::Device& device);
bool can_launch_cuda(const mx::Device& device, std::string* why_not);
DeviceTraits cuda_traits(const mx::Device& device);

// The device that trace() reports for a kernel: "cuda (sm_90)" if it was loaded from a cubin of
// that architecture, "cuda" if the driver assembled its PTX.
std::string cuda_device_text(const Kernel& kernel, const mx::Device& device);
#endif

}  // namespace mlx_anvil
