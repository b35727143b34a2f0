"""Errors of a loss function that fails, names an unknown keyword, or is in the wrong place."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tsunax._core import checks, trees
from tsunax.errors import WrongTypeError, remedy, warn
from tsunax.loss import Loss


def warn_of_no_key(fn: Callable) -> None:
    """Warn of a training step without the key that a loss function would take, unless bound."""
    if "key" not in getattr(fn, "keywords", {}):
        fix = "Give it one, setup(..., key=0), or functools.partial(loss_fn, key=None) to mean it."
        warn(f"{trees.describe_call(fn)} names key, but the state has none. {fix}")


def check_options(options: Any, whole: bool, where: str) -> None:
    """Raise WrongTypeError for options of a gradient that exclude each other.

    `options` are a `GradientOptions`; `whole` says that the loss cuts its batch itself.
    """
    per_example, noise_scale = options.per_example, options.noise_scale
    checks.check_flags(where, noise_scale=noise_scale)
    if not isinstance(per_example, bool) and not callable(per_example):
        raise WrongTypeError("per_example", where, repr(per_example), "a bool or a function")
    conflicts = {
        "on_nonfinite='drop' for a loss without micro-batches, of the whole batch or per example": (
            options.on_nonfinite == "drop" and (whole or per_example)
        ),
        "per_example=True over an axis of devices": per_example is True and options.axis_name,
        "per_example or noise_scale of a whole_batch loss": whole and (per_example or noise_scale),
        "noise_scale without accumulate=2 or more, or with per_example": (
            noise_scale and (options.accumulate < 2 or per_example)
        ),
    }
    for conflict, has_conflict in conflicts.items():
        if has_conflict:
            raise WrongTypeError("options", where, conflict, "options that fit together")


A_STEP = "a function (state, batch) -> (state, info)"


def check_no_loss_fn(f: Callable, state, batch, title: str, expected: str) -> None:
    """Raise WrongTypeError if `f`, which failed on a state, is a loss function of its params."""
    try:
        out = f(state.params, batch)
    except Exception:
        return
    if isinstance(out, Loss) or np.shape(out) == ():
        got = f"{trees.describe_call(f)}, a loss function"
        fix = "Give ts.eval_step(loss_fn) or ts.train_step(loss_fn)."
        raise WrongTypeError(title, "", got, expected, fix) from None


def note(fn: Callable, batch: Any, error: Exception) -> str:
    """The note on an exception of the user's code: the function, and the shapes of its batch."""
    leaf_texts = [f"{path} {trees.describe(x)}".strip() for path, x in trees.leaves_at("", batch)]
    shapes = trees.listed(leaf_texts, 4) or "None"
    fix = ". It is compiled: return values as metrics, print with jax.debug.print"
    fix = f"{fix}, branch with jnp.where" if remedy(error) else ""
    return f"raised by the loss function {trees.describe_call(fn)}; its batch: {shapes}{fix}"
