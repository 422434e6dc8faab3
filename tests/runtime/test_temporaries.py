"""The temporaries of a launch are memory that one call alone uses.

MLX takes them out of what later kernels wait for. With an array of the graph among them, a later kernel could read it
too early. Which arrays may become temporaries is settled by the type (csrc/common/scratch.h); that nobody took a copy,
at launch.
"""

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
