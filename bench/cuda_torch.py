"""What PyTorch takes on the same GPU: the peers of bench/cuda.py that are not MLX's."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

ROUNDS, CALLS = 9, 10
HEAD_START = 20_000_000  # cycles for which the GPU waits, while the host queues calls
HAS_TORCH = find_spec("torch") is not None


def gpu_microseconds(call: Callable[[], Any]) -> float:
    """Median time of a call on the GPU, of calls that are queued before the first one starts. Frees PyTorch's unused
    memory."""
    import torch

    call()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    torch.cuda.empty_cache()
    return round(sorted(times)[ROUNDS // 2], 2)


def kernel_microseconds(call: Callable[[], Any]) -> float:
    """What the kernels of a call take on the GPU together, without the gaps between them: for calls that keep the host
    busy for longer than the GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(ROUNDS):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return round(sum(event.self_device_time_total for event in seen.key_averages()) / CALLS, 2)


def grouped_experts(experts: int, pairs: int, width: int, hidden: int) -> dict[str, float]:
    """Experts in bfloat16 by PyTorch's grouped product: rows already sorted, evenly spread over the experts."""
    if not HAS_TORCH:
        return {}
    import torch
    from torch.nn.functional import grouped_mm, silu

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 16

    rows, gate_up, down = normal(pairs, width), normal(experts, width, 2 * hidden), normal(experts, hidden, width)
    ends = (torch.arange(1, experts + 1, device="cuda") * pairs // experts).to(torch.int32)

    def call() -> torch.Tensor:
        gate, up = grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
        return grouped_mm(silu(gate) * up, down, offs=ends)

    return {"torch_bfloat16": gpu_microseconds(call)}


class Shape(NamedTuple):
    """Of attention."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int

    def __str__(self) -> str:
        return f"({self.batch}, {self.heads}/{self.kv_heads}, {self.length}, {self.dim})"


def attention_us(attend: Callable[..., "torch.Tensor"], shape: Shape, dtype: str, backward: bool) -> float:
    """Of attend(q, k, v), with its gradients if `backward`."""
    import torch

    batch, heads, kv_heads, length, dim = shape

    def normal(heads: int) -> torch.Tensor:
        x = torch.randn(batch, heads, length, dim, device="cuda", dtype=getattr(torch, dtype))
        return x.requires_grad_(backward)

    q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)
    d_out = torch.randn_like(q)

    def call() -> Any:
        out = attend(q, k, v)
        return torch.autograd.grad(out, (q, k, v), d_out) if backward else out

    return gpu_microseconds(call)


def cudnn_attention_us(shape: Shape, dtype: str, *, causal: bool, backward: bool) -> dict[str, float]:
    if not HAS_TORCH:
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor") -> "torch.Tensor":
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return {"cudnn": attention_us(attend, shape, dtype, backward)}


def flex_attention_us(
    shape: Shape,
    dtype: str,
    *,
    backward: bool,
    window_size: int | None = None,
    softcap: float | None = None,
    documents: int | None = None,
) -> dict[str, float]:
    """Causal and compiled. With `documents`, the sequence consists of that many documents of equal length, and a query
    sees keys of its own document only."""
    if not HAS_TORCH:
        return {}
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = shape.length

    def is_seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = query >= key
        if window_size:
            seen = seen & (query - key < window_size)
        if documents:
            seen = seen & (query // (length // documents) == key // (length // documents))
        return seen

    def capped(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {
        "block_mask": create_block_mask(is_seen, None, None, length, length, device="cuda"),
        "score_mod": capped if softcap else None,
        "enable_gqa": shape.heads != shape.kv_heads,
    }
    return {"flex": attention_us(partial(compiled, **options), shape, dtype, backward)}
