"""The state of a sharded optimizer as one tree, and back."""

import json
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from mlx_anvil.distributed._exchange import gather_bytes
from mlx_anvil.distributed._parts import Parts
from mlx_anvil.distributed._reduce import Chain, flattened, joined, parted


def gathered_state(parts: Parts, state: Any, group: mx.distributed.Group) -> Any:
    """The states of all processes as that of one optimizer."""
    full = parts.merged(_gathered(dict(flattened(state)), group))
    mx.eval(full)  # here, as all processes have to take part
    return tree_unflatten(list(full.items()))


def own_state(parts: Parts, full: Any, like: Any, name: str) -> Any:
    """This process's part of a full state. ``like``: a state of this process, for the paths of what it needs."""
    by_path = dict(flattened(full))
    own = []
    for path, _ in flattened(like):
        try:
            own.append((path, parts.taken(path, by_path)))
        except KeyError as error:
            raise ValueError(
                f"{name} the state has no {error.args[0]}; allowed: the state of the same optimizer for the same "
                "parameters."
            ) from None
    return tree_unflatten(own)


def _gathered(own: dict[str, mx.array], group: mx.distributed.Group) -> list[dict[str, mx.array]]:
    """The arrays of every process by path. Processes may have different ones."""
    if group.size() == 1:
        return [own]
    described = [(path, list(array.shape), str(array.dtype)) for path, array in own.items()]
    listed = [json.loads(each) for each in gather_bytes(json.dumps(described).encode(), group)]
    chain = Chain(group)
    gathered: list[dict[str, mx.array]] = [{} for _ in listed]
    for dtype in dict.fromkeys(each[2] for of_rank in listed for each in of_rank):
        kind: mx.Dtype = getattr(mx, dtype.removeprefix("mlx.core."))
        like = [[(path, mx.zeros(shape, kind)) for path, shape, d in of_rank if d == dtype] for of_rank in listed]
        length = max(sum(array.size for _, array in of_rank) for of_rank in like)
        mine = [array for array in own.values() if array.dtype == kind]
        vector = joined(mine, length) if mine else mx.zeros(length, kind)
        rows = chain.all_gather(vector).reshape(len(listed), length)
        for result, of_rank, row in zip(gathered, like, rows, strict=True):
            parts = parted(row, [array for _, array in of_rank])
            result.update(zip([path for path, _ in of_rank], parts, strict=True))
    return gathered
