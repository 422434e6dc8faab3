#include <nanobind/stl/string.h>

#include "common/bind_op.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "flash_attention/flash_attention.h"

namespace mlx_anvil {

using namespace nb::literals;

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

// An int counts the keys on either side, including the query's own position.
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

// The signatures without and with the log-sum-exp tell type checkers what return_lse changes.
constexpr const char* kSignatures[2] = {
    MLX_ANVIL_ATTENTION_SIGNATURE("typing.Literal[False] = False", "mlx.core.array"),
    MLX_ANVIL_ATTENTION_SIGNATURE("typing.Literal[True]", "tuple[mlx.core.array, mlx.core.array]"),
};

constexpr const char* kDoc =
    R"(Scaled dot-product attention, fused forward and backward, without a score matrix in memory.

Formula:
    ``s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j]``, ``cap(x) = softcap * tanh(x / softcap)``;
    ``lse[i] = log(sum_j exp(s[i, j]) + exp(sink))``; ``out[i] = sum_j exp(s[i, j] - lse[i]) v[j]``.

    The sums run over the keys visible to query ``i``: those inside the window that are not masked.
    A query without visible keys has an output of 0, an lse of ``sink`` or -inf, and zero gradients.

A drop-in replacement for ``mx.fast.scaled_dot_product_attention``. It adds a sliding window,
softcap, the log-sum-exp, and gradients in O(length) memory: the backward kernels recompute the
scores and use the saved ``lse``. The arithmetic is float32 for every dtype. Inputs may have any
strides and are not copied. If ``q`` is a transposed view of ``[B, L, H, D]``, the result has the
same layout.

Fused kernels compute the gradients of ``q``, ``k``, ``v``, ``sinks`` and an additive ``mask``,
including those through ``lse``. Forward mode and higher derivatives use a graph of MLX ops that
materialises the scores. ``vmap`` works over any of the arrays. Head dims above 256 (512 for at most
8 queries) run as a graph of MLX ops, which ``trace()`` reports.

Args:
    q (array): queries ``[B, Hq, Lq, D]``; float32, float16 or bfloat16.
    k (array): keys ``[B, Hkv, Lk, D]``, with ``Hq`` a multiple of ``Hkv`` (grouped-query
        attention).
    v (array): values ``[B, Hkv, Lk, Dv]``.
    scale (float, optional): factor of ``q . k``. Default: ``D ** -0.5``.
    mask (str or array, optional): ``"causal"``, aligned so that the last query sees the last key;
        or an array that broadcasts with ``[B, Hq, Lq, Lk]``. A bool mask marks visible keys with
        ``True``. A floating-point mask is added to the scores; its dtype must promote to that of
        the result. The broadcast is never materialised.
    sinks (array, optional): ``[Hq]``, one logit per head. It enters the softmax sum but has no
        value.
    window_size (int or (int, int), optional): ``(left, right)``, the number of keys that a query
        sees before and after its own position. An int ``w`` means ``(w - 1, w - 1)``; with
        ``"causal"`` a query then sees ``w`` keys, including its own. -1: unbounded. Positions are
        aligned as for ``"causal"``, and the window combines with any mask.
    softcap (float, optional): bounds the scores to (-softcap, softcap) before the mask is added.
        ``None`` and 0: unbounded. Default: ``None``.
    return_lse (bool): also return ``lse``. Default: ``False``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array or tuple[array, array]: ``[B, Hq, Lq, Dv]`` in the promoted dtype of ``q``, ``k`` and ``v``;
    with ``return_lse`` also the natural log-sum-exp ``[B, Hq, Lq]`` in float32.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: ranks, head counts, lengths or head dims do not match; the mask does not broadcast,
        has integers, or has a dtype that does not promote; softcap or window is negative; a dtype
        is unsupported; the stream is on a GPU and MLX has no GPU backend.

After Dao 2023, "FlashAttention-2". Matches ``mx.fast.scaled_dot_product_attention``.
)";

nb::object flash_attention_of_python(nb::handle q,
                                     nb::handle k,
                                     nb::handle v,
                                     nb::handle scale,
                                     nb::handle mask,
                                     nb::handle sinks,
                                     nb::handle window_size,
                                     nb::handle softcap,
                                     nb::handle return_lse,
                                     nb::handle stream) {
  auto [out, lse] =
      flash_attention(to_array(kFlashAttention, "q", q), to_array(kFlashAttention, "k", k),
                      to_array(kFlashAttention, "v", v),
                      to_attention_options(scale, mask, sinks, window_size, softcap, return_lse),
                      to_stream_or_device(kFlashAttention, stream));
  return lse ? nb::object(nb::make_tuple(out, *lse)) : nb::cast(out);
}

const BindOp bind_flash_attention([](nb::module_& m) {
  for (const char* signature : kSignatures) {  // the first overload takes every call
    m.def("flash_attention", flash_attention_of_python, "q"_a.none(), "k"_a.none(), "v"_a.none(),
          nb::kw_only(), "scale"_a = nb::none(), "mask"_a = nb::none(), "sinks"_a = nb::none(),
          "window_size"_a = nb::none(), "softcap"_a = nb::none(), "return_lse"_a.none() = false,
          "stream"_a = nb::none(), nb::sig(signature), kDoc);
  }
});

}  // namespace

}  // namespace mlx_anvil
