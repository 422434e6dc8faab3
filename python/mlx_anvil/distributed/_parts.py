"""How ShardedOptimizer splits parameters: equal parts of joined elements, or whole parameters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from mlx_anvil.distributed._reduce import Chain, buckets, flattened, joined, parted

Flat = list[tuple[str, mx.array]]


class Parts(ABC):
    """Which process owns what of a list of parameters. All processes compute the same."""

    def __init__(self, flat: Flat, rank: int, size: int, bucket_bytes: int) -> None:
        self.rank, self.size = rank, size
        self.paths = [path for path, _ in flat]
        self._given = [(path, tuple(array.shape), array.dtype) for path, array in flat]
        self._buckets = buckets([array for _, array in flat], bucket_bytes)

    def check(self, flat: Flat, name: str) -> None:
        """Raises an error unless these are the parameters that the object was made for."""
        given = [(path, tuple(array.shape), array.dtype) for path, array in flat]
        if given != self._given:
            kept, now = dict.fromkeys(self._given), dict.fromkeys(given)
            path, shape, dtype = next(each for each in [*now, *kept] if not (each in now and each in kept))
            raise ValueError(
                f"{name} {path}, {dtype} {list(shape)}, is not in both this step and the first; allowed: gradients of "
                "the same paths, shapes and dtypes in every step."
            )

    @abstractmethod
    def own(self, parameters: Any) -> Any:
        """This process's part of the parameters, as a tree for its optimizer."""

    @abstractmethod
    def reduced(self, gradients: Any, chain: Chain, *, reduce: bool, scatters: bool) -> Any:
        """This process's part of the gradients, averaged over the processes if ``reduce``."""

    @abstractmethod
    def gathered(self, own: Any, parameters: Any, chain: Chain) -> Any:
        """All parameters from the parts that the processes own. ``parameters`` gives the shapes."""

    @abstractmethod
    def merged(self, states: Sequence[dict[str, mx.array]]) -> dict[str, mx.array]:
        """The state of all parameters from those of the processes, by path."""

    @abstractmethod
    def taken(self, path: str, full: dict[str, mx.array]) -> mx.array:
        """This process's part of a full state. ``path`` is that of the part; KeyError if there is nothing."""

    def _arrays(self, tree: Any) -> list[mx.array]:
        by_path = dict(flattened(tree))
        return [by_path[path] for path in self.paths]


class ElementParts(Parts):
    """Bucket ``b`` joins parameters; each process owns the same number of elements of it, as a vector ``bucket<b>``."""

    def __init__(self, flat: Flat, rank: int, size: int, bucket_bytes: int) -> None:
        super().__init__(flat, rank, size, bucket_bytes)
        sizes = [sum(flat[index][1].size for index in bucket) for bucket in self._buckets]
        self._lengths = {f"bucket{b}": -(-total // size) for b, total in enumerate(sizes)}
        self._indices = dict(zip(self._lengths, self._buckets, strict=True))

    def own(self, parameters: Any) -> Any:
        arrays = self._arrays(parameters)
        return {name: self._cut(name, [arrays[i] for i in indices]) for name, indices in self._indices.items()}

    def reduced(self, gradients: Any, chain: Chain, *, reduce: bool, scatters: bool) -> Any:
        if not reduce:
            return self.own(gradients)
        arrays, own = self._arrays(gradients), {}
        for name, indices in self._indices.items():
            length = self._lengths[name]
            vector = joined([arrays[i] for i in indices], length * self.size)
            if scatters:
                own[name] = chain.sum_scatter(vector) / self.size
            else:
                own[name] = chain.all_sum(vector)[self.rank * length : (self.rank + 1) * length] / self.size
        return own

    def gathered(self, own: Any, parameters: Any, chain: Chain) -> Any:
        full = self._arrays(parameters)
        for name, indices in self._indices.items():
            parts = parted(chain.all_gather(own[name]), [full[i] for i in indices])
            for index, array in zip(indices, parts, strict=True):
                full[index] = array
        return tree_unflatten(list(zip(self.paths, full, strict=True)))

    def merged(self, states: Sequence[dict[str, mx.array]]) -> dict[str, mx.array]:
        full = {}
        for path, array in states[0].items():
            name, _, key = path.partition(".")
            if name not in self._indices:
                full[path] = array
                continue
            indices = self._indices[name]
            vector = mx.concatenate([state[path] for state in states])
            shapes = [mx.zeros(self._given[i][1]) for i in indices]  # not evaluated
            for index, part in zip(indices, parted(vector, shapes), strict=True):
                full[f"{self.paths[index]}.{key}"] = part
        return full

    def taken(self, path: str, full: dict[str, mx.array]) -> mx.array:
        name, _, key = path.partition(".")
        if name not in self._indices:
            return full[path]
        return self._cut(name, [full[f"{self.paths[index]}.{key}"] for index in self._indices[name]])

    def _cut(self, name: str, arrays: Sequence[mx.array]) -> mx.array:
        """This process's elements of arrays that a bucket joins. Other arrays are not touched."""
        length = self._lengths[name]
        begin, end = self.rank * length, (self.rank + 1) * length
        pieces, at = [], 0
        for array in arrays:
            if at < end and at + array.size > begin:
                pieces.append(array.reshape(-1)[max(begin - at, 0) : end - at])
            at += array.size
        return joined(pieces, length) if pieces else mx.zeros(length, arrays[0].dtype)


class ParameterParts(Parts):
    """Each process owns whole parameters. The largest are dealt out first, each to the process that has least."""

    def __init__(self, flat: Flat, rank: int, size: int, bucket_bytes: int) -> None:
        super().__init__(flat, rank, size, bucket_bytes)
        loads = [0] * size
        self._owners = [0] * len(flat)
        for index in sorted(range(len(flat)), key=lambda i: -flat[i][1].nbytes):
            self._owners[index] = loads.index(min(loads))
            loads[self._owners[index]] += flat[index][1].nbytes

    def own(self, parameters: Any) -> Any:
        return self._tree(self._arrays(parameters))

    def reduced(self, gradients: Any, chain: Chain, *, reduce: bool, scatters: bool) -> Any:
        arrays = self._arrays(gradients)
        for indices in self._buckets if reduce else []:
            total = chain.all_sum(joined([arrays[i] for i in indices])) / self.size
            for index, array in zip(indices, parted(total, [arrays[i] for i in indices]), strict=True):
                arrays[index] = array
        return self._tree(arrays)

    def gathered(self, own: Any, parameters: Any, chain: Chain) -> Any:
        updated, full = dict(flattened(own)), self._arrays(parameters)
        for dtype in dict.fromkeys(array.dtype for array in full):
            indices = [[i for i in self._owned(rank) if full[i].dtype == dtype] for rank in range(self.size)]
            length = max(sum(full[i].size for i in of_rank) for of_rank in indices)
            mine = [updated[self.paths[i]] for i in indices[self.rank]]
            vector = joined(mine, length) if mine else mx.zeros(length, dtype)
            parts = chain.all_gather(vector).reshape(self.size, length)
            for of_rank, part in zip(indices, parts, strict=True):
                for index, array in zip(of_rank, parted(part, [full[i] for i in of_rank]), strict=True):
                    full[index] = array
        return tree_unflatten(list(zip(self.paths, full, strict=True)))

    def merged(self, states: Sequence[dict[str, mx.array]]) -> dict[str, mx.array]:
        return {path: array for state in reversed(states) for path, array in state.items()}

    def taken(self, path: str, full: dict[str, mx.array]) -> mx.array:
        return full[path]

    def _owned(self, rank: int) -> list[int]:
        return [index for index, owner in enumerate(self._owners) if owner == rank]

    def _tree(self, arrays: Sequence[mx.array]) -> Any:
        flat = [(self.paths[index], arrays[index]) for index in self._owned(self.rank)]
        return tree_unflatten(flat) if flat else {}
