#include "flash_attention/arguments.h"

#include <nanobind/stl/string.h>

#include "common/errors.h"
#include "common/python_args.h"

namespace mlx_anvil {

namespace {

std::optional<float> to_optional_number(const char* argument, nb::handle value) {
  return value.is_none()
             ? std::nullopt
             : std::optional(to_float32(kFlashAttention, argument, value, "None, or a number"));
}

int64_t to_keys(nb::handle value) {
  return to_int(kFlashAttention, "window_size", value,
                "None, an int, or a pair of ints (left, right)");
}

// An int counts the keys up to and with the query's own, on either side.
std::pair<int64_t, int64_t> to_window(nb::handle value) {
  if (value.is_none()) {
    return {-1, -1};
  }
  if (nb::isinstance<nb::tuple>(value) || nb::isinstance<nb::list>(value)) {
    if (nb::len(value) != 2) {
      throw_value_error(kFlashAttention,
                        "window_size has " + std::to_string(nb::len(value)) +
                            " entries; allowed: None, an int, or a pair (left, right).");
    }
    return {to_keys(value[0]), to_keys(value[1])};
  }
  const int64_t keys = to_keys(value);
  if (keys != -1 && keys < 1) {
    throw_value_error(kFlashAttention,
                      "window_size is " + std::to_string(keys) +
                          "; allowed: at least 1 (the query's own position), or -1 for all.");
  }
  const int64_t side = keys == -1 ? -1 : keys - 1;
  return {side, side};
}

}  // namespace

AttentionOptions to_attention_options(nb::handle scale,
                                      nb::handle mask,
                                      nb::handle sinks,
                                      nb::handle window_size,
                                      nb::handle softcap,
                                      nb::handle return_lse) {
  AttentionOptions options;
  options.scale = to_optional_number("scale", scale);
  if (nb::isinstance<nb::str>(mask)) {
    options.mask = nb::cast<std::string>(mask);
  } else if (nb::isinstance<mx::array>(mask)) {
    options.mask = nb::cast<mx::array>(mask);
  } else if (!mask.is_none()) {
    throw_type_error(kFlashAttention, "mask", mask, "None, 'causal', mlx.core.array");
  }
  if (!sinks.is_none()) {
    options.sinks = to_array(kFlashAttention, "sinks", sinks);
  }
  options.window = to_window(window_size);
  options.softcap = to_optional_number("softcap", softcap);
  options.return_lse = to_bool(kFlashAttention, "return_lse", return_lse);
  return options;
}

#define MLX_ANVIL_ATTENTION_SIGNATURE(return_lse, result)                                 \
  "def flash_attention(q: mlx.core.array, k: mlx.core.array, v: mlx.core.array, *, "      \
  "scale: float | None = None, mask: typing.Literal['causal'] | mlx.core.array | None = " \
  "None, sinks: mlx.core.array | None = None, "                                           \
  "window_size: int | tuple[int, int] | None = None, softcap: float | None = None, "      \
  "return_lse: " return_lse ", stream: " MLX_ANVIL_STREAM_TYPE " = None) -> " result

const char* const kFlashAttentionSignatures[2] = {
    MLX_ANVIL_ATTENTION_SIGNATURE("typing.Literal[False] = False", "mlx.core.array"),
    MLX_ANVIL_ATTENTION_SIGNATURE("typing.Literal[True]", "tuple[mlx.core.array, mlx.core.array]"),
};

const char* const kFlashAttentionDoc =
    R"(Scaled dot-product attention, fused forward and backward, without the matrix of scores.

Formula:
    ``s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j]``, ``cap(x) = softcap * tanh(x / softcap)``;
    ``lse[i] = log(sum_j exp(s[i, j]) + exp(sink))``; ``out[i] = sum_j exp(s[i, j] - lse[i]) v[j]``.

    The sums run over the keys that query ``i`` may see: those inside the window and not masked. A
    query that sees none gets 0 (its lse is the sink, or -inf), and gradients of 0.

A drop-in for ``mx.fast.scaled_dot_product_attention``, with a sliding window, softcap, the
log-sum-exp, and gradients that need O(length) memory: the backward kernels recompute the scores
from ``lse``. The arithmetic is float32 whatever the dtype. Inputs of any strides are read in place;
where ``q`` is a view of ``[B, L, H, D]``, so is the result.

Gradients of ``q``, ``k``, ``v``, ``sinks`` and an additive ``mask`` are fused, those of the lse
included; forward mode and higher derivatives go through a graph of MLX ops that holds the scores.
``vmap`` works over any of the arrays. Head dims above 256 (512 for at most 8 queries) run as a
graph of MLX ops; ``trace()`` says so.

Args:
    q (array): queries ``[B, Hq, Lq, D]``; float32, float16 or bfloat16.
    k (array): keys ``[B, Hkv, Lk, D]``, ``Hq`` a multiple of ``Hkv`` (grouped-query attention).
    v (array): values ``[B, Hkv, Lk, Dv]``.
    scale (float, optional): factor of the products. Default: ``D ** -0.5``.
    mask (str or array, optional): ``"causal"``, aligned so that the last query sees the last key;
        or an array that broadcasts with ``[B, Hq, Lq, Lk]``: bool (``True``: may be seen), or of a
        dtype that promotes to that of the result, added to the scores. Never materialised.
    sinks (array, optional): ``[Hq]``, a logit for each head that takes part in the sum and has no
        value.
    window_size (int or (int, int), optional): a pair ``(left, right)`` is how many keys a query
        sees before and after its own position; an int ``w`` is ``(w - 1, w - 1)``, so that with
        ``"causal"`` a query sees ``w`` keys, its own included. -1: no bound. The positions are
        aligned as for ``"causal"``, and the window combines with any mask.
    softcap (float, optional): bounds the scores to (-softcap, softcap) before the mask is added.
        Default: ``None``, or 0: no bound.
    return_lse (bool): give ``lse`` as well.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array or (array, array): ``[B, Hq, Lq, Dv]`` in the promoted dtype of ``q``, ``k`` and ``v``;
    and the natural log-sum-exp ``[B, Hq, Lq]`` in float32, if asked for.

Raises:
    TypeError: an argument of the wrong type.
    ValueError: ranks, head counts, lengths or head dims that do not fit; a mask that does not
        broadcast, or whose dtype does not promote; a negative softcap or window; an unsupported
        dtype; a GPU stream where MLX has no GPU backend.

After Dao 2023, "FlashAttention-2". Matches ``mx.fast.scaled_dot_product_attention``.
)";

}  // namespace mlx_anvil
