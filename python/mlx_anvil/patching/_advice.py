"""What a user can do about a call that ``patch`` left as it was, or that fell back since."""

import re

NOTHING = "nothing to do; MLX's ops run there, as before the patch."

# By what the reason contains; the first that matches applies.
_ADVICE = (
    (r"(\w+)=False$", r"pass \1=True to patch."),
    (r"softmax_topk computes it", "call mlx_anvil.softmax_topk in the model's own code."),
    (r"not in the form down\(", "if it is a gate, call mlx_anvil.gated in the model's own code."),
    (
        r"attention written out in the model's own code",
        "call mlx_anvil.flash_attention in the model's own code, if it is softmax attention.",
    ),
    (
        r"cannot be replaced|assigns to | calls \w+\(\)",
        "call the op in the model's own code, or leave it to MLX's ops.",
    ),
)
_FALLBACK = "see the reason in docs/troubleshooting.md, under Fallbacks."


def advice(why: str) -> str:
    """What to do about a call that was left, as the end of a sentence."""
    for pattern, text in _ADVICE:
        if found := re.search(pattern, why):
            return found.expand(text) if found.re.groups else text
    return NOTHING


def fallback_advice(reason: str) -> str:
    """What to do about calls that fell back, as the end of a sentence."""
    if "float64" in reason:
        return "use float32, float16 or bfloat16: no kernel takes float64."
    return _FALLBACK
