"""``shard``: splits a model's heads, columns of MLPs and experts over processes, unevenly if they do not divide."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_anvil.distributed._head import GatheredLinear
from mlx_anvil.patching._shards import inherit

_ROUND = 16  # columns of a dense MLP are split at multiples of this, if they divide by it

_Change = Callable[[], object]
_Part = tuple[int, int]  # from, to


def shard(model: nn.Module, group: mx.distributed.Group | None = None, *, head: bool = False) -> None:
    """Splits a model over the processes of a group, in place. Every process calls it with the whole model.

    In a group of one process, nothing happens.

    As ``model.shard()`` of mlx-lm: key and value heads with their query heads, and the columns between the projections
    of MLPs and experts, are divided; outputs are summed. But where the processes do not divide them, the first ones get
    one head, or one group of columns, more. A part of a quantized matrix is whole quantization groups. A patched model
    stays patched. Embedding, norms and routers are whole in every process. Gradients of those that a process
    uses for its own heads or experts only (norms of heads, routers, the projection to the latent) are of its own part;
    their sum over the processes is that of one process. All other gradients are those of one process.

    It takes models whose layers are Llama's, Qwen 3's, Qwen3-MoE's or DeepSeek-V3's: ``self_attn`` with ``q_proj``,
    ``k_proj``, ``v_proj``, ``o_proj``, or with latent attention; ``mlp`` with ``gate_proj``, ``up_proj``,
    ``down_proj``, or with ``switch_mlp`` and maybe ``shared_experts``.

    Args:
        model (mlx.nn.Module): a model of mlx-lm. If an error is raised, it is unchanged.
        group (mx.distributed.Group): the processes. Default: ``mx.distributed.init()``.
        head: split the output head too, ``lm_head``, and gather the logits. For generation: a loss over long sequences
            would send all of their logits. Default: False.

    Raises:
        ValueError: a layer has another structure, or fewer parts than there are processes; or ``head`` is set, and the
            model has no ``lm_head``. Every process raises it.

    Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
    """
    group = mx.distributed.init() if group is None else group
    if group.size() == 1:
        return
    changes: list[_Change] = []
    for i, layer in enumerate(model.layers):
        if layer is None:  # of another stage of a pipeline
            continue
        split = _Split(group, f"layers.{i}")
        changes += split.attention(getattr(layer, "self_attn", None))
        changes += split.mlp(getattr(layer, "mlp", None))
    if head:
        changes.append(_Split(group, "").head(model))
    for change in changes:
        change()


@dataclass(frozen=True)
class _Split:
    """The changes that split the modules of one layer."""

    group: mx.distributed.Group
    path: str

    def attention(self, module: nn.Module | None) -> Iterator[_Change]:
        names = _parameter_names(module)
        if module is not None and "embed_q" in names:
            yield from self._latent(module, names)
            return
        self._check(
            f"{self.path}.self_attn",
            names,
            needed={"q_proj", "k_proj", "v_proj", "o_proj"},
            allowed={"q_norm", "k_norm"},
            attributes=("n_heads", "n_kv_heads"),
            module=module,
        )
        assert module is not None
        heads, kv_heads = module.n_heads, module.n_kv_heads
        head_dim = module.q_proj["weight"].shape[0] // heads
        for name in names & {"q_norm", "k_norm"}:
            if module[name]["weight"].size != head_dim:
                self._refuse(f"{self.path}.self_attn.{name} spans several heads", "norms of one head")
        each = heads // kv_heads
        begin, end = self._heads(kv_heads, each, module.o_proj, heads)
        for name in ("q_proj", "k_proj", "v_proj"):
            count = heads if name == "q_proj" else kv_heads
            dims = module[name]["weight"].shape[0] // count * (each if name == "q_proj" else 1)
            yield self._rows(module, name, (begin * dims, end * dims))
        dims = _columns(module.o_proj) // kv_heads
        yield self._columns(module, "o_proj", (begin * dims, end * dims))
        yield lambda: _set(module, n_heads=(end - begin) * each, n_kv_heads=end - begin)

    def _latent(self, module: nn.Module, names: set[str]) -> Iterator[_Change]:
        query = "q_b_proj" if "q_b_proj" in names else "q_proj"
        self._check(
            f"{self.path}.self_attn",
            names,
            needed={query, "embed_q", "unembed_out", "o_proj", "kv_a_proj_with_mqa"},
            allowed={"q_a_proj", "q_a_layernorm", "kv_a_layernorm"},
            attributes=("num_heads",),
            module=module,
        )
        heads = module.num_heads
        begin, end = self._heads(heads, 1, module.o_proj, heads)
        dims = module[query]["weight"].shape[0] // heads
        yield self._rows(module, query, (begin * dims, end * dims))
        # The latent is whole in every process, but read by its own heads only: this layer sums the gradient of x.
        whole = module.kv_a_proj_with_mqa["weight"].shape[0]
        yield self._rows(module, "kv_a_proj_with_mqa", (0, whole))
        for name in ("embed_q", "unembed_out"):
            arrays = {key: mx.contiguous(array[begin:end]) for key, array in module[name].parameters().items()}
            yield partial(module[name].update, arrays)
        dims = _columns(module.o_proj) // heads
        yield self._columns(module, "o_proj", (begin * dims, end * dims))
        yield lambda: _set(module, num_heads=end - begin)

    def mlp(self, module: nn.Module | None) -> Iterator[_Change]:
        names, path = _parameter_names(module), f"{self.path}.mlp"
        projections = {"gate_proj", "up_proj", "down_proj"}
        if "switch_mlp" not in names:
            self._check(path, names, needed=projections, allowed=set(), attributes=(), module=module)
            assert module is not None
            part = self._hidden(module, path)
            yield self._rows(module, "gate_proj", part)
            yield self._rows(module, "up_proj", part)
            yield self._columns(module, "down_proj", part)
            return
        self._check(
            path,
            names,
            needed={"gate", "switch_mlp"},
            allowed={"shared_experts"},
            attributes=("sharding_group",),
            module=module,
        )
        assert module is not None
        for name in sorted(names & {"switch_mlp", "shared_experts"}):
            experts = module[name]
            path = f"{self.path}.mlp.{name}"
            self._check(path, _parameter_names(experts), projections, set(), (), experts)
            if "bias" in experts.down_proj:
                self._refuse(f"{path}.down_proj has a bias, which every process would add", "no bias")
            part = self._hidden(experts, path)
            # The block sums over the processes itself, so its projections keep their class.
            for projection in ("gate_proj", "up_proj"):
                yield partial(experts[projection].update, _rows_of(experts[projection], part))
            yield partial(experts.down_proj.update, _columns_of(experts.down_proj, part))
        yield lambda: _set(module, sharding_group=self.group)

    def head(self, model: nn.Module) -> _Change:
        layer = getattr(model, "lm_head", None)
        if layer is None or "weight" not in layer:
            self._refuse("the model has no lm_head that is a linear layer", "head=False")
        assert layer is not None
        outputs, size = layer["weight"].shape[0], self.group.size()
        share = -(-outputs // size)
        begin, end = (min(rank * share, outputs) for rank in (self.group.rank(), self.group.rank() + 1))
        if share * (size - 1) >= outputs:
            self._refuse(f"lm_head has {outputs} outputs", f"more than {share} for each of {size - 1} processes")
        part = self._made(layer, _rows_of(layer, (begin, end)), to_all=False)

        def change() -> None:
            model.lm_head = GatheredLinear(part, share, outputs)
            inherit(layer, part)

        return change

    def _heads(self, kv_heads: int, each: int, out: nn.Module, heads: int) -> _Part:
        """The key and value heads of this process; ``each`` is the number of query heads of one."""
        columns = _columns(out) // heads * each
        unit = _group(out) // math.gcd(_group(out), columns)
        what = "key and value heads" if unit == 1 else f"sets of {unit} heads, which are whole quantization groups"
        return self._part(f"{self.path}.self_attn", what, kv_heads, unit)

    def _hidden(self, mlp: nn.Module, path: str) -> _Part:
        columns, group = _columns(mlp.down_proj), _group(mlp.down_proj)
        unit = _ROUND if group == 1 and columns % _ROUND == 0 and columns >= _ROUND * self.group.size() else group
        return self._part(path, "columns" if unit == 1 else f"groups of {unit} columns", columns, unit)

    def _part(self, path: str, what: str, total: int, unit: int) -> _Part:
        """The share of this process: whole units, one more in the first processes if they do not divide."""
        units, size, rank = total // unit, self.group.size(), self.group.rank()
        if total % unit or units < size:
            self._refuse(f"{path} has {total / unit:g} {what}", f"at least one for each of {size} processes")
        share, more = divmod(units, size)
        begin = rank * share + min(rank, more)
        return begin * unit, (begin + share + (rank < more)) * unit

    def _rows(self, module: nn.Module, name: str, part: _Part) -> _Change:
        return self._replaced(module, name, _rows_of(module[name], part), to_all=False)

    def _columns(self, module: nn.Module, name: str, part: _Part) -> _Change:
        return self._replaced(module, name, _columns_of(module[name], part), to_all=True)

    def _replaced(self, module: nn.Module, name: str, arrays: dict[str, mx.array], to_all: bool) -> _Change:
        layer = module[name]
        new = self._made(layer, arrays, to_all)

        def change() -> None:
            setattr(module, name, new)
            inherit(layer, new)

        return change

    def _made(self, layer: nn.Module, arrays: dict[str, mx.array], to_all: bool) -> nn.Module:
        """A layer of MLX with these parameters."""
        options: dict[str, Any] = {"bias": False, "group": self.group}
        size = self.group.size()
        new: nn.Module
        # MLX's layers accept only sizes that divide. They are made small, and get their parameters afterwards.
        if "scales" in layer:
            options |= {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            if to_all:
                new = nn.QuantizedShardedToAllLinear(layer.group_size * size, 1, **options)
            else:
                new = nn.QuantizedAllToShardedLinear(layer.group_size, size, **options)
        else:
            new = nn.ShardedToAllLinear(size, 1, **options) if to_all else nn.AllToShardedLinear(1, size, **options)
        for key, array in arrays.items():
            new[key] = array
        new.train(layer.training)
        if not layer.trainable_parameters():  # type: ignore[no-untyped-call]
            new.freeze()
        return new

    def _check(
        self,
        path: str,
        names: set[str],
        needed: set[str],
        allowed: set[str],
        attributes: tuple[str, ...],
        module: nn.Module | None,
    ) -> None:
        """Refuses a module with parameters that the split does not know: it could need a part of them."""
        missing, unknown = needed - names, names - needed - allowed
        absent = [name for name in attributes if not hasattr(module, name)]
        if missing or unknown or absent:
            found = [*(f"no {name}" for name in [*sorted(missing), *absent]), *sorted(unknown)]
            self._refuse(f"{path} has {', '.join(found)}", "layers as in Llama, Qwen 3, Qwen3-MoE or DeepSeek-V3")
        assert module is not None
        for name in sorted(needed):
            if name.endswith("_proj") and "weight" not in module[name]:
                self._refuse(f"{path}.{name} is a {type(module[name]).__name__}", "linear layers, quantized or not")

    def _refuse(self, given: str, allowed: str) -> None:
        raise ValueError(f"[shard] {given}; allowed: {allowed}.")


def _parameter_names(module: nn.Module | None) -> set[str]:
    """The first parts of the names of the parameters."""
    if module is None:
        return set()
    parameters = dict(tree_flatten(module.parameters()))  # type: ignore[no-untyped-call]
    return {path.partition(".")[0] for path in parameters}


def _set(module: nn.Module, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(module, name, value)


def _group(layer: nn.Module) -> int:
    return int(layer.group_size) if "scales" in layer else 1


def _columns(layer: nn.Module) -> int:
    """The inputs of a linear layer."""
    if "scales" in layer:
        return int(layer["scales"].shape[-1] * layer.group_size)
    return int(layer["weight"].shape[-1])


def _rows_of(layer: nn.Module, part: _Part) -> dict[str, mx.array]:
    """The parameters for these outputs, of one matrix or of one for each expert."""
    begin, end = part
    arrays: dict[str, mx.array] = layer.parameters()  # type: ignore[no-untyped-call]
    return {
        name: mx.contiguous(array[..., begin:end] if name == "bias" else array[..., begin:end, :])
        for name, array in arrays.items()
    }


def _columns_of(layer: nn.Module, part: _Part) -> dict[str, mx.array]:
    """The parameters for these inputs. A bias is added after the sum, so it is whole."""
    total = _columns(layer)

    def cut(array: mx.array) -> mx.array:
        begin, end = [edge * array.shape[-1] // total for edge in part]  # codes and scales have fewer columns
        return mx.contiguous(array[..., begin:end])

    arrays: dict[str, mx.array] = layer.parameters()  # type: ignore[no-untyped-call]
    return {name: array if name == "bias" else cut(array) for name, array in arrays.items()}
