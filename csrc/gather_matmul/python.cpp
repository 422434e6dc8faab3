#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "common/bind_op.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "gated/python_args.h"
#include "gather_matmul/gather_matmul.h"
#include "gather_matmul/primitive.h"
#include "quantized_matmul/python_matrix.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

std::optional<mx::array> to_optional_ids(const char* op, const char* argument, nb::handle value) {
  if (value.is_none()) {
    return std::nullopt;
  }
  const mx::array& ids = to_array(op, argument, value);
  if (!mx::issubdtype(ids.dtype(), mx::integer)) {
    const std::string text = std::string(argument) + " has dtype " + to_text(ids.dtype()) +
                             "; allowed: an integer dtype.";
    throw nb::type_error(op_message(op, text).c_str());
  }
  return ids;
}

constexpr const char* kQuantizedDoc =
    R"(Products of matrices of ``x`` with quantized matrices, both chosen by ids: the experts of a
mixture.

Formula:
    ``out[p] = x[lhs_indices[p]] @ W[rhs_indices[p]].T``, or ``@ W`` with ``transpose=False``; ``W``
    as for ``quantized_matmul``

A drop-in for ``mx.gather_qmm``. Pairs that share an expert share the read of its weights, whether
the ids are sorted or not. The arithmetic is float32 for every dtype.

Ids count the matrices over all leading axes; negative ones count from the end. Ids out of range
raise an error if their values are known when the op is called: on the CPU, if the array has been
evaluated. Otherwise they clamp to the first or last matrix.

The gradient with respect to ``x`` is the other product with the same ids; those with respect to
``scales`` and ``biases`` (affine) sum products by expert. On the CPU they are deterministic. No
array holds a matrix of weights per pair. Forward mode is fused. ``vmap`` works over any of the
arrays.

Args:
    x (array): ``[..., M, K]``, or ``[..., M, N]`` without ``transpose``; float32, float16 or
        bfloat16.
    w (array): uint32 ``[..., N, K * bits / 32]``.
    scales (array): ``[..., N, K / group_size]``; floating point (affine), or uint8.
    biases (array, optional): like ``scales``; affine only, and required there.
    lhs_indices (array, optional): integers, which matrix of ``x`` each pair takes. Default:
        ``None``, the indices of all, in the shape of the leading axes of ``x``.
    rhs_indices (array, optional): likewise for ``w``. Both broadcast. Without both, the op is
        ``quantized_matmul``.
    transpose (bool): whether ``w`` is transposed. Default: ``True``.
    group_size (int, optional): as for ``quantized_matmul``.
    bits (int, optional): likewise.
    mode (str): likewise.
    sorted_indices (bool): a promise that the ids that are given ascend, which may be faster.
        Default: ``False``.
    activation_bits (int, optional): as for ``quantized_matmul``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: ``[*ids.shape, M, N]`` (``[*ids.shape, M, K]``), in the promoted dtype of ``x``,
    ``scales`` and ``biases``; in the dtype of ``x`` for modes other than affine.

Raises:
    TypeError: an argument of the wrong type; ids that are not integers.
    ValueError: an unknown format, shapes that do not match the format, ids that do not broadcast
        or are out of range, an unsupported dtype, or a GPU stream if MLX has no GPU backend.

Matches ``mx.gather_qmm``.
)";

constexpr const char* kDenseDoc =
    R"(Products of matrices of ``a`` and ``b``, both chosen by ids: dense experts of a mixture.

Formula:
    ``out[p] = a[lhs_indices[p]] @ b[rhs_indices[p]]``

A drop-in for ``mx.gather_mm``. Ids are those of ``gather_quantized_matmul``. ``b`` may be a view
whose last two axes are swapped (``w.swapaxes(-1, -2)``), which is not copied. The arithmetic is
float32 for every dtype, rounded once.

The gradients with respect to ``a`` and ``b`` are products of the same kind and sums of outer
products by expert. On the CPU they are deterministic. No array holds a matrix of weights per pair.
Forward mode is fused. ``vmap`` works over any of the arrays.

Args:
    a (array): ``[..., M, K]``, or ``[K]``; float32, float16 or bfloat16.
    b (array): ``[..., K, N]``, or ``[K]``.
    lhs_indices (array, optional): integers, which matrix of ``a`` each pair takes. Default:
        ``None``, the indices of all, in the shape of the leading axes of ``a``.
    rhs_indices (array, optional): likewise for ``b``. Both broadcast.
    sorted_indices (bool): a promise that the ids that are given ascend, which may be faster.
        Default: ``False``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: ``[*ids.shape, M, N]``, in the promoted dtype of ``a`` and ``b``.

Raises:
    TypeError: an argument of the wrong type; ids that are not integers.
    ValueError: shapes that do not match, ids that do not broadcast or are out of range, an
        unsupported dtype, or a GPU stream if MLX has no GPU backend.

Matches ``mx.gather_mm``.
)";

const BindOp bind_gather_matmul([](nb::module_& m) {
  m.def(
      "gather_quantized_matmul",
      [](nb::handle x, nb::handle w, nb::handle scales, nb::handle biases, nb::handle lhs_indices,
         nb::handle rhs_indices, nb::handle transpose, nb::handle group_size, nb::handle bits,
         nb::handle mode, nb::handle sorted_indices, nb::handle activation_bits,
         nb::handle stream) {
        constexpr const char* op = kGatherQuantizedMatmul;
        const mx::array& x_array = to_array(op, "x", x);
        QuantizedMatrix matrix = to_quantized_matrix(op, "", w, scales, biases);
        const auto lhs = to_optional_ids(op, "lhs_indices", lhs_indices);
        const auto rhs = to_optional_ids(op, "rhs_indices", rhs_indices);
        const bool transposed = to_bool(op, "transpose", transpose);
        return gather_quantized_matmul(
            x_array, std::move(matrix), lhs, rhs, transposed,
            to_quantized_options(op, group_size, bits, mode, activation_bits),
            to_bool(op, "sorted_indices", sorted_indices), to_stream_or_device(op, stream));
      },
      "x"_a.none(), "w"_a.none(), "scales"_a.none(), "biases"_a = nb::none(),
      "lhs_indices"_a = nb::none(), "rhs_indices"_a = nb::none(), "transpose"_a.none() = true,
      "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a.none() = "affine", nb::kw_only(),
      "sorted_indices"_a.none() = false, "activation_bits"_a = nb::none(), "stream"_a = nb::none(),
      nb::sig("def gather_quantized_matmul(x: mlx.core.array, w: mlx.core.array, "
              "scales: mlx.core.array, biases: mlx.core.array | None = None, "
              "lhs_indices: mlx.core.array | None = None, "
              "rhs_indices: mlx.core.array | None = None, transpose: bool = "
              "True, " MLX_ANVIL_QUANTIZED_FORMAT
              "*, sorted_indices: bool = False, " MLX_ANVIL_ACTIVATION_BITS
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
      kQuantizedDoc);

  m.def(
      "gather_matmul",
      [](nb::handle a, nb::handle b, nb::handle lhs_indices, nb::handle rhs_indices,
         nb::handle sorted_indices, nb::handle stream) {
        constexpr const char* op = kGatherMatmul;
        const mx::array& a_array = to_array(op, "a", a);
        const mx::array& b_array = to_array(op, "b", b);
        const auto lhs = to_optional_ids(op, "lhs_indices", lhs_indices);
        const auto rhs = to_optional_ids(op, "rhs_indices", rhs_indices);
        return gather_matmul(a_array, b_array, lhs, rhs,
                             to_bool(op, "sorted_indices", sorted_indices),
                             to_stream_or_device(op, stream));
      },
      "a"_a.none(), "b"_a.none(), "lhs_indices"_a = nb::none(), "rhs_indices"_a = nb::none(),
      nb::kw_only(), "sorted_indices"_a.none() = false, "stream"_a = nb::none(),
      nb::sig("def gather_matmul(a: mlx.core.array, b: mlx.core.array, "
              "lhs_indices: mlx.core.array | None = None, "
              "rhs_indices: mlx.core.array | None = None, *, sorted_indices: bool = False, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"),
      kDenseDoc);

  // For tests. The arrays must have the shapes and dtypes that apply_gather_quantized_swiglu() asks
  // for; rhs and lhs are int32.
  m.def(
      "_gather_quantized_swiglu",
      [](const mx::array& x, const Arrays& gate, const Arrays& up, const mx::array& rhs,
         std::optional<mx::array> lhs, std::optional<mx::array> gate_bias,
         std::optional<mx::array> up_bias, nb::handle activation, nb::handle limit,
         nb::handle group_size, nb::handle bits, nb::handle mode, bool sorted) {
        constexpr const char* op = "gather_quantized_swiglu";
        const auto matrix = [](const Arrays& parts) -> QuantizedMatrix {
          return {parts.at(0), parts.at(1),
                  parts.size() > 2 ? std::optional(parts[2]) : std::nullopt};
        };
        const QuantizedFormat format =
            checked_format(op, to_quantized_options(op, group_size, bits, mode));
        return apply_gather_quantized_swiglu(
            op, format, x, {matrix(gate), gate_bias}, {matrix(up), up_bias},
            to_gate_options(op, activation, limit), {rhs, lhs, sorted}, require_stream(op, {}));
      },
      "x"_a, "gate"_a, "up"_a, "rhs"_a, "lhs"_a = nb::none(), "gate_bias"_a = nb::none(),
      "up_bias"_a = nb::none(), "activation"_a = "silu", "limit"_a = nb::none(),
      "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a = "affine", "sorted"_a = false);
});

}  // namespace

}  // namespace mlx_anvil
