"""Figures of links and machines that the model of distributed_cost.py predicts with, each with its source.

None was measured for this page on that hardware, but for the H200's rates, which bench/cuda.py measured on one GPU.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from harness import RESULTS

from distributed_cost import KERNELS, MESH, SWITCH, Link, Machine, Model, forward
from mlx_anvil.mslc import estimation

MICRO, GIGA = 1e-6, 1e9


@dataclass(frozen=True)
class PublishedLink:
    """A link as expected, and as slow and as fast as the sources and assumptions allow."""

    expected: Link
    slow: Link
    fast: Link
    machine: str
    latency_source: str
    bandwidth_source: str

    @property
    def name(self) -> str:
        return self.expected.name


def _links(
    name: str, latency: tuple[float, ...], bandwidth: tuple[float, ...], call: tuple[float, ...], **more: Any
) -> dict[str, Link]:
    """Expected, slow, fast: microseconds, GB/s, microseconds."""
    names = ("expected", "slow", "fast")
    figures = zip(names, latency, bandwidth, call, strict=True)
    return {which: Link(name, t * MICRO, b * GIGA, c * MICRO, **more) for which, t, b, c in figures}


def _issue(repository: str, number: int, kind: str = "issues") -> str:
    return f"[{repository.split('/')[-1]} #{number}](https://github.com/{repository}/{kind}/{number})"


GEERLING = "[Geerling](https://www.jeffgeerling.com/blog/2025/15-tb-vram-on-mac-studio-rdma-over-thunderbolt-5)"
KARRAY = "[mlx-jaccl-cluster](https://github.com/omar-karray/mlx-jaccl-cluster)"
OMLX = _issue("jundot/omlx", 3118, "pull")
# Assumed: of a collective on a Mac, whose GPU waits for the CPU, which sends (MLX's stream of communication is there).
HANDOVER = (50, 100, 10)
LINKS = (
    PublishedLink(
        **_links("10 GbE, TCP", (100, 300, 25), (1.15, 0.9, 1.25), HANDOVER),
        machine="M3 Ultra",
        latency_source=f"assumed; 23 us by UDP between servers ({_issue('Mellanox/sockperf', 136)}), "
        f"300 us by TCP between Macs ({GEERLING})",
        bandwidth_source="line rate 1.25 GB/s, less TCP/IP's overhead",
    ),
    PublishedLink(
        # A Mac Studio has cables for 5 peers; a ring of more has one to each neighbour.
        **_links(
            "Thunderbolt 5, JACCL",
            (28, 50, 20),
            (6.5, 3.8, 8.0),
            HANDOVER,
            collective=MESH,
            two_ways=2.0,
            most_peers=5,
        ),
        machine="M3 Ultra",
        latency_source=f"25.5 us ({KARRAY}), 27 to 31 us ({OMLX}), below 50 us ({GEERLING})",
        bandwidth_source=f"8 GB/s ({KARRAY}), 6.1 to 6.5 ({OMLX}), 3.8 ({_issue('ml-explore/mlx', 3207)})",
    ),
    PublishedLink(
        **_links("NVLink 4, NCCL", (3, 6, 2), (370, 300, 450), (3, 6, 2), collective=SWITCH),
        machine="H200",
        latency_source=f"6 us for a sum over 2 GPUs ({_issue('NVIDIA/nccl', 1259)}); 3 us for each doubling are assumed",
        bandwidth_source=f"370 GB/s each way ({_issue('NVIDIA/nccl', 1442)}), of a line rate of 450",
    ),
)

# KV heads limit how far tensor parallelism goes: 8 here.
LARGE = Model("Llama 70B, 4-bit", 80, 8192, 28672, 64, 8, 128, 128256)
SMALL = Model("Llama 1B, bfloat16", 16, 2048, 8192, 32, 8, 64, 128256, weight=2.0)
_OWN = Model("decoder of bench/cuda.py", 32, 4096, 14336, 32, 8, 128, 128256)
_LLAMA_CPP = Model("Llama 3.2 3B, Q4_K_M", 28, 3072, 8192, 24, 8, 128, 128256, weight=1.87 * 2**30 / 3.21e9)

# Of an M3 Ultra: tokens of a prompt a second, 4-bit model with 123 billion weights (ml-explore/mlx #3094), and tokens a
# second of a Llama 3.2 3B Q4_K_M of 1.87 GiB by llama.cpp (geerlingguy/beowulf-ai-cluster #17).
M3_ULTRA_PROMPT, M3_ULTRA_TOKENS = 91.5, 171.16
ATTENTION_SHARE = 0.6  # assumed, of the rate of products on a Mac


@cache
def machine(name: str) -> Machine:
    """An H200 by our own measurements; an M3 Ultra by published ones."""
    if name == "H200":
        rows = {row["what"]: row for row in json.loads((RESULTS / "cuda_h200.json").read_text())["rows"]}
        memory = rows["quantized_matmul 4-bit bfloat16 8192->8192, 1 rows"]["bytes_per_second"]
        flops = 1e12 * rows["quantized_matmul 4-bit bfloat16 4096->14336, 512 rows"]["tflops"]
        attention = 1e12 * rows["attention bfloat16 (1, 32/8, 4096, 128) causal"]["tflops"]
        token = 1e-6 * rows["decoder, 8B shape, 4-bit, one token, bfloat16, context 1024"]["ours_us"]
        without = Machine(name, memory, flops, attention, 0.0)
        return replace(without, launch=_launch(without, _OWN, token, 1024))
    # The share of the bandwidth that kernels reach is the one that docs/estimates.md fits to many Macs.
    memory = 1e9 * estimation.chips()[name]["dram_gb_s"]["value"] * estimation.validation()[0].memory
    flops = 2 * 123e9 * M3_ULTRA_PROMPT
    without = Machine(name, memory, flops, ATTENTION_SHARE * flops, 0.0)
    return replace(without, launch=_launch(without, _LLAMA_CPP, 1 / M3_ULTRA_TOKENS, 128))


def _launch(without: Machine, model: Model, token: float, context: int) -> float:
    """What a token takes beyond memory traffic, spread over its kernels."""
    beyond = token - forward(without, model, 1, context).seconds
    return max(0.0, beyond) / (model.layers * KERNELS)
