"""Rules for short convolutions with their state, and for Mamba-1's loops over steps. What they call is in
:mod:`~mlx_anvil.patching._recurrences`.

Letters of these rules: X are the rows, S the state before them, I both, A the cache, J its slot, M the layer, O the
result. K rows stay in the cache; E, P and T say which.
"""

from mlx_anvil.patching import _recurrence_forms as forms
from mlx_anvil.patching._recurrences import CONVOLUTION, GATED_DELTA, SELECTIVE_SCAN
from mlx_anvil.patching._rules import Rule

# Qwen3-Next, Qwen 3.5 and Bailing V3
_WITH_STATE = (
    """
I = mx.concatenate([S, X], axis=1)
if A is not None:
    K = self.Q - 1
    if A.lengths is not None:
        E = mx.clip(A.lengths, 0, T)
        P = (E[:, None] + mx.arange(K))[..., None]
        A[J] = mx.take_along_axis(I, P, axis=1)
    else:
        A[J] = mx.contiguous(I[:, -K:, :])
""",
    """
I = mlx_anvil_conv(M, X, S, None if A is None else A.lengths)
if A is not None:
    A[J] = I[1]
""",
)
_CONVOLUTIONS = (
    (f"{_WITH_STATE[0]}_ = nn.silu(M(I))", f"{_WITH_STATE[1]}_ = I[0]"),
    # Mamba-2, Nemotron-H, Falcon-H1, Granite's hybrid and Plamo 2
    (
        """
if A is not None:
    if A[J] is None:
        S = mx.zeros((X.shape[0], self.Q - 1, self.D), dtype=X.dtype)
    else:
        S = A[J]
    I = mx.concatenate([S, X], axis=1)
    K = self.Q - 1
    if A.lengths is not None:
        T = I.shape[1]
        E = mx.clip(A.lengths, 0, T - K)
        P = (E[:, None] + mx.arange(K))[..., None]
        A[J] = mx.take_along_axis(I, P, axis=1)
    else:
        A[J] = I[:, -K:, :]
else:
    I = mx.pad(X, [(0, 0), (self.Q - 1, 0), (0, 0)])
O = self.M(I)
return nn.silu(O)
""",
        """
I = mlx_anvil_conv(self.M, X, None if A is None else A[J], None if A is None else A.lengths)
if A is not None:
    A[J] = I[1]
return I[0]
""",
    ),
    # Kimi Linear and K3, whose argument L are the lengths
    (
        """
if S is None:
    S = mx.zeros((X.shape[0], self.Q - 1, X.shape[-1]), dtype=X.dtype)
I = mx.concatenate([S, X], axis=1)
O = nn.silu(self.M(I))
K = self.Q - 1
if L is not None:
    E = mx.clip(L, 0, X.shape[1])
    P = (E[:, None] + mx.arange(K))[..., None]
    N = mx.take_along_axis(I, P, axis=1)
else:
    N = mx.contiguous(I[:, -K:, :])
return O, N
""",
        "return mlx_anvil_conv(self.M, X, S, L)",
    ),
    # OLMo's hybrid
    (
        """
if S is not None:
    I = mx.concatenate([S, X], axis=1)
else:
    I = mx.concatenate([mx.zeros((B, K, D), dtype=X.dtype), X], axis=1)
if A is not None:
    A[J] = mx.contiguous(I[:, -K:, :])
return nn.silu(M(I))
""",
        """
I = mlx_anvil_conv(M, X, S)
if A is not None:
    A[J] = I[1]
return I[0]
""",
    ),
    # Mamba and Jamba
    (
        """
if S is not None:
    I = mx.concatenate([S, X], axis=1)
else:
    I = mx.pad(X, [(0, 0), (K - 1, 0), (0, 0)])
O = self.M(I)
N = I[:, -(K - 1):, :]
X = nn.silu(O)
""",
        "X, N = mlx_anvil_conv(self.M, X, S)",
    ),
    # LFM2 and its mixture
    (
        """
if A is not None:
    if A[J] is None:
        S = mx.zeros((X.shape[0], self.Q - 1, self.args.D), dtype=X.dtype)
    else:
        S = A[J]
    X = mx.concatenate([S, X], axis=1)
    K = self.Q - 1
    T = U.shape[1]
    if A.lengths is not None:
        E = mx.clip(A.lengths, 0, T)
        P = (E[:, None] + mx.arange(K))[..., None]
        A[J] = mx.take_along_axis(X, P, axis=1)
    else:
        A[J] = X[:, -K:, :]
    A.advance(T)
else:
    X = mx.pad(X, [(0, 0), (self.Q - 1, 0), (0, 0)])
O = self.M(X)
""",
        """
O = mlx_anvil_conv(self.M, X, None if A is None else A[J], None if A is None else A.lengths, None)
if A is not None:
    A[J] = O[1]
    A.advance(U.shape[1])
O = O[0]
""",
    ),
    # Gear
    (
        """
K = self.Q - 1
if A is not None:
    S = A[J]
    if S is None:
        S = mx.zeros((X.shape[0], K, X.shape[-1]), dtype=X.dtype)
    I = mx.concatenate([S, X], axis=1)
    if K > 0:
        if A.lengths is not None:
            E = mx.clip(A.lengths, 0, X.shape[1])
            P = (E[:, None] + mx.arange(K))[..., None]
            A[J] = mx.take_along_axis(I, P, axis=1)
        else:
            A[J] = mx.contiguous(I[:, -K:, :])
    else:
        A[J] = mx.zeros((X.shape[0], 0, X.shape[-1]), dtype=X.dtype)
else:
    I = mx.pad(X, [(0, 0), (K, 0), (0, 0)])
return M(I)
""",
        """
I = mlx_anvil_conv(M, X, None if A is None else A[J], None if A is None else A.lengths, None)
if A is not None:
    A[J] = I[1]
return I[0]
""",
    ),
    # RecurrentGemma
    (
        """
if S is not None:
    X = mx.concatenate([S, X], axis=1)
else:
    X = mx.pad(X, [(0, 0), (K - 1, 0), (0, 0)])
O = mx.conv_general(X, self.weight, groups=G)
O = O + self.bias
return O, X[:, -K + 1:, :]
""",
        "return mlx_anvil_conv_with(self.weight, self.bias, X, S)",
    ),
)

# Letters of these rules: X and Z are rows and their gates, S and C states, T a step. F is dt.
_MAMBA = Rule(
    SELECTIVE_SCAN,
    """
C = S
Y = []
for T in range(L):
    O, C = self.ssm_step(X[:, T], A, C)
    Y.append(O)
Y = mx.stack(Y, axis=1)
_ = self.P(swiglu(Z, Y))
""",
    """
Y, C = mlx_anvil_scan_of_mamba(self, X, Z, A, S)
_ = self.P(Y)
""",
)
_JAMBA = Rule(
    SELECTIVE_SCAN,
    """
F = nn.softplus(self.P(F))
W = mx.expand_dims(F * X, -1) * mx.expand_dims(B, -2)
E = mx.exp(mx.expand_dims(F, -1) * A)
for T in range(L):
    if S is not None:
        W[:, T] = fma(S, E[:, T], W[:, T])
    S = W[:, T]
Y = (W @ mx.expand_dims(C, -1)).squeeze(-1)
Y = Y + D * X
return Y, W[:, -1]
""",
    "return mlx_anvil_scan(X, self.P(F), A, B, C, D, S)",
    {"fma": forms.product_and_sum},
)

# Kimi K3, on Metal: what mx.compile has traced would stay as it is in another patch and after unpatch.
_COMPILED_STEP = Rule(
    GATED_DELTA,
    """
if self._step is None:
    self._step = mx.compile(self._decode_core)
O, C, S = self._step(X, C, S)
""",
    "O, C, S = self._decode_core(X, C, S)",
)

RULES = (*(Rule(CONVOLUTION, before, after) for before, after in _CONVOLUTIONS), _MAMBA, _JAMBA, _COMPILED_STEP)
