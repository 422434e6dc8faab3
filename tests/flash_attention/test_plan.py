"""``attention_plan``: calls with a plan have the bits of calls with its arguments."""

from typing import Any

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import AttentionPlan, Tree, attention_plan, flash_attention
from support import assert_same_bits
from tests.flash_attention.cases import draw

LENGTHS = (40, 1, 0, 64)
TABLE = [[3, 0, 1, 7], [2, -1, -1, -1], [-1, -1, -1, -1], [4, 5, 6, 2]]


def padded(q_len: int = 3) -> tuple[list[mx.array], dict[str, Any], AttentionPlan]:
    case = draw((4, 2), (q_len, 64), (64, 64), mx.float16, "none", batch=4)
    options = {"lengths": mx.array(LENGTHS), "q_lengths": mx.array([q_len, 1, 0, 2])}
    return [case.q, case.k, case.v], options, attention_plan(q_len=q_len, kv_len=64, **options)


def packed() -> tuple[list[mx.array], dict[str, Any], AttentionPlan]:
    case = draw((4, 2), (70, 90), (64, 64), mx.float16, "none")
    options = {"cu_seqlens_q": mx.array([0, 30, 70]), "cu_seqlens_k": mx.array([0, 50, 90])}
    return [case.q, case.k, case.v], options, attention_plan(q_len=70, kv_len=90, **options)


def paged() -> tuple[list[mx.array], dict[str, Any], AttentionPlan]:
    q = mx.random.normal((4, 4, 3, 64)).astype(mx.float16)
    k, v = (mx.random.normal((8, 2, 16, 64)).astype(mx.float16) for _ in range(2))
    options = {"lengths": mx.array(LENGTHS), "block_table": mx.array(TABLE)}
    return [q, k, v], options, attention_plan(q_len=3, page_size=16, **options)


@pytest.mark.parametrize("kind", [padded, packed, paged])
def test_the_bits_of_the_call_without(kind: Any):
    arrays, options, plan = kind()
    with mlx_anvil.strict():
        found = flash_attention(*arrays, mask="causal", plan=plan, return_lse=True)
    for result, expected in zip(
        found, flash_attention(*arrays, mask="causal", return_lse=True, **options), strict=True
    ):
        assert_same_bits(result, expected)

    def loss(more: dict[str, Any]) -> Any:
        return lambda *qkv: flash_attention(*qkv, mask="causal", **more).square().sum()

    gradients = (mx.grad(loss(more), argnums=(0, 1, 2))(*arrays) for more in ({"plan": plan}, options))
    for result, expected in zip(*gradients, strict=True):
        assert_same_bits(result, expected)


def test_quantized_pages():
    (q, *cache), options, plan = paged()
    k, v = (tuple(mx.quantize(x, bits=4)) for x in cache)
    assert_same_bits(flash_attention(q, k, v, kv_bits=4, plan=plan), flash_attention(q, k, v, kv_bits=4, **options))


def test_a_tree_at_the_end_of_each_sequence():
    (q, k, v), _, _ = paged()
    options = {"lengths": mx.array([40, 3, 16, 64]), "block_table": mx.maximum(mx.array(TABLE), 0)}
    plan = attention_plan(q_len=3, page_size=16, **options)
    tree = Tree([-1, 0, 0])
    assert_same_bits(flash_attention(q, k, v, mask=tree, plan=plan), flash_attention(q, k, v, mask=tree, **options))


@pytest.mark.parametrize("shapeless", [False, True])
def test_compiled(shapeless: bool):
    arrays, options, plan = padded()
    compiled = mx.compile(lambda *qkv: flash_attention(*qkv, plan=plan), shapeless=shapeless)
    assert_same_bits(compiled(*arrays), flash_attention(*arrays, **options))


def test_lengths_of_a_map():
    arrays, options, _ = padded()
    others = {name: mx.minimum(x, 2) for name, x in options.items()}

    def call(lengths: mx.array, q_lengths: mx.array) -> mx.array:
        plan = attention_plan(q_len=3, kv_len=64, lengths=lengths, q_lengths=q_lengths)
        return flash_attention(*arrays, plan=plan)

    stacked = [mx.stack([options[name], others[name]]) for name in ("lengths", "q_lengths")]
    for found, own in zip(mx.vmap(call)(*stacked), (options, others), strict=True):
        assert mx.allclose(found, flash_attention(*arrays, **own), rtol=1e-2, atol=1e-3)


def test_what_it_is():
    assert repr(padded()[2]) == "AttentionPlan(batch=4, q_len=3, kv_len=64)"
    plan = paged()[2]
    assert (plan.batch, plan.q_len, plan.kv_len) == (4, 3, 64)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "without block_table, kv_len is needed and page_size is not"),
        ({"kv_len": 9}, ValueError, "no lengths are given; allowed: lengths and q_lengths, or cu_seqlens_q"),
        ({"kv_len": 9, "lengths": mx.array([10])}, ValueError, "lengths has 10; allowed: 0 to 9"),
        ({"kv_len": 9, "lengths": mx.array([[1]])}, ValueError, "lengths has shape"),
        ({"kv_len": 9.0, "lengths": mx.array([1])}, TypeError, "kv_len is a float; allowed: None, or an int"),
        ({"kv_len": -1, "lengths": mx.array([0])}, ValueError, "kv_len is -1; allowed: at least 0"),
        ({"kv_len": 9, "cu_seqlens_q": mx.array([0, 4])}, ValueError, "cu_seqlens_q has 4 after 0; allowed: "),
        ({"kv_len": 9, "cu_seqlens_k": mx.array([0, 3])}, ValueError, "cu_seqlens_k is given without cu_seqlens_q"),
        ({"block_table": mx.array([[0]])}, ValueError, "block_table is given without lengths"),
        (
            {"block_table": mx.array([[0]]), "lengths": mx.array([1])},
            ValueError,
            "with block_table, page_size is needed",
        ),
        ({"block_table": mx.array([0]), "lengths": mx.array([1]), "page_size": 4}, ValueError, "block_table has shape"),
    ],
)
def test_bad_plans(options: dict[str, Any], error: type[Exception], message: str):
    mx.eval(*(x for x in options.values() if isinstance(x, mx.array)))
    with pytest.raises(error, match=r"^\[attention_plan\] " + message):
        attention_plan(**{"q_len": 3} | options)


@pytest.mark.cpu_only
def test_calls_that_do_not_fit_the_plan():
    arrays, options, plan = padded()
    pages, _, of_pages = paged()
    with pytest.raises(ValueError, match=r"^\[flash_attention\] plan is given with lengths.*; allowed: the plan alone"):
        flash_attention(*arrays, plan=plan, **options)
    with pytest.raises(TypeError, match=r"^\[flash_attention\] plan is a dict; allowed: None, mlx_anvil.AttentionPlan"):
        flash_attention(*arrays, plan=options)
    with pytest.raises(
        ValueError, match=r"^\[flash_attention\] plan is for batch 4, 3 queries and 64 keys and the call"
    ):
        flash_attention(arrays[0], arrays[1][:, :, 1:], arrays[2][:, :, 1:], plan=plan)
    with pytest.raises(ValueError, match=r"^\[flash_attention\] plan is for pages 0 to 6 and the call has 6 pages"):
        flash_attention(pages[0], pages[1][:6], pages[2][:6], plan=of_pages)
