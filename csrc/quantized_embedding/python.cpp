#include "common/bind_op.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "gguf_matmul/python_args.h"
#include "quantized_embedding/quantized_embedding.h"
#include "quantized_matmul/python_matrix.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

const mx::array& to_ids(nb::handle value) {
  const mx::array& ids = to_array(kQuantizedEmbedding, "ids", value);
  if (!mx::issubdtype(ids.dtype(), mx::integer)) {
    const std::string text =
        "ids has dtype " + to_text(ids.dtype()) + "; allowed: an integer dtype.";
    throw nb::type_error(op_message(kQuantizedEmbedding, text).c_str());
  }
  return ids;
}

std::optional<mx::Dtype> to_optional_dtype(nb::handle value) {
  if (value.is_none()) {
    return std::nullopt;
  }
  if (!nb::isinstance<mx::Dtype>(value)) {
    throw_type_error(kQuantizedEmbedding, "dtype", value, "None, or mlx.core.Dtype");
  }
  return nb::cast<mx::Dtype>(value);
}

constexpr const char* kDoc =
    R"(Dequantises the requested rows of a matrix: an embedding whose table stays quantized.

Formula:
    ``out[..., k] = scales[id, k // group_size] * value(code[id, k]) + biases[id, k // group_size]``
    with ``id = ids[...]``

Equals ``mx.dequantize(w[ids], scales[ids], biases[ids])``, in one kernel that reads only the
requested rows. It computes in float32 and rounds once. On the CPU, results of up to 2^20 elements
are computed eagerly if all inputs are available (evaluated, row-contiguous, not traced): that is
faster than waking the thread that evaluates graphs.

Negative ids count from the last row. Ids out of range raise an error if their values are known when
the op is called: on the CPU, if the array has been evaluated. Otherwise they clamp to the first or
last row.

Gradients with respect to ``scales`` and ``biases`` (affine) accumulate over equal ids, in a graph
of MLX ops. Forward mode is fused. ``vmap`` works over any of the arrays.

Args:
    ids (array): any shape, any integer dtype.
    w (array): uint32 ``[N, K * bits / 32]``, or uint8 ``[N, bytes of a row]`` in modes of GGUF.
    scales (array, optional): ``[N, K / group_size]``; floating point (affine), or uint8. Required
        but in modes of GGUF, which have none.
    biases (array, optional): like ``scales``; affine only, and required there.
    group_size (int, optional): as for ``quantized_matmul``.
    bits (int, optional): likewise.
    mode (str): likewise.
    dtype (Dtype, optional): dtype of the result: float32, float16 or bfloat16. Default: ``None``,
        the promoted dtype of ``scales`` and ``biases`` for affine, else bfloat16.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: ``[*ids.shape, K]``, of ``dtype``.

Raises:
    TypeError: an argument of the wrong type; ids that are not integers.
    ValueError: an unknown format, shapes that do not match the format, ids out of range, an
        unsupported dtype, or a GPU stream if MLX has no GPU backend.

Matches ``mlx.nn.QuantizedEmbedding``.
)";

const BindOp bind_quantized_embedding([](nb::module_& m) {
  m.def(
      kQuantizedEmbedding,
      [](nb::handle ids, nb::handle w, nb::handle scales, nb::handle biases, nb::handle group_size,
         nb::handle bits, nb::handle mode, nb::handle dtype, nb::handle stream) {
        const mx::array& id_array = to_ids(ids);
        if (const auto gguf = to_gguf_options(kQuantizedEmbedding, group_size, bits, mode)) {
          return gguf_embedding(
              id_array, to_gguf_matrix(kQuantizedEmbedding, "", w, scales, biases), gguf->kind,
              to_optional_dtype(dtype), to_stream_or_device(kQuantizedEmbedding, stream));
        }
        QuantizedMatrix matrix = to_quantized_matrix(kQuantizedEmbedding, "", w, scales, biases);
        return quantized_embedding(
            id_array, std::move(matrix),
            to_quantized_options(kQuantizedEmbedding, group_size, bits, mode),
            to_optional_dtype(dtype), to_stream_or_device(kQuantizedEmbedding, stream));
      },
      "ids"_a.none(), "w"_a.none(), "scales"_a = nb::none(), "biases"_a = nb::none(),
      "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a.none() = "affine", nb::kw_only(),
      "dtype"_a = nb::none(), "stream"_a = nb::none(),
      nb::sig("def quantized_embedding(ids: mlx.core.array, w: mlx.core.array, "
              "scales: mlx.core.array | None = None, biases: mlx.core.array | None = "
              "None, " MLX_ANVIL_QUANTIZED_FORMAT "*, dtype: mlx.core.Dtype | None = None, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
      kDoc);
});

}  // namespace

}  // namespace mlx_anvil
