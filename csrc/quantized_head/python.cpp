#include "common/bind_op.h"
#include "common/python_args.h"
#include "gguf_matmul/python_args.h"
#include "quantized_head/quantized_head.h"
#include "quantized_matmul/python_matrix.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kArgmaxDoc =
    R"(Index, and optionally value, of each row's largest logit: the last step of greedy decoding.

Formula:
    ``logits = x @ W.T``, ``W`` as for ``quantized_matmul``; ``index = argmax(logits, axis=-1)``

Equals ``mx.argmax(mlx_anvil.quantized_gemv(x, w, scales, biases), axis=-1)``, without an array of
logits: the kernel searches each block of logits as it computes it. Logits are first rounded to
their dtype, as if stored. The first of equal logits wins, whatever the number of threads. NaN is
larger than every number, as in ``mx.argmax``.

``x`` may have any number of rows. Up to 8 rows share one pass over ``w`` on a GPU; all rows do on
the CPU. The gradient of indices is zero, as for ``mx.argmax``. Values are differentiable with
respect to ``x``, ``scales`` and ``biases`` (affine), in reverse and forward mode, through products
with the selected rows of ``w``. ``vmap`` works over any of the arrays.

Args:
    x (array): ``[..., K]``; float32, float16 or bfloat16.
    w (array): uint32 ``[N, K * bits / 32]``, or uint8 ``[N, bytes of a row]`` in modes of GGUF.
    scales (array, optional): ``[N, K / group_size]``; floating point (affine), or uint8. Required
        but in modes of GGUF, which have none.
    biases (array, optional): like ``scales``; affine only, and required there.
    return_values (bool): also return the largest logits. Default: ``False``.
    group_size (int, optional): as for ``quantized_matmul``.
    bits (int, optional): likewise.
    mode (str): likewise.
    activation_bits (int, optional): likewise.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array or tuple[array, array]: indices, uint32 ``[...]``; with ``return_values`` also the values, in
    the promoted dtype of ``x``, ``scales`` and ``biases``.

Raises:
    TypeError: an argument of the wrong type.
    ValueError: an unknown format, shapes that do not match the format, an empty ``w``, an
        unsupported dtype, or a GPU stream if MLX has no GPU backend.
)";

constexpr const char* kTopkDoc =
    R"(The ``k`` largest logits of each row and their indices: the candidates of top-k sampling.

Formula:
    ``logits = x @ W.T``, ``W`` as for ``quantized_matmul``; the ``k`` largest of each row, in
    descending order

It needs no array of logits. Rounding, ties, NaN, gradients and ``vmap`` follow
``quantized_argmax``.

Args:
    x (array): ``[..., K]``; float32, float16 or bfloat16.
    w (array): uint32 ``[N, K * bits / 32]``, or uint8 ``[N, bytes of a row]`` in modes of GGUF.
    scales (array, optional): ``[N, K / group_size]``; floating point (affine), or uint8. Required
        but in modes of GGUF, which have none.
    biases (array, optional): like ``scales``; affine only, and required there.
    k (int): from 1 to 256, and at most N.
    group_size (int, optional): as for ``quantized_matmul``.
    bits (int, optional): likewise.
    mode (str): likewise.
    activation_bits (int, optional): likewise.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array]: indices and values, each ``[..., k]``: uint32, and the promoted dtype of ``x``,
    ``scales`` and ``biases``.

Raises:
    TypeError: an argument of the wrong type.
    ValueError: ``k`` out of range; any error of ``quantized_argmax``.
)";

#define MLX_ANVIL_HEAD_ARRAYS                                                     \
  "(x: mlx.core.array, w: mlx.core.array, scales: mlx.core.array | None = None, " \
  "biases: mlx.core.array | None = None, *, "
#define MLX_ANVIL_HEAD_END                                                              \
  MLX_ANVIL_QUANTIZED_FORMAT MLX_ANVIL_ACTIVATION_BITS "stream: " MLX_ANVIL_STREAM_TYPE \
                                                       " = None) -> "
#define MLX_ANVIL_ARGMAX_SIGNATURE(return_values, result)                      \
  "def quantized_argmax" MLX_ANVIL_HEAD_ARRAYS "return_values: " return_values \
  ", " MLX_ANVIL_HEAD_END result

constexpr const char* kArgmaxSignatures[] = {
    MLX_ANVIL_ARGMAX_SIGNATURE("typing.Literal[False] = False", "mlx.core.array"),
    MLX_ANVIL_ARGMAX_SIGNATURE("typing.Literal[True]", "tuple[mlx.core.array, mlx.core.array]"),
};

nb::object python_argmax(nb::handle x,
                         nb::handle w,
                         nb::handle scales,
                         nb::handle biases,
                         nb::handle return_values,
                         nb::handle group_size,
                         nb::handle bits,
                         nb::handle mode,
                         nb::handle activation_bits,
                         nb::handle stream) {
  constexpr const char* op = "quantized_argmax";
  const mx::array& x_array = to_array(op, "x", x);
  const bool with_values = to_bool(op, "return_values", return_values);
  const auto best_logits = [&]() -> BestLogits {
    if (const auto gguf = to_gguf_options(op, group_size, bits, mode, activation_bits)) {
      return gguf_best_logits(op, x_array, to_gguf_matrix(op, "", w, scales, biases), 1,
                              /*squeezed=*/true, *gguf, to_stream_or_device(op, stream));
    }
    QuantizedMatrix matrix = to_quantized_matrix(op, "", w, scales, biases);
    return quantized_argmax(x_array, std::move(matrix),
                            to_quantized_options(op, group_size, bits, mode, activation_bits),
                            to_stream_or_device(op, stream));
  };
  const BestLogits best = best_logits();
  return with_values ? nb::object(nb::make_tuple(best.indices, best.values))
                     : nb::cast(best.indices);
}

nb::tuple python_topk(nb::handle x,
                      nb::handle w,
                      nb::handle scales,
                      nb::handle biases,
                      nb::handle k,
                      nb::handle group_size,
                      nb::handle bits,
                      nb::handle mode,
                      nb::handle activation_bits,
                      nb::handle stream) {
  constexpr const char* op = "quantized_topk";
  const mx::array& x_array = to_array(op, "x", x);
  if (const auto gguf = to_gguf_options(op, group_size, bits, mode, activation_bits)) {
    const BestLogits best =
        gguf_best_logits(op, x_array, to_gguf_matrix(op, "", w, scales, biases), to_int(op, "k", k),
                         /*squeezed=*/false, *gguf, to_stream_or_device(op, stream));
    return nb::make_tuple(best.indices, best.values);
  }
  QuantizedMatrix matrix = to_quantized_matrix(op, "", w, scales, biases);
  const BestLogits best =
      quantized_topk(x_array, std::move(matrix), to_int(op, "k", k),
                     to_quantized_options(op, group_size, bits, mode, activation_bits),
                     to_stream_or_device(op, stream));
  return nb::make_tuple(best.indices, best.values);
}

const BindOp bind_quantized_head([](nb::module_& m) {
  // Registered twice, so that type checkers infer the result from return_values. The first overload
  // takes every call.
  for (const char* signature : kArgmaxSignatures) {
    m.def("quantized_argmax", python_argmax, "x"_a.none(), "w"_a.none(), "scales"_a = nb::none(),
          "biases"_a = nb::none(), nb::kw_only(), "return_values"_a.none() = false,
          "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a.none() = "affine",
          "activation_bits"_a = nb::none(), "stream"_a = nb::none(), nb::sig(signature),
          kArgmaxDoc);
  }
  m.def("quantized_topk", python_topk, "x"_a.none(), "w"_a.none(), "scales"_a = nb::none(),
        "biases"_a = nb::none(), nb::kw_only(), "k"_a.none(), "group_size"_a = nb::none(),
        "bits"_a = nb::none(), "mode"_a.none() = "affine", "activation_bits"_a = nb::none(),
        "stream"_a = nb::none(),
        nb::sig("def quantized_topk" MLX_ANVIL_HEAD_ARRAYS "k: int, " MLX_ANVIL_HEAD_END
                "tuple[mlx.core.array, mlx.core.array]"),
        kTopkDoc);
});

}  // namespace

}  // namespace mlx_anvil
