"""The functions that examples call. A script that is printed holds the source of those it uses: they need nothing but
``math``, ``mx``, ``np`` and ``rng``."""

import math

import mlx.core as mx
import numpy as np

from support import every_second, inside_larger, off_alignment, reversed_twice, transposed

rng = np.random.default_rng(0)  # a script has its own


def normal(shape):
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def huge(shape, largest):
    """One number of a row close to the largest of its format."""
    x = rng.standard_normal(shape)
    x[..., :1] = largest * rng.uniform(0.5, 1, x[..., :1].shape)
    return mx.array(x.astype(np.float32))


def integers(low, high, shape, dtype):
    return mx.array(rng.integers(low, high, shape, dtype=np.int64)).astype(dtype)


def permutation(shape):
    return mx.array(rng.permutation(math.prod(shape)).reshape(shape).astype(np.int32))


def codes(shape, keep=0xFFFFFFFF):
    """Packed weights; ``keep`` clears bits that would make a NaN."""
    return mx.array(rng.integers(0, 2**32, shape, dtype=np.uint32) & np.uint32(keep))


def one_hot(ids, count):
    """A one-hot matrix. A product with it selects rows as indexing does, whose gradient, a scatter, has no jvp in MLX
    0.32.4."""
    ids = ids.astype(mx.int64)
    return (mx.where(ids < 0, ids + count, ids)[..., None] == mx.arange(count)).astype(mx.float32)


def chosen(x, ids):
    """The matrices ``ids`` of x, by ``one_hot``."""
    rows = one_hot(ids, x.shape[0]).astype(x.dtype) @ x.reshape(x.shape[0], -1)
    return rows.reshape(*ids.shape, *x.shape[1:])


def visible(shape):
    """A bool mask."""
    return mx.array(rng.random(shape) < 0.7)


def some_hidden(shape):
    """An additive mask with some keys hidden."""
    return mx.array(np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape)).astype(np.float32))


def levels(shape, count):
    """Biases that make the results of ``count`` rows of a matrix clearly different."""
    ranks = rng.permutation(shape[0])
    biases = 0.25 * np.maximum(count + 1 - ranks, 0)[:, None]
    return mx.array(np.broadcast_to(biases, shape).astype(np.float32))


def not_normalized(out, lse, *with_lse):
    """Attention of which a softmax's total is a constant: derivatives are one part of two, which may cancel."""
    finite = mx.where(lse == -math.inf, mx.zeros((), lse.dtype), lse)
    out = out * mx.exp(finite - mx.stop_gradient(finite))[..., None]
    return (out, *with_lse)


def attention_without_pairs(
    q, k, v, sinks=None, return_lse=False, kv_group_size=None, kv_bits=None, kv_mode="affine", **options
):
    """Of no query or no key. MLX 0.32.4's empty products of views write to freed memory (docs/mlx-bugs.md)."""
    from mlx_anvil.reference._quantized_kv import as_arrays  # here, so that a script has it too

    q, _, v = as_arrays(q, k, v, kv_group_size, kv_bits, kv_mode)
    lse = mx.full(q.shape[:3], -math.inf, q.dtype) if sinks is None else mx.broadcast_to(sinks[:, None], q.shape[:3])
    out = mx.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    return (out, lse) if return_lse else out


def uneven(y):
    """Rotated pairs of which one element counts more: the sum of their squares then depends on the angle."""
    return y * mx.linspace(0.5, 1, y.shape[-1]).astype(y.dtype)


def rounded(h, dtype):
    """Rounds to ``dtype``. Derivatives pass unchanged."""
    return h if h.dtype == dtype else h + mx.stop_gradient(h.astype(dtype).astype(h.dtype) - h)


def all_as_largest(x):
    """Rows of their largest element: integer products round each element by a share of that (docs/numerics.md)."""
    return mx.broadcast_to(mx.abs(x).max(-1, keepdims=True), x.shape)


def repeated(x, axis):
    """A broadcast view: the first along the axis in place of all."""
    return mx.broadcast_to(mx.split(x, [1], axis)[0], x.shape)


def grad(f, argnums):
    """The gradient of the sum of the squares of all results."""
    gradient = mx.grad(lambda *xs: sum((y * y).sum() for y in f(*xs)), argnums)
    return lambda *xs: list(gradient(*xs)) if len(argnums) > 1 else [gradient(*xs)]


def in_some(f, xs, argnums):
    """``f`` as a function of the arguments at ``argnums``, the others as in ``xs``."""
    return lambda *ys: f(*(ys[argnums.index(i)] if i in argnums else x for i, x in enumerate(xs)))


def vjp(f, argnums, results):
    """A function of the arguments and, behind them, a cotangent for each result."""
    return lambda *xs: mx.vjp(in_some(f, xs[:-results], argnums), [xs[i] for i in argnums], list(xs[-results:]))[1]


def jvp(f, argnums):
    """A function of the arguments and, behind them, a tangent for each of ``argnums``."""
    count = len(argnums)
    return lambda *xs: mx.jvp(in_some(f, xs[:-count], argnums), [xs[i] for i in argnums], list(xs[-count:]))[1]


def checkpoint(f, argnums):
    """Where derivatives follow, of the arguments that have any: ``mx.checkpoint`` takes them in all that it is
    given."""
    return lambda *xs: mx.checkpoint(in_some(f, xs, argnums))(*(xs[i] for i in argnums))


def distinct(f):
    """MLX 0.32.4 moves the batch axis of an array only once, even if a function returns the array several times."""
    return lambda *xs: [mx.contiguous(y) for y in f(*xs)]


def one_by_one(f, in_axes, out_axes):
    """What ``mx.vmap`` should return. Uses split, because the gradient of indexing crashes MLX 0.32.4 on empty
    arrays."""

    def mapped(*xs):
        size = next(x.shape[axis] for x, axis in zip(xs, in_axes, strict=True) if axis is not None)
        elements = [
            [
                x if a is None else mx.squeeze(mx.split(mx.moveaxis(x, a, 0), size)[i], 0)
                for x, a in zip(xs, in_axes, strict=True)
            ]
            for i in range(size)
        ]
        return [mx.stack(ys, axis=out_axes) for ys in zip(*(f(*xs) for xs in elements), strict=True)]

    return mapped


HELPERS = {
    f.__name__: f
    for f in (
        *(
            normal,
            huge,
            integers,
            permutation,
            codes,
            visible,
            some_hidden,
            levels,
            not_normalized,
            uneven,
            one_hot,
            chosen,
            rounded,
        ),
        *(all_as_largest, attention_without_pairs),
        *(transposed, inside_larger, every_second, reversed_twice, off_alignment, repeated),
        *(in_some, grad, vjp, jvp, checkpoint, distinct, one_by_one),
    )
}
