"""The judge of the random tests, on results that consist of rounding only, and on wrong ones."""

import pytest

import fuzz_ops
import fuzz_quantized
from fuzz_case import Arg, Call, Case, Result, Transform
from fuzz_judge import Wrong, check

pytestmark = pytest.mark.cpu_only


def case_of(call: Call, *transforms: Transform) -> Case:
    case = Case(call, sum(t.derivative for t in transforms))
    for transform in transforms:
        case.apply(transform)
    return case


def grad(*argnums: int) -> Transform:
    return Transform("grad", argnums=argnums)


def attention_of_one_key() -> Call:
    """The weights are 1, so the gradients of q and k are zero. What remains is the rounding of terms that cancel."""
    args = [Arg(name, (1, heads, length, 72)) for name, heads, length in (("q", 2, 31), ("k", 1, 1), ("v", 1, 1))]
    call = Call("flash_attention", args, {a.name: a.name for a in args}, [Result((1, 2, 31, 72), "float32")], {})
    call.tolerance = 2e-5
    call.terms = fuzz_ops.terms_of_attention("reference.flash_attention(q=q, k=k, v=v)", with_lse=False)
    return call


def norm_of_equal_numbers(columns: int) -> Call:
    """The variance is 0, so the rounding of the mean in float32 is divided by sqrt(eps)."""
    args = [Arg("x", (7, columns), value=f"mx.broadcast_to(normal((7, 1)), (7, {columns}))")]
    return Call("layer_norm", args, {"x": "x", "eps": "1e-6"}, [Result((7, columns), "float32")], {})


def norm_of_rounded_sums() -> Call:
    """The gradient of its weight is a long sum, by h in float16 around 30: a last place there is 1 / 64."""
    rows = ("rows", "columns")
    args = [Arg("x", rows, "float16", "30 + normal({shape})"), Arg("weight", ("columns",))]
    args.append(Arg("residual", rows, "float16"))
    sizes = {"rows": 8192, "columns": 8}
    call = Call("layer_norm", args, {a.name: a.name for a in args}, [Result(rows, "float16")] * 2, sizes)
    call.long_axis = "rows"
    call.exact = fuzz_ops.norm_of_rounded_sum(call)
    return call


def product_with_outliers() -> Call:
    """Results of the large element do not fit float16. The others have the error by which it rounds its row."""
    x = Arg("x", ("rows", "columns"), "float16", "huge({shape}, 60000.0)")
    w = Arg("w", ("outputs", 4), "uint32", "codes({shape})", differentiable=False)
    scales = Arg("scales", ("outputs", 1), "uint8", "integers(122, 128, {shape}, mx.uint8)", differentiable=False)
    arguments = {"x": "x", "w": "w", "scales": "scales", "mode": "'mxfp4'", "group_size": "32", "bits": "4"}
    sizes = {"rows": 257, "columns": 32, "outputs": 16}
    call = Call("quantized_matmul", [x, w, scales], arguments, [Result(("rows", "outputs"), "float16")], sizes)
    call.tolerance = 5e-5
    call.terms = fuzz_quantized.terms_of_outliers(call)
    return call


def product_near_half_of_the_largest() -> Call:
    """Twice a result, as the gradient of its square has it, fits bfloat16 or not by how that result was rounded. The
    definition rounds a weight of 1.0032 to 1."""
    x = Arg("x", ("rows", 64), "bfloat16", "huge({shape}, 1.75e38)")
    w = Arg("w", (1, 16), "uint32", "mx.full({shape}, 0x40404040, mx.uint32)", differentiable=False)
    scales = Arg("scales", (1, 2), "bfloat16", "mx.full({shape}, 5e-5)", differentiable=False)
    biases = Arg("biases", (1, 2), "bfloat16", "mx.array([[1.0, 0.25]])", differentiable=False)
    arguments = {a.name: a.name for a in (x, w, scales, biases)} | {"group_size": "32", "bits": "8"}
    results = [Result(("rows", 1), "bfloat16")]
    return Call("quantized_matmul", [x, w, scales, biases], arguments, results, {"rows": 2048}, tolerance=5e-5)


def rope_of_frequencies() -> Call:
    """A rotation preserves the sum of squares, so frequencies have no gradient."""
    args = [Arg("x", (1, 1, 4, 8)), Arg("freqs", (4,), value="1 + 99 * mx.abs(normal({shape}))")]
    arguments = {"x": "x", "dims": "8", "freqs": "freqs", "base": "None", "offset": "10**6"}
    call = Call("rope", args, arguments, [Result((1, 1, 4, 8), "float32")], {})
    call.terms = f"uneven(reference.rope({call.keywords}))"
    return call


def choice_of_pairs(gap: float) -> Call:
    """Expert 8 + i has the score of expert i, and a larger bias: both are chosen, the second one first."""
    logits = Arg("logits", ("rows", 16), value="mx.tile(normal((*{shape}[:-1], 8)), 2)")
    bias = Arg("bias", (16,), value=f"mx.concatenate([mx.arange(8.0), mx.arange(8.0) + {gap}])")
    arguments = {"logits": "logits", "k": "16", "scoring": "'sigmoid'", "e_score_correction_bias": "bias"}
    results = [Result(("rows", 16), "float32"), Result(("rows", 16), "uint32")]
    return Call("softmax_topk", [logits, bias], arguments, results, {"rows": 3}, floats="[:1]", ranks_sums=True)


@pytest.mark.parametrize(
    "case",
    [
        case_of(attention_of_one_key(), grad(0, 1)),
        case_of(attention_of_one_key(), grad(0, 1), grad(0, 1)),
        *(case_of(norm_of_equal_numbers(columns)) for columns in (5, 17, 127)),
        case_of(norm_of_equal_numbers(17), grad(0)),
        case_of(norm_of_equal_numbers(17), grad(0), grad(0)),
        case_of(norm_of_rounded_sums()),
        case_of(norm_of_rounded_sums(), Transform("vjp", argnums=(1,))),
        case_of(product_with_outliers()),
        case_of(product_near_half_of_the_largest(), grad(0)),
        case_of(rope_of_frequencies(), grad(1)),
        case_of(rope_of_frequencies(), grad(1), grad(1)),
        case_of(choice_of_pairs(0.0)),
        case_of(choice_of_pairs(1e-9)),
        case_of(choice_of_pairs(1e-9), Transform("vmap", in_axes=(0, None), out_axis=-1)),
    ],
    ids=lambda case: f"{case.call.op} {case.kinds}",
)
def test_rounding_is_no_error(case, seed):
    case.seed = seed
    check(case)


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (attention_of_one_key(), "mlx_anvil.flash_attention(q, k, 1.0002 * v)"),
        (norm_of_equal_numbers(17), "mlx_anvil.layer_norm(x, eps=1e-6) + 0.01"),
        (product_with_outliers(), "mlx_anvil.quantized_matmul(1.01 * x, w, scales, None, True, 32, 4, 'mxfp4')"),
        (rope_of_frequencies(), "mlx_anvil.rope(x, 8, freqs=freqs, base=None, offset=10**6 + 1)"),
    ],
    ids=lambda value: value.op if isinstance(value, Call) else "",
)
def test_errors_are_seen(call, wrong, seed):
    call.ours = wrong
    with pytest.raises(Wrong, match="error of result 0"):
        check(case_of(call))
    if call.op == "flash_attention":
        with pytest.raises(Wrong, match="error of result 0"):
            check(case_of(call, grad(2)))


def test_wrong_choices_are_seen(seed):
    call = choice_of_pairs(1e-3)
    call.ours = "(lambda weights, indices: (weights, (indices + 8) % 16))(*mlx_anvil.softmax_topk("
    call.ours += f"{call.keywords}))"
    for case in (case_of(call), case_of(call, Transform("vmap", in_axes=(0, None), out_axis=-1))):
        with pytest.raises(Wrong, match="result 1 is"):
            check(case)


def test_overflow_on_the_way_is_seen(seed):
    call = product_near_half_of_the_largest()
    call.ours = f"0.5 * (2 * mlx_anvil.quantized_matmul({call.keywords}))"
    with pytest.raises(Wrong, match="result 0 is not finite where it should be"):
        check(case_of(call))


def test_norms_of_sums_that_are_not_rounded_are_seen(seed):
    call = norm_of_rounded_sums()
    call.ours = "(lambda h: (mlx_anvil.layer_norm(h, weight).astype(mx.float16), h.astype(mx.float16)))"
    call.ours += "(x.astype(mx.float32) + residual)"
    with pytest.raises(Wrong, match="error of result 0"):
        check(case_of(call, Transform("vjp", argnums=(1,))))
