"""Data-parallel training: gradients are reduced while they are made, and optimizer states are sharded."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
import training_programs as programs
from mlx.utils import tree_unflatten

from mlx_anvil import distributed
from mlx_anvil.distributed import _local

pytestmark = pytest.mark.cpu_only

ELEMENTWISE = ["SGD", "RMSprop", "Adagrad", "AdaDelta", "Adam", "AdamW", "Adamax", "Lion"]
# Sums in another order round differently; optimizers that divide by a small root amplify it.
TOLERANCE = 1e-5


def largest_difference(ours: programs.Arrays, expected: programs.Arrays) -> float:
    assert ours.keys() == expected.keys()
    for path, array in expected.items():
        assert ours[path].shape == array.shape, path
        assert ours[path].dtype == array.dtype, path
    return max(float(np.max(np.abs(ours[path] - expected[path]), initial=0.0)) for path in expected)


@pytest.mark.parametrize("processes", [2, 3])
def test_sharded_optimizers_do_what_optimizers_alone_do(processes: int):
    names = list(programs.OPTIMIZERS)
    results = _local.results(programs.optimizers, processes, names)
    for name in names:
        parameters, state, _, expected, expected_state, whole = results[0][name]
        assert largest_difference(parameters, expected) < TOLERANCE, name
        assert largest_difference(state, expected_state) < TOLERANCE, name
        assert largest_difference(parameters, programs.arrays_of(programs.small_model().parameters())) > 1e-3, name
        for result in results:
            assert largest_difference(result[name][0], parameters) == 0, name
            if name in ELEMENTWISE:
                assert result[name][2] < whole / processes + 200, name
        assert sum(result[name][2] for result in results) < whole + 200 * processes, name


def test_steps_of_every_kind_agree():
    ways = _local.results(programs.variants, 3)[0]
    plain = ways.pop("plain")
    assert set(ways) == {"compiled", "averaged before", "with sum_scatter"}
    for way, parameters in ways.items():
        assert largest_difference(parameters, plain) < 1e-6, way


def test_another_number_of_processes_reads_the_state():
    """Two processes train; one goes on alone, with its own batches."""
    parameters, state, *_ = _local.results(programs.optimizers, 2, ["AdamW"])[0]["AdamW"]
    outcomes = []
    for optimizer in (
        optim.AdamW(0.01, weight_decay=0.1),
        distributed.ShardedOptimizer(optim.AdamW(0.01, weight_decay=0.1)),
    ):
        model = programs.small_model()
        model.update(tree_unflatten([(path, mx.array(array)) for path, array in parameters.items()]))
        full = tree_unflatten([(path, mx.array(array)) for path, array in state.items()])
        if isinstance(optimizer, distributed.ShardedOptimizer):
            optimizer.load_full_state(full, model.trainable_parameters())
        else:
            optimizer.state = full
        programs.train(model, optimizer, mx.distributed.init(), range(2), averages=False)
        outcomes.append(programs.arrays_of(model.parameters()))
    assert largest_difference(*outcomes) < 1e-7
    assert largest_difference(outcomes[0], parameters) > 1e-3


def test_reduced_gradients_are_averages():
    for result in _local.results(programs.reduced, 3, [1, 100, 1 << 20]):
        for ours, expected in result:
            assert largest_difference(ours, expected) < 1e-6


def test_sums_run_during_the_backward_pass():
    """The other rank sees each sum end. MLX's average comes after the backward pass, whatever its stream."""
    kinds = ["reduce_gradients", "average_gradients"]
    _, rounds = _local.results(programs.times_of_sums, 2, 3 * kinds)
    # When the first sum ends, as a share of when the last one does. A busy machine blurs a single round.
    ours, mlx = (min(times[0] / times[-1] for times in rounds[kind::2]) for kind in (0, 1))
    assert ours < 0.9 * mlx


def test_refused():
    assert programs.refused() == [
        "[ShardedOptimizer] split is 'elements' and Muon needs whole parameters; allowed with it: 'auto', 'parameters'.",
        "[ShardedOptimizer] split is 'half'; allowed: 'auto', 'elements', 'parameters'.",
        "[ShardedOptimizer] max_norm is 0.0; allowed: positive numbers, None.",
        "[ShardedOptimizer] bucket_bytes is 0; allowed: positive numbers.",
        "[ShardedOptimizer] there is no state yet; allowed: after init, or after the first step.",
        "[ShardedOptimizer] layers.0.bias, mlx.core.float32 [11], is not in both this step and the first; allowed: "
        "gradients of the same paths, shapes and dtypes in every step.",
        "[ShardedOptimizer] the state has no layers.3.bias.v; allowed: the state of the same optimizer for the same "
        "parameters.",
        "[reduce_gradients] bucket_bytes is -1; allowed: positive numbers.",
    ]
