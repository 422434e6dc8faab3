"""Metal files of MLX's that its wheel has no header of (norms, RoPE, argmax, convolution): from GitHub, one commit, unchanged.

They are kept in the cache folder of mslc. `MLX_SOURCE` names a checkout of MLX to read them from instead. A file that is
not the one that was counted with is refused.
"""

import hashlib
import os
from pathlib import Path
from urllib.request import urlopen

from mlx_anvil.mslc.toolchain import cache_directory

COMMIT = "846d176227a0ac13d2667e58d2bb68b322109ab0"
FOLDER = "mlx/backend/metal/kernels"
DIGESTS = {
    "arg_reduce.metal": "3d413c4d7eb5a6c397a52487721f445e08ba206a997a90fddcb7e51bf126d1f2",
    "conv.metal": "d0604f69e144ffb65dcfc99e6383880b6d2d61645fa73147f35230034a1cd874",
    "rms_norm.metal": "b2e04e377fdad1d645581f9beeaf9cbb06d1ad32926161e06cbc15240caf12bf",
    "rope.metal": "2b35221ebea033ff43100b85eaaddec5c0e34e3cfd52e7c692573764b2b7d0ab",
}


def metal_file(name: str) -> str:
    """The text of a file, whose name is one of `DIGESTS`."""
    kept = cache_directory() / f"mlx-{COMMIT[:12]}" / name
    if "MLX_SOURCE" in os.environ:
        data = (Path(os.environ["MLX_SOURCE"]) / FOLDER / name).read_bytes()
    elif kept.exists():
        data = kept.read_bytes()
    else:
        with urlopen(f"https://raw.githubusercontent.com/ml-explore/mlx/{COMMIT}/{FOLDER}/{name}", timeout=60) as reply:
            data = reply.read()
    if hashlib.sha256(data).hexdigest() != DIGESTS[name]:
        raise SystemExit(f"{FOLDER}/{name} is not that of MLX's commit {COMMIT}")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
    return data.decode()
