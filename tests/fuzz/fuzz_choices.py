"""How random sizes, dtypes and options are drawn."""

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from fuzz_case import FLOATS


@dataclass
class Draw:
    """Draws values for generators. hypothesis shrinks towards the first of the choices."""

    of: Callable
    derivatives: int  # how many will be taken; two are judged in float32
    small: bool  # sizes of a quick run

    def choice(self, *values):
        return self.of(st.sampled_from(values))

    def maybe(self) -> bool:
        return self.of(st.booleans())

    def one_in(self, n: int) -> bool:
        return self.of(st.integers(0, n - 1)) == n - 1

    def count(self, low: int, high: int) -> int:
        return self.of(st.integers(low, high))

    def size(self, *more: int) -> int:
        large = () if self.small else (97, 128, 257)
        return self.choice(1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, *more, *large)

    def lead(self, most: int = 2) -> dict[str, int]:
        """Leading dims: none, some, sometimes an empty one."""
        return {f"d{i}": 0 if self.one_in(20) else self.choice(1, 2, 3, 5) for i in range(self.count(0, most))}

    def dtype(self) -> str:
        return FLOATS[0] if self.derivatives > 1 else self.choice(*FLOATS)

    def other_dtype(self, dtype: str) -> str:
        return self.dtype() if self.one_in(5) else dtype


def promoted(*dtypes: str) -> str:
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


def activation_of(draw: Draw) -> dict[str, str]:
    activation = draw.choice("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
    limit = draw.choice(None, None, 0.5, 1.0, 7.0)
    return {"activation": repr(activation), "limit": repr(limit)}
