"""An output head that is split over processes."""

import mlx.core as mx
import mlx.nn as nn


class GatheredLinear(nn.Module):
    """Each process computes some outputs of a linear layer, and gathers all of them.

    The result is the same in every process. Its gradient is not summed, as every process has the whole of it; the
    gradient of the input is, by ``part``.

    Args:
        part (mlx.nn.Module): an ``AllToShardedLinear``, quantized or not, with this process's outputs. All processes
            but the last have equally many, and the last one at most as many.
        share (int): their number.
        output_dims (int): the outputs of all processes.
    """

    def __init__(self, part: nn.Module, share: int, output_dims: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = part
        self.share = share
        self.output_dims = output_dims

    def __call__(self, x: mx.array) -> mx.array:
        """``[..., output_dims]``, of x ``[..., input_dims]``."""
        y: mx.array = self.part(x)
        group = self.part.group
        if group.size() == 1:
            return y
        if y.shape[-1] < self.share:
            y = mx.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, self.share - y.shape[-1])])
        every = mx.distributed.all_gather(y[None], group=group)  # a process's outputs behind each other
        return mx.moveaxis(every, 0, -2).flatten(-2)[..., : self.output_dims]
