#include "quantized_matmul/shared_input.h"

#include <utility>

#include "common/block.h"
#include "common/checks.h"
#include "common/simulate.h"
#include "quantized_matmul/checks.h"
#include "quantized_matmul/primitive.h"

namespace mlx_anvil {

namespace {

// After this many products in vain the layers stay alone.
constexpr int kMostDropped = 8;
// A layer that was alone in as many runs stays alone.
constexpr int kRunsAlone = 4;
// Threads that ended in the middle of a layer leave products behind.
constexpr size_t kMostThreads = 16;

bool is_same(const QuantizedMatrix& a, const QuantizedMatrix& b) {
  return a.w.id() == b.w.id() && a.scales.id() == b.scales.id() &&
         a.biases.has_value() == b.biases.has_value() &&
         (!a.biases || a.biases->id() == b.biases->id());
}

bool is_traced(const QuantizedMatrix& matrix) {
  return matrix.w.is_tracer() || matrix.scales.is_tracer() ||
         (matrix.biases && matrix.biases->is_tracer());
}

// True if the node takes the matrix as it is. Other calls are errors, or need conversions.
bool suits(const QuantizedFormat& format, const mx::array& x, const QuantizedMatrix& matrix) {
  const auto& [w, scales, biases] = matrix;
  // As convert_for_product() leaves them on the CPU.
  const bool has_scales = biases ? scales.dtype() == biases->dtype() &&
                                       (x.dtype() == mx::float32 ? is_kernel_dtype(scales.dtype())
                                                                 : scales.dtype() == x.dtype())
                                 : scales.dtype() == mx::uint8;
  const bool has_dtypes =
      has_scales && w.dtype() == mx::uint32 && format.has_biases() == biases.has_value();
  const int64_t columns = x.shape(-1);
  return has_dtypes && w.ndim() == 2 && scales.ndim() == 2 && w.shape(0) > 0 &&
         scales.shape(0) == w.shape(0) && int64_t{32} * w.shape(1) == columns * format.bits &&
         int64_t{scales.shape(1)} * format.group == columns &&
         (!biases || biases->shape() == scales.shape()) && !is_traced(matrix);
}

}  // namespace

SharedInput::SharedInput(const QuantizedFormat& format, size_t layers)
    : format_(format), together_(layers, 0), alone_(layers, layers > 1 ? 0 : kRunsAlone) {}

std::optional<mx::array> SharedInput::multiply(size_t layer,
                                               const mx::array& x,
                                               const QuantizedMatrix& own,
                                               const MatrixOf& matrix_of,
                                               mx::Stream s) {
  if (for_gpu(s) || composing() || x.is_tracer() || x.ndim() < 2 || x.size() == 0 ||
      !is_kernel_dtype(x.dtype())) {
    return std::nullopt;
  }
  if (auto out = take(layer, x, own, s)) {
    return out;
  }
  const int64_t rows = static_cast<int64_t>(x.size()) / x.shape(-1);
  if (rows > kQuantizedGemvRows) {
    return std::nullopt;
  }
  if (is_learning(layer)) {
    learn(layer, x);
  }
  if (together_[layer] == 0) {
    return suits(format_, x, own) ? std::optional(apply_quantized_products(format_, x, {own}, s)[0])
                                  : std::nullopt;
  }
  std::vector<size_t> layers;
  for (size_t i = 0; i < together_.size(); ++i) {
    if (together_[layer] >> i & 1) {
      layers.push_back(i);
    }
  }
  std::optional<std::vector<QuantizedMatrix>> matrices =
      matrices_of(layers, layer, x, own, matrix_of);
  if (!matrices) {
    return std::nullopt;
  }
  const Arrays outputs = apply_quantized_products(format_, x, *matrices, s);
  if (waiting_.size() >= kMostThreads) {
    waiting_.clear();
  }
  Products products{x, s, {}};
  std::optional<mx::array> result;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] == layer) {
      result = outputs[i];
    } else {
      products.of.emplace(layers[i], Product{std::move((*matrices)[i]), outputs[i]});
    }
  }
  waiting_.emplace(std::this_thread::get_id(), std::move(products));
  return result;
}

bool SharedInput::is_learning(size_t layer) const {
  return together_[layer] == 0 && alone_[layer] < kRunsAlone && dropped_ < kMostDropped;
}

// A run ends with a call that has another x, or of a layer that was in it. Holding x keeps its
// identity from being used again.
void SharedInput::learn(size_t layer, const mx::array& x) {
  const std::thread::id thread = std::this_thread::get_id();
  const Layers own = Layers{1} << layer;
  if (run_ && (run_->x.id() != x.id() || run_->thread != thread || (run_->layers & own))) {
    if (run_->thread == thread) {
      finish_run();
    }
    run_.reset();
  }
  if (!is_learning(layer)) {
    return;
  }
  if (!run_) {
    run_.emplace(Run{x, thread});
  }
  run_->layers |= own;
}

void SharedInput::finish_run() {
  for (size_t i = 0; i < together_.size(); ++i) {
    if (run_->layers == Layers{1} << i) {
      ++alone_[i];
    } else if (run_->layers >> i & 1) {
      together_[i] = run_->layers;
    }
  }
}

void SharedInput::forget(size_t layer) {
  const Layers layers = together_[layer];
  for (size_t i = 0; i < together_.size(); ++i) {
    if (layers >> i & 1) {
      together_[i] = 0;
    }
  }
}

std::optional<mx::array> SharedInput::take(size_t layer,
                                           const mx::array& x,
                                           const QuantizedMatrix& own,
                                           mx::Stream s) {
  const auto of_thread = waiting_.find(std::this_thread::get_id());
  if (of_thread == waiting_.end()) {
    return std::nullopt;
  }
  Products& products = of_thread->second;
  const auto found = products.of.find(layer);
  if (products.x.id() != x.id() || products.stream != s || found == products.of.end() ||
      !is_same(found->second.matrix, own)) {
    ++dropped_;
    run_.reset();
    forget(products.of.begin()->first);
    waiting_.erase(of_thread);
    return std::nullopt;
  }
  mx::array out = std::move(found->second.out);
  products.of.erase(found);
  if (products.of.empty()) {
    waiting_.erase(of_thread);
  }
  return out;
}

std::optional<std::vector<QuantizedMatrix>> SharedInput::matrices_of(
    const std::vector<size_t>& layers,
    size_t layer,
    const mx::array& x,
    const QuantizedMatrix& own,
    const MatrixOf& matrix_of) const {
  std::vector<QuantizedMatrix> matrices;
  for (const size_t i : layers) {
    std::optional<QuantizedMatrix> matrix = i == layer ? own : matrix_of(i);
    if (!matrix || !suits(format_, x, *matrix)) {
      return std::nullopt;
    }
    matrices.push_back(*std::move(matrix));
  }
  return matrices;
}

}  // namespace mlx_anvil
