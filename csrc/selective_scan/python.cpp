#include "common/bind_op.h"
#include "common/python_args.h"
#include "selective_scan/selective_scan.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kDoc =
    R"(The selective state-space recurrence of Mamba-1, over all steps of a sequence in one kernel.

Formula:
    For each batch and channel ``c``, with states ``n``, from ``h[-1] = state``:
    ``h[t, n] = exp(dt[t] A[c, n]) h[t - 1, n] + dt[t] x[t] B[t, n]``;
    ``y[t] = (sum_n h[t, n] C[t, n] + D[c] x[t]) silu(z[t])``.
    With ``dt_softplus``, ``softplus(dt)`` takes the place of ``dt``.

The arithmetic and the state are float32 for every dtype; ``y`` is rounded once. The states of all
steps are never stored: they stay in registers or in the L1 cache, and the gradient computes them
again from some that it keeps, one in 16 or 32 steps.

``x``, ``dt``, ``B``, ``C`` and ``z`` may be slices and other views whose last axis is contiguous;
they are not copied. One step with ``state`` is a decode step.

Gradients of all arrays, the state included, are fused. Forward mode and higher derivatives use a
graph of MLX ops that stores the states of all steps. ``vmap`` works over any of the arrays; over
``A`` or ``D`` it is such a graph too, and so are more than 16 states on a GPU.

Args:
    x (array): ``[batch, steps, channels]``, float32, float16 or bfloat16.
    dt (array): ``[batch, steps, channels]``, the step sizes.
    A (array): ``[channels, states]``, the rates of decay, which are negative in models. Computed in
        float32.
    B (array): ``[batch, steps, states]``, what a step writes.
    C (array): ``[batch, steps, states]``, what a step reads.
    D (array, optional): ``[channels]``, the weight of ``x`` itself. Default: ``None``, 0.
    z (array, optional): ``[batch, steps, channels]``, the gate. Default: ``None``, no gate.
    state (array, optional): ``[batch, channels, states]``, the state before the first step.
        Default: ``None``, zeros.
    dt_softplus (bool): apply softplus to ``dt``. Default: ``False``.
    lengths (array, optional): ``[batch]`` integers: only the first ``lengths[b]`` steps of a batch
        count. The others leave the state alone, their ``y`` is 0, and so are their gradients.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array]: ``y``, ``[batch, steps, channels]`` in the promoted dtype of ``x``, ``dt``,
    ``B``, ``C`` and ``z``; and the state after the last step, float32.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes do not match; a dtype is unsupported; a length is out of range; the stream is
        on a GPU and MLX has no GPU backend.

After Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces".
)";

const BindOp bind_selective_scan([](nb::module_& m) {
  const auto of_python = [](nb::handle x, nb::handle dt, nb::handle a, nb::handle b, nb::handle c,
                            nb::handle d, nb::handle z, nb::handle state, nb::handle dt_softplus,
                            nb::handle lengths, nb::handle stream) {
    const auto of = [](const char* name, nb::handle given) -> const mx::array& {
      return to_array(kSelectiveScan, name, given);
    };
    ScanOptions options;
    options.d = to_optional_array(kSelectiveScan, "D", d);
    options.z = to_optional_array(kSelectiveScan, "z", z);
    options.state = to_optional_array(kSelectiveScan, "state", state);
    options.lengths = to_optional_array(kSelectiveScan, "lengths", lengths);
    options.softplus = to_bool(kSelectiveScan, "dt_softplus", dt_softplus);
    const auto [y, last] =
        selective_scan(of("x", x), of("dt", dt), of("A", a), of("B", b), of("C", c), options,
                       to_stream_or_device(kSelectiveScan, stream));
    return nb::make_tuple(y, last);
  };
  m.def(
      "selective_scan", of_python, "x"_a.none(), "dt"_a.none(), "A"_a.none(), "B"_a.none(),
      "C"_a.none(), "D"_a = nb::none(), "z"_a = nb::none(), "state"_a = nb::none(), nb::kw_only(),
      "dt_softplus"_a.none() = false, "lengths"_a = nb::none(), "stream"_a = nb::none(),
      nb::sig("def selective_scan(x: mlx.core.array, dt: mlx.core.array, A: mlx.core.array, "
              "B: mlx.core.array, C: mlx.core.array, D: mlx.core.array | None = None, "
              "z: mlx.core.array | None = None, state: mlx.core.array | None = None, *, "
              "dt_softplus: bool = False, lengths: mlx.core.array | None = None, "
              "stream: " MLX_ANVIL_STREAM_TYPE " = None) -> tuple[mlx.core.array, mlx.core.array]"),
      kDoc);
});

}  // namespace

}  // namespace mlx_anvil
