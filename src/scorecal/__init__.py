"""Calibrate LLM judges that score text on a numeric scale."""

from typing import Any

__all__ = [
    "Calibration",
    "HeadSettings",
    "ScoreData",
    "ServerJudge",
    "Task",
    "TransformersJudge",
    "VllmJudge",
]

_HOMES = {
    "Calibration": "scorecal.calibration.module",
    "HeadSettings": "scorecal.calibration.head",
    "ScoreData": "scorecal.calibration.data",
    "ServerJudge": "scorecal.judging.server",
    "Task": "scorecal.judging.task",
    "TransformersJudge": "scorecal.judging.transformers",
    "VllmJudge": "scorecal.judging.vllm",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are used: a judge's engine is heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'scorecal' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
