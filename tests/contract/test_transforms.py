"""vmap over every input and axis, and graphs compiled for any shapes, for every op and its derivatives."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import mlx.core as mx
import pytest

import mlx_anvil
import support
from support import OTHER_KERNEL, Arrays, as_list, max_error, on_one_device
from tests.contract.transform_cases import CALLS, Call

pytestmark = pytest.mark.parametrize("call", CALLS, ids=[call.id for call in CALLS])

BATCH = 2
# Of MLX 0.32.4, in gradients of looked-up rows and in composed() heads.
NO_FORWARD_MODE = (
    "[scatter] JVP not yet implemented",
    "[QuantizedMatmul::jvp] No JVP wrt the quantized matrix yet.",
)


def element(x: mx.array, i: int) -> mx.array:
    """The i-th element of a batch that starts with ``x``."""
    if mx.issubdtype(x.dtype, mx.floating):
        return x * (1 + 0.1 * i)
    return mx.roll(x, i, axis=-1) if x.dtype == mx.bool_ else x + i


def floats(arrays: Arrays) -> list[int]:
    return [i for i, x in enumerate(arrays) if mx.issubdtype(x.dtype, mx.floating)]


def with_gradients(call: Call, arrays: Arrays):
    """The op and its gradients in all floating-point inputs, as a function of the inputs and a cotangent."""
    at = floats(arrays)

    def function(*inputs):
        *primals, cotangent = inputs

        def of_floats(*values):
            moved = list(primals)
            for i, value in zip(at, values, strict=True):
                moved[i] = value
            return call.function(*moved)

        outputs, gradients = mx.vjp(of_floats, [primals[i] for i in at], [cotangent])
        return [*outputs, *gradients]

    return function


def with_tangents(call: Call, arrays: Arrays):
    """The forward-mode derivative, as a function of the inputs and the tangents of floating-point ones."""
    at = floats(arrays)

    def function(*inputs):
        primals, tangents = list(inputs[: len(arrays)]), list(inputs[len(arrays) :])

        def of_floats(*values):
            moved = list(primals)
            for i, value in zip(at, values, strict=True):
                moved[i] = value
            return call.function(*moved)

        return mx.jvp(of_floats, [primals[i] for i in at], tangents)[1]

    return function


def draw(call: Call, number: int = 0) -> Arrays:
    arrays = call.make(number)
    mx.eval(arrays)
    return arrays


def assert_close(results: Arrays, wanted: Arrays, tolerance: float = OTHER_KERNEL) -> None:
    for a, b in zip(results, wanted, strict=True):
        assert max_error(a, b) <= tolerance


# ---- vmap ------------------------------------------------------------------------------------------------------------


def mapped(function, count: int, index: int, axis: int):
    """``function`` of ``count`` inputs, mapped over one axis of one of them."""
    return mx.vmap(function, in_axes=tuple(axis if i == index else None for i in range(count)))


def test_vmap_of_each_input_at_each_axis(call: Call):
    arrays = draw(call)
    cotangent = mx.random.normal(call.function(*arrays).shape)
    function = with_gradients(call, arrays)
    inputs = [*arrays, cotangent]
    for index, x in enumerate(inputs):
        elements = [[element(x, i) for i in (2 * o, 2 * o + 1)] for o in range(BATCH)]

        def at(value, index=index):
            return [*inputs[:index], value, *inputs[index + 1 :]]

        rows = [[function(*at(value)) for value in row] for row in elements]
        wanted_rows = [[mx.stack(outputs) for outputs in zip(*row, strict=True)] for row in rows]
        wanted = [mx.stack(outputs) for outputs in zip(*wanted_rows, strict=True)]
        mx.eval(wanted)
        for inner in range(x.ndim + 1):
            in_one = mapped(function, len(inputs), index, inner)
            stacked = [mx.stack(row, axis=inner) for row in elements]
            assert_close(in_one(*at(stacked[0])), wanted_rows[0])
            if index < len(arrays):
                alone = mapped(call.function, len(arrays), index, inner)
                assert_close([alone(*at(stacked[0])[:-1])], wanted_rows[0][:1])
            # The simulator takes minutes for all of them.
            for outer in range(x.ndim + 2) if support.backend != "simulator" else (0,):
                in_two = mapped(in_one, len(inputs), index, outer)
                assert_close(in_two(*at(mx.stack(stacked, axis=outer))), wanted)


@contextmanager
def says_what_mlx_lacks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if str(error) not in NO_FORWARD_MODE:
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("of", ["op", "gradient"])
def test_vmap_of_each_tangent(call: Call, of: str, composed: bool):
    arrays = draw(call)
    function = with_tangents(call, arrays)
    if of == "gradient":
        cotangent = mx.random.normal(call.function(*arrays).shape)
        gradients, arrays = with_gradients(call, arrays), [*arrays, cotangent]
        function = with_tangents(dataclasses.replace(call, function=lambda *xs: gradients(*xs)[1:]), arrays)
    tangents = [mx.random.normal(arrays[i].shape) for i in floats(arrays)]
    for index, tangent in enumerate(tangents):

        def along(value: mx.array, index: int = index) -> Arrays:
            return list(function(*arrays, *tangents[:index], value, *tangents[index + 1 :]))

        elements = [element(tangent, i) for i in range(BATCH)]
        with mlx_anvil.composed() if composed else nullcontext(), says_what_mlx_lacks():
            wanted = [mx.stack(outputs) for outputs in zip(*map(along, elements), strict=True)]
            assert_close(mx.vmap(along)(mx.stack(elements)), wanted)


def test_composed_gradients(call: Call):
    arrays = draw(call)
    inputs = [*arrays, mx.random.normal(call.function(*arrays).shape)]
    wanted = with_gradients(call, arrays)(*inputs)
    with mlx_anvil.composed():
        assert_close(with_gradients(call, arrays)(*inputs), wanted)


# ---- compiled for any shapes -----------------------------------------------------------------------------------------


def assert_shapeless(function, *calls: Arrays, tolerance: float = OTHER_KERNEL) -> None:
    """The graph traced with the first call's shapes gives right results for the second call, and for the first
    again."""
    if support.backend == "simulator":
        pytest.skip("tests/contract/test_shapeless.py does that in the simulator, which takes minutes for every op")
    compiled = mx.compile(function, shapeless=True)
    for arrays in (*calls, calls[0]):
        mx.eval(arrays)
        with on_one_device():
            results = compiled(*arrays)
        assert_close(results, function(*arrays), tolerance)


def batched(arrays: Arrays, count: int) -> Arrays:
    return [mx.stack([element(x, i) for i in range(count)], axis=-1) for x in arrays]


def test_shapeless(call: Call):
    assert_shapeless(lambda *xs: [call.function(*xs)], draw(call, 0), draw(call, 1))


def test_shapeless_gradient(call: Call):
    calls = [draw(call, number) for number in range(2)]
    calls = [[*arrays, mx.random.normal(call.function(*arrays).shape)] for arrays in calls]
    function = with_gradients(call, draw(call))
    assert_shapeless(function, *calls)
    in_all = mx.vmap(function, in_axes=(-1,) * len(calls[0]))
    assert_shapeless(in_all, *(batched(arrays, 2 + number) for number, arrays in enumerate(calls)))


def test_shapeless_tangent(call: Call):
    calls = [draw(call, number) for number in range(2)]
    calls = [[*arrays, *(mx.random.normal(arrays[i].shape) for i in floats(arrays))] for arrays in calls]
    assert_shapeless(with_tangents(call, draw(call)), *calls)


def test_shapeless_vmap(call: Call):
    calls = [draw(call, number) for number in range(2)]
    count = len(calls[0])
    in_all = mx.vmap(lambda *xs: [call.function(*xs)], in_axes=(-1,) * count)
    assert_shapeless(in_all, *(batched(arrays, 2 + number) for number, arrays in enumerate(calls)))
    for index in range(count):
        in_one = mapped(lambda *xs: [call.function(*xs)], count, index, 0)
        assert_shapeless(
            in_one,
            *(
                [mx.stack([x] * (2 + number)) if i == index else x for i, x in enumerate(arrays)]
                for number, arrays in enumerate(calls)
            ),
        )


def test_shapeless_second_derivatives(call: Call):
    calls = [draw(call, number) for number in range(2)]
    at = floats(calls[0])
    count = len(calls[0])

    def gradients(*inputs):
        return with_gradients(call, calls[0])(*inputs)[1:]

    def function(*inputs):
        """The gradient of a weighted sum of the gradients."""
        primals, weights = list(inputs[: count + 1]), list(inputs[count + 1 :])

        def of_floats(*values):
            moved = list(primals)
            for i, value in zip(at, values, strict=True):
                moved[i] = value
            return [g * 1 for g in gradients(*moved)]  # each an array of its own (docs/mlx-bugs.md)

        return mx.vjp(of_floats, [primals[i] for i in at], weights)[1]

    assert_shapeless(
        function,
        *(
            [*arrays, mx.random.normal(call.function(*arrays).shape), *(mx.random.normal(arrays[i].shape) for i in at)]
            for arrays in calls
        ),
        tolerance=10 * OTHER_KERNEL,
    )


def test_shapeless_vmap_of_the_gradient_of_a_sum(call: Call):
    """MLX's vmap fixes the shape of the gradient of a sum (docs/mlx-bugs.md). The result is right, or an
    error."""
    calls = [draw(call, number) for number in range(2)]
    at = floats(calls[0])
    in_all = mx.vmap(mx.grad(lambda *xs: call.function(*xs).sum(), argnums=at), in_axes=(-1,) * len(calls[0]))
    compiled = mx.compile(in_all, shapeless=True)
    for number, arrays in enumerate(calls):
        inputs = batched(arrays, 2 + number)
        try:
            results = as_list(compiled(*inputs))
        except (ValueError, IndexError):
            continue
        assert_close(results, as_list(in_all(*inputs)))
