"""Checks of `fit`: resumed runs, and many steps in one compiled loop."""

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import Function, PyTree, trees
from tsunax.data.positions import Data, innermost
from tsunax.errors import WrongTypeError
from tsunax.loop import fit
from tsunax.run.info_columns import logged_step
from tsunax.state import TrainState
from tsunax.testing._comparing import EXACT, check_compared_steps, compared, copied, live_step


def check_resume(
    step: Function,
    state: PyTree,
    data: Iterable[PyTree],
    steps: int = 6,
    at: int = 3,
    **options: Any,
) -> None:
    """Compare the bits of a run that stopped at step `at` and resumed with an uninterrupted run.

    Compares state, key, position of the data and losses; raises CheckError for one other bit, and
    WrongTypeError unless `at` is between the step of `state` and `steps`. Each run begins at the
    current position of `data`, which is restored at the end. `options` are further arguments for
    `fit`, for example `fast_forward=True` for data that stores no position.

    >>> import jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(2)})
    >>> check_resume(step, state, ts.batches(np.ones((8, 2), np.float32), 2, shuffle=True))
    """
    where = "check_resume()"
    begin = live_step(state, steps, where)
    if not begin < at < steps:
        expected = f"a step after {begin}, where the state is, and before steps={steps}"
        raise WrongTypeError("at", where, at, expected)
    options = {"progress": False, "log_every": 1, **options}
    title = f"a run resumed at step {at}"
    with tempfile.TemporaryDirectory() as folder, _rereading(data, where) as reread:
        run = lambda n, **resume: fit(step, copied(state), reread(), steps=n, **options, **resume)
        expected, history = run(steps)
        losses = _finite_losses(history, where)  # a checkpoint that is not finite would be refused
        path = Path(folder) / "run"
        run(at, checkpoint=path)
        resumed, history = run(steps, checkpoint=path, resume="must")
    compared(title, resumed, expected, 0.0, "state")
    compared(f"losses of {title}", _finite_losses(history, where), losses, 0.0, "losses")


def check_fused(
    step: Function, state: PyTree, data: Iterable[PyTree], steps: int = 6, tolerance: float = EXACT
) -> float:
    """Compare the bits of many steps in one compiled loop with calls of a single step.

    `fit(step, state, data, steps=steps, steps_per_call=n)` for n of 1, 4 and "auto": CheckError for
    another bit. The params of a loop in Python may differ by `tolerance · steps`, because XLA may
    round differently; returns that difference, a float.
    """
    where, options = "check_fused()", {"steps": steps, "progress": False, "log_every": 1}
    live_step(state, steps, where)
    runs = {}
    with _rereading(data, where) as reread:
        for n in (1, 4, "auto"):
            runs[n], rows = fit(step, copied(state), reread(), steps_per_call=n, **options)
            _finite_losses(rows, where)
        plain, steps_done = copied(state), logged_step(state, 0)
        for batch in itertools.chain.from_iterable(itertools.repeat(reread())):
            plain, _ = step(plain, batch)
            steps_done = logged_step(plain, steps_done + 1)
            if steps_done >= steps:
                break
    for n in (4, "auto"):
        compared(f"steps_per_call={n!r}", runs[n], runs[1], 0.0, "state")
    params = lambda x: x.params if isinstance(x, TrainState) else x
    return compared("the plain loop", params(plain), params(runs[1]), tolerance * steps, "params")


@contextmanager
def _rereading(data: Any, where: str) -> Iterator[Callable[[], Any]]:
    """A function that returns the data at their current position, which is restored at the end."""
    inner, read, write = innermost(data), None, None
    for names in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if all(hasattr(inner, name) for name in names) and not isinstance(inner, Data):
            read, write = (getattr(inner, name) for name in names)
    if write is None and isinstance(inner, Iterator):
        fix = "A list is, and fit saves its position."
        raise WrongTypeError(
            "data", where, trees.describe(inner), "data that can be read again", fix
        )
    start = read and copy.deepcopy(read())  # some return the dict that they change later

    def begin():
        if write is not None:
            write(copy.deepcopy(start))
        return data.afresh() if isinstance(data, Data) else data

    yield begin
    if write is not None:
        write(start)


def _finite_losses(rows: Any, where: str) -> dict[str, Any]:
    """The losses of a run by name. Raises DataError if there are some and none is finite."""
    losses = {name: rows[name] for name in rows.names if name.partition("/")[0] == "loss"}
    check_compared_steps(map(np.isfinite, losses.values()) if losses else [True], where)
    return losses
