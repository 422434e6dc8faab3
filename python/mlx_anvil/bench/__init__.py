"""``python -m mlx_anvil bench``: how fast the ops are on this machine beside MLX's own, in files that can be compared.

:mod:`~mlx_anvil.bench.timing` is what all benchmarks of the project measure with.
"""
