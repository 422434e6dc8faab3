"""``patch(model)``: the ops inside models that were written without them, in place and reversibly.

No module is replaced and no parameter moves. The class of a module becomes a subclass of its class whose methods are the
same code, with our ops where its module of origin names MLX's (:mod:`~mlx_anvil.patching._rebind`): other instances of
the class, other models and other threads are out of reach of it. What cannot be had by another name for a call is a
short list of methods written anew (:mod:`~mlx_anvil.patching._adapters`).
"""

from mlx_anvil.patching._patch import patch, unpatch
from mlx_anvil.patching._report import Fallback, Report, Row

__all__ = ["Fallback", "Report", "Row", "patch", "unpatch"]
