"""Which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from tsunax._core import checks, trees
from tsunax.errors import WrongTypeError

__all__ = ["Best"]

Metrics = Mapping[int, Mapping[str, float]]  # of each step


@dataclass(frozen=True)
class Best:
    """Keep the `k` checkpoints with the best `metric` of `save(metrics=...)`.

    The best are the lowest ("min") or the highest ("max"). Raises WrongTypeError for another mode
    or none, HyperparameterError if the number `k` is below 1.

    >>> Best("accuracy", mode="max", k=3)
    Best(metric='accuracy', mode='max', k=3)
    """

    metric: str
    _: KW_ONLY
    mode: str | None = None  # "min" or "max": which one is better, no name tells
    k: int = 1

    def __post_init__(self) -> None:
        checks.check_count(self.k, "Best()", "k")
        if not checks.is_one_of(self.mode, ("min", "max")):
            got, fix = trees.describe(self.mode), "It says which values are the best."
            raise WrongTypeError("mode", "Best()", got, "'min' or 'max'", fix)

    def of(self, metrics: Metrics) -> list[int]:
        """The best steps of `metrics`; a NaN is never one of them, and of equal ones the later is.

        >>> Best("loss", mode="min").of({10: {"loss": 0.5}, 20: {"loss": 0.4}})
        [20]
        """
        sign = -1 if self.mode == "max" else 1
        known = {step: sign * found[self.metric] for step, found in metrics.items()
                 if not math.isnan(found.get(self.metric, math.nan))}  # fmt: skip
        return sorted(known, key=lambda step: (known[step], -step))[: self.k]


def dropped(known: Metrics, last: int | None, best: Best | None, every: int | None) -> list[int]:
    """The steps that no policy keeps, after the newest of them was written."""
    if last is None:
        return []
    kept = set(sorted(known)[-last:])
    if best is not None:
        kept.update(best.of(known))
    if every is not None:
        kept.update(step for step in known if step % every == 0)
    return [step for step in sorted(known) if step not in kept]
