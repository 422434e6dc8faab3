"""What a launch of the project's own dispatch asks of memory."""

import re
from dataclasses import replace

import numpy as np

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil.mslc import PROFILED, Library
from mlx_anvil.mslc.preprocess import Source
from mlx_anvil.mslc.profile import LaunchProfile


def profile(op: str, event: mlx_anvil.Event, arrays: list[np.ndarray]) -> LaunchProfile:
    """Of a kernel under ``metal/<op>``, with the function constants, grid and threadgroup of ``event``."""
    found = re.fullmatch(r"(.*?)((?:_c\d+[tf])*)", event.kernel)
    assert found
    constants = {int(i): flag == "t" for i, flag in re.findall(r"_c(\d+)([tf])", found[2])}
    text = Source(text=_ext._op_source(op), name=f"metal/{op}")
    library = Library(text, constants=constants, options=replace(PROFILED, kernels=(found[1],)))
    report = library.run(found[1], dict(enumerate(arrays)), event.grid, event.threadgroup)
    assert report.profile is not None
    return report.profile
