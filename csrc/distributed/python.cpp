#include <string>

#include "common/bind_op.h"
#include "common/errors.h"
#include "distributed/ring_attention.h"
#include "flash_attention/python_lengths.h"
#include "flash_attention/python_options.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

bool to_zigzag(nb::handle layout) {
  if (!nb::isinstance<nb::str>(layout)) {
    throw_type_error(kRingAttention, "layout", layout, "'contiguous', 'zigzag'");
  }
  const auto name = nb::cast<std::string>(layout);
  if (name != "contiguous" && name != "zigzag") {
    throw_value_error(kRingAttention, "layout is '" + name + "'; allowed: 'contiguous', 'zigzag'.");
  }
  return name == "zigzag";
}

nb::object ring_attention_of_python(nb::handle q,
                                    nb::handle k,
                                    nb::handle v,
                                    nb::handle group,
                                    nb::handle scale,
                                    nb::handle mask,
                                    nb::handle window_size,
                                    nb::handle softcap,
                                    nb::handle sinks,
                                    nb::handle lengths,
                                    nb::handle layout,
                                    nb::handle return_lse,
                                    nb::handle stream) {
  RingOptions options;
  if (!group.is_none()) {
    if (!nb::isinstance<Group>(group)) {
      throw_type_error(kRingAttention, "group", group, "None, mlx.core.distributed.Group");
    }
    options.group = nb::cast<Group>(group);
  }
  if (nb::isinstance<nb::str>(mask)) {
    options.attention.mask = nb::cast<std::string>(mask);
  } else if (!mask.is_none()) {
    throw_type_error(kRingAttention, "mask", mask, "None, 'causal'");
  }
  options.attention.scale = to_optional_number(kRingAttention, "scale", scale);
  options.attention.window = to_window(kRingAttention, window_size);
  options.attention.softcap = to_optional_number(kRingAttention, "softcap", softcap);
  options.attention.sinks = to_optional_array(kRingAttention, "sinks", sinks);
  options.lengths = to_optional_array(kRingAttention, "lengths", lengths);
  options.zigzag = to_zigzag(layout);
  options.return_lse = to_bool(kRingAttention, "return_lse", return_lse);
  auto [out, lse] = ring_attention(
      to_array(kRingAttention, "q", q), to_array(kRingAttention, "k", k),
      to_array(kRingAttention, "v", v), options, to_stream_or_device(kRingAttention, stream));
  return lse ? nb::object(nb::make_tuple(out, *lse)) : nb::cast(out);
}

const BindOp bind_ring_attention([](nb::module_& m) {
  m.def("_ring_attention", ring_attention_of_python, "q"_a.none(), "k"_a.none(), "v"_a.none(),
        nb::kw_only(), "group"_a = nb::none(), "scale"_a = nb::none(), "mask"_a = nb::none(),
        "window_size"_a = nb::none(), "softcap"_a = nb::none(), "sinks"_a = nb::none(),
        "lengths"_a = nb::none(), "layout"_a.none() = "contiguous", "return_lse"_a.none() = false,
        "stream"_a = nb::none());
});

}  // namespace

}  // namespace mlx_anvil
