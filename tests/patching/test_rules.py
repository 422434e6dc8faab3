"""The engine that rewrites statements of methods."""

from types import FunctionType

import pytest

from mlx_anvil.patching._rebind import Call
from mlx_anvil.patching._rules import Rule, calls_of, rewritten

pytestmark = pytest.mark.cpu_only

CALL = Call("router", "two steps", "softmax_topk")
RULE = Rule(CALL, "T = A + B; _ = T * C", "_ = one_step(A, B, C)")


def one_step(a, b, c):
    return "one step", a, b, c


def run(function, *args):
    copy = FunctionType(function.__code__, dict(function.__globals__), function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return rewritten(function, copy, (RULE,))(*args)


def returned(x, y):
    total = x[0] + y
    return total * (y - 1)


def assigned(x, *, y=2):
    """Other statements stay as they are."""
    x += 1
    total = x + y
    result = total * total if False else None
    total = x + y
    total = total * 3
    if result is None:
        return total
    return result


def under_another_name(x, y):
    t = x + y
    product = t * 5
    return product


def used_later(x, y):
    total = x + y
    product = total * 5
    return product, total


def apart(x, y):
    total = x + y
    x += 1
    return total * x


def test_statements_are_replaced():
    assert run(returned, [4], 2) == ("one step", 4, 2, 1)
    assert run(assigned, 3) == ("one step", 4, 2, 3)
    assert run(under_another_name, 1, 2) == ("one step", 1, 2, 5)
    assert calls_of(returned, (RULE,)) == {CALL}


@pytest.mark.parametrize("function", [used_later, apart])
def test_other_statements_stay(function):
    assert calls_of(function, (RULE,)) == frozenset()
    assert run(function, 1, 2) == function(1, 2)


def test_a_letter_stands_for_the_same_code():
    rule = Rule(CALL, "T = A + A", "T = one_step(A, 0, 0)")

    def same(x):
        y = x[1] + x[1]
        return y

    def different(x):
        y = x[1] + x[0]
        return y

    assert calls_of(same, (rule,)) == {CALL}
    assert not calls_of(different, (rule,))


def test_attributes_and_the_lines_of_errors():
    rule = Rule(CALL, "R = self.M(X)", "R = self.M(X, 1)")

    class Model:
        def layer(self, x, more=0):
            raise ValueError(more)

        def call(self, x):
            y = self.layer(x)
            return y

    copy = FunctionType(Model.call.__code__, globals())
    with pytest.raises(ValueError, match="1") as error:
        rewritten(Model.call, copy, (rule,))(Model(), 0)
    assert error.traceback[-2].lineno == Model.call.__code__.co_firstlineno  # traceback counts from 0


def test_a_function_without_a_file_stays():
    names = {}
    exec("def f(x, y):\n    t = x + y\n    return t * 2", names)
    assert not calls_of(names["f"], (RULE,))
