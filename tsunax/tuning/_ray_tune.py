"""Trials on a Ray cluster, many at once, under Ray Tune's schedulers. What is tried is drawn here,
and recorded here.

Each trial is a function trainable that computes its values from its number, and reports its record
in the end. The driver writes the journal as the records come in; Ray's own files are thrown away.
"""

from __future__ import annotations

import importlib
import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from tsunax.errors import MissingLibraryError, WrongTypeError, message
from tsunax.tuning import _sweep, _trials
from tsunax.tuning._trials import Cause, Trial

__all__ = []


def _tune() -> Any:
    try:
        return importlib.import_module("ray.tune")
    except ModuleNotFoundError as error:
        fix = "pip install 'tsunax[ray]'"
        raise MissingLibraryError(
            message("ray", "tune()", "no such library", "Ray", fix)
        ) from error


def trainable(objective: Callable[..., Any], metric: str) -> Callable[[Mapping[str, Any]], None]:
    """See `tuning.as_trainable`."""

    def train(config: Mapping[str, Any]) -> None:
        tune = _tune()

        def report(step: int, value: float) -> None:
            _trials.note({}, step, value)
            tune.report({metric: float(value), "step": int(step)})

        own = _trials.own(objective, tune.get_context().get_trial_id(), report)
        metrics, value = _trials.numbers(
            objective(**config, **own), metric if metric != "value" else None
        )
        tune.report({**metrics, metric: value})

    return train


class Spread(_sweep.Drawn):
    """A `Drawn` whose trials run elsewhere."""

    def __init__(
        self,
        space,
        seed,
        mode,
        pruner,
        scheduler: Any = None,
        resources: Any = None,
        concurrent: Any = None,
    ):
        super().__init__(space, seed, mode, pruner, None)
        if pruner is not None:
            fix = 'ray.tune.schedulers.ASHAScheduler(time_attr="step", max_t=...), say.'
            raise WrongTypeError(
                message("pruner", "tune(backend='ray')", repr(pruner), "scheduler=", fix)
            )
        self.scheduler, self.resources, self.concurrent = scheduler, resources, concurrent
        self.started: set[int] = set()
        _tune()

    def go(self, sweep: _sweep.Sweep, left: Iterable[int]) -> None:
        left = [i for i in left if not sweep.died(i, self.values(i))]
        if not left:
            return
        tune = _tune()
        train: Any = _recorded(self.values, sweep.objective, sweep.metric)
        if self.resources is not None:
            train = tune.with_resources(train, self.resources)
        config = tune.TuneConfig(
            metric="value",
            mode=self.mode,
            scheduler=self.scheduler,
            max_concurrent_trials=self.concurrent,
        )
        with tempfile.TemporaryDirectory(
            prefix="tsunax-ray-", ignore_cleanup_errors=True
        ) as folder:
            run = tune.RunConfig(storage_path=folder, callbacks=[_recorder(sweep)], verbose=0)
            space = {"trial": tune.grid_search(left)}
            try:
                tune.Tuner(train, param_space=space, tune_config=config, run_config=run).fit()
            finally:
                sweep = _SWEEPS.pop(id(sweep))
        if missing := [
            i for i in left if i not in sweep.trials
        ]:  # Ray heard a signal itself, and returned
            sweep.ending.asked = sweep.ending.asked or signal.SIGINT
            sweep.interrupt(
                [Trial(i, self.values(i), "interrupted") for i in missing if i in self.started]
            )


def _recorded(values: Callable, objective: Callable, metric: str | None) -> Callable:
    """A trainable of {"trial": index} whose last report has the record of it."""

    def train(config: Mapping[str, Any]) -> None:
        tune, index, reports = _tune(), config["trial"], {}

        def report(step: int, value: float) -> None:
            _trials.note(reports, step, value)
            tune.report({"value": reports[int(step)], "step": int(step)})

        own = _trials.own(objective, index, report)
        mine, began = values(index), time.perf_counter()
        try:
            outcome = jax.block_until_ready(objective(**mine, **own))
        except Exception as error:
            outcome = _trials.cause_of(error)
        trial = _trials.judged(index, mine, outcome, metric, reports, time.perf_counter() - began)
        value = float("nan") if trial.value is None else trial.value
        tune.report(
            {
                "value": value,
                "step": max(reports, default=0),
                "record": json.dumps(_trials.as_record(trial)),
            }
        )

    return train


_SWEEPS: dict[int, _sweep.Sweep] = {}  # Ray pickles its callbacks, also where they stay


def _recorder(sweep: _sweep.Sweep) -> Any:
    """A callback of Ray Tune, in this process, that ends trials in the journal."""

    class Recorder(_tune().Callback):
        def __init__(self, key: int):
            self.key, self.reports = key, {}

        def on_trial_start(self, iteration, trials, trial, **_):
            _SWEEPS[self.key].source.started.add(trial.config["trial"])
            _SWEEPS[self.key].start([trial.config["trial"]])

        def on_trial_result(self, iteration, trials, trial, result, **_):
            if "record" not in result and "step" in result:
                self.reports.setdefault(trial.config["trial"], {})[result["step"]] = float(
                    result["value"]
                )

        def on_trial_complete(self, iteration, trials, trial, **_):
            self._end(trial, "pruned", None)

        def on_trial_error(self, iteration, trials, trial, **_):
            lines = (trial.get_error() or "the worker died").strip().splitlines()
            self._end(trial, "failed", Cause("RayError", lines[-1][:300]))

        def _end(self, trial, status, cause):
            sweep, index = _SWEEPS[self.key], trial.config["trial"]
            if "record" in (trial.last_result or {}):
                sweep.end([_trials.from_record(json.loads(trial.last_result["record"]))])
                return
            reports = self.reports.get(index, {})
            value = next(reversed(reports.values()), None)
            sweep.end(
                [
                    Trial(
                        index,
                        sweep.source.values(index),
                        status,
                        value,
                        cause=cause,
                        reports=reports,
                    )
                ]
            )

    _SWEEPS[id(sweep)] = sweep
    return Recorder(id(sweep))
