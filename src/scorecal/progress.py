"""What somebody who watches a command sees on stderr: notices, and bars where it is a terminal."""

import sys
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

Thing = TypeVar("Thing")
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Show neither notices nor bars from now on, or show both."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Whether notices and bars are left out."""
    return _quiet


def notice(text: str) -> None:
    """A line on stderr."""
    if not _quiet:
        sys.stderr.write(text + "\n")


def bar() -> Any:
    """Description, bar, rate and time left; tasks have the fields `done` and `rate`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description} {task.fields[done]}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=_quiet or not console.is_terminal,
    )


def tracked(things: Collection[Thing], description: str) -> Iterator[Thing]:
    """The things one by one, under a bar."""
    with bar() as progress:
        task = progress.add_task(description, total=len(things), done="", rate="")
        for done, thing in enumerate(things, 1):
            yield thing
            progress.update(task, completed=done, done=f"{done}/{len(things)}")
