"""``python -m mlx_anvil tune``: measures choices between kernels on this machine, and writes the file that holds them."""
