"""What resampled figures say: intervals, p-values, and which of many differences are reliable."""

import math
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from scorecal.functional.resampling import percentile_interval

LEVEL = 0.95


class Interval(NamedTuple):
    """An estimate and its 95 % interval; NaN where undefined or not resampled."""

    estimate: float
    low: float
    high: float


def interval(estimate: float, samples: Float[Tensor, " resamples"], groups: int) -> Interval:
    """Expanded percentile interval (Hesterberg 2015): a percentile interval of few groups is short.

    The tail is that at which a normal interval would be as wide as Student's over `groups`.

    >>> samples = torch.linspace(-1, 1, 2001)
    >>> [round(interval(0.0, samples, groups).high, 3) for groups in (10, 1000)]
    [0.983, 0.95]
    """
    if math.isnan(estimate) or groups < 2 or len(samples) < 2:
        return Interval(estimate, math.nan, math.nan)
    from scipy.stats import norm, t

    reach = t.ppf((1 + LEVEL) / 2, groups - 1) * math.sqrt(groups / (groups - 1))
    low, high = percentile_interval(samples, level=1 - 2 * float(norm.sf(reach)))
    return Interval(estimate, low.item(), high.item())


def difference_p(samples: Float[Tensor, " resamples"], groups: int) -> float:
    """Two-sided p of a difference being 0: where the interval would just exclude it.

    NaN resamples, of an undefined metric, are left out. Where all lie on one side, the normal tail
    of their mean and deviation tells how far beyond: 2,000 of them could not say less than 0.001.
    """
    samples = samples[~samples.isnan()]
    if groups < 2 or len(samples) < 2:
        return math.nan
    from scipy.stats import norm, t

    below, above = int((samples <= 0).sum()), int((samples >= 0).sum())
    tail = min((min(below, above) + 1) / (len(samples) + 1), 0.5)
    reach = float(norm.isf(tail))
    if min(below, above) == 0:
        reach = max(reach, abs(samples.mean().item()) / max(samples.std().item(), 1e-300))
    reach /= math.sqrt(groups / (groups - 1))
    return float(2 * t.sf(reach, groups - 1))


def adjusted(p_values: list[float]) -> list[float]:
    """Benjamini and Hochberg's q of each p; NaN stays NaN and counts for nothing."""
    from scipy.stats import false_discovery_control

    known = [p for p in p_values if not math.isnan(p)]
    q_values = iter(false_discovery_control(known).tolist() if known else [])
    return [math.nan if math.isnan(p) else next(q_values) for p in p_values]
