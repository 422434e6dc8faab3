#include "rope/cache_primitive.h"

#include <algorithm>
#include <string>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/run_on_cpu.h"
#include "common/siblings.h"
#include "common/trace.h"
#include "rope/cpu.h"
#include "rope/gpu.h"

namespace mlx_anvil {

namespace {

// Makes `view` the first rows of a cache.
void set_view(const mx::array& cache, mx::array& view) {
  size_t span = 1;
  for (int axis = 0; axis < 4; ++axis) {
    span += static_cast<size_t>(view.shape(axis) - 1) * cache.strides(axis);
  }
  auto flags = cache.flags();
  flags.contiguous = flags.row_contiguous = span == view.size();
  flags.col_contiguous = flags.row_contiguous && cache.flags().col_contiguous;
  view.copy_shared_buffer(cache, cache.strides(), flags, span);
}

// For each row of a cache, [batch or 1, 1, capacity, 1]: if a token is written there, and which.
struct CacheRows {
  mx::array written, token;

  CacheRows(const mx::array& offset, int capacity, int length, mx::Stream s)
      : written(mx::array(false)), token(mx::array(0)) {
    const mx::array first = mx::reshape(mx::astype(offset, mx::int64, s), {-1, 1, 1, 1}, s);
    const mx::array rows =
        mx::reshape(mx::arange(0.0, capacity, 1.0, mx::int64, s), {1, 1, capacity, 1}, s);
    const mx::array none = mx::array(0, mx::int64), last = mx::array(length - 1, mx::int64);
    const mx::array relative = mx::subtract(rows, first, s);
    written =
        mx::logical_and(mx::greater_equal(relative, none, s), mx::less_equal(relative, last, s), s);
    token = mx::clip(relative, none, last, s);
  }
};

// Inputs: q, k, v, or one array with the heads of all; k_cache, v_cache, offset, and freqs if
// given. Outputs: q, k_cache, v_cache.
class RopeAndCache : public FusedPrimitive {
 public:
  RopeAndCache(mx::Stream stream, const RopeConfig& config, size_t tensors)
      : FusedPrimitive(stream), config_(config), tensors_(tensors) {}

  const char* op() const override { return "rope_and_cache"; }
  const char* kind() const override { return "RopeAndCache"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const RopeAndCache&>(other).config_;
  }

  Arrays compose(const Arrays& inputs) override;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape q = inputs[0].shape();
    q[1] = q_heads(inputs);
    return {q, k_cache(inputs).shape(), v_cache(inputs).shape()};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override;

 protected:
  bool wants_dense(size_t input) const override { return input >= tensors_; }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override;

  // Sets the strides of [batch, heads, length, head_dim].
  virtual void set_strides(const mx::array& heads,
                           int64_t /*batch*/,
                           int64_t /*head_dim*/,
                           int64_t* strides) const {
    std::copy_n(heads.strides().begin(), 4, strides);
  }

  const mx::array& k_cache(const Arrays& inputs) const { return inputs[tensors_]; }
  const mx::array& v_cache(const Arrays& inputs) const { return inputs[tensors_ + 1]; }
  size_t offset_at() const { return tensors_ + 2; }

  int q_heads(const Arrays& inputs) const {
    return inputs[0].shape(1) - (tensors_ == 1 ? 2 * k_cache(inputs).shape(1) : 0);
  }

  RopePositions positions_of(const Arrays& inputs) const {
    return RopePositions::of(inputs, offset_at());
  }

  CacheRows rows_of(const Arrays& inputs) {
    return {inputs[offset_at()], k_cache(inputs).shape(2), inputs[0].shape(2), stream()};
  }

  // q, k and v, each with its first element relative to its array.
  RopeCacheOperands operands_of(const Arrays& inputs, const Arrays& outputs) const;

  // Gives each cache the memory of its input if that is donatable, else memory of its own.
  void allocate_outputs(const Arrays& inputs, Arrays& outputs);

  const RopeConfig config_;

 private:
  const size_t tensors_;
};

// One token: q, k and v are dense, of any shape with the elements [batch, heads, head_dim]. Two
// more outputs are the rows of the caches up to the token, as views.
class RopeAndCacheOfToken : public RopeAndCache {
 public:
  RopeAndCacheOfToken(mx::Stream stream, const RopeConfig& config, int heads, int rows)
      : RopeAndCache(stream, config, 3), heads_(heads), rows_(rows) {}

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!RopeAndCache::is_equivalent(other)) {
      return false;
    }
    const auto& same = static_cast<const RopeAndCacheOfToken&>(other);
    return heads_ == same.heads_ && rows_ == same.rows_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    mx::Shape of_keys = k_cache(inputs).shape();
    of_keys[2] = 1;
    mx::Shape of_queries = of_keys;
    of_queries[1] = heads_;
    Arrays in = inputs;
    for (size_t i = 0; i < 3; ++i) {
      in[i] = mx::reshape(inputs[i], i == 0 ? of_queries : of_keys, s);
    }
    Arrays outputs = RopeAndCache::compose(in);
    for (size_t i = 1; i < 3; ++i) {
      outputs.push_back(mx::slice(outputs[i], {0, 0, 0, 0}, view_shape(inputs), s));
    }
    return outputs;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape& cache = k_cache(inputs).shape();
    return {{cache[0], heads_, 1, cache[3]}, cache, cache, view_shape(inputs), view_shape(inputs)};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    RopeAndCache::eval_cpu_kernels(inputs, outputs);
    for (size_t i = 1; i < 3; ++i) {
      set_view(outputs[i], outputs[i + 2]);
    }
  }

  void eval_gpu_kernels(const Arrays&, Arrays&) override {
    throw_internal_error(op(), "a node for the CPU was evaluated elsewhere.");
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  void set_strides(const mx::array& heads,
                   int64_t batch,
                   int64_t head_dim,
                   int64_t* strides) const override {
    const int64_t all[] = {static_cast<int64_t>(heads.size()) / batch, head_dim, head_dim, 1};
    std::copy_n(all, 4, strides);
  }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override {
    return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }

 private:
  mx::Shape view_shape(const Arrays& inputs) const {
    mx::Shape shape = k_cache(inputs).shape();
    shape[2] = rows_;
    return shape;
  }

  const int heads_, rows_;
};

Arrays RopeAndCache::compose(const Arrays& inputs) {
  const mx::Stream s = stream();
  const int queries = q_heads(inputs), keys = k_cache(inputs).shape(1);
  Arrays heads(inputs.begin(), inputs.begin() + static_cast<int64_t>(tensors_));
  if (tensors_ == 1) {
    heads = mx::split(inputs[0], mx::Shape{queries, queries + keys}, 1, s);
  }
  const Arrays rotated = compose_rope(config_, {heads[0], heads[1]}, positions_of(inputs), s);
  if (inputs[0].shape(2) == 0) {
    return {rotated[0], k_cache(inputs), v_cache(inputs)};
  }
  const CacheRows rows = rows_of(inputs);
  const auto written = [&](const mx::array& x, const mx::array& cache) {
    return mx::where(rows.written, mx::take_along_axis(x, rows.token, 2, s), cache, s);
  };
  return {rotated[0], written(rotated[1], k_cache(inputs)), written(heads[2], v_cache(inputs))};
}

RopeCacheOperands RopeAndCache::operands_of(const Arrays& inputs, const Arrays& outputs) const {
  RopeCacheOperands operands{};
  const int64_t heads[] = {outputs[0].shape(1), outputs[1].shape(1), outputs[1].shape(1)};
  int64_t head = 0;
  for (size_t i = 0; i < 3; ++i) {
    const mx::array& x = inputs[tensors_ == 1 ? 0 : i];
    operands.heads[i] = {&x, heads[i], tensors_ == 1 ? head * x.strides(1) : 0};
    head += heads[i];
  }
  operands.k_cache = &k_cache(inputs);
  operands.v_cache = &v_cache(inputs);
  return operands;
}

void RopeAndCache::allocate_outputs(const Arrays& inputs, Arrays& outputs) {
  allocate_dense(outputs[0], stream());
  for (size_t i = 1; i < 3; ++i) {
    allocate_or_reuse(outputs[i], {&inputs[tensors_ + i - 1]}, stream());
  }
}

void RopeAndCache::eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) {
  const SiblingsWithoutInputs released(inputs, outputs);
  allocate_outputs(inputs, outputs);
  const RopeCacheOperands operands = operands_of(inputs, outputs);
  RopeArgs args = cpu_args(config_, positions_of(inputs), outputs[0]);
  args.count = 3;
  const auto size = static_cast<int64_t>(outputs[0].itemsize());
  for (size_t i = 0; i < 3; ++i) {
    const RopeCacheOperands::Heads& from = operands.heads[i];
    RopeTensor& tensor = args.tensors[i];
    tensor.in = from.array->data<char>() + from.first * size;
    tensor.out = outputs[i].data<void>();
    tensor.heads = from.count;
    set_strides(*from.array, outputs[0].shape(0), outputs[0].shape(3), tensor.strides);
    tensor.out_rows = outputs[i].shape(2);
    tensor.at_offset = i > 0;
    tensor.rotates = i < 2;
  }
  for (size_t i = 1; i < 3; ++i) {
    const mx::array& cache = inputs[tensors_ + i - 1];
    if (cache.data<void>() != outputs[i].data<void>()) {
      args.copies[i - 1] = {cache.data<void>(), outputs[i].data<void>(),
                            static_cast<int64_t>(outputs[i].nbytes())};
    }
  }
  run_on_cpu(
      *this, inputs, outputs, [args] { rope_cpu(args); },
      [&] { return std::string(op()) + "_" + to_text(args.dtype); });
}

void RopeAndCache::eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) {
  const SiblingsWithoutInputs released(inputs, outputs);
  allocate_outputs(inputs, outputs);
  rope_and_cache_gpu(config_, operands_of(inputs, outputs), positions_of(inputs), outputs,
                     stream());
}

// Written rows of a cache come from k or v, the others from the cache. Rows of k are rotated back.
// The gradient of freqs is a graph of MLX ops.
Arrays RopeAndCache::gradient(const Arrays& primals,
                              const Arrays& cotangents,
                              const std::vector<int>& argnums,
                              const Arrays& outputs) {
  const mx::Stream s = stream();
  const int length = primals[0].shape(2);
  const bool differentiates_heads = std::any_of(
      argnums.begin(), argnums.end(), [&](int i) { return i < static_cast<int>(tensors_); });
  Arrays heads;  // the gradients of q, k and v
  const auto tokens_of = [&](const mx::array& cotangent) {
    const int capacity = cotangent.shape(2);
    mx::Shape shape = cotangent.shape();
    shape[2] = length;
    if (capacity == 0 || length == 0) {
      return mx::zeros(shape, cotangent.dtype(), s);
    }
    const mx::array first =
        mx::reshape(mx::astype(primals[offset_at()], mx::int64, s), {-1, 1, 1, 1}, s);
    const mx::array steps =
        mx::reshape(mx::arange(0.0, length, 1.0, mx::int64, s), {1, 1, length, 1}, s);
    const mx::array rows = mx::add(first, steps, s);
    const mx::array none = mx::array(0, mx::int64), last = mx::array(capacity - 1, mx::int64);
    const mx::array exists =
        mx::logical_and(mx::greater_equal(rows, none, s), mx::less_equal(rows, last, s), s);
    const mx::array taken = mx::take_along_axis(cotangent, mx::clip(rows, none, last, s), 2, s);
    return mx::where(exists, taken, mx::zeros_like(taken, s), s);
  };
  if (differentiates_heads) {
    RopeConfig inverse = config_;
    inverse.inverse = !config_.inverse;
    heads =
        apply_rope(inverse, {cotangents[0], tokens_of(cotangents[1])}, positions_of(primals), s);
    heads.push_back(tokens_of(cotangents[2]));
    if (tensors_ == 1) {
      heads = {mx::concatenate(heads, 1, s)};
    }
  }
  Arrays gradients;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    if (at < tensors_) {
      gradients.push_back(heads[at]);
    } else if (at < offset_at()) {
      const mx::array& cotangent = cotangents[at - tensors_ + 1];
      gradients.push_back(length == 0 ? cotangent
                                      : mx::where(rows_of(primals).written,
                                                  mx::zeros_like(cotangent, s), cotangent, s));
    } else if (at == offset_at()) {
      throw_value_error(op(), "offset has no gradient, because it counts positions.");
    } else {
      gradients.push_back(FusedPrimitive::gradient(primals, cotangents, {i}, outputs)[0]);
    }
  }
  return gradients;
}

}  // namespace

namespace {

Arrays inputs_of(RopeCacheArrays arrays, RopePositions positions) {
  Arrays inputs = std::move(arrays.heads);
  inputs.reserve(inputs.size() + 4);
  inputs.push_back(std::move(arrays.k_cache));
  inputs.push_back(std::move(arrays.v_cache));
  inputs.push_back(std::move(positions.offset));
  if (positions.freqs) {
    inputs.push_back(*std::move(positions.freqs));
  }
  return inputs;
}

}  // namespace

Arrays apply_rope_and_cache(const RopeConfig& config,
                            RopeCacheArrays arrays,
                            RopePositions positions,
                            mx::Stream s) {
  const std::vector<mx::Dtype> dtypes(3, arrays.heads[0].dtype());
  auto primitive = std::make_shared<RopeAndCache>(s, config, arrays.heads.size());
  Arrays inputs = inputs_of(std::move(arrays), std::move(positions));
  std::string why_not;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &why_not)) {
    note_fallback(primitive->op(), why_not);
    return primitive->compose(inputs);
  }
  return outputs_of(std::move(primitive), dtypes, std::move(inputs));
}

Arrays apply_rope_and_cache_of_token(const RopeConfig& config,
                                     RopeCacheArrays arrays,
                                     int heads,
                                     int rows,
                                     RopePositions positions,
                                     mx::Stream s) {
  const std::vector<mx::Dtype> dtypes(5, arrays.heads[0].dtype());
  return outputs_of(std::make_shared<RopeAndCacheOfToken>(s, config, heads, rows), dtypes,
                    inputs_of(std::move(arrays), std::move(positions)));
}

}  // namespace mlx_anvil
