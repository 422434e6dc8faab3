"""What PyTorch takes on the same GPU: the peers of bench/cuda.py that are not MLX's."""

from collections.abc import Callable
from typing import Any

ROUNDS, CALLS = 9, 10


def gpu_microseconds(call: Callable[[], Any]) -> float:
    """Median time of a call on the GPU, of calls that are queued one after the other. Frees PyTorch's unused memory."""
    import torch

    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    torch.cuda.empty_cache()
    return round(sorted(times)[ROUNDS // 2], 2)


def grouped_experts(experts: int, pairs: int, width: int, hidden: int) -> dict[str, float]:
    """Experts in bfloat16 by PyTorch's grouped product: rows already sorted, evenly spread over the experts."""
    try:
        import torch
        from torch.nn.functional import grouped_mm, silu
    except ImportError:
        return {}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 16

    rows, gate_up, down = normal(pairs, width), normal(experts, width, 2 * hidden), normal(experts, hidden, width)
    ends = (torch.arange(1, experts + 1, device="cuda") * pairs // experts).to(torch.int32)

    def call() -> torch.Tensor:
        gate, up = grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
        return grouped_mm(silu(gate) * up, down, offs=ends)

    call()
    return {"torch_bfloat16_gpu_us": gpu_microseconds(call)}
