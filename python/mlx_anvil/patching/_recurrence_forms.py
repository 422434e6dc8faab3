"""The form of a step of mlx-lm's Mamba, as in :mod:`~mlx_anvil.patching._cache_forms`, and of Jamba's helper."""

# mypy: disable-error-code="no-untyped-def"

import mlx.core as mx
import mlx.nn as nn


def step_of_mamba(self, x, A, state=None):
    D = self.D
    deltaBC = self.x_proj(x)
    delta, B, C = mx.split(
        deltaBC,
        [self.time_step_rank, self.time_step_rank + self.ssm_state_size],
        axis=-1,
    )
    if self.use_bcdt_rms:
        eps = self.args.mixer_rms_eps
        delta = mx.fast.rms_norm(delta, weight=None, eps=eps)
        B = mx.fast.rms_norm(B, weight=None, eps=eps)
        C = mx.fast.rms_norm(C, weight=None, eps=eps)
    delta = nn.softplus(self.dt_proj(delta))
    new_state = mx.expand_dims(delta * x, -1) * mx.expand_dims(B, 1)
    if state is not None:
        new_state += state * mx.exp(mx.expand_dims(delta, -1) * A)
    y = (new_state @ mx.expand_dims(C, -1)).squeeze(2)
    y = y + D * x
    return y, new_state


def product_and_sum(a, b, c):
    return a * b + c
