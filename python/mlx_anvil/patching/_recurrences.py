"""Recurrences of linear attention and state space models, and the short convolutions before them: mlx-lm's functions,
and what rules put in place of a model's own code.

Each has a twin in MLX ops, which runs what the op does not take. States keep mlx-lm's layout, so that a cache may go
from a patched model to another and back. They are float32.
"""

import functools
import math
from collections.abc import Mapping
from types import FunctionType
from typing import Any, TypeGuard

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _ext
from mlx_anvil.patching import _recurrence_forms as forms
from mlx_anvil.patching._code import names_of_form
from mlx_anvil.patching._described import Described
from mlx_anvil.patching._namespace import live
from mlx_anvil.patching._rebind import Call, Function, StandIn
from mlx_anvil.patching._routes import runs, unrouted

Pair = tuple[mx.array, mx.array]

GATED_DELTA = Call("recurrence", "gated_delta_update", "gated_delta")
SSD = Call("recurrence", "ssm_update", "ssd_scan")
NORMALIZED = Call("recurrence", "normalize_qk", "")  # without an op: not in the report
SELECTIVE_SCAN = Call("recurrence", "loop over steps (Mamba)", "selective_scan")
CONVOLUTION = Call("recurrence", "causal convolution", "causal_conv1d")
OPS = {call.op for call in (GATED_DELTA, SSD, SELECTIVE_SCAN)}

_CONV1D = nn.Conv1d.__call__  # as it is on import, before another package replaces it


# ---- gated delta rules -----------------------------------------------------------------------------------------------


class _Normalized(Described):
    """Normalised queries or keys that gated_delta can normalise itself."""

    rows: mx.array
    eps: float

    @staticmethod
    def of(normalized: mx.array, rows: mx.array, eps: float) -> "_Normalized":
        result = _Normalized(normalized)
        result.rows, result.eps = rows, eps
        return result


def normalize_stand_in(original: Function) -> StandIn:
    """That of ``normalize_qk``."""

    @functools.wraps(original)
    def normalize_qk(q: mx.array, k: mx.array, *, inv_scale: float, eps: float) -> Pair:
        pair: Pair = original(q, k, inv_scale=inv_scale, eps=eps)
        if not math.isclose(inv_scale, q.shape[-1] ** -0.5):
            return pair
        return _Normalized.of(pair[0], q, eps), _Normalized.of(pair[1], k, eps)

    return StandIn(original, lambda current: live(current, original, normalize_qk))


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,  # ours has gradients
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> Pair:
    g, beta = _ext.gated_delta_gates(a, b, A_log, dt_bias, lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval)
    if mask is not None:  # a step of padding keeps the state, and writes nothing to it
        g = mx.where(mask.reshape(*mask.shape, *(1,) * (g.ndim - 2)), g, 1)
        beta = mx.where(mask[..., None], beta, 0)
    eps = None
    if _is_normalized(q) and _is_normalized(k) and q.eps == k.eps:
        eps, q, k = q.eps, q.rows, k.rows
    return _ext.gated_delta(q, k, v, g, beta, state, normalize_eps=eps)


def _is_normalized(x: mx.array) -> TypeGuard[_Normalized]:
    return type(x) is _Normalized and not x.was_changed


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------


def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> Pair:
    least, most = time_step_limit
    options: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": True, "dt_limit": (least, most)}
    if mask is not None:  # a step of no time keeps the state; masks of mlx-lm include the lengths
        time = mx.clip(nn.softplus(dt.astype(mx.float32) + dt_bias), least, most)
        dt, options = mx.where(mask[..., None], time, 0), {}
    elif lengths is not None:
        options["lengths"] = mx.clip(lengths, 0, hidden_states.shape[1])
    A = -mx.exp(A_log.astype(mx.float32))
    y, state = _ext.ssd_scan(hidden_states, dt, A, B, C, D, state=state, **options)
    return y.astype(mx.result_type(hidden_states, D)), state


# ---- Mamba-1 ---------------------------------------------------------------------------------------------------------


def scan(
    x: mx.array,
    dt: mx.array,
    A: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    state: mx.array | None,
    z: mx.array | None = None,
) -> Pair:
    """All steps. ``dt`` is what softplus makes the step sizes of, ``z`` a gate."""
    y, state = _ext.selective_scan(x, dt, A, B, C, D, z, state, dt_softplus=True)
    return y.astype(mx.result_type(x, dt, A, B, C, D, *([] if z is None else [z]))), state


def scan_by_ops(
    x: mx.array, dt: mx.array, A: mx.array, B: mx.array, C: mx.array, D: mx.array, state: mx.array | None
) -> Pair:
    dt = nn.softplus(dt)
    decays, written = mx.exp(dt[..., None] * A), (dt * x)[..., None] * B[..., None, :]
    states = []
    for t in range(x.shape[1]):
        state = written[:, t] if state is None else state * decays[:, t] + written[:, t]
        states.append(state)
    y = (mx.stack(states, axis=1) @ C[..., None]).squeeze(-1) + D * x
    return y, states[-1]


def scan_of_mamba(self: nn.Module, x: mx.array, z: mx.array, A: mx.array, state: mx.array | None) -> Pair:
    """All steps of ``MambaBlock.ssm_step``, and the gate after them."""
    if not _is_step_of_mamba(unrouted(type(self).ssm_step)):  # type: ignore[attr-defined]
        raise ValueError("[selective_scan] ssm_step is not that of mlx-lm's Mamba.")
    rank, size = self.time_step_rank, self.ssm_state_size
    dt, B, C = mx.split(self.x_proj(x), [rank, rank + size], axis=-1)
    if self.use_bcdt_rms:
        dt, B, C = (_ext.rms_norm(part, None, self.args.mixer_rms_eps) for part in (dt, B, C))
    return scan(x, self.dt_proj(dt), A, B, C, self.D, state, z)


def scan_of_mamba_by_ops(self: nn.Module, x: mx.array, z: mx.array, A: mx.array, state: mx.array | None) -> Pair:
    steps = []
    for t in range(x.shape[1]):
        y, state = self.ssm_step(x[:, t], A, state)
        steps.append(y)
    return nn.silu(z) * mx.stack(steps, axis=1), state  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def _is_step_of_mamba(method: FunctionType) -> bool:
    return names_of_form(method, forms.step_of_mamba) is not None


# ---- short convolutions ----------------------------------------------------------------------------------------------


def convolved(
    layer: nn.Module,
    x: mx.array,
    state: mx.array | None,
    lengths: mx.array | None = None,
    activation: str | None = "silu",
) -> Pair:
    """A depthwise layer over the rows of ``state`` and ``x``, and the last rows, from which the next call goes on.

    Args:
        layer: an ``nn.Conv1d`` without padding.
        x: rows ``[batch, time, channels]``.
        state: the rows before; None for zeros.
        lengths: of the rows of each sequence that count, as caches of mlx-lm have them.
        activation: of causal_conv1d.
    """
    weight = layer.weight
    is_plain = (
        runs(layer, _CONV1D)
        and (layer.stride, layer.padding, layer.dilation) == (1, 0, 1)
        and (weight.shape[0], weight.shape[2]) == (x.shape[-1], 1)
    )
    if not is_plain:
        raise ValueError("[causal_conv1d] the layer is not a depthwise nn.Conv1d without stride, padding, dilation.")
    return convolved_with(weight, layer.get("bias"), x, state, lengths, activation)


def convolved_by_ops(
    layer: nn.Module,
    x: mx.array,
    state: mx.array | None,
    lengths: mx.array | None = None,
    activation: str | None = "silu",
) -> Pair:
    rows, keep = _rows(layer.weight, x, state)
    y = layer(rows)
    return (y if activation is None else nn.silu(y)), _last(rows, keep, lengths)


def convolved_with(
    weight: mx.array,
    bias: mx.array | None,
    x: mx.array,
    state: mx.array | None,
    lengths: mx.array | None = None,
    activation: str | None = None,
) -> Pair:
    """The same with the weight and the bias of a layer."""
    y, last = _ext.causal_conv1d(x, weight.squeeze(-1), bias, state, activation=activation, lengths=lengths)
    return y, last.astype(x.dtype if state is None else mx.result_type(x, state))


def convolved_with_by_ops(weight: mx.array, bias: mx.array, x: mx.array, state: mx.array | None) -> Pair:
    rows, keep = _rows(weight, x, state)
    return mx.conv1d(rows, weight, groups=x.shape[-1]) + bias, _last(rows, keep, None)


def _rows(weight: mx.array, x: mx.array, state: mx.array | None) -> tuple[mx.array, int]:
    keep = weight.shape[1] - 1
    if state is None:
        state = mx.zeros((x.shape[0], keep, x.shape[-1]), x.dtype)
    return mx.concatenate([state, x], axis=1), keep


def _last(rows: mx.array, keep: int, lengths: mx.array | None) -> mx.array:
    time = rows.shape[1] - keep
    if lengths is None:
        return mx.contiguous(rows[:, time:])
    positions = mx.clip(lengths, 0, time)[:, None] + mx.arange(keep)
    return mx.take_along_axis(rows, positions[..., None], axis=1)


# ---- what patch takes from here --------------------------------------------------------------------------------------


def functions_of_models(modules: Mapping[str, Any]) -> dict[Call, tuple[Function, Function]]:
    """mlx-lm's functions and ours, of those modules that were imported."""
    pairs: dict[Call, tuple[Function, Function]] = {}
    if module := modules.get("mlx_lm.models.gated_delta"):
        pairs[GATED_DELTA] = (module.gated_delta_update, gated_delta_update)
    if module := modules.get("mlx_lm.models.ssm"):
        pairs[SSD] = (module.ssm_update, ssm_update)
    return pairs


# By the name in rules: our op, the twin in MLX ops, and our function.
FUNCTIONS_OF_RULES: dict[str, tuple[str, Function, Function]] = {
    "mlx_anvil_conv": (CONVOLUTION.op, convolved_by_ops, convolved),
    "mlx_anvil_conv_with": (CONVOLUTION.op, convolved_with_by_ops, convolved_with),
    "mlx_anvil_scan": (SELECTIVE_SCAN.op, scan_by_ops, scan),
    "mlx_anvil_scan_of_mamba": (SELECTIVE_SCAN.op, scan_of_mamba_by_ops, scan_of_mamba),
}
