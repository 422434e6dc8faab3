"""``ShardedOptimizer``: each process keeps its part of the state of an optimizer."""

from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_unflatten

from mlx_anvil.distributed._parts import ElementParts, Flat, ParameterParts, Parts
from mlx_anvil.distributed._reduce import BUCKET_BYTES, Chain, check_bucket_bytes, flattened
from mlx_anvil.distributed._state import gathered_state, own_state

_NAME = "[ShardedOptimizer]"
_ELEMENTWISE = (
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.AdaDelta,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.Lion,
)
_OF_WHOLE_PARAMETERS = (optim.Adafactor, optim.Muon, optim.MultiOptimizer)
Split = Literal["auto", "elements", "parameters"]


class ShardedOptimizer:
    """Wraps an optimizer of MLX for data-parallel training: each process keeps 1/n of its state (ZeRO stage 1).

    A step averages the gradients of the processes, each process updates its own part of the parameters, and the parts
    are gathered. All processes then have the same parameters, bit for bit. They are those that ``optimizer`` alone
    computes from the averaged gradients, to the rounding of sums in another order. The sums start during the backward pass, as in :func:`reduce_gradients`.

    How the parameters are split:

    - ``"elements"``: vectors that join several parameters are cut into n equal parts. For optimizers that treat every
      element alone: SGD, RMSprop, Adagrad, AdaDelta, Adam, AdamW, Adamax, Lion.
    - ``"parameters"``: each process has whole parameters, of about the same size in sum. For Adafactor, Muon,
      MultiOptimizer, and optimizers of other classes.

    Parameters and gradients stay whole in every process. Where these are too large as well, use MLX's
    ``nn.fully_shard``, which keeps 1/n of each parameter and gathers it for every pass; it needs a backend with
    ``mx.distributed.sum_scatter``, and a first axis that n divides in every parameter. This class works on all backends,
    the ring included: if the backend has no ``sum_scatter``, the whole sum is made and 1/n of it kept. That is tried
    once, when the object is made.

    Args:
        optimizer: an optimizer of ``mlx.optimizers``, without a state yet.
        group: the processes; the global group of ``mx.distributed.init()`` if None. All of them make the object and
            call its methods at the same places. In a group of one process, it does what ``optimizer`` does.
        split: ``"elements"``, ``"parameters"``, or ``"auto"``: the first where it is allowed.
        reduce: average the gradients over the processes. With False, they are averaged already.
        max_norm: scales the averaged gradients down to this global norm, as ``mlx.optimizers.clip_grad_norm`` does.
        bucket_bytes: see :func:`reduce_gradients`. It also is the size of the vectors that ``"elements"`` cuts.
        stream: where the processes communicate; see :func:`reduce_gradients`.

    Attributes:
        optimizer: the optimizer, whose ``state`` is this process's part.
        gradient_norm (array or None): with ``max_norm``, the norm of the last gradients before scaling.

    Raises:
        ValueError: ``split`` is unknown, or ``"elements"`` and the optimizer needs whole parameters; the gradients of a
            step are not those of the first step; ``max_norm`` or ``bucket_bytes`` is not positive.

    Example:
        >>> optimizer = ShardedOptimizer(optim.AdamW(1e-3), group)
        >>> loss, gradients = loss_and_gradients(model, batch)  # of this process's batch
        >>> optimizer.update(model, gradients)
        >>> mx.eval(loss, model.parameters(), optimizer.state)

    A step can be compiled with ``mx.compile``, after :meth:`init`.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        group: mx.distributed.Group | None = None,
        *,
        split: Split = "auto",
        reduce: bool = True,
        max_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        stream: mx.Stream | None = None,
    ) -> None:
        if split not in ("auto", "elements", "parameters"):
            raise ValueError(f"{_NAME} split is {split!r}; allowed: 'auto', 'elements', 'parameters'.")
        if split == "elements" and isinstance(optimizer, _OF_WHOLE_PARAMETERS):
            raise ValueError(
                f"{_NAME} split is 'elements' and {type(optimizer).__name__} needs whole parameters; allowed with it: "
                "'auto', 'parameters'."
            )
        if max_norm is not None and max_norm <= 0:
            raise ValueError(f"{_NAME} max_norm is {max_norm}; allowed: positive numbers, None.")
        check_bucket_bytes(bucket_bytes, _NAME)
        self.optimizer = optimizer
        self.gradient_norm: mx.array | None = None
        self._group = group or mx.distributed.init()
        # A subclass may do anything in its update.
        self._elements = split == "elements" or (split == "auto" and type(optimizer) in _ELEMENTWISE)
        self._reduce, self._max_norm, self._bucket_bytes, self._stream = reduce, max_norm, bucket_bytes, stream
        self._scatters = self._elements and self._group.size() > 1 and has_sum_scatter(self._group)
        self._parts: Parts | None = None

    def init(self, parameters: Any) -> None:
        """Makes the state before the first step, for example to read a checkpoint into it.

        Args:
            parameters: the tree of the trainable parameters.
        """
        parts = self._parts_of(parameters)
        _initialize(self.optimizer, parts.own(parameters))

    def update(self, model: nn.Module, gradients: Any) -> None:
        """Updates the parameters of the model.

        Args:
            model: the model, with the same parameters in all processes.
            gradients: this process's gradients, such as those that ``nn.value_and_grad`` returns.
        """
        model.update(self.apply_gradients(gradients, model))

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Returns the updated parameters as a tree like ``gradients``. ``parameters`` may have more than these."""
        parts = self._parts_of(gradients)
        chain = Chain(self._group, self._stream)
        own = parts.reduced(gradients, chain, reduce=self._reduce, scatters=self._scatters)
        if self._max_norm is not None:
            own = self._clipped(own, self._max_norm, chain)
        updated = _applied(self.optimizer, own, parts.own(parameters))
        return parts.gathered(updated, parameters, chain)

    @property
    def state(self) -> Any:
        """This process's part of the state, to evaluate after a step."""
        return self.optimizer.state

    @property
    def step(self) -> mx.array:
        step: mx.array = self.optimizer.step
        return step

    @property
    def learning_rate(self) -> mx.array:
        rate: mx.array = self.optimizer.learning_rate
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: float | mx.array) -> None:
        self.optimizer.learning_rate = rate

    def full_state(self) -> Any:
        """The state of all processes as one tree, that of ``optimizer`` used alone. Every process has to call it.

        It does not depend on the number of processes, so a checkpoint with it can be read by another number of them.
        """
        return gathered_state(self._need_parts(), self.optimizer.state, self._group)

    def load_full_state(self, state: Any, parameters: Any) -> None:
        """Takes this process's part of what :meth:`full_state` returned, or of the state of an optimizer used alone.

        Args:
            state: the tree.
            parameters: the tree of the trainable parameters.

        Raises:
            ValueError: the state has nothing for one of the parameters.
        """
        self.init(parameters)
        self.optimizer.state = own_state(self._need_parts(), state, self.optimizer.state, _NAME)

    def _parts_of(self, tree: Any) -> Parts:
        flat = flattened(tree)
        if self._parts is None:
            kind = ElementParts if self._elements else ParameterParts
            self._parts = kind(flat, self._group.rank(), self._group.size(), self._bucket_bytes)
        self._parts.check(flat, _NAME)
        return self._parts

    def _need_parts(self) -> Parts:
        if self._parts is None:
            raise ValueError(f"{_NAME} there is no state yet; allowed: after init, or after the first step.")
        return self._parts

    def _clipped(self, own: Any, max_norm: float, chain: Chain) -> Any:
        flat = flattened(own)
        # In float32, as a process without parameters sends a float32 zero.
        squares = [gradient.astype(mx.float32).square().sum() for _, gradient in flat]
        total = mx.array(sum(squares, mx.array(0.0)))
        self.gradient_norm = mx.sqrt(chain.all_sum(total) if self._group.size() > 1 else total)
        scale = mx.minimum(max_norm / (self.gradient_norm + 1e-6), 1.0)
        return _unflattened([(path, gradient * scale.astype(gradient.dtype)) for path, gradient in flat])


def _initialize(optimizer: optim.Optimizer, parameters: Any) -> None:
    for each, tree in _dealt(optimizer, parameters):
        each.init(tree)


def _applied(optimizer: optim.Optimizer, gradients: Any, parameters: Any) -> Any:
    """The updated parameters. An optimizer without any still counts the step."""
    updated = [
        leaf
        for each, tree in _dealt(optimizer, gradients)
        for leaf in flattened(each.apply_gradients(tree, parameters))
    ]
    return _unflattened(updated)


def _dealt(optimizer: optim.Optimizer, tree: Any) -> list[tuple[optim.Optimizer, Any]]:
    """Optimizers and the part of a tree for each. MultiOptimizer itself fails where one of its parts is empty."""
    if not isinstance(optimizer, optim.MultiOptimizer):
        return [(optimizer, tree)]
    parts: list[Flat] = [[] for _ in optimizer.optimizers]
    for path, array in flattened(tree):
        parts[next(i for i, accepts in enumerate(optimizer.filters) if accepts(path, array))].append((path, array))
    return [(each, _unflattened(part)) for each, part in zip(optimizer.optimizers, parts, strict=True)]


def _unflattened(flat: Flat) -> Any:
    return tree_unflatten(flat) if flat else {}


def has_sum_scatter(group: mx.distributed.Group) -> bool:
    """True if the backend of the group has ``mx.distributed.sum_scatter``. MLX has no other way to ask."""
    try:
        mx.eval(mx.distributed.sum_scatter(mx.zeros(group.size()), group=group))
    except RuntimeError as error:
        if "sum_scatter" not in str(error):
            raise
        return False
    return True
