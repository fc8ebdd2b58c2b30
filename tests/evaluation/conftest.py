"""The evaluation tests use the tables and fits of the calibration tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "calibration"))
