#include <utility>

#include "common/bind_op.h"
#include "common/python_args.h"
#include "gated_delta/python_states.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

#define MLX_ANVIL_GATED_DELTA_SIGNATURE(return_states, result)                                   \
  "def gated_delta(q: mlx.core.array, k: mlx.core.array, v: mlx.core.array, g: mlx.core.array, " \
  "beta: mlx.core.array, state: mlx.core.array | None = None, *, return_states: " return_states  \
  ", lengths: mlx.core.array | None = None, normalize_eps: float | None = None, "                \
  "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> " result

// The signatures tell type checkers what return_states changes.
constexpr const char* kSignatures[2] = {
    MLX_ANVIL_GATED_DELTA_SIGNATURE("None = None", "tuple[mlx.core.array, mlx.core.array]"),
    MLX_ANVIL_GATED_DELTA_SIGNATURE("list[int] | tuple[int, ...] | mlx.core.array",
                                    "tuple[mlx.core.array, mlx.core.array, mlx.core.array]"),
};

constexpr const char* kDoc =
    R"(The gated delta rule: linear attention with a state per head (Gated DeltaNet, Kimi Delta Attention).

Formula:
    For each step ``t`` and head of ``v``, with the head of ``q`` and ``k`` that it shares with its
    group: ``S = g[t] * S``; ``S = S + beta[t] * (v[t] - S k[t]) k[t]^T``; ``y[t] = S q[t]``.

    With ``normalize_eps``, ``k`` is ``k / sqrt(sum(k**2) + eps)`` and ``q`` is ``Dk**-0.5 * q /
    sqrt(sum(q**2) + eps)``. Without, the caller has scaled them.

One kernel runs all steps, and the state stays in registers or in the L1 cache. The arithmetic
and the states are float32 for every dtype. A step of a decode reads and writes the state once, in
place if nothing else refers to it. Inputs may have any strides; rows with a last stride of 1 are not
copied.

Kernels compute the gradients of all arrays from states kept at intervals, so memory grows with
``T`` and not with ``T * Dv * Dk``. They are deterministic. Forward mode and higher derivatives use
a graph of MLX ops, and so does a ``Dk`` above 256, which ``trace()`` reports. ``vmap`` works over
any of the arrays.

Args:
    q (array): ``[B, T, Hk, Dk]``; float32, float16 or bfloat16.
    k (array): ``[B, T, Hk, Dk]``.
    v (array): ``[B, T, Hv, Dv]``; ``Hv`` is a multiple of ``Hk``.
    g (array): the factor of the state before each step, such as ``exp`` of a log decay: ``[B, T,
        Hv]``, one per head, or ``[B, T, Hv, Dk]``, one per channel of the key.
    beta (array): ``[B, T, Hv]``, the rate at which a step writes.
    state (array, optional): ``[B, Hv, Dv, Dk]``, the state before the first step. Default: zeros.
    return_states (list of int or array, optional): positions, ``[n]``, or ``[B, n]`` of each batch
        row. Also return the state after the step at each of them, from 0 to ``T - 1``: a speculative
        decode goes back to that of the last token it accepts. Default: ``None``.
    lengths (array, optional): ``[B]`` integers: of each batch row only the first ``lengths[b]`` steps
        count. The others are padding: they leave the state alone, and their ``y`` is 0.
    normalize_eps (float, optional): normalise ``q`` and ``k`` as above. Default: ``None``, they are
        used as they are.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array] or tuple[array, array, array]: ``y`` ``[B, T, Hv, Dv]`` in the dtype of ``q``;
    the state after the last step in float32; with ``return_states`` also the states ``[B, n, Hv, Dv,
    Dk]`` in float32.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes do not match; a dtype is unsupported; a length or a position is out of range,
        if that is known at the call (a list, or an evaluated array on the CPU; otherwise the nearest
        that is in range is used); ``normalize_eps`` is negative or not finite; the stream is on a GPU
        and MLX has no GPU backend.

After Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks". Matches ``gated_delta_ops`` of mlx-lm.
)";

const BindOp bind_gated_delta([](nb::module_& m) {
  const auto gated_delta_of_python = [](nb::handle q, nb::handle k, nb::handle v, nb::handle g,
                                        nb::handle beta, nb::handle state, nb::handle return_states,
                                        nb::handle lengths, nb::handle normalize_eps,
                                        nb::handle stream) {
    const auto of = [](const char* name, nb::handle x) -> const mx::array& {
      return to_array(kGatedDelta, name, x);
    };
    GatedDeltaOptions options;
    options.state = to_optional_array(kGatedDelta, "state", state);
    options.lengths = to_optional_array(kGatedDelta, "lengths", lengths);
    if (!normalize_eps.is_none()) {
      options.normalize_eps =
          to_float32(kGatedDelta, "normalize_eps", normalize_eps, "None, or a number");
    }
    options.return_states = to_return_states(kGatedDelta, return_states);
    return to_tuple(gated_delta(of("q", q), of("k", k), of("v", v), of("g", g), of("beta", beta),
                                options, to_stream_or_device(kGatedDelta, stream)));
  };
  for (const char* signature : kSignatures) {  // the first overload takes every call
    m.def("gated_delta", gated_delta_of_python, "q"_a.none(), "k"_a.none(), "v"_a.none(),
          "g"_a.none(), "beta"_a.none(), "state"_a = nb::none(), nb::kw_only(),
          "return_states"_a = nb::none(), "lengths"_a = nb::none(),
          "normalize_eps"_a.none() = nb::none(), "stream"_a = nb::none(), nb::sig(signature), kDoc);
  }
});

}  // namespace

}  // namespace mlx_anvil
