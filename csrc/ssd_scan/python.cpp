#include "common/bind_op.h"
#include "common/python_args.h"
#include "gated_delta/python_states.h"
#include "ssd_scan/ssd_scan.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

std::pair<float, float> to_limit(nb::handle limit) {
  constexpr const char* kAllowed = "None, or a tuple of two numbers";
  const bool is_sequence = nb::isinstance<nb::tuple>(limit) || nb::isinstance<nb::list>(limit);
  if (!is_sequence || nb::len(limit) != 2) {
    throw_type_error(kSsdScan, "dt_limit", limit, kAllowed);
  }
  const auto of = [&](int i) { return to_float32(kSsdScan, "dt_limit", limit[i], kAllowed); };
  return {of(0), of(1)};
}

#define MLX_ANVIL_SSD_SCAN_SIGNATURE(return_states, result)                                    \
  "def ssd_scan(x: mlx.core.array, dt: mlx.core.array, A: mlx.core.array, B: mlx.core.array, " \
  "C: mlx.core.array, D: mlx.core.array | None = None, z: mlx.core.array | None = None, "      \
  "state: mlx.core.array | None = None, *, dt_bias: mlx.core.array | None = None, "            \
  "dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None, "                   \
  "lengths: mlx.core.array | None = None, return_states: " return_states                       \
  ", stream: " MLX_ANVIL_STREAM_TYPE " = None) -> " result

// The signatures tell type checkers what return_states changes.
constexpr const char* kSignatures[2] = {
    MLX_ANVIL_SSD_SCAN_SIGNATURE("None = None", "tuple[mlx.core.array, mlx.core.array]"),
    MLX_ANVIL_SSD_SCAN_SIGNATURE("list[int] | tuple[int, ...] | mlx.core.array",
                                 "tuple[mlx.core.array, mlx.core.array, mlx.core.array]"),
};

constexpr const char* kDoc =
    R"(The state-space recurrence of Mamba-2 (SSD), over all steps of a sequence in one kernel.

Formula:
    For each step ``t`` and head of ``x``, with the group of ``B`` and ``C`` that it shares:
    ``S = exp(dt[t] * A) * S + (dt[t] * x[t]) B[t]^T``; ``y[t] = S C[t] + D * x[t]``; with ``z``,
    ``y[t] = y[t] * silu(z[t])``.

    ``dt`` is prepared first, in float32: ``dt_bias`` is added, with ``dt_softplus`` its softplus is
    taken, and it is clipped to ``dt_limit``, each if given.

The state stays in registers or in the L1 cache for all steps. The arithmetic and the states are
float32 for every dtype. A step of a decode reads and writes the state once, in place if nothing else
refers to it. ``x``, ``B``, ``C`` and ``z`` may have any strides; rows with a last stride of 1, such as
slices of one projection, are not copied.

Kernels compute the gradients of all arrays from states kept at intervals, so memory grows with
``T`` and not with ``T * P * N``. They are deterministic. Forward mode and higher derivatives use a graph
of MLX ops, and so does an ``N`` above 256, which ``trace()`` reports. ``vmap`` works over any of the
arrays.

Args:
    x (array): ``[B, T, H, P]``; float32, float16 or bfloat16.
    dt (array): ``[B, T, H]``, the step sizes.
    A (array): ``[H]``, the rates of decay, which are negative in models: ``-exp(A_log)``.
    B (array): ``[B, T, G, N]``, what a step writes; head ``h`` of ``x`` uses group ``h // (H // G)``.
    C (array): ``[B, T, G, N]``, what a step reads.
    D (array, optional): ``[H]``, the weight of ``x`` itself. Default: ``None``, 0.
    z (array, optional): ``[B, T, H, P]``, the gate. Default: ``None``, no gate.
    state (array, optional): ``[B, H, P, N]``, the state before the first step. Default: zeros.
    dt_bias (array, optional): ``[H]``. Default: ``None``, 0.
    dt_softplus (bool): take the softplus of ``dt``. Default: ``False``.
    dt_limit (tuple of float, optional): the least and the largest ``dt``. Default: ``None``, no limit.
    lengths (array, optional): ``[B]`` integers: of each batch row only the first ``lengths[b]`` steps
        count. The others are padding: they leave the state alone, and their ``y`` is 0.
    return_states (list of int or array, optional): positions, ``[n]``, or ``[B, n]`` of each batch
        row. Also return the state after the step at each of them, from 0 to ``T - 1``. Default:
        ``None``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array] or tuple[array, array, array]: ``y`` ``[B, T, H, P]`` in the dtype of ``x``;
    the state after the last step in float32; with ``return_states`` also the states ``[B, n, H, P,
    N]`` in float32.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes do not match; a dtype is unsupported; a length or a position is out of range,
        if that is known at the call (a list, or an evaluated array on the CPU; otherwise the nearest
        that is in range is used); ``dt_limit`` is empty; the stream is on a GPU and MLX has no GPU
        backend.

After Dao and Gu 2024, "Transformers are SSMs". Matches ``ssm_update`` of mlx-lm.
)";

const BindOp bind_ssd_scan([](nb::module_& m) {
  const auto ssd_scan_of_python =
      [](nb::handle x, nb::handle dt, nb::handle a, nb::handle b, nb::handle c, nb::handle d,
         nb::handle z, nb::handle state, nb::handle dt_bias, nb::handle dt_softplus,
         nb::handle dt_limit, nb::handle lengths, nb::handle return_states, nb::handle stream) {
        const auto of = [](const char* name, nb::handle given) -> const mx::array& {
          return to_array(kSsdScan, name, given);
        };
        SsdOptions options;
        options.d = to_optional_array(kSsdScan, "D", d);
        options.z = to_optional_array(kSsdScan, "z", z);
        options.state = to_optional_array(kSsdScan, "state", state);
        options.dt_bias = to_optional_array(kSsdScan, "dt_bias", dt_bias);
        options.lengths = to_optional_array(kSsdScan, "lengths", lengths);
        options.softplus = to_bool(kSsdScan, "dt_softplus", dt_softplus);
        if (!dt_limit.is_none()) {
          options.limit = to_limit(dt_limit);
        }
        options.return_states = to_return_states(kSsdScan, return_states);
        return to_tuple(ssd_scan(of("x", x), of("dt", dt), of("A", a), of("B", b), of("C", c),
                                 options, to_stream_or_device(kSsdScan, stream)));
      };
  for (const char* signature : kSignatures) {  // the first overload takes every call
    m.def("ssd_scan", ssd_scan_of_python, "x"_a.none(), "dt"_a.none(), "A"_a.none(), "B"_a.none(),
          "C"_a.none(), "D"_a = nb::none(), "z"_a = nb::none(), "state"_a = nb::none(),
          nb::kw_only(), "dt_bias"_a = nb::none(), "dt_softplus"_a.none() = false,
          "dt_limit"_a = nb::none(), "lengths"_a = nb::none(), "return_states"_a = nb::none(),
          "stream"_a = nb::none(), nb::sig(signature), kDoc);
  }
});

}  // namespace

}  // namespace mlx_anvil
