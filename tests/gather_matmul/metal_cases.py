"""Gathered products with their exact results, for the tests of the Metal kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

import mlx_anvil
from mlx_anvil import _ext
from quantized_numpy import Format, Matrix, assert_rounded, dense_factor, draw
from support import to_numpy

COLUMNS = 256
EXPERTS = 3


@dataclass
class Case:
    """Each pair multiplies `rows` rows of x by an expert's matrix. Sorted pairs have one row each and are x's rows;
    others choose theirs with lhs."""

    format: Format
    x: mx.array  # [lefts, rows, K], or N without `transpose`
    matrices: list[Matrix]  # one, or gate and up
    vectors: list[mx.array | None]  # that experts add to gate and up
    rhs: np.ndarray
    lhs: np.ndarray | None = None
    sorted_ids: bool = False
    transpose: bool = True
    rounded_weights: bool = False
    activation: dict[str, object] = field(default_factory=dict)

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        format: Format,
        dtype: mx.Dtype,
        pairs: int,
        outputs: int,
        *,
        columns: int = COLUMNS,
        experts: int = EXPERTS,
        rows: int = 1,
        sorted_ids: bool = False,
        gated: bool = False,
        transpose: bool = True,
        rounded_weights: bool = False,
    ) -> Case:
        lefts = pairs if sorted_ids else 4
        x = rng.standard_normal((lefts, rows, columns if transpose else outputs)).astype(np.float32)
        x = x / 30 if gated else x  # no gate so large that its error is magnified
        rhs = rng.integers(0, experts, pairs).astype(np.int32)
        vectors: list[mx.array | None] = [None, None]
        if gated:
            added = rng.standard_normal((2, experts, outputs)).astype(np.float32)
            vectors = [mx.array(each).astype(dtype) if rng.random() < 0.7 else None for each in added]
        return cls(
            format,
            mx.array(x).astype(dtype),
            [draw(format, (experts, outputs, columns), rng, dtype) for _ in range(1 + gated)],
            vectors,
            np.sort(rhs) if sorted_ids else rhs,
            None if sorted_ids else rng.integers(0, lefts, pairs).astype(np.int32),
            sorted_ids,
            transpose,
            rounded_weights,
        )

    def evaluate(self, *, hide_ids: bool = False) -> mx.array:
        """With ``hide_ids``, the op cannot read ids when it is called, and so does not check their range."""
        rhs, lhs = mx.array(self.rhs), None if self.lhs is None else mx.array(self.lhs)
        if hide_ids:
            rhs = mx.array(self.rhs - 1) + 1
        options = self.format.options
        if len(self.matrices) == 1:
            ids = {"lhs_indices": lhs, "rhs_indices": rhs, "sorted_indices": self.sorted_ids}
            matrix = self.matrices[0].arrays
            out = mlx_anvil.gather_quantized_matmul(self.x, *matrix, transpose=self.transpose, **ids, **options)
        else:
            gate, up = (list(matrix.arrays) for matrix in self.matrices)
            biases = dict(zip(("gate_bias", "up_bias"), self.vectors, strict=True))
            how = {"sorted": self.sorted_ids, **self.activation, **options}
            out = _ext._gather_quantized_swiglu(self.x, gate, up, rhs, lhs, **biases, **how)
        mx.eval(out)
        return out

    def exact(self) -> np.ndarray:
        experts = self.matrices[0].w.shape[0]
        ids = np.clip(np.where(self.rhs < 0, self.rhs + experts, self.rhs), 0, experts - 1)
        x = to_numpy(self.x)
        x = x if self.lhs is None else x[self.lhs]
        products = []
        for matrix, vector in zip(self.matrices, self.vectors, strict=False):
            weights = matrix.weights[ids]
            of_pairs = x @ (weights.swapaxes(-1, -2) if self.transpose else weights)
            products.append(of_pairs if vector is None else of_pairs + to_numpy(vector)[ids][:, None])
        if len(products) == 1:
            return products[0]
        gate, up = products
        return gate / (1 + np.exp(-gate)) * up

    def check(self, result: mx.array | None = None) -> None:
        result = self.evaluate() if result is None else result
        terms = 0 if len(self.matrices) > 1 else self.x.shape[-1]
        factor = dense_factor(9, self.rounded_weights)
        assert_rounded(result, self.exact(), self.x.dtype, terms=terms, factor=factor)
