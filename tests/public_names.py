"""The public names of the package, as users write them."""

import ast
import inspect
import re

import mlx_anvil
import mlx_anvil.distributed
import mlx_anvil.lm
import mlx_anvil.mslc
import mlx_anvil.patching


def public_names() -> dict[str, object]:
    """Public names by the path that users write, without submodules and plain values."""
    names_of_package = set(mlx_anvil.__all__)
    names = {f"mlx_anvil.{name}": getattr(mlx_anvil, name) for name in names_of_package}
    for module in (mlx_anvil.distributed, mlx_anvil.lm, mlx_anvil.mslc, mlx_anvil.patching):
        names |= {f"{module.__name__}.{name}": getattr(module, name) for name in set(module.__all__) - names_of_package}
    own = (name for name, value in vars(mlx_anvil.nn).items() if getattr(value, "__module__", "") == "mlx_anvil.nn")
    names |= {f"mlx_anvil.nn.{name}": getattr(mlx_anvil.nn, name) for name in own}
    return {
        path: value
        for path, value in names.items()
        if not inspect.ismodule(value) and not path.rpartition(".")[2].startswith("_")
    }


NAMES = public_names()
OPS = {path for path, value in NAMES.items() if hasattr(value, "__nb_signature__")}
FUNCTIONS = {path for path, value in NAMES.items() if inspect.isfunction(value)}
CLASSES = {path for path, value in NAMES.items() if inspect.isclass(value)}


def signatures(function: object) -> list[ast.arguments]:
    """The signatures of a function; for an op, those that nanobind keeps."""
    if hasattr(function, "__nb_signature__"):
        texts = [re.sub(r"\\\d+", "None", text) for text, *_ in function.__nb_signature__]
    else:
        plain = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]
        texts = ["def f" + re.sub(r"<[^>]*>", "None", str(inspect.Signature(plain)))]
    return [arguments(text) for text in texts]


def arguments(text: str) -> ast.arguments:
    """The parsed parameters of ``def name(...)``."""
    (definition,) = ast.parse(text + ": ...").body
    assert isinstance(definition, ast.FunctionDef)
    return definition.args


def parameters(function: object) -> list[str]:
    """Names of a function's parameters."""
    names = (a.arg for kept in signatures(function) for a in (*kept.args, *kept.kwonlyargs))
    return list(dict.fromkeys(names))
