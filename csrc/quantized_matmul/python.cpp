#include <nanobind/stl/string.h>

#include "common/bind_op.h"
#include "common/python_args.h"
#include "gated/python_args.h"
#include "gguf_matmul/python_args.h"
#include "quantized_matmul/dense.h"
#include "quantized_matmul/python_matrix.h"
#include "quantized_matmul/quantized_matmul.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kMatmulDoc =
    R"(Product with a quantized matrix: ``x W^T``, or ``x W`` with ``transpose=False``.

Formula:
    ``W[n, k] = scales[n, k // group_size] * value(code[n, k]) + biases[n, k // group_size]``;
    ``out = x @ W.T``

A drop-in for ``mx.quantized_matmul`` with the same packing (``docs/design/quantized_matmul.md``
draws it). Up to 8 rows of ``x`` share one pass over ``w``. The bits of a row's result do not depend
on the number of rows up to 8. The arithmetic is float32 for every dtype; on CUDA, products of more
rows in 16 bits round the weights to 16 bits.

``activation_bits=8`` makes ``x W^T`` faster on CPUs that multiply bytes: it rounds blocks of 32
elements of ``x`` or fewer to 8 bits, each with a scale of its own, as llama.cpp does. 16 does the
same for float32; float16 and bfloat16 need no more. Derivatives, ``x W``, mxfp8, GPUs and other
CPUs keep all bits.

The gradient with respect to ``x`` is the other product. No call keeps a dequantised copy of ``w``.
Those with respect to ``scales`` and ``biases`` (affine) are one kernel on the CPU, which stores no
gradient of ``W``, and a graph of MLX ops on a GPU. Forward mode is fused for all three. ``vmap``
works over any of the arrays.

Args:
    x (array): ``[..., M, K]``, or ``[..., M, N]`` without ``transpose``; float32, float16 or
        bfloat16.
    w (array): uint32 ``[..., N, K * bits / 32]``, or uint8 ``[..., N, bytes of a row]`` in modes of
        GGUF; rank 2, or leading dimensions that broadcast with those of ``x``.
    scales (array, optional): ``[..., N, K / group_size]``; floating point (affine), or uint8.
        Required but in modes of GGUF, which have none. With float32 ``x``, the CPU reads scales and
        biases of float16 or of bfloat16 as they are; every other call converts them to the promoted
        dtype.
    biases (array, optional): like ``scales``; affine only, and required there.
    transpose (bool): whether ``w`` is transposed. Default: ``True``.
    group_size (int, optional): 32, 64 (default) or 128 for affine; 32 for mxfp4 and mxfp8; 16 for
        nvfp4.
    bits (int, optional): 2, 3, 4 (default), 5, 6 or 8 for affine; 4 for mxfp4 and nvfp4; 8 for
        mxfp8.
    mode (str): ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``; or a format of GGUF's own
        blocks of bytes (``docs/gguf.md``): ``"q4_0"``, ``"q8_0"``, ``"q4_k"``, ``"q5_k"``,
        ``"q6_k"``, ``"iq4_nl"`` or ``"iq4_xs"``, where ``group_size`` and ``bits`` are ``None``.
    activation_bits (int, optional): the most bits, 8 or 16, that the CPU may keep of each element
        of ``x`` in ``x W^T``. Default: ``None``, as many as the dtype needs.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: ``[..., M, N]`` (``[..., M, K]``), in the promoted dtype of ``x``, ``scales`` and
    ``biases``; in the dtype of ``x`` for modes other than affine.

Raises:
    TypeError: an argument of the wrong type.
    ValueError: an unknown format, shapes that do not match the format, ``w`` of another dtype,
        missing or superfluous ``scales`` or ``biases``, an unsupported dtype, or a GPU stream if MLX has no GPU
        backend.

Matches ``mx.quantized_matmul``.
)";

constexpr const char* kGemvDoc =
    R"(``quantized_matmul`` for at most 8 rows of ``x`` per ``w``; more rows raise an error.

Formula:
    ``out = x @ W.T``, ``W`` as for ``quantized_matmul``

Use it for decoding, where a call with more rows would be a mistake. Gradients and ``vmap`` are
those of ``quantized_matmul``.

Args:
    x (array): ``[..., M, K]``, M at most 8; float32, float16 or bfloat16.
    w (array): as for ``quantized_matmul``.
    scales (array, optional): likewise.
    biases (array, optional): like ``scales``; affine only, and required there.
    group_size (int, optional): as for ``quantized_matmul``.
    bits (int, optional): likewise.
    mode (str): likewise.
    activation_bits (int, optional): likewise.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: ``[..., M, N]``, in the promoted dtype of ``x``, ``scales`` and ``biases``; in the dtype
    of ``x`` for modes other than affine.

Raises:
    TypeError: an argument of the wrong type.
    ValueError: more than 8 rows; any error of ``quantized_matmul``.
)";

constexpr const char* kSwigluDoc =
    R"(The gate of a quantized MLP in one kernel: SwiGLU, or one of ``gated``.

Formula:
    ``out = silu(x @ Wg.T) * (x @ Wu.T)``, both matrices as for ``quantized_matmul``; with another
    ``activation`` or a ``limit``, ``gated(x @ Wg.T, x @ Wu.T)``

For up to 8 rows, the kernel reads ``x`` and both matrices once and stores no intermediate. More
rows run as two products and ``silu_gate`` or ``gated``. Gradients and ``vmap`` are those of these
ops.

Args:
    x (array): ``[..., K]``; float32, float16 or bfloat16.
    gate (tuple): ``(w, scales, biases)`` of Wg, or ``(w, scales)`` for modes without biases, or
        ``(w,)`` for modes of GGUF, as for ``quantized_matmul``; rank 2.
    up (tuple): the same for Wu, with the same shapes.
    group_size (int, optional): as for ``quantized_matmul``, the same for both matrices.
    bits (int, optional): likewise.
    mode (str): likewise.
    activation (str): as for ``gated``. Default: ``"silu"``.
    limit (float, optional): as for ``gated``. Default: ``None``.
    activation_bits (int, optional): as for ``quantized_matmul``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: ``[..., N]``, in the promoted dtype of ``x``, scales and biases; in the dtype of ``x``
    for modes other than affine.

Raises:
    TypeError: an argument of the wrong type.
    ValueError: any error of ``quantized_matmul`` for either matrix; matrices of different shapes;
        an unknown ``activation``; a ``limit`` that is not finite and above 0.
)";

#define MLX_ANVIL_QUANTIZED_END \
  MLX_ANVIL_ACTIVATION_BITS "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> mlx.core.array"

const BindOp bind_quantized_matmul([](nb::module_& m) {
  m.def(
      "quantized_matmul",
      [](nb::handle x, nb::handle w, nb::handle scales, nb::handle biases, nb::handle transpose,
         nb::handle group_size, nb::handle bits, nb::handle mode, nb::handle activation_bits,
         nb::handle stream) {
        constexpr const char* op = "quantized_matmul";
        const mx::array& x_array = to_array(op, "x", x);
        if (const auto gguf = to_gguf_options(op, group_size, bits, mode, activation_bits)) {
          const mx::array& matrix = to_gguf_matrix(op, "", w, scales, biases);
          return gguf_matmul(x_array, matrix, to_bool(op, "transpose", transpose), *gguf,
                             to_stream_or_device(op, stream));
        }
        QuantizedMatrix matrix = to_quantized_matrix(op, "", w, scales, biases);
        const bool transposed = to_bool(op, "transpose", transpose);
        return quantized_matmul(x_array, std::move(matrix), transposed,
                                to_quantized_options(op, group_size, bits, mode, activation_bits),
                                to_stream_or_device(op, stream));
      },
      "x"_a.none(), "w"_a.none(), "scales"_a = nb::none(), "biases"_a = nb::none(),
      "transpose"_a.none() = true, "group_size"_a = nb::none(), "bits"_a = nb::none(),
      "mode"_a.none() = "affine", nb::kw_only(), "activation_bits"_a = nb::none(),
      "stream"_a = nb::none(),
      nb::sig("def quantized_matmul(x: mlx.core.array, w: mlx.core.array, "
              "scales: mlx.core.array | None = None, biases: mlx.core.array | None = None, "
              "transpose: bool = True, " MLX_ANVIL_QUANTIZED_FORMAT "*, " MLX_ANVIL_QUANTIZED_END),
      kMatmulDoc);

  m.def(
      "quantized_gemv",
      [](nb::handle x, nb::handle w, nb::handle scales, nb::handle biases, nb::handle group_size,
         nb::handle bits, nb::handle mode, nb::handle activation_bits, nb::handle stream) {
        constexpr const char* op = "quantized_gemv";
        const mx::array& x_array = to_array(op, "x", x);
        if (const auto gguf = to_gguf_options(op, group_size, bits, mode, activation_bits)) {
          return gguf_gemv(x_array, to_gguf_matrix(op, "", w, scales, biases), *gguf,
                           to_stream_or_device(op, stream));
        }
        QuantizedMatrix matrix = to_quantized_matrix(op, "", w, scales, biases);
        return quantized_gemv(x_array, std::move(matrix),
                              to_quantized_options(op, group_size, bits, mode, activation_bits),
                              to_stream_or_device(op, stream));
      },
      "x"_a.none(), "w"_a.none(), "scales"_a = nb::none(), "biases"_a = nb::none(), nb::kw_only(),
      "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a.none() = "affine",
      "activation_bits"_a = nb::none(), "stream"_a = nb::none(),
      nb::sig("def quantized_gemv(x: mlx.core.array, w: mlx.core.array, "
              "scales: mlx.core.array | None = None, biases: mlx.core.array | None = None, "
              "*, " MLX_ANVIL_QUANTIZED_FORMAT MLX_ANVIL_QUANTIZED_END),
      kGemvDoc);

  m.def(
      "quantized_swiglu",
      [](nb::handle x, nb::handle gate, nb::handle up, nb::handle group_size, nb::handle bits,
         nb::handle mode, nb::handle activation, nb::handle limit, nb::handle activation_bits,
         nb::handle stream) {
        constexpr const char* op = "quantized_swiglu";
        const mx::array& x_array = to_array(op, "x", x);
        if (const auto gguf = to_gguf_options(op, group_size, bits, mode, activation_bits)) {
          return gguf_swiglu(x_array, to_gguf_tuple(op, "gate", gate), to_gguf_tuple(op, "up", up),
                             to_gate_options(op, activation, limit), *gguf,
                             to_stream_or_device(op, stream));
        }
        QuantizedMatrix gate_matrix = to_quantized_tuple(op, "gate", gate);
        QuantizedMatrix up_matrix = to_quantized_tuple(op, "up", up);
        return quantized_swiglu(x_array, std::move(gate_matrix), std::move(up_matrix),
                                to_gate_options(op, activation, limit),
                                to_quantized_options(op, group_size, bits, mode, activation_bits),
                                to_stream_or_device(op, stream));
      },
      "x"_a.none(), "gate"_a.none(), "up"_a.none(), nb::kw_only(), "group_size"_a = nb::none(),
      "bits"_a = nb::none(), "mode"_a.none() = "affine", "activation"_a.none() = "silu",
      "limit"_a = nb::none(), "activation_bits"_a = nb::none(), "stream"_a = nb::none(),
      nb::sig("def quantized_swiglu(x: mlx.core.array, gate: tuple[mlx.core.array, ...], "
              "up: tuple[mlx.core.array, ...], *, " MLX_ANVIL_QUANTIZED_FORMAT
              "activation: str = 'silu', limit: float | None = None, " MLX_ANVIL_QUANTIZED_END),
      kSwigluDoc);

  m.def("_set_dense_scratch_bytes", &set_dense_scratch_bytes, "bytes"_a);
});

}  // namespace

}  // namespace mlx_anvil
