"""Arrays that know what they were made from, so that an op can take that instead, and MLX never computes them."""

import functools

import mlx.core as mx

from mlx_anvil.patching._rebind import Function


class Described(mx.array):
    """An array, and in a subclass what is in it.

    Attributes:
        was_changed: in place, since it was made.
    """

    was_changed: bool = False


def _changing(method: Function) -> Function:
    @functools.wraps(method)
    def call(self: Described, *args: mx.array) -> mx.array:
        self.was_changed = True
        result: mx.array = method(self, *args)
        return result

    return call


_OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"
for _name in ("__setitem__", *(f"__i{operator}__" for operator in _OPERATORS)):
    setattr(Described, _name, _changing(getattr(mx.array, _name)))
