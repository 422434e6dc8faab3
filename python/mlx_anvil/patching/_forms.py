"""Forms of gated MLPs. A method has a form if its bytecode is equal, up to the names of its layers and of its
activation.

They never run. ``nn`` has to be an import: the bytecode of ``nn.activation(...)`` depends on that.
"""

# mypy: disable-error-code="attr-defined"

from typing import Any

import mlx.nn as nn

activated: Any = None


def of_function(self, x):  # type: ignore[no-untyped-def]
    return self.down(activated(self.gate(x), self.up(x)))


def in_line(self, x):  # type: ignore[no-untyped-def]
    return self.down(nn.activation(self.gate(x)) * self.up(x))


def in_steps(self, x):  # type: ignore[no-untyped-def]
    """RecurrentGemma."""
    gate = self.gate(x)
    x = self.up(x)
    return self.down(nn.activation(gate) * x)


def with_norm(self, x):  # type: ignore[no-untyped-def]
    """BitNet."""
    x = nn.activation(self.gate(x)) * self.up(x)
    x = self.norm(x)
    x = self.down(x)
    return x
