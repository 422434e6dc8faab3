#include <string>

#include "common/bind_op.h"
#include "common/errors.h"
#include "flash_attention/python_lengths.h"
#include "flash_attention/python_options.h"
#include "ring_attention/ring_attention.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kSignature =
    "def ring_attention(q: mlx.core.array, k: mlx.core.array, v: mlx.core.array, *, "
    "group: mlx.core.distributed.Group | None = None, scale: float | None = None, "
    "mask: typing.Literal['causal'] | None = None, "
    "window_size: int | tuple[int, int] | None = None, softcap: float | None = None, "
    "sinks: mlx.core.array | None = None, lengths: mlx.core.array | None = None, "
    "layout: typing.Literal['contiguous', 'zigzag'] = 'contiguous', return_lse: bool = False, "
    "stream: " MLX_ANVIL_STREAM_TYPE
    " = None) -> mlx.core.array | tuple[mlx.core.array, mlx.core.array]";

constexpr const char* kDoc =
    R"(Attention over a sequence that is split over the ranks of a group, with gradients.

Each rank has its part of the queries, keys and values, and gets its part of the result, as
:func:`mlx_anvil.flash_attention` of the whole arrays would compute it: positions, ``"causal"``, windows
and lengths refer to the whole sequence::

    s[i, j] = cap(scale * q[i] . k[j])            cap(x) = softcap * tanh(x / softcap)
    lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
    out[i]  = sum over visible j of exp(s[i, j] - lse[i]) v[j]

Keys and values go round the ring of ranks, and each rank joins partial results by their
log-sum-exp. On the CPU they go in pieces, each of which is received while the one before is used;
a rank holds its own part and two pieces of others. Pieces go no further than a query needs them.
For the gradients they go round once more, and theirs with them, in float32. On a GPU, whole parts
go round. The memory of a rank is that of its part.

All ranks have to call it with the same shapes and options, in the same order with all they
send and receive. A process must not communicate on another stream at the same time.

Args:
    q (array): queries ``[B, Hq, L, D]`` of this rank's part, ``L`` rows of ``n * L``; float32,
        float16 or bfloat16.
    k (array): keys ``[B, Hkv, L, D]``, with ``Hq`` a multiple of ``Hkv``.
    v (array): values ``[B, Hkv, L, Dv]``.
    group (Group, optional): the ranks. Default: ``None``, all of ``mx.distributed.init()``.
    scale (float, optional): factor of ``q . k``. Default: ``D ** -0.5``.
    mask (str, optional): ``"causal"``, or None: every query sees every key. Default: ``None``.
    window_size (int or (int, int), optional): ``(left, right)``, the number of keys that a query
        sees before and after its own position, as for :func:`mlx_anvil.flash_attention`.
    softcap (float, optional): bounds the scores to (-softcap, softcap). Default: ``None``.
    sinks (array, optional): ``[Hq]``, one logit per head. Each rank's gradient is that of its own
        queries; sum it over the ranks, as of any other parameter.
    lengths (array, optional): ``[B]`` integers: of each whole sequence, only the first ``lengths[b]``
        rows are in use. Rows of the result past the end are 0. Default: all.
    layout (str): how the sequence is split. ``"contiguous"``: rank r has part r of n. ``"zigzag"``:
        of 2n chunks, rank r has chunks r and 2n - 1 - r, one after the other; with a causal mask
        all ranks then have the same work. Default: ``"contiguous"``.
    return_lse (bool): also return ``lse``. Default: ``False``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array or tuple[array, array]: ``[B, Hq, L, Dv]`` of this rank's part; with ``return_lse`` also the
    natural log-sum-exp ``[B, Hq, L]`` in float32.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: ranks, head counts or head dims do not match; ``q`` and ``k`` differ in length; the
        length is odd with ``"zigzag"``; ``mask`` or ``layout`` is another string; softcap or window is
        negative.
    RuntimeError: an earlier transfer of this process failed. One that fails during the evaluation
        raises there, and names the rank.

After Liu et al. 2023, "Ring Attention with Blockwise Transformers"; the zig-zag layout after
Brandon et al. 2023, "Striped Attention".
)";

bool to_zigzag(nb::handle layout) {
  if (!nb::isinstance<nb::str>(layout)) {
    throw_type_error(kRingAttention, "layout", layout, "'contiguous', 'zigzag'");
  }
  const auto name = nb::cast<std::string>(layout);
  if (name != "contiguous" && name != "zigzag") {
    throw_value_error(kRingAttention,
                      "layout is '" + name + "'; allowed: 'contiguous', 'zigzag'.");
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
  auto [out, lse] = ring_attention(to_array(kRingAttention, "q", q),
                                   to_array(kRingAttention, "k", k),
                                   to_array(kRingAttention, "v", v), options,
                                   to_stream_or_device(kRingAttention, stream));
  return lse ? nb::object(nb::make_tuple(out, *lse)) : nb::cast(out);
}

const BindOp bind_ring_attention([](nb::module_& m) {
  m.def("ring_attention", ring_attention_of_python, "q"_a.none(), "k"_a.none(), "v"_a.none(), nb::kw_only(),
        "group"_a = nb::none(), "scale"_a = nb::none(), "mask"_a = nb::none(),
        "window_size"_a = nb::none(), "softcap"_a = nb::none(), "sinks"_a = nb::none(),
        "lengths"_a = nb::none(), "layout"_a.none() = "contiguous", "return_lse"_a.none() = false,
        "stream"_a = nb::none(), nb::sig(kSignature), kDoc);
});

}  // namespace

}  // namespace mlx_anvil
