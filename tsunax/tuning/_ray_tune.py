"""Trials on a Ray cluster, many at once; and an objective for Ray Tune.

Values are drawn by this process, and it writes the journal as the trials end. Searchers, schedulers
and restarts of Ray Tune work on `trainable`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from tsunax.distributed.ray import library
from tsunax.tuning import _sweep, _trials
from tsunax.tuning._trials import Cause, Trial


def trainable(objective: Callable[..., Any], metric: str) -> Callable[[Mapping[str, Any]], None]:
    """See `tuning.as_trainable`."""

    def train(config: Mapping[str, Any]) -> None:
        tune = library(".tune", "as_trainable()")

        def report(step: int, value: float) -> None:
            tune.report({metric: float(value), "step": int(step)})

        own = _trials.own(objective, tune.get_context().get_trial_id(), report)
        found = objective(**config, **own)
        metrics, value = _trials.numbers(found, metric if metric != "value" else None)
        tune.report({**metrics, metric: value})

    return train


def _trial(objective: Callable, metric: str | None, index: int, values: dict[str, Any]) -> Trial:
    """One trial, in a worker of Ray."""
    reports: dict[int, float] = {}
    own = _trials.own(objective, index, lambda step, value: _trials.note(reports, step, value))
    began = time.perf_counter()
    try:
        outcome = jax.block_until_ready(objective(**values, **own))
    except Exception as error:
        outcome = _trials.cause_of(error)
    return _trials.judged(index, values, outcome, metric, reports, time.perf_counter() - began)


class Spread(_sweep.Drawn):
    """A `Drawn` whose trials run in workers of Ray."""

    def __init__(
        self, space, seed, resources: Mapping | None = None, concurrent: int | None = None
    ):
        super().__init__(space, seed)
        self.resources, self.concurrent = dict(resources or {"cpu": 1}), concurrent
        library(where="tune()")

    def go(self, sweep: _sweep.Sweep, left: Iterable[int]) -> None:
        ray, running, left = library(), {}, iter(left)
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        given = {f"num_{name}s": n for name, n in self.resources.items()}
        run = ray.remote(_trial).options(max_retries=0, **given)
        most = self.concurrent or int(ray.cluster_resources().get("CPU", 1))
        while not sweep.ending.asked:
            while len(running) < most and (i := next(left, None)) is not None:
                if not sweep.died(i, values := self.values(i)):
                    sweep.journal.start([i])
                    running[run.remote(sweep.objective, sweep.metric, i, values)] = i
            if not running:
                return
            try:
                sweep.ending.is_inside = True  # a signal ends the wait
                (done, *_), _ = ray.wait(list(running))
            except (KeyboardInterrupt, SystemExit):
                break
            finally:
                sweep.ending.is_inside = False
            i = running.pop(done)
            try:
                sweep.end([ray.get(done)])
            except ray.exceptions.RayError as error:
                cause = Cause("RayError", str(error).strip().splitlines()[-1][:300])
                sweep.end([Trial(i, self.values(i), "failed", cause=cause)])
        for reference, i in running.items():
            ray.cancel(reference, force=True)
            sweep.interrupted.append(Trial(i, self.values(i), "interrupted"))
            sweep.journal.interrupt([i])
