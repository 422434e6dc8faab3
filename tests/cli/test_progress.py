"""Long runs show their progress and the time left, only on a terminal and on stderr."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from mlx_anvil import _cli
from mlx_anvil.mslc.commands.progress import LEAST, in_progress

pytestmark = pytest.mark.cpu_only

FILES = ["one.metal", "two.metal", "three.metal", "four.metal"]


def shown(files: list[str], is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    assert list(in_progress(files, console)) == files
    return console.file.getvalue()


def test_many_files_on_a_terminal():
    text = shown(FILES, True)
    assert f"{len(FILES)}/{len(FILES)}" in text
    assert "left" in text


@pytest.mark.parametrize(("files", "is_terminal"), [(FILES, False), (FILES[: LEAST - 1], True)])
def test_nothing_is_shown(files, is_terminal):
    assert "left" not in shown(files, is_terminal)


def test_the_bar_of_the_commands_has_the_time_left(capsys):
    with _cli.progress_bar() as progress:
        assert isinstance(progress, Progress)
        assert any(isinstance(column, TimeRemainingColumn) for column in progress.columns)
        progress.advance(progress.add_task("", total=2))
    assert capsys.readouterr() == ("", "")
