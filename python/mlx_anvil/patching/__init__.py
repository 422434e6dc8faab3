"""``patch(model)``: the ops inside models that were written without them, in place and reversibly.

No module is replaced, none changes its class and no parameter moves. A method of a class becomes a route, which looks up
whether the instance is patched (:mod:`~mlx_anvil.patching._routes`). Those that are run a copy of the method: the same
code, which sees the globals of its module, with our ops where these name MLX's (:mod:`~mlx_anvil.patching._rebind`). Other
instances, other models and other threads run the method itself. What cannot be had by another name for a call is a short
list of methods written anew (:mod:`~mlx_anvil.patching._adapters`).
"""

from mlx_anvil.patching._patch import patch, unpatch
from mlx_anvil.patching._report import Fallback, Report, Row

__all__ = ["Fallback", "Report", "Row", "patch", "unpatch"]
