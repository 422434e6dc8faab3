"""Rules for ``x * sigmoid(gate)`` at the end of attention, and for norms with a gate after them."""

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _ext
from mlx_anvil.patching._rebind import Call, Function
from mlx_anvil.patching._routes import runs
from mlx_anvil.patching._rules import Rule
from mlx_anvil.patching._stand_ins import RMS_NORM, SWIGLU, widened

SIGMOID_GATE = Call(SWIGLU.option, "sigmoid gate", "sigmoid_gate")
GATED_NORM = Call(RMS_NORM.option, "rms_norm, and a gate", RMS_NORM.op)

_NORM = nn.RMSNorm.__call__  # as it is on import, before another package replaces it

# Letters of these rules: G is the gate of X. N is a layer that normalises, P a projection, E the name of an epsilon, O
# of an option.
_NORMS = (
    # Kimi Linear and K3
    (
        "_ = (self.N(X) * mx.sigmoid(G)).reshape(B, T, -1)",
        "_ = mlx_anvil_norm_and_gate(self.N, X, G).reshape(B, T, -1)",
    ),
    # Bailing V3
    (
        "Y = self.N(X); _ = Y * mx.sigmoid(G.astype(mx.float32)).astype(Y.dtype)",
        "_ = mlx_anvil_norm_and_gate(self.N, X, G, True)",
    ),
    # Qwen3-Next and 3.5
    (
        """
Y = mx.fast.rms_norm(X, self.weight, self.E)
if G is not None:
    return precise_swiglu(X, G, Y)
else:
    return Y.astype(X.dtype)
""",
        """
if G is not None:
    return mlx_anvil_gated_norm(X, self.weight, self.E, G)
else:
    return mx.fast.rms_norm(X, self.weight, self.E).astype(X.dtype)
""",
    ),
    # OLMo's hybrid
    (
        "Y = mx.fast.rms_norm(X, self.weight, self.E); return precise_swiglu(X, G, Y)",
        "return mlx_anvil_gated_norm(X, self.weight, self.E, G)",
    ),
    # Falcon-H1
    (
        """
Y = mx.fast.rms_norm(Y, self.weight, self.E)
if self.O and G is not None:
    Y = swiglu(G, Y)
return Y
""",
        """
if self.O and G is not None:
    return mlx_anvil_norm_then_gate(Y, self.weight, self.E, G)
return mx.fast.rms_norm(Y, self.weight, self.E)
""",
    ),
)
_GATES = (
    ("_ = self.P(X * mx.sigmoid(G))", "_ = self.P(mlx_anvil_sigmoid_gate(X, G))"),  # Qwen3-Next and 3.5
    ("_ = self.P(mx.sigmoid(G) * X)", "_ = self.P(mlx_anvil_sigmoid_gate(X, G))"),  # Gear
    ("_ = X * mx.sigmoid(G)[..., None]", "_ = mlx_anvil_sigmoid_gate(X, G[..., None])"),  # Step 3.5
    # Kimi K3, Muse Glimmer, Bailing hybrid and linear
    ("_ = X * mx.sigmoid(self.P(Y))", "_ = mlx_anvil_sigmoid_gate(X, self.P(Y))"),
    ("Y = mx.sigmoid(G); _ = X * Y", "_ = mlx_anvil_sigmoid_gate(X, G)"),  # AFMoE
    # Bailing V3 and Spark 2.5
    (
        "Y = mx.sigmoid(G.astype(mx.float32)).astype(X.dtype); _ = X * Y[..., None]",
        "_ = mlx_anvil_sigmoid_gate(X, G[..., None]).astype(X.dtype)",
    ),
)

RULES = (
    *(Rule(GATED_NORM, before, after) for before, after in _NORMS),
    *(Rule(SIGMOID_GATE, before, after) for before, after in _GATES),
)


def _sigmoid_gate_by_ops(x: mx.array, gate: mx.array) -> mx.array:
    return x * mx.sigmoid(gate)


def _gated_norm(x: mx.array, weight: mx.array, eps: float, gate: mx.array) -> mx.array:
    """Float32 arithmetic, and the result in the dtype of ``x``."""
    return _ext.rms_norm(x, weight, eps, gate=gate).astype(x.dtype)


def _gated_norm_by_ops(x: mx.array, weight: mx.array, eps: float, gate: mx.array) -> mx.array:
    y = mx.fast.rms_norm(x, weight, eps).astype(mx.float32)
    result: mx.array = (nn.silu(gate.astype(mx.float32)) * y).astype(x.dtype)
    return result


def _norm_then_gate(x: mx.array, weight: mx.array, eps: float, gate: mx.array) -> mx.array:
    return _ext.rms_norm(widened(x, weight), weight, eps, gate=gate)


def _norm_then_gate_by_ops(x: mx.array, weight: mx.array, eps: float, gate: mx.array) -> mx.array:
    result: mx.array = nn.silu(gate) * mx.fast.rms_norm(x, weight, eps)
    return result


def _norm_and_gate(norm: nn.Module, x: mx.array, gate: mx.array, of_norm: bool = False) -> mx.array:
    """``norm(x) * sigmoid(gate)``, in the dtype of the norm's result if ``of_norm``."""
    if runs(norm, _NORM):
        x = widened(x, norm["weight"])
        y: mx.array = _ext.rms_norm(x, norm["weight"], norm.eps, gate=gate, gate_activation="sigmoid")
    else:
        x = norm(x)
        y = _ext.sigmoid_gate(x, gate)
    return y.astype(x.dtype) if of_norm else y


def _norm_and_gate_by_ops(norm: nn.Module, x: mx.array, gate: mx.array, of_norm: bool = False) -> mx.array:
    x = norm(x)
    return x * (mx.sigmoid(gate.astype(mx.float32)).astype(x.dtype) if of_norm else mx.sigmoid(gate))


# By the name in rules: our op, the twin in MLX ops, and our function.
FUNCTIONS_OF_RULES: dict[str, tuple[str, Function, Function]] = {
    "mlx_anvil_sigmoid_gate": (SIGMOID_GATE.op, _sigmoid_gate_by_ops, _ext.sigmoid_gate),
    "mlx_anvil_gated_norm": (GATED_NORM.op, _gated_norm_by_ops, _gated_norm),
    "mlx_anvil_norm_then_gate": (GATED_NORM.op, _norm_then_gate_by_ops, _norm_then_gate),
    "mlx_anvil_norm_and_gate": (GATED_NORM.op, _norm_and_gate_by_ops, _norm_and_gate),
}
