#include "kv_append/primitive.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/run_on_cpu.h"
#include "common/siblings.h"
#include "common/trace.h"
#include "kv_append/cpu.h"
#include "kv_append/gpu.h"
#include "kv_append/kv_append.h"

namespace mlx_anvil {

namespace {

// Inputs: the arrays of KvAppendArrays, in its order. Outputs: the caches.
class KvAppend : public FusedPrimitive {
 public:
  KvAppend(mx::Stream stream, const KvAppendConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kKvAppend; }
  const char* kind() const override { return "KvAppend"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const KvAppend&>(other).config_;
  }

  Arrays compose(const Arrays& inputs) override;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < caches(); ++i) {
      shapes.push_back(inputs[first_cache() + i].shape());
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const SiblingsWithoutInputs released(inputs, outputs);
    allocate_outputs(inputs, outputs);
    kv_append_gpu(config_, arrays_of(inputs), outputs, stream());
  }

 protected:
  bool wants_dense(size_t input) const override { return input >= tokens(); }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override {
    require_differentiable();
    return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }
  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    require_differentiable();
    return FusedPrimitive::tangent(primals, tangents, argnums);
  }

 private:
  size_t tokens() const { return static_cast<size_t>(config_.arrays(0) + config_.arrays(1)); }
  size_t caches() const { return static_cast<size_t>(config_.parts[0] + config_.parts[1]); }
  size_t first_cache() const { return tokens() + 1; }

  void require_differentiable() const {
    if (config_.quantizes() || config_.parts[0] > 1) {
      throw_value_error(op(),
                        "quantized caches have no derivative, because codes are integers; allowed: "
                        "caches that are arrays, or mx.stop_gradient of the arguments.");
    }
  }

  KvAppendArrays arrays_of(const Arrays& inputs) const {
    const auto from = [&](size_t i) { return inputs.begin() + static_cast<int64_t>(i); };
    const size_t extras = first_cache() + caches();
    const auto optional = [&](size_t i) {
      return i < inputs.size() ? std::optional(inputs[i]) : std::nullopt;
    };
    return {Arrays(inputs.begin(), from(tokens())), inputs[tokens()],
            Arrays(from(first_cache()), from(extras)), optional(extras), optional(extras + 1)};
  }

  // Gives each cache the memory of its input if that is donatable, else memory of its own.
  void allocate_outputs(const Arrays& inputs, Arrays& outputs) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      allocate_or_reuse(outputs[i], {&inputs[first_cache() + i]}, stream());
    }
  }

  const KvAppendConfig config_;
};

// ---- the definition -----------------------------------------------------------------------------

// A number for each token: [batch or 1, length].
mx::array per_token(const mx::array& numbers, int length, mx::Stream s) {
  return numbers.shape(1) == length
             ? numbers
             : mx::add(numbers, mx::arange(0.0, length, 1.0, mx::int64, s), s);
}

// For each row of the caches of a batch row, the last token that it gets, or -1: [batch or 1, 1,
// rows, 1].
mx::array tokens_of_rows(const mx::array& rows, int count, mx::Stream s) {
  const int batch = rows.shape(0), length = rows.shape(1);  // the batch may be 1 for all
  const auto counted = [&](int end) { return mx::arange(0.0, end, 1.0, mx::int64, s); };
  const mx::array is_here = mx::equal(mx::reshape(rows, {batch, 1, length}, s),
                                      mx::reshape(counted(count), {-1, 1}, s), s);
  const mx::array token = mx::where(is_here, counted(length), mx::array(-1, mx::int64), s);
  return mx::reshape(mx::max(token, -1, false, s), {batch, 1, count, 1}, s);
}

Arrays KvAppend::compose(const Arrays& inputs) {
  const mx::Stream s = stream();
  const KvAppendArrays arrays = arrays_of(inputs);
  const mx::array& k = arrays.tokens[0];
  const int batch = k.shape(0), heads = k.shape(1), length = k.shape(2);
  const int page_size = arrays.caches[0].shape(2);
  const int pages = batch == 0 ? 0 : arrays.caches[0].shape(0) / batch;
  if (batch * heads * length * pages * page_size == 0) {
    return arrays.caches;
  }
  Arrays given;
  for (int side = 0; side < 2; ++side) {
    for (int i = 0; i < config_.arrays(side); ++i) {
      mx::array x = arrays.tokens[static_cast<size_t>(side == 0 ? i : config_.arrays(0) + i)];
      if (side == 0 && config_.rope) {
        x = rotated_keys(*config_.rope, arrays, s);
      }
      const Arrays parts =
          config_.bits[side] == 0
              ? Arrays{x}
              : mx::quantize(x, config_.group, config_.bits[side], "affine", std::nullopt, s);
      given.insert(given.end(), parts.begin(), parts.end());
    }
  }
  const mx::array token = tokens_of_rows(per_token(arrays.rows, length, s), pages * page_size, s);
  const mx::array none = mx::array(0, mx::int64);
  const mx::array is_written = mx::greater_equal(token, none, s);
  const mx::array taken = mx::maximum(token, none, s);
  Arrays outputs;
  for (size_t i = 0; i < caches(); ++i) {
    const mx::array& cache = arrays.caches[i];
    const int columns = cache.shape(3);
    // The pages of a batch row follow each other inside a head.
    const mx::array paged = mx::transpose(
        mx::reshape(cache, {batch, pages, heads, page_size, columns}, s), {0, 2, 1, 3, 4}, s);
    const mx::array old = mx::reshape(paged, {batch, heads, pages * page_size, columns}, s);
    const mx::array rows =
        mx::where(is_written, mx::take_along_axis(given[i], taken, 2, s), old, s);
    const mx::array apart = mx::reshape(rows, {batch, heads, pages, page_size, columns}, s);
    outputs.push_back(mx::reshape(mx::transpose(apart, {0, 2, 1, 3, 4}, s), cache.shape(), s));
  }
  return outputs;
}

// ---- the CPU ------------------------------------------------------------------------------------

void KvAppend::eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) {
  const SiblingsWithoutInputs released(inputs, outputs);
  allocate_outputs(inputs, outputs);
  const KvAppendArrays arrays = arrays_of(inputs);
  const mx::array& k = arrays.tokens[0];
  const mx::array& cache = arrays.caches[0];
  KvAppendArgs args{};
  args.dtype = k.dtype();
  size_t next = 0, next_out = 0;
  for (int side = 0; side < 2; ++side) {
    for (int i = 0; i < config_.arrays(side); ++i) {
      const mx::array& x = arrays.tokens[next++];
      KvAppendTensor tensor{};
      tensor.in = x.data<void>();
      std::copy_n(x.strides().begin(), 4, tensor.strides);
      tensor.columns = x.shape(3);
      tensor.itemsize = static_cast<int64_t>(x.itemsize());
      tensor.bits = config_.bits[side];
      tensor.rotates = side == 0 && config_.rope.has_value();
      for (int part = 0; part < (tensor.bits == 0 ? 1 : config_.parts[side]); ++part) {
        tensor.out[part] = outputs[next_out++].data<void>();
      }
      args.tensors.push_back(tensor);
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const void* const from = arrays.caches[i].data<void>();
    if (from != outputs[i].data<void>()) {
      args.copies.push_back(
          {from, outputs[i].data<void>(), static_cast<int64_t>(outputs[i].nbytes())});
    }
  }
  args.rows = NumbersOfTokens::of(arrays.rows);
  args.batch = k.shape(0);
  args.heads = k.shape(1);
  args.length = k.shape(2);
  args.pages = cache.shape(0);
  args.page_size = cache.shape(2);
  args.group = config_.group;
  args.distinct = config_.distinct;
  if (config_.rope) {
    args.rope = *config_.rope;
    args.positions = NumbersOfTokens::of(*arrays.positions);
    args.freqs = arrays.freqs ? arrays.freqs->data<float>() : nullptr;
  }
  run_on_cpu(
      *this, inputs, outputs, [args = std::move(args)] { kv_append_cpu(args); },
      [&] {
        return std::string(op()) + (config_.quantizes() ? "_affine_" : "_plain_") +
               to_text(k.dtype());
      });
}

}  // namespace

mx::array rotated_keys(const RopeConfig& config, const KvAppendArrays& arrays, mx::Stream s) {
  const mx::array& k = arrays.tokens[0];
  // Each token is a batch row of rope, because it has its own position.
  const int batch = k.shape(0), heads = k.shape(1), length = k.shape(2), columns = k.shape(3);
  const mx::array positions =
      mx::reshape(mx::broadcast_to(per_token(*arrays.positions, length, s), {batch, length}, s),
                  {batch * length}, s);
  const mx::array apart =
      mx::reshape(mx::transpose(k, {0, 2, 1, 3}, s), {batch * length, heads, 1, columns}, s);
  const mx::array turned = apply_rope(config, {apart}, {positions, arrays.freqs}, s)[0];
  return mx::transpose(mx::reshape(turned, {batch, length, heads, columns}, s), {0, 2, 1, 3}, s);
}

Arrays apply_kv_append(const KvAppendConfig& config, KvAppendArrays arrays, mx::Stream s) {
  std::vector<mx::Dtype> dtypes;
  Arrays inputs = std::move(arrays.tokens);
  inputs.push_back(std::move(arrays.rows));
  for (mx::array& cache : arrays.caches) {
    dtypes.push_back(cache.dtype());
    inputs.push_back(std::move(cache));
  }
  if (arrays.positions) {
    inputs.push_back(*std::move(arrays.positions));
  }
  if (arrays.freqs) {
    inputs.push_back(*std::move(arrays.freqs));
  }
  auto primitive = std::make_shared<KvAppend>(s, config);
  std::string why_not;
  if (s.device == mx::Device::gpu) {
    can_launch(s.device, &why_not);
  }
  if (why_not.empty() && primitive->launches_kernels() && config.arrays(0) > 1) {
    why_not = "GPU kernels quantize in mode 'affine' only";
  }
  if (!why_not.empty()) {
    note_fallback(primitive->op(), why_not);
    return primitive->compose(inputs);
  }
  return outputs_of(std::move(primitive), dtypes, std::move(inputs));
}

}  // namespace mlx_anvil
