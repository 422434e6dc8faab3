"""``python -m mlx_anvil bench``: times the ops beside MLX's, saves the results, and compares two runs.

All benchmarks of the project measure with :mod:`~mlx_anvil.bench.timing`.
"""
