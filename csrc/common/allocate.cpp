#include "common/allocate.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/plan.h"
#include "common/simulate.h"
#include "mlx/backend/gpu/device_info.h"
#include "mlx/primitives.h"

#ifdef MLX_ANVIL_CUDA
#include "common/cuda_backend.h"
#endif

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace mlx_anvil {

namespace {

// MLX's cache or the heap serves smaller blocks, and their pages have been touched already.
[[maybe_unused]] constexpr size_t kHugePageThreshold = size_t{8} << 20;

void prefer_huge_pages([[maybe_unused]] void* start, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  if (bytes < kHugePageThreshold) {
    return;
  }
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + page - 1) & ~(page - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + bytes) & ~(page - 1);
  // madvise() is only a hint: a kernel without huge pages ignores it.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Returns true if allocator::malloc() gives heap memory. With a GPU backend the driver may manage
// the memory; we then leave its pages and alignment alone.
bool is_heap(const mx::Stream& stream) {
  return stream.device == mx::Device::cpu && !mx::gpu::is_available();
}

#ifdef MLX_ANVIL_CUDA
// MLX does not export its stream-ordered allocation. allocator::malloc() gives managed memory,
// which page-faults, and even converts cached device memory to it. But a unary op allocates its
// output in stream order, as large as its operand claims to be; without elements it launches
// nothing.
class StreamAllocator {
 public:
  explicit StreamAllocator(const mx::Stream& stream)
      : op_(std::make_shared<mx::Exp>(stream)),
        operands_({mx::array({0}, mx::float16, nullptr, {})}),
        out_({0}, mx::uint8, op_, operands_) {}

  const mx::Stream& stream() const { return op_->stream(); }

  mx::allocator::Data allocate(size_t bytes) {
    mx::array::Flags flags{};
    flags.contiguous = flags.row_contiguous = flags.col_contiguous = true;
    operands_[0].set_data(
        mx::allocator::Data(mx::allocator::Buffer(nullptr), [](mx::allocator::Buffer) {}), bytes,
        {1}, flags);
    op_->eval_gpu(operands_, out_);
    return std::move(*out_.data_shared_ptr());
  }

 private:
  const std::shared_ptr<mx::Exp> op_;
  // The element size differs from the output's, so the op cannot donate this memory to the output.
  std::vector<mx::array> operands_;
  mx::array out_;  // the op takes the stream from it
};

mx::allocator::Data allocate_on_cuda(size_t bytes, const mx::Stream& stream) {
  // Kept across calls: building the arrays and the op takes longer than finding the memory.
  static thread_local std::optional<StreamAllocator> allocator;
  if (!allocator || !(allocator->stream() == stream)) {
    allocator.emplace(stream);
  }
  return allocator->allocate(bytes);
}
#endif

}  // namespace

mx::allocator::Data allocate(size_t bytes, const mx::Stream& stream) {
  if (planning()) {
    return planned_memory();
  }
#ifdef MLX_ANVIL_CUDA
  if (stream.device == mx::Device::gpu && mlx_has_cuda()) {
    return allocate_on_cuda(bytes, stream);
  }
#endif
  mx::allocator::Data data = mx::allocator::malloc(bytes);
  if (is_heap(stream)) {
    prefer_huge_pages(data.buffer().raw_ptr(), bytes);
  }
  return data;
}

void allocate_dense(mx::array& out, const mx::Stream& stream) {
  constexpr size_t kLine = 64, kPage = 4096;
  // MLX's large arrays start right after a page boundary. An output that did so too, one line
  // further on, would suffer 4K aliasing: loads compare the low 12 address bits with those of
  // earlier stores.
  const bool is_large = out.nbytes() >= 4 * kPage;
  const size_t alignment = is_large ? kPage : kLine, start = is_large ? kPage / 2 : 0;
  // On a GPU, and in the simulator, the offset into the buffer selects the kernel. It must not
  // change.
  const bool may_shift = is_heap(stream) && !simulation_mode().on && !planning();
  out.set_data(allocate(out.nbytes() + (may_shift ? alignment : 0), stream));
  if (may_shift) {
    const size_t address = reinterpret_cast<uintptr_t>(out.data<void>());
    const size_t elements = (start - address) % alignment / out.itemsize();
    out.copy_shared_buffer(out, out.strides(), out.flags(), out.data_size(),
                           static_cast<int64_t>(elements));
  }
}

void allocate_dense(std::vector<mx::array>& outputs, const mx::Stream& stream) {
  for (mx::array& out : outputs) {
    allocate_dense(out, stream);
  }
}

bool allocate_or_reuse(mx::array& out,
                       std::initializer_list<const mx::array*> donors,
                       const mx::Stream& stream) {
  for (const mx::array* donor : donors) {
    if (donor && donor->is_donatable() && donor->flags().row_contiguous &&
        donor->itemsize() == out.itemsize() && donor->size() == out.size()) {
      out.copy_shared_buffer(*donor);
      return false;
    }
  }
  allocate_dense(out, stream);
  return true;
}

}  // namespace mlx_anvil
