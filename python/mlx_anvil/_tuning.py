"""The file of ``python -m mlx_anvil tune``: where it is, and what it says. Kernels are launched as it says.

``csrc/common/choices.h`` has the choices. The file is read at the first launch that has one.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from mlx_anvil import _ext

VARIABLE = "MLX_ANVIL_TUNING"
FORMAT = 1


class TuningFileError(ValueError):
    """A file that is not a tuning file; the text says why."""


def path() -> Path | None:
    """The file that is read: ``MLX_ANVIL_TUNING``, or in the user's configuration folder. None if it is ``off``."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() == "off":
        return None
    if given:
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-anvil" / "tuning.json"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mlx-anvil" / "tuning.json"


def shown(file: Path) -> str:
    """The path with ``~`` for the home folder."""
    home = Path.home()
    return f"~/{file.relative_to(home)}" if file.is_relative_to(home) else str(file)


def load(file: Path) -> dict[str, Any]:
    """The sections of a file by device.

    Raises:
        TuningFileError: the file cannot be read, or is no tuning file.
    """
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TuningFileError(error.strerror or str(error)) from None
    except ValueError as error:  # of JSON or of UTF-8
        raise TuningFileError(f"it is not JSON: {error}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise TuningFileError(f'it has no "format": {FORMAT}')
    devices = body.get("devices")
    if not isinstance(devices, dict) or not all(
        isinstance(section, dict) and isinstance(section.get("choices"), dict) for section in devices.values()
    ):
        raise TuningFileError('it has no "devices", each with its "choices"')
    return devices


def usable(choices: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The choices that exist and have an allowed value, and what is wrong with the others."""
    fields = _ext._choice_fields()
    good, wrong = {}, []
    for name, value in choices.items():
        if name not in fields:
            wrong.append(f"{name} is not a choice of this version")
        elif isinstance(value, bool) or not isinstance(value, int) or not fields[name][0] <= value <= fields[name][1]:
            wrong.append(f"{name} is {value!r}; allowed: integers from {fields[name][0]} to {fields[name][1]}")
        else:
            good[name] = value
    return good, wrong


def _read(key: str) -> dict[str, int]:
    """What the file says about a device. What it says wrongly is ignored with a warning."""
    file = path()
    if file is None or not (file.exists() or os.environ.get(VARIABLE)):
        return {}
    try:
        section = load(file).get(key, {"choices": {}})
    except TuningFileError as error:
        warnings.warn(f"[tune] {file}: {error}. The defaults are used.", RuntimeWarning, stacklevel=2)
        return {}
    good, wrong = usable(section["choices"])
    if wrong:
        warnings.warn(f"[tune] {file}: {'; '.join(wrong)}. Ignored.", RuntimeWarning, stacklevel=2)
    return good


def state() -> str:
    """Which file is in force, in words, and for which devices."""
    file = path()
    if file is None:
        return f"off ({VARIABLE})"
    if not file.exists():
        return f"defaults; {shown(file)} does not exist" if os.environ.get(VARIABLE) else "defaults"
    try:
        devices = load(file)
    except TuningFileError as error:
        return f"defaults; {shown(file)}: {error}"
    wrong = [text for section in devices.values() for text in usable(section["choices"])[1]]
    return f"{shown(file)}, for {', '.join(devices) or 'no device'}" + "".join(f"; ignored: {text}" for text in wrong)


def forget() -> None:
    """Reads the file at the next launch, again if it was read before."""
    _ext._set_choices_file(_read)
