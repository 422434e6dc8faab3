"""Rules for routers that choose experts in groups, in statements of a method or in a function of their own.

Letters of these rules: I and S are the indices and the scores of the experts, G the logits, B the bias, M how many
experts are chosen, F the factor of their weights. Of L groups, T stay.
"""

import re
import textwrap
from collections.abc import Iterator

from mlx_anvil.patching._router_rules import GROUPS, SIGMOID
from mlx_anvil.patching._rules import Rule


def _form(text: str, **parts: str) -> str:
    """The text, in which lines ``<name>`` become those of that part, with the same indentation."""

    def filled(match: re.Match[str]) -> str:
        return textwrap.indent(_form(parts[match[2]], **parts), match[1])

    return re.sub(r"^( *)<(\w+)>$", filled, textwrap.dedent(text).strip(), flags=re.MULTILINE)


# Scores below the others for the groups that are left out. A is the array of scores, V that score.
_MASKED = """
A = mx.unflatten(S, axis=-1, shape=(L, -1))
H = mx.topk(A, 2, axis=-1).sum(axis=-1, keepdims=True)
K = L - T
J = mx.argpartition(H, kth=K - 1, axis=-2)[..., :K, :]
A = mx.put_along_axis(A, mx.stop_gradient(J), V, axis=-2)
"""
_EITHER = """
if C == "sigmoid":
    S = mx.sigmoid(G.astype(mx.float32))
else:
    S = mx.softmax(G.astype(mx.float32), axis=-1)
"""
_OF_EITHER = '"sigmoid" if C == "sigmoid" else "softmax"'
_LARGEST = """
I = mx.argpartition(-S, kth=M - 1, axis=-1)[..., :M]
I = mx.stop_gradient(I)
"""
_WITH_K = f"K = M\n{_LARGEST.strip().replace('M - 1', 'K - 1').replace(':M', ':K')}"


def _masked(value: str, array: str = "S", scores: str = "S") -> str:
    text = _MASKED.replace("unflatten(S", f"unflatten({scores}").replace("A", array)
    return text.replace("V", value).strip()


def _grouped(value: str) -> str:
    return _form("if L > 1:\n    <masked>\n    S = mx.flatten(S, -2, -1)", masked=_masked(value))


def _functions() -> Iterator[Rule]:
    """Whole functions."""
    sigmoid = 'mlx_anvil_route(G.astype(mx.float32), M, M > 1 and R, "sigmoid", B, (L, T), F, masked_score=0.0)'
    either = sigmoid.replace('"sigmoid"', _OF_EITHER)
    deepseek_v3 = """
        <scores>
        S = S + B
        <groups>
        <choice>
        S = mx.take_along_axis(O, I, axis=-1)
        if M > 1 and R:
            D = S.sum(axis=-1, keepdims=True)
            S = S / D
        S = S * F
        return I, S
    """
    first = "S = mx.sigmoid(G.astype(mx.float32))\nO = S"
    groups, choice = _grouped("mx.array(0.0)"), _WITH_K
    other_norm = deepseek_v3.replace("S / D", "S / (D + 1e-20)")
    # GLM-4-MoE too; EXAONE-MoE and MiMo-V2; Nemotron-H
    for text, scores in ((deepseek_v3, first), (other_norm, first), (other_norm, f"O = {first[:-6]}")):
        yield Rule(GROUPS, _form(text, scores=scores, groups=groups, choice=choice), f"return {sigmoid}")
    dots1 = """
        K = L - T
        if K != 0:
            S = mx.unflatten(S, axis=-1, shape=(L, -1))
            H = mx.topk(S, 2, axis=-1).sum(axis=-1, keepdims=True)
            J = mx.argpartition(H, kth=K - 1, axis=-2)[..., :K, :]
            J = mx.stop_gradient(J)
            S = mx.put_along_axis(S, J, mx.array(0.0), axis=-2)
            S = mx.flatten(S, -2, -1)
    """
    parts = {"scores": f"K = M\n{first}", "groups": textwrap.dedent(dots1), "choice": choice}
    yield Rule(GROUPS, _form(deepseek_v3, **parts), f"return {sigmoid}")
    bailing = """
        E = G.dtype
        <scores>
        O = S
        if B is not None:
            S = S + B
        <groups>
        <choice>
        S = mx.take_along_axis(O, I, axis=-1)
        if M > 1 and R:
            D = S.sum(axis=-1, keepdims=True) + 1e-20
            S = S / D
        S = S * F
        return I, S.astype(E)
    """
    after = f"E = G.dtype; I, S = {either}; return I, S.astype(E)"
    last = choice.replace("(-S, kth=K - 1", "(S, kth=-K").replace(":K", "-K:")
    parts = {"scores": _EITHER, "groups": _grouped("mx.array(0.0, S.dtype)"), "choice": last}
    yield Rule(GROUPS, _form(bailing, **parts), after)
    linear = bailing.replace(" + 1e-20", "")
    yield Rule(GROUPS, _form(linear, scores=_EITHER, groups=groups, choice=choice), after)
    kimi = """
        O = S
        if B is not None:
            S = S + B.astype(S.dtype)
        <groups>
        <choice>
        S = mx.take_along_axis(O, I, axis=-1)
        if M > 1 and R:
            D = S.sum(axis=-1, keepdims=True) + 1e-20
            S = S / D
    """
    parts = {"groups": _grouped("mx.array(0.0, dtype=S.dtype)"), "choice": _LARGEST, "kimi": kimi}
    k3 = "E = G.dtype\nS = mx.sigmoid(G.astype(mx.float32))\n<kimi>\nreturn I, (S * F).astype(E)"
    yield Rule(GROUPS, _form(k3, **parts), f"E = G.dtype; I, S = {sigmoid}; return I, S.astype(E)")
    linear = """
        if C == "sigmoid":
            S = mx.sigmoid(G)
        elif C == "softmax":
            S = mx.softmax(G, axis=-1, precise=True)
        else:
            raise ValueError(A)
        <kimi>
        return I, S * F
    """
    unknown = 'if C not in ("sigmoid", "softmax"):\n    raise ValueError(A)'
    after = sigmoid.replace('"sigmoid"', "C").replace("G.astype(mx.float32)", "G")
    yield Rule(GROUPS, _form(linear, **parts), f"{unknown}\nreturn {after}")
    # O are the weights.
    bailing_v3 = """
        S = mx.sigmoid(G.astype(mx.float32))
        P = S + B
        <groups>
        P = mx.flatten(P, -2, -1)
        <choice>
        O = mx.take_along_axis(S, I, axis=-1)
        O = O / (O.sum(axis=-1, keepdims=True) + 1e-20)
        return I, O * F
    """
    parts = {"groups": _masked('mx.array(float("-inf"))', "P", "P"), "choice": _LARGEST.replace("-S", "-P")}
    after = 'return mlx_anvil_route(G.astype(mx.float32), M, True, "sigmoid", B, (L, T), F)'
    yield Rule(GROUPS, _form(bailing_v3, **parts), after)
    mistral4 = """
        S = mx.softmax(G.astype(mx.float32), axis=-1)
        if L > 1:
            <groups>
            P = mx.flatten(Q, -2, -1)
        else:
            P = S
        <choice>
        O = mx.take_along_axis(S, I, axis=-1)
        if R:
            D = O.sum(axis=-1, keepdims=True) + 1e-20
            O = O / D
        O = O * F
        return I, O
    """
    parts["groups"] = _masked("mx.array(0.0)", "Q")
    after = "return mlx_anvil_route(G.astype(mx.float32), M, R, groups=(L, T), factor=F)"
    yield Rule(GROUPS, _form(mistral4, **parts), after)
    step3p5 = """
        S = mx.sigmoid(G.astype(mx.float32))
        P = S + B
        <choice>
        O = mx.take_along_axis(S, I, axis=-1)
        if R:
            O = O / (mx.sum(O, axis=-1, keepdims=True) + 1e-20)
        return I, O * F
    """
    after = 'return mlx_anvil_route(G.astype(mx.float32), M, R, "sigmoid", B, factor=F)'
    yield Rule(SIGMOID, _form(step3p5, **parts), after)


def _in_groups() -> Iterator[Rule]:
    """Statements of a method."""
    afmoe = """
        <scores>
        S = O + self.B
        <groups>
        K = M
        I = mx.argpartition(-S, kth=K - 1, axis=-1)[..., :K]
        I = mx.stop_gradient(I)
        P = mx.take_along_axis(O, I, axis=-1)
        if R and M > 1:
            D = P.sum(axis=-1, keepdims=True)
            P = P / D
        P = P * F
    """
    parts = {"scores": _EITHER.replace("S =", "O ="), "groups": _grouped("mx.array(0.0)")}
    route = "mlx_anvil_route(G.astype(mx.float32), M, M > 1 and R, {}, {}, (L, T), F{})"
    after = f"K = M; I, P = {route.format(_OF_EITHER, 'self.B', ', masked_score=0.0')}"
    yield Rule(GROUPS, _form(afmoe, **parts), after)
    bailing_hybrid = """
        E = G.dtype
        G = G.astype(mx.float32)
        <scores>
        O = S
        if B is not None:
            S = S + B
        K = L - T
        if K > 0:
            <groups>
            S = mx.flatten(S, -2, -1)
        <choice>
        S = mx.take_along_axis(O, I, axis=-1)
        if M > 1 and R:
            S = S / (S.sum(axis=-1, keepdims=True) + 1e-20)
        S = S * F
        return I, S.astype(E)
    """
    masked = _masked("mx.array(-mx.inf, S.dtype)").replace("K = L - T\n", "")
    parts = {"scores": _EITHER.replace("G.astype(mx.float32)", "G"), "groups": masked, "choice": _LARGEST}
    after = f"E = G.dtype; I, S = {route.format(_OF_EITHER, 'B', '')}; return I, S.astype(E)"
    yield Rule(GROUPS, _form(bailing_hybrid, **parts), after)
    deepseek_v2 = """
        S = mx.softmax(G, axis=-1, precise=True)
        if C == "group_limited_greedy":
            P, Q = X.shape[:2]
            S = S.reshape(P, Q, L, -1)
            H = S.max(axis=-1, keepdims=True)
            K = L - T
            J = mx.argpartition(H, kth=K - 1, axis=-2)[..., :K, :]
            J = mx.stop_gradient(J)
            S = mx.put_along_axis(S, J, mx.array(0.0, S.dtype), axis=-2)
            S = S.reshape(P, Q, -1)
        K = self.A
        I = mx.argpartition(-S, kth=K - 1, axis=-1)[..., :K]
        I = mx.stop_gradient(I)
        S = mx.take_along_axis(S, I, axis=-1)
        S = S * F
    """
    groups = '(L, T) if C == "group_limited_greedy" else (1, 1)'
    after = f'K = self.A; I, S = mlx_anvil_route(G, K, False, groups={groups}, factor=F, group_scoring="max")'
    yield Rule(GROUPS, _form(deepseek_v2), after)


RULES = tuple(_in_groups())
FUNCTION_RULES = tuple(_functions())
