"""The order of communication, which has to be the same on all ranks."""

import mlx.core as mx


class Order:
    """Makes each exchange wait for the one before it, in the order of the calls.

    Without it, the order is that of evaluation, which may differ between ranks: a rank that stores a token evaluates
    more than one that does not. And MLX's ring mixes up messages of two streams that communicate at the same time, as
    mlx-lm's stream and the default one would.
    """

    def __init__(self) -> None:
        self._last: mx.array | None = None

    def after_last(self, *arrays: mx.array) -> list[mx.array]:
        """The arrays, which wait for the last exchange."""
        return list(arrays) if self._last is None else mx.depends(list(arrays), [self._last])

    def set_last(self, result: mx.array) -> None:
        """Takes an array that depends on the last exchange."""
        self._last = result

    def settle(self) -> None:
        """Forgets the last exchange. All ranks have evaluated the same arrays, and read no others."""
        self._last = None

    def wait(self) -> None:
        """Waits for the last exchange."""
        if self._last is not None:
            mx.eval(self._last)


ORDER = Order()  # of the process: groups share its sockets
