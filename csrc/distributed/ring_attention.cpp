#include "distributed/ring_attention.h"

#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"
#include "common/simulate.h"
#include "distributed/ring_node.h"
#include "flash_attention/checks.h"
#include "flash_attention/forward.h"

namespace mlx_anvil {

namespace {

bool runs_on_cpu(const RingConfig& config, const RingInputs& in, mx::Stream s) {
  const bool talks_on_cpu =
      config.group.size() == 1 || communication_stream(config.group).device == mx::Device::cpu;
  return !for_gpu(s) && talks_on_cpu &&
         !why_not_fused(in.q.shape(3), in.v.shape(3), /*gradient=*/true, /*on_gpu=*/false);
}

void check_call(const mx::array& q, const mx::array& k, const RingOptions& options) {
  if (q.shape(2) != k.shape(2)) {
    throw_value_error(kRingAttention, shape_text("q", q) + " and " + shape_text("k", k) +
                                          "; allowed: the same length, that of a rank's part.");
  }
  if (options.zigzag && q.shape(2) % 2 != 0) {
    throw_value_error(
        kRingAttention,
        shape_text("q", q) + "; allowed with layout='zigzag': an even length, two chunks.");
  }
}

// int32, from 0 to the length of the whole sequence.
mx::array checked_lengths(const mx::array& lengths,
                          const mx::array& q,
                          const Group& group,
                          mx::Stream s) {
  const int longest = q.shape(2) * group.size();
  require_integers(kRingAttention, {"lengths", lengths});
  require_shape(kRingAttention, {"lengths", lengths}, {q.shape(0)},
                "the length of each whole sequence");
  for_each_readable(lengths, s, [&](int64_t length, int64_t) {
    require_inside(kRingAttention, "lengths", length, 0, longest);
  });
  return ids_up_to(lengths, longest, s);
}

AttentionResult result_of(const Arrays& outputs, const RingOptions& options) {
  return {outputs[0], options.return_lse ? std::optional(outputs[1]) : std::nullopt};
}

// The op in a shapeless trace: positions depend on lengths.
AttentionResult shapeless(const mx::array& q,
                          const mx::array& k,
                          const mx::array& v,
                          const RingOptions& options,
                          mx::Stream s) {
  Arrays inputs = {q, k, v};
  OptionalInputs::append(inputs, options.attention.sinks);
  OptionalInputs::append(inputs, options.lengths);
  const auto graph = [options, s](const Arrays& in) -> Arrays {
    RingOptions own = options;
    OptionalInputs optional(in, 3);
    optional.replace(own.attention.sinks);
    optional.replace(own.lengths);
    own.return_lse = true;
    const auto [out, lse] = ring_attention(in[0], in[1], in[2], own, s);
    return {out, *lse};
  };
  return result_of(shapeless_node(kRingAttention, s, std::move(inputs), graph), options);
}

}  // namespace

AttentionResult ring_attention(const mx::array& q,
                               const mx::array& k,
                               const mx::array& v,
                               const RingOptions& given,
                               mx::StreamOrDevice stream) {
  RingOptions options = given;
  options.attention.op = kRingAttention;
  const std::initializer_list<NamedArray> arrays = {{"q", q}, {"k", k}, {"v", v}};
  require_kernel_dtypes(kRingAttention, arrays);
  const mx::Stream s = require_stream(kRingAttention, stream);
  check_attention_shapes(kRingAttention, q, k, v);
  check_call(q, k, options);
  require_connection(kRingAttention);
  RingConfig config{options.group ? *options.group : mx::distributed::init(),
                    checked_attention_config(options.attention, q.shape(3)), options.zigzag,
                    options.lengths.has_value()};
  const mx::Dtype dtype = promoted_dtype(arrays);
  const AttentionExtras extras =
      checked_attention_extras(config.attention, options.attention, q, k, dtype, s);
  const auto of = [](const std::optional<mx::array>& x) { return x ? &*x : nullptr; };
  if (traces_shapeless({&q, &k, &v, of(options.attention.sinks), of(options.lengths)})) {
    return shapeless(q, k, v, options, s);
  }
  RingInputs in{mx::astype(q, dtype, s), mx::astype(k, dtype, s), mx::astype(v, dtype, s),
                extras.sinks, std::nullopt};
  if (options.lengths) {
    in.lengths = checked_lengths(*options.lengths, q, config.group, s);
  }
  return result_of(runs_on_cpu(config, in, s) ? apply_ring_attention(config, in, s)
                                              : compose_ring_attention(config, in, s),
                   options);
}

}  // namespace mlx_anvil
