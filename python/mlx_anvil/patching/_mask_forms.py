"""The form of the mask of mlx-lm's ``BatchRotatingKVCache``, as in :mod:`~mlx_anvil.patching._cache_forms`."""

# mypy: disable-error-code="no-untyped-def, call-arg"

import mlx.core as mx


def batch_rotating_mask(self, N: int, window_size=None, return_array: bool = False):
    left_padding = self.left_padding
    window_size = window_size or self.max_size
    offset = min(self.max_size - 1, self._offset)
    rinds = mx.arange(offset + N)
    linds = mx.arange(offset, offset + N) if offset else rinds
    linds = linds[:, None]
    rinds = rinds[None]
    mask = linds >= rinds
    mask &= linds < rinds + window_size
    if (trim_size := self._idx - self.max_size + int(N > 1)) > 0:
        left_padding = left_padding - trim_size

    rotated = N == 1 and (self.rotated or self._idx >= self.max_size)
    if rotated:
        left_padding = left_padding - 1

    mask = mask & (rinds >= mx.expand_dims(left_padding, (1, 2, 3)))

    if rotated:
        idx = self._idx
        if idx >= self.max_size:
            idx = 0
        mask = mx.roll(mask, shift=idx + 1, axis=-1)

    return mask
