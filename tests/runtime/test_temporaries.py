"""Temporaries of a launch are memory that only one call uses, so MLX lets later kernels start without waiting for them.
An array of the graph among them could be read too early. The type Scratch (csrc/common/scratch.h) prevents that, and
launch() checks that nobody else holds a temporary."""

import pytest

import mlx_anvil
from mlx_anvil import _ext

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("held", ["array", "view"])
def test_launch_refuses_a_temporary_that_somebody_holds(held):
    message = (
        r"^\[silu_gate\] .*silu_gate_forward_float32_flat received a temporary that is also held elsewhere; "
        r"allowed: memory that only this call uses\."
    )
    with mlx_anvil.simulate(), pytest.raises(RuntimeError, match=message):
        _ext._launch_with_held_temporary(held)
