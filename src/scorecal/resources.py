"""Files that ship with scorecal: configs and frozen tables, in a checkout or a wheel."""

from collections.abc import Callable
from pathlib import Path

_PACKAGE = Path(__file__).parent


def _folders(kind: str) -> list[Path]:
    """Where files of a kind lie: the working directory, the checkout, the wheel."""
    return [Path.cwd() / kind, _PACKAGE.parents[1] / kind, _PACKAGE / kind]


def find(kind: str, name: str, exists: Callable[[Path], bool] = Path.is_file) -> Path | None:
    """The path that `name` is, or the shipped file of that name."""
    path = Path(name).expanduser()
    candidates = [path]
    if not path.is_absolute():
        candidates += [folder / path for folder in _folders(kind)]
    return next((candidate for candidate in candidates if exists(candidate)), None)


def names(kind: str, pattern: str) -> list[str]:
    """Names of the shipped files of a kind."""
    return sorted({path.name for folder in _folders(kind) for path in folder.glob(pattern)})
