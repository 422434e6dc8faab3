#include <utility>

#include "common/bind_op.h"
#include "common/python_args.h"
#include "mla_decode/mla_decode.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

AttentionOptions to_options(nb::handle scale,
                            nb::handle mask,
                            nb::handle lengths,
                            nb::handle softcap,
                            nb::handle sinks,
                            nb::handle return_lse) {
  AttentionOptions options;
  options.op = kMlaDecode;
  options.scale = to_float32(kMlaDecode, "scale", scale);
  if (nb::isinstance<nb::str>(mask)) {
    options.mask = nb::cast<std::string>(mask);
  } else if (nb::isinstance<mx::array>(mask)) {
    options.mask = nb::cast<mx::array>(mask);
  } else if (!mask.is_none()) {
    throw_type_error(kMlaDecode, "mask", mask, "None, 'causal', mlx.core.array");
  }
  options.lengths.keys = to_optional_array(kMlaDecode, "lengths", lengths);
  if (!softcap.is_none()) {
    options.softcap = to_float32(kMlaDecode, "softcap", softcap, "None, or a number");
  }
  options.sinks = to_optional_array(kMlaDecode, "sinks", sinks);
  options.return_lse = to_bool(kMlaDecode, "return_lse", return_lse);
  return options;
}

#define MLX_ANVIL_MLA_SIGNATURE(return_lse, result)                                         \
  "def mla_decode(q_nope: mlx.core.array, q_rope: mlx.core.array, latent: mlx.core.array, " \
  "k_rope: mlx.core.array, *, scale: float, "                                               \
  "mask: typing.Literal['causal'] | mlx.core.array | None = None, "                         \
  "lengths: mlx.core.array | None = None, softcap: float | None = None, "                   \
  "sinks: mlx.core.array | None = None, return_lse: " return_lse                            \
  ", stream: " MLX_ANVIL_STREAM_TYPE " = None) -> " result

// The signatures without and with the log-sum-exp tell type checkers what return_lse changes.
constexpr const char* kSignatures[2] = {
    MLX_ANVIL_MLA_SIGNATURE("typing.Literal[False] = False", "mlx.core.array"),
    MLX_ANVIL_MLA_SIGNATURE("typing.Literal[True]", "tuple[mlx.core.array, mlx.core.array]"),
};

constexpr const char* kDoc =
    R"(Multi-head latent attention in absorbed form (DeepSeek-V2 and V3), for a few queries over a cache of latents.

Formula:
    ``s[i, j] = cap(scale * (q_nope[i] . latent[j] + q_rope[i] . k_rope[j])) + mask[i, j]``,
    ``cap(x) = softcap * tanh(x / softcap)``;
    ``lse[i] = log(sum_j exp(s[i, j]) + exp(sink))``; ``out[i] = sum_j exp(s[i, j] - lse[i]) latent[j]``.

    The sums run over the keys visible to query ``i``. A query without visible keys, such as padding,
    has an output of 0, an lse of ``sink`` or -inf, and zero gradients.

A latent is the key and the value of all heads at once. The kernels read it once for both products
and for a block of heads, and store no scores. The arithmetic is float32 for every dtype. Inputs may
have any strides, such as slices of a cache, and are not copied.

The query is multiplied by the key part of the up projection first, and the output by its value part
afterwards. A decode gains from that form. For a prompt, ``flash_attention`` over up-projected keys
and values does less arithmetic. Any number of queries gives a correct result.

On the CPU, gradients are those of ``flash_attention`` over both parts side by side. On GPUs they,
and on all devices forward mode and higher derivatives, use a graph of MLX ops that materialises the
scores, which ``trace()`` reports. ``vmap`` works over any of the arrays. Ranks above 512 and rope
dims above 64 run as that graph too.

Args:
    q_nope (array): ``[B, H, Lq, R]``, the part of the queries without positions, multiplied by the
        key part of the up projection; float32, float16 or bfloat16.
    q_rope (array): ``[B, H, Lq, P]``, the rotated part.
    latent (array): ``[B, 1, Lk, R]``, the compressed keys and values; ``R`` is ``kv_lora_rank``.
    k_rope (array): ``[B, 1, Lk, P]``, the rotated part of the keys, which all heads share.
    scale (float): factor of the scores, that of the model's full head dim:
        ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`` in DeepSeek-V2.
    mask (str or array, optional): ``"causal"``, aligned so that the last query sees the last key;
        or an array that broadcasts with ``[B, H, Lq, Lk]``. A bool mask marks visible keys with
        ``True``. A floating-point mask is added to the scores; its dtype must promote to that of
        the result. The broadcast is never materialised.
    lengths (array, optional): ``[B]`` integers: of each batch, only the first ``lengths[b]`` keys
        are keys, and the last query is aligned with the last of them. The rest is padding.
    softcap (float, optional): bounds the scores to (-softcap, softcap) before the mask is added.
        ``None`` and 0: unbounded. Default: ``None``.
    sinks (array, optional): ``[H]``, one logit per head. It enters the softmax sum but has no
        value.
    return_lse (bool): also return ``lse``. Default: ``False``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array or tuple[array, array]: ``[B, H, Lq, R]`` in the promoted dtype of the first four arrays;
    with ``return_lse`` also the natural log-sum-exp ``[B, H, Lq]`` in float32.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: ranks, heads, lengths or last axes do not match; ``latent`` or ``k_rope`` has more
        than one head; the mask does not broadcast, has integers, or has a dtype that does not
        promote; softcap is negative; a length is out of range; a dtype is unsupported; the stream
        is on a GPU and MLX has no GPU backend.

After DeepSeek-AI 2024, "DeepSeek-V2".
)";

const BindOp bind_mla_decode([](nb::module_& m) {
  const auto mla_decode_of_python = [](nb::handle q_nope, nb::handle q_rope, nb::handle latent,
                                       nb::handle k_rope, nb::handle scale, nb::handle mask,
                                       nb::handle lengths, nb::handle softcap, nb::handle sinks,
                                       nb::handle return_lse, nb::handle stream) {
    const auto of = [](const char* name, nb::handle x) -> const mx::array& {
      return to_array(kMlaDecode, name, x);
    };
    auto [out, lse] = mla_decode(of("q_nope", q_nope), of("q_rope", q_rope), of("latent", latent),
                                 of("k_rope", k_rope),
                                 to_options(scale, mask, lengths, softcap, sinks, return_lse),
                                 to_stream_or_device(kMlaDecode, stream));
    return lse ? nb::object(nb::make_tuple(out, *lse)) : nb::cast(out);
  };
  for (const char* signature : kSignatures) {  // the first overload takes every call
    m.def("mla_decode", mla_decode_of_python, "q_nope"_a.none(), "q_rope"_a.none(),
          "latent"_a.none(), "k_rope"_a.none(), nb::kw_only(), "scale"_a.none(),
          "mask"_a = nb::none(), "lengths"_a = nb::none(), "softcap"_a = nb::none(),
          "sinks"_a = nb::none(), "return_lse"_a.none() = false, "stream"_a = nb::none(),
          nb::sig(signature), kDoc);
  }
});

}  // namespace

}  // namespace mlx_anvil
