"""``patch(model)``: uses the ops in an existing model, in place and reversibly.

No module is replaced, no class of a module changes, and no parameter moves; only ``repack`` replaces arrays
(:mod:`~mlx_anvil.patching._repack`). A method of a class becomes a route, which looks up if the instance is patched
(:mod:`~mlx_anvil.patching._routes`). A patched instance runs a copy of the method. The copy has the same code, but some
of its global names refer to our ops (:mod:`~mlx_anvil.patching._rebind`). Other instances run the original method.
Methods that need more than another function are rewritten (:mod:`~mlx_anvil.patching._adapters`).
"""

from mlx_anvil.patching._patch import patch, unpatch
from mlx_anvil.patching._report import Fallback, Report, Row

__all__ = ["Fallback", "Report", "Row", "patch", "unpatch"]
