"""A model of what distributing costs: bytes, messages, kernels and time of each scheme, on n machines.

A message takes a latency and its bytes over the bandwidth. Computing takes the longer of its memory traffic and its
operations, and a launch for each kernel. What overlaps counts once. distributed_fit.py fits the figures of this machine;
distributed_public.py has published ones of others.

Collectives are those of MLX's backends (mlx/distributed/ring/ring.cpp, jaccl/lib/jaccl/mesh.cpp, ring_impl.h); ring
attention is that of ring_simulation.py.
"""

from dataclasses import dataclass, replace
from math import ceil, inf, log2

RING, MESH, SWITCH = "ring", "mesh", "switch"
TWO_WAY_BYTES = 262144  # ring.cpp sends both ways from twice this many bytes in a segment
MESH_STEP_BYTES = 32768  # mesh.cpp sends small messages to every peer in one step
KERNELS = 10  # launches of a patched layer: two norms, five products, rope, attention, the gate
GRADIENT_FLOPS = 3.5  # of attention with its gradients, over the forward pass alone: 7 products instead of 2


@dataclass(frozen=True)
class Link:
    """Between neighbours.

    Attributes:
        latency: seconds of a message.
        bandwidth: bytes a second, each way.
        call: seconds of a collective whatever it sends.
        local: bytes a second at which a rank copies and adds what it receives.
        collective: which algorithm.
        two_ways: how much faster a ring is that sends both ways at once: 2 if each neighbour has its own cable.
        most_peers: of a mesh, above which the ring is used.
    """

    name: str
    latency: float
    bandwidth: float
    call: float = 0.0
    local: float = inf
    collective: str = RING
    two_ways: float = 1.0
    most_peers: int = 0


@dataclass(frozen=True)
class Machine:
    """Rates that are reached, not peaks: bytes a second, operations a second, seconds of a launch."""

    name: str
    memory: float
    flops: float
    attention_flops: float
    launch: float


@dataclass(frozen=True)
class Model:
    """A Llama. `weight` is bytes of a weight, `number` of an activation or a cached key."""

    name: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    weight: float = 0.5625
    number: int = 2

    @property
    def layer_weights(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.vocabulary * self.hidden

    @property
    def cache_bytes(self) -> int:
        """Of a position, in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.number


@dataclass(frozen=True)
class Cost:
    """Of the busiest rank: what it sends and launches, and its seconds."""

    compute: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0  # of the communication, behind computing
    sent: float = 0.0
    messages: float = 0.0
    kernels: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.communication - self.hidden

    def __add__(self, other: "Cost") -> "Cost":
        names = self.__dataclass_fields__
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __mul__(self, factor: float) -> "Cost":
        return Cost(**{name: getattr(self, name) * factor for name in self.__dataclass_fields__})


# ---- Transfers -------------------------------------------------------------------------------------------------------


def _transfer(link: Link, steps: int, sent: float, gain: float = 1.0, worked: float = 0.0) -> Cost:
    seconds = link.call + steps * link.latency + sent / (link.bandwidth * gain) + worked / link.local
    return Cost(communication=seconds, sent=sent, messages=steps)


def _both_ways(link: Link, segment: float) -> float:
    """The gain of a ring whose ranks send a segment of this many bytes in each step."""
    return link.two_ways if segment >= 2 * TWO_WAY_BYTES else 1.0


def _is_mesh(link: Link, n: int) -> bool:
    return link.collective == MESH and n - 1 <= link.most_peers


def all_reduce(link: Link, n: int, size: float) -> Cost:
    """The sum of `size` bytes of each rank."""
    if n == 1:
        return Cost()
    if _is_mesh(link, n):
        if n == 2 or size <= MESH_STEP_BYTES:  # everything to every peer, each over its own cable
            cost = _transfer(link, 1, size, worked=n * size)
            return replace(cost, sent=(n - 1) * size, messages=n - 1)
        cost = _transfer(link, 2, 2 * size / n, worked=2 * size)
        return replace(cost, sent=2 * (n - 1) * size / n, messages=2 * (n - 1))
    sent = 2 * (n - 1) * size / n
    if link.collective == SWITCH:
        return _transfer(link, ceil(log2(n)), sent)
    return _transfer(link, 2 * (n - 1), sent, _both_ways(link, size / n), size + (n - 1) * size / n)


def all_gather(link: Link, n: int, size: float) -> Cost:
    """`size` bytes of each rank, in every rank."""
    if n == 1:
        return Cost()
    if _is_mesh(link, n):
        return replace(_transfer(link, 1, size, worked=n * size), sent=(n - 1) * size, messages=n - 1)
    steps = ceil(log2(n)) if link.collective == SWITCH else n - 1
    return _transfer(link, steps, (n - 1) * size, _both_ways(link, size), size)


def exchange(link: Link, n: int, size: float) -> Cost:
    """`size` bytes to the right neighbour, as many from the left."""
    return _transfer(link, 1, size) if n > 1 else Cost()


# ---- Layers ----------------------------------------------------------------------------------------------------------


def products(machine: Machine, weights: float, bytes_of_weight: float, tokens: int) -> float:
    """Seconds for the products of `weights` weights with `tokens` tokens."""
    return max(weights * bytes_of_weight / machine.memory, 2 * weights * tokens / machine.flops)


def attention(machine: Machine, model: Model, tokens: int, context: int, share: float = 1.0) -> float:
    """Seconds of `tokens` new queries over `context` positions, causal; `share` of the heads or of the keys."""
    pairs = tokens * (context - (tokens - 1) / 2)
    flops = 4 * model.heads * model.head_dim * pairs
    return share * max(context * model.cache_bytes / machine.memory, flops / machine.attention_flops)


def _head(machine: Machine, model: Model) -> float:
    """Of the last token; every rank computes it whole."""
    return products(machine, model.vocabulary * model.hidden, model.weight, 1)


def forward(machine: Machine, model: Model, tokens: int, context: int) -> Cost:
    """One machine."""
    return tensor_parallel(machine, model, Link("none", 0, inf), 1, tokens, context)


def tensor_parallel(
    machine: Machine, model: Model, link: Link, n: int, tokens: int, context: int, *, chunks: int = 1
) -> Cost:
    """Heads and MLP split over n ranks; two sums in each layer. n must divide the KV heads.

    With chunks, the product before a sum is computed in parts of its outputs, and one part's sum overlaps the next
    part's product.
    """
    if model.kv_heads % n:
        raise ValueError(f"{n} ranks do not divide {model.kv_heads} KV heads")
    rows = products(machine, model.layer_weights / n, model.weight, tokens)
    compute = rows + attention(machine, model, tokens, context, 1 / n) + KERNELS * machine.launch
    reduced = all_reduce(link, n, tokens * model.hidden * model.number / chunks) * (2 * chunks)
    # Of the weights, those whose product a sum follows: the output projection and the MLP's last.
    before = (model.hidden * model.head_dim * model.heads + model.hidden * model.mlp) / model.layer_weights
    hidden = (chunks - 1) / chunks * min(reduced.communication, before * rows)
    layer = Cost(compute, hidden=hidden, kernels=KERNELS + 2 * (chunks - 1)) + reduced
    return layer * model.layers + Cost(_head(machine, model), kernels=1)


def best_tensor_parallel(machine: Machine, model: Model, link: Link, n: int, tokens: int, context: int) -> Cost:
    """With the best number of chunks."""
    costs = (tensor_parallel(machine, model, link, n, tokens, context, chunks=c) for c in (1, 2, 4, 8))
    return min(costs, key=lambda cost: cost.seconds)


def sharded_cache(machine: Machine, model: Model, link: Link, n: int, context: int) -> Cost:
    """A decode whose cache is split by positions: weights and products in every rank, partial outputs gathered."""
    rows = products(machine, model.layer_weights, model.weight, 1)
    partial = model.heads * (model.head_dim + 1) * 4  # float32, with the log-sum-exp
    merging = machine.launch if n > 1 else 0.0
    compute = rows + attention(machine, model, 1, context, 1 / n) + KERNELS * machine.launch + merging
    layer = Cost(compute, kernels=KERNELS + (n > 1)) + all_gather(link, n, partial)
    return layer * model.layers + Cost(_head(machine, model), kernels=1)


def pipeline_decode(machine: Machine, model: Model, link: Link, n: int, context: int) -> Cost:
    """A token through n stages, as mlx-lm's: a send behind each stage but the last, then a gather to all ranks."""
    size = model.hidden * model.number
    passed = exchange(link, n, size)
    path = replace(passed, communication=passed.communication * (n - 1))  # one stage after the other
    return forward(machine, model, 1, context) + path + all_gather(link, n, size)


def pipeline_prefill(machine: Machine, model: Model, link: Link, n: int, tokens: int, *, chunk: int = 2048) -> Cost:
    """A prompt in chunks: a stage works on a chunk while the next stage has the one before."""
    chunk = min(chunk, tokens)
    count = ceil(tokens / chunk)
    whole = forward(machine, model, tokens, tokens)
    passed = exchange(link, n, chunk * model.hidden * model.number)
    stage = whole.compute / n / count
    rounds = count + n - 1
    # A stage sends a chunk while it works on the next; the way of the first chunk through all stages is not hidden.
    hidden = (count - 1) * min(passed.communication, stage)
    communication = (rounds - 1) * passed.communication
    cost = Cost(rounds * stage, communication, hidden if n > 1 else 0.0, kernels=whole.kernels * count / n)
    return replace(cost, sent=passed.sent * count, messages=passed.messages * count)


# ---- Ring attention --------------------------------------------------------------------------------------------------


def ring_hops(n: int, length: int, source: int, *, zigzag: bool, causal: bool = True, window: int | None = None) -> int:
    """How far the keys of a rank travel."""
    if not causal or (zigzag and window is None):
        return n - 1
    if zigzag:
        raise ValueError("a window with the zig-zag layout has no closed form: see ring_simulation.py")
    last = n - 1 - source
    return last if window is None else min(last, ceil((window - 1) / (length // n)))


def ring_sent(n: int, length: int, rank: int, *, zigzag: bool, causal: bool = True, window: int | None = None) -> int:
    """Parts of keys and values that a rank passes on: of every source, if they travel beyond it."""
    hops = (ring_hops(n, length, source, zigzag=zigzag, causal=causal, window=window) for source in range(n))
    return sum((rank - source) % n < hop for source, hop in enumerate(hops))


def ring_attention(
    machine: Machine,
    model: Model,
    link: Link,
    n: int,
    length: int,
    *,
    zigzag: bool = False,
    causal: bool = True,
    gradients: bool = False,
    pieces: int = 1,
    turns: int = 2,
) -> Cost:
    """One layer's attention, of the busiest rank. Keys and values travel while the kernels run.

    The defaults are those of GPUs: whole parts, and a rank sends first and then receives, or the other way round. On
    the CPU there are up to 16 pieces, and with MLX's ring one turn, in both directions at once. With gradients, forward and backward: in the backward the keys travel again, and their float32 gradients make all n
    hops.
    """
    share = 1 / n if not causal else 1 / (2 * n) if zigzag else (1 - 1 / (2 * n)) / n
    whole = 4 * model.heads * model.head_dim * length**2 / machine.attention_flops
    parts = max(ring_sent(n, length, rank, zigzag=zigzag, causal=causal) for rank in range(n))
    part = length / n * model.cache_bytes
    cost = _overlapped(machine, link, share * whole, n * pieces, parts * part, parts * pieces, turns)
    if gradients:
        home = n if n > 1 else 0
        sent = parts * part + home * part * 4 / model.number
        backward = (GRADIENT_FLOPS - 1) * share * whole
        cost += _overlapped(machine, link, backward, n * pieces, sent, (parts + home) * pieces, turns)
    return cost


def sequence_parallel_prefill(machine: Machine, model: Model, link: Link, n: int, length: int) -> Cost:
    """A prompt split over n ranks, each with all weights: products of the rank's tokens, zig-zag ring attention."""
    rows = products(machine, model.layer_weights, model.weight, length // n)
    layer = Cost(rows + (KERNELS - 1) * machine.launch, kernels=KERNELS - 1)
    layer += ring_attention(machine, model, link, n, length, zigzag=True)
    return layer * model.layers + Cost(_head(machine, model), kernels=1)


def _overlapped(
    machine: Machine, link: Link, compute: float, kernels: int, sent: float, messages: int, turns: int
) -> Cost:
    """The longer of computing and sending, and before it the first piece's way or work, whichever is shorter."""
    compute += kernels * machine.launch
    communication = turns * (messages * link.latency + sent / link.bandwidth)
    first = min(compute / kernels, communication / messages) if messages else 0.0
    hidden = min(compute, communication) - first
    return Cost(compute, communication, hidden if messages else 0.0, sent, messages, kernels)


# ---- Training --------------------------------------------------------------------------------------------------------


def data_parallel(
    machine: Machine, model: Model, link: Link, n: int, tokens: int, *, sharded: bool = False, gradient: int = 4
) -> Cost:
    """A training step, each rank with `tokens` of its own, the gradients summed layer by layer behind the backward.

    The embedding, which is the head as well, has its gradient last: nothing is left to hide its sum. sharded: the
    optimiser's states are split (ZeRO-1), so the new weights are gathered, behind nothing. MLX's ring has no
    reduce-scatter: the gradients are summed whole either way.
    """
    part = 3 * products(machine, model.layer_weights, model.weight, tokens)  # the backward is twice the forward
    part += GRADIENT_FLOPS * attention(machine, model, tokens, tokens) + 3 * KERNELS * machine.launch
    reduced = all_reduce(link, n, model.layer_weights * gradient)
    behind = 2 / 3 * part * (model.layers - 1) / model.layers  # the last layer's sum has no layer to hide behind
    layer = Cost(part, hidden=min(reduced.communication, behind), kernels=3 * KERNELS) + reduced
    vocabulary = model.vocabulary * model.hidden
    head = Cost(3 * products(machine, vocabulary, model.weight, tokens), kernels=3)
    cost = layer * model.layers + head + all_reduce(link, n, vocabulary * gradient)
    if sharded:
        cost += all_gather(link, n, model.weights * model.weight / n)
    return cost
