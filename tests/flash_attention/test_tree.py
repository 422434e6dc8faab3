"""``mask=Tree(parents)``: each draft token sees what came before the tree, its ancestors and itself."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import Tree, flash_attention
from support import assert_same_bits
from tests.flash_attention.cases import draw

PARENTS = [-1, 0, 0, 1, -1, 4, 3, 2]
DEPTHS = [0, 1, 1, 2, 0, 1, 3, 2]


def path_to(token: int, parents: list[int]) -> list[int]:
    return [*path_to(parents[token], parents), token] if token >= 0 else []


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("before", [0, 1, 60])
def test_a_token_is_the_last_of_its_path(before: int, bits: int | None):
    """Its output is that of a causal call on the tokens before the tree and its path alone."""
    case = draw((4, 2), (8, before + 8), (64, 64), mx.float32, "none", batch=2)
    kv = [tuple(mx.quantize(x, bits=bits)) if bits else (x,) for x in (case.k, case.v)]
    options = {"kv_bits": bits} if bits else {}

    def attend(q: mx.array, parts: list[tuple[mx.array, ...]], **more: Any) -> mx.array:
        k, v = (x if bits else x[0] for x in parts)
        return flash_attention(q, k, v, **more, **options)

    with mlx_anvil.strict():
        out = attend(case.q, kv, mask=Tree(PARENTS))
    for token in range(8):
        keys = mx.array([*range(before), *(before + t for t in path_to(token, PARENTS))])
        alone = attend(case.q[:, :, token : token + 1], [tuple(y[:, :, keys] for y in x) for x in kv])
        assert mx.allclose(out[:, :, token : token + 1], alone, rtol=2e-5, atol=2e-5)


def test_a_chain_is_causal():
    case = draw((4, 2), (8, 40), (64, 64), mx.float32, "none")
    arrays = case.q, case.k, case.v
    chain = flash_attention(*arrays, mask=Tree(range(-1, 7)))
    assert mx.allclose(chain, flash_attention(*arrays, mask="causal"), rtol=1e-5, atol=1e-6)


def test_trees_of_a_batch_and_depths():
    other = [-1, -1, 1, 2, 3, -1, 5, 6]
    case = draw((4, 2), (8, 40), (64, 64), mx.float32, "none", batch=2)
    both = Tree([PARENTS, other])
    out = flash_attention(case.q, case.k, case.v, mask=both)
    for b, parents in enumerate((PARENTS, other)):
        alone = slice(b, b + 1)
        own = flash_attention(case.q[alone], case.k[alone], case.v[alone], mask=Tree(parents))
        assert_same_bits(out[alone], own)
    assert Tree(PARENTS).depths.tolist() == DEPTHS
    assert both.depths.shape == (2, 8)
    assert len(both) == 8


@pytest.mark.parametrize("page_size", [None, 16])
def test_lengths(page_size: int | None):
    """The tree ends each sequence."""
    lengths = (8, 30, 64)
    case = draw((4, 2), (8, 64), (64, 64), mx.float32, "none", batch=3)
    k, v, options = case.k, case.v, {"lengths": mx.array(lengths)}
    if page_size:
        k, v = (x.reshape(3, 2, 4, 16, 64).swapaxes(1, 2).reshape(12, 2, 16, 64) for x in (k, v))
        options["block_table"] = mx.arange(12).reshape(3, 4)
    out = flash_attention(case.q, k, v, mask=Tree(PARENTS), **options)
    for b, n in enumerate(lengths):
        alone = slice(b, b + 1)
        own = flash_attention(case.q[alone], case.k[alone, :, :n], case.v[alone, :, :n], mask=Tree(PARENTS))
        assert mx.allclose(out[alone], own, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_mask():
    case = draw((4, 2), (8, 40), (64, 64), mx.float32, "none")
    seen = np.zeros((8, 8), bool)
    for token in range(8):
        seen[token, path_to(token, PARENTS)] = True
    mask = mx.concatenate([mx.ones((8, 32), mx.bool_), mx.array(seen)], axis=1)

    def loss(mask: Any) -> Any:
        return lambda *qkv: flash_attention(*qkv, mask=mask).square().sum()

    arrays = case.q, case.k, case.v
    for found, expected in zip(
        *(mx.grad(loss(m), argnums=(0, 1, 2))(*arrays) for m in (Tree(PARENTS), mask)), strict=True
    ):
        assert_same_bits(found, expected)


def test_compiled_and_mapped():
    case = draw((4, 2), (8, 40), (64, 64), mx.float32, "none", batch=2)
    tree = Tree(PARENTS)
    arrays = case.q, case.k, case.v
    out = flash_attention(*arrays, mask=tree)
    assert_same_bits(mx.compile(lambda *qkv: flash_attention(*qkv, mask=tree))(*arrays), out)
    stacked = [mx.stack([x, 2 * x]) for x in arrays]
    mapped = mx.vmap(lambda *qkv: flash_attention(*qkv, mask=tree))(*stacked)
    assert mx.allclose(mapped[0], out, rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("parents", "error", "message"),
    [
        ([], ValueError, "parents is empty; allowed: at least one token"),
        ([0], ValueError, "the parent of token 0 is 0; allowed: -1 to -1"),
        ([-1, 1], ValueError, "the parent of token 1 is 1; allowed: -1 to 0"),
        ([-1, -2], ValueError, "the parent of token 1 is -2; allowed: -1 to 0"),
        ([-1, 0.0], TypeError, "parents has a float; allowed: ints"),
        ([[-1], [-1, 0]], ValueError, r"the trees have \[1, 2\] tokens; allowed: one number for all"),
        ("ab", TypeError, "parents is a str; allowed: a sequence of ints"),
        (mx.array([-1, 0]), TypeError, "parents is an mlx.core.array; allowed: a sequence of ints, such as parents"),
    ],
)
def test_bad_parents(parents: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=r"^\[Tree\] " + message):
        Tree(parents)


@pytest.mark.cpu_only
def test_calls_that_do_not_fit_the_tree():
    q, k = mx.zeros((1, 2, 3, 16)), mx.zeros((1, 2, 9, 16))
    tree = Tree([-1, 0, 0])
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((q[:, :, :2], k, k), {}, ValueError, "q has 2 queries and mask is a Tree of 3 tokens; allowed: one query"),
        (
            (q, k[:, :, :2], k[:, :, :2]),
            {},
            ValueError,
            "k has 2 keys and mask is a Tree of 3 tokens; allowed: the keys",
        ),
        ((q, k, k), {"q_lengths": mx.array([3])}, ValueError, "mask is a Tree and q_lengths is given; allowed"),
        ((q, k[0], k), {}, ValueError, "k has shape .*; allowed: rank 4"),
        ((q, "k", k), {}, TypeError, "k is a str; allowed: "),
        ((q, k, k), {"lengths": 3}, TypeError, "lengths is a int; allowed: "),
    ]
    for arrays, options, error, message in cases:
        with pytest.raises(error, match=r"^\[flash_attention\] " + message):
            flash_attention(*arrays, mask=tree, **options)
