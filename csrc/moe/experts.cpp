// quantized_experts in four steps, each an op with its own kernels and derivatives: sort the pairs
// of token and expert, gate and up with the activation, down, and the sum over a token's experts.
#include "moe/experts.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/device_traits.h"
#include "common/ids.h"
#include "common/shapeless.h"
#include "gather_matmul/pairs.h"
#include "gather_matmul/primitive.h"
#include "moe/experts_checks.h"
#include "moe/moe.h"
#include "moe/primitive.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

// True if sorted pairs are worth their launches: an expert's tokens then share one read of its
// weights. If tokens choose at random, pairs for half of the experts share a fifth of the reads. On
// Apple's GPUs, products share reads if there are as many pairs as experts (gpu_choice.cpp). The
// CPU groups pairs inside the products.
bool suits_sorting(int tokens, int chosen, int experts, mx::Stream s) {
  constexpr int64_t kManyPairs = 64;
  const int64_t pairs = int64_t{tokens} * chosen;
  if (!for_gpu(s) || tokens == 1) {
    return false;
  }
  return device_traits(s.device).matrix_units ? 2 * pairs >= experts
                                              : pairs >= std::min<int64_t>(experts, kManyPairs);
}

// 0, 1, 2 and so on, like `ids`. The array is kept: as a constant, it costs no launch, and
// mx.compile() sees that two calls have the same one.
mx::array places_like(const mx::array& ids, mx::Stream s) {
  static std::mutex mutex;
  static mx::array* kept = nullptr;  // never freed: MLX's allocator may be gone at exit
  const int count = static_cast<int>(ids.size());
  const std::lock_guard<std::mutex> lock(mutex);
  if (kept == nullptr || kept->size() < ids.size()) {
    std::vector<int32_t> places(std::max<size_t>(1024, 2 * ids.size()));
    std::iota(places.begin(), places.end(), 0);
    delete kept;
    kept = new mx::array(places.begin(), {static_cast<int>(places.size())}, mx::int32);
  }
  return mx::reshape(mx::slice(*kept, {0}, {count}, s), ids.shape(), s);
}

// The rows of x and the experts of the pairs, and the place of each pair among them, like `ids`.
struct Pairs {
  mx::array x;
  PairIds ids;
  mx::array inverse;
};

// x [..., D], ids [tokens, k].
Pairs pairs_of(const mx::array& x, const mx::array& ids, int experts, mx::Stream s) {
  const int rows = ids.shape(0), columns = x.shape(-1);
  const mx::array own = ids_in_32_bits(ids, s);
  if (suits_sorting(rows, ids.shape(1), experts, s)) {
    Arrays sorted = apply_moe_permute(mx::reshape(x, {rows, columns}, s), own, experts, 0, s);
    for (const size_t integers : {2, 3}) {  // beside rows, which have a gradient
      sorted[integers] = mx::stop_gradient(sorted[integers], s);
    }
    return {mx::expand_dims(sorted[4], 1, s), {sorted[3], std::nullopt, true}, sorted[2]};
  }
  return {mx::reshape(x, {rows, 1, 1, columns}, s), {own}, places_like(ids, s)};
}

// inverse [..., k]
mx::array summed(const mx::array& rows,
                 const mx::array& inverse,
                 const ExpertArrays& arrays,
                 mx::Stream s) {
  return moe_combine(rows, inverse,
                     {arrays.weights, arrays.residual, arrays.shared, arrays.shared_gate}, s);
}

mx::array in_steps(ExpertArrays&& arrays,
                   const GateOptions& activation,
                   const QuantizedFormat& gate_and_up,
                   const QuantizedFormat& down,
                   mx::Stream s) {
  const mx::Dtype dtype = experts_dtype(arrays);
  for (ExpertMatrix* side : {&arrays.gate, &arrays.up, &arrays.down}) {
    convert_for_product(side->matrix, dtype, s);
    if (side->bias) {
      side->bias = mx::astype(*side->bias, dtype, s);
    }
  }
  const int experts = arrays.gate.matrix.w.shape(0), outputs = arrays.down.matrix.w.shape(1);
  const mx::array ids = mx::stop_gradient(arrays.ids, s);
  mx::Shape rows_shape = ids.shape();
  rows_shape.push_back(outputs);
  if (ids.size() == 0) {
    const mx::array none = mx::zeros({0, outputs}, dtype, s);
    return arrays.weights ? summed(none, mx::zeros(ids.shape(), mx::int32, s), arrays, s)
                          : mx::reshape(none, rows_shape, s);
  }
  require_ids(kQuantizedExperts, arrays.ids, experts, {"ids", " and gate w ", " experts"}, s);
  const int k = ids.shape(-1), tokens = static_cast<int>(ids.size() / k);
  const Pairs pairs =
      pairs_of(mx::astype(arrays.x, dtype, s), mx::reshape(ids, {tokens, k}, s), experts, s);
  mx::array hidden =
      apply_gather_quantized_swiglu(kQuantizedExperts, gate_and_up, pairs.x, std::move(arrays.gate),
                                    std::move(arrays.up), activation, pairs.ids, s);
  const mx::array rows =
      mx::reshape(apply_gather_projection(kQuantizedExperts, down, std::move(hidden), arrays.down,
                                          pairs.ids, s),
                  {tokens * k, outputs}, s);
  if (arrays.weights) {
    return summed(rows, mx::reshape(pairs.inverse, ids.shape(), s), arrays, s);
  }
  if (!pairs.ids.sorted) {
    return mx::reshape(rows, rows_shape, s);
  }
  const mx::array places = mx::reshape(pairs.inverse, {tokens * k, 1}, s);  // sums of one row
  return mx::reshape(moe_combine(rows, places, {}, s), rows_shape, s);
}

// Calls visit(array) for all arrays in a fixed order.
template <class Visit>
void for_each(ExpertArrays& arrays, Visit visit) {
  const auto optional = [&](std::optional<mx::array>& x) {
    if (x) {
      visit(*x);
    }
  };
  visit(arrays.x);
  visit(arrays.ids);
  optional(arrays.weights);
  for (ExpertMatrix* side : {&arrays.gate, &arrays.up, &arrays.down}) {
    visit(side->matrix.w);
    visit(side->matrix.scales);
    optional(side->matrix.biases);
    optional(side->bias);
  }
  optional(arrays.residual);
  optional(arrays.shared);
  optional(arrays.shared_gate);
}

}  // namespace

mx::array quantized_experts(ExpertArrays arrays,
                            const ExpertOptions& options,
                            mx::StreamOrDevice stream) {
  constexpr const char* op = kQuantizedExperts;
  const QuantizedFormat gate_and_up = checked_format(op, options.gate_and_up);
  const QuantizedFormat down = checked_format(op, options.down, "down_");
  check_experts(op, arrays, gate_and_up, down);
  const mx::Stream s = require_stream(op, stream);
  Arrays inputs;
  bool traced = false;
  for_each(arrays, [&](const mx::array& x) {
    traced = traced || traces_shapeless({&x});
    inputs.push_back(x);
  });
  if (traced) {
    const auto call = [=](const Arrays& in) -> Arrays {
      ExpertArrays own = arrays;
      size_t at = 0;
      for_each(own, [&](mx::array& x) { x = in[at++]; });
      return {quantized_experts(std::move(own), options, s)};
    };
    return shapeless_node(op, s, std::move(inputs), call)[0];
  }
  return in_steps(std::move(arrays), options.activation, gate_and_up, down, s);
}

}  // namespace mlx_anvil
