"""Progress bars on stderr."""

from typing import Any


def bar() -> Any:
    """Description, bar, rate and time left; tasks have the fields `done` and `rate`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description} {task.fields[done]}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
