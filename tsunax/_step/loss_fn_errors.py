"""Errors of a loss function that fails, names an unknown keyword, or is in the wrong place."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tsunax._core import checks, trees
from tsunax.errors import LossError, WrongTypeError, remedy, unknown, warn
from tsunax.loss import Loss, rows_of


def missing_keyword(name: str, offered: Sequence[str], extra: Any, train: bool) -> LossError:
    """The error for a keyword that a loss function names, but no caller gives."""
    keyword = f"keyword {name!r}"
    if name == "key" and not train:
        return LossError(
            keyword,
            "loss_fn",
            got="an evaluation, which has no key",
            expected="one",
            fix="For dropout write key=None in its signature, and leave it out if key is None. If "
            "the loss itself is random, pass key=jax.random.key(0) to evaluate or to the eval "
            "step.",
        )
    if name in ("key", "model_state", "ema"):
        value = {"key": "jax.random.key(0)", "ema": "0.999"}.get(name, "...")
        return LossError(
            keyword,
            "loss_fn",
            got="a state without one",
            expected="one",
            fix=f"Give it: setup(..., {name}={value}).",
        )
    verb = "Rename it to key, pass" if "rng" in name else "Pass"
    fix = f"{verb} step(state, batch, {name}=...), or read it from the batch."
    return LossError(unknown("keyword", "loss_fn", name, [*offered, *extra], fix))


def warn_of_no_key(fn: Callable) -> None:
    """Warn of a training step without the key that a loss function would take, unless bound."""
    if "key" not in getattr(fn, "keywords", {}):
        warn(
            f"{trees.describe_call(fn)} names key, but the state has none: it gets its default. "
            "For dropout or noise give it one: setup(..., key=0). To mean it, bind the default: "
            "functools.partial(loss_fn, key=None)."
        )


def check_options(options: Any, whole: bool, where: str) -> None:
    """Raise WrongTypeError for a wrong `per_example` or `noise_scale`, or a wrong combination.

    `options` are a `GradientOptions`; `whole` says that the loss cuts its batch itself.
    """
    per_example, noise_scale = options.per_example, options.noise_scale
    if options.on_nonfinite == "drop" and (whole or per_example):
        raise WrongTypeError(
            "on_nonfinite",
            where,
            got="'drop' with " + ("a whole_batch loss" if whole else "per_example"),
            expected="'skip', 'raise' or 'ignore'",
            fix="No micro-batch can be left out there: use 'skip'.",
        )
    is_function = callable(per_example) and not isinstance(per_example, type)
    if not (is_function or isinstance(per_example, bool)):
        raise WrongTypeError(
            "per_example",
            where,
            got=trees.describe(per_example),
            expected="True, or a function of the gradient of one row",
        )
    if per_example is True and (axes := checks.as_axes(options.axis_name, where)):
        raise WrongTypeError(
            "per_example",
            where,
            got=f"True over axis {axes!r}",
            expected="gradients with a mean",
            fix="Give a function of the gradient of one row, or axis_name=() and no mean.",
        )
    checks.check_flags(where, noise_scale=noise_scale)
    if whole and (per_example or noise_scale):
        raise WrongTypeError(
            "per_example" if per_example else "noise_scale",
            where,
            got="a whole_batch loss",
            expected="a mean over rows",
            fix="The loss of the whole batch has one gradient, none of parts of it.",
        )
    if noise_scale and (options.accumulate < 2 or per_example):
        raise WrongTypeError(
            "noise_scale",
            where,
            got="per_example beside it" if per_example else f"accumulate={options.accumulate}",
            expected="accumulate=2 or more, and no per_example",
            fix="It compares the gradients of micro-batches.",
        )


A_STEP = "a function (state, batch) -> (state, info)"


def check_no_loss_fn(f: Callable, state, batch, title: str, expected: str) -> None:
    """Raise WrongTypeError if `f`, which failed on a state, is a loss function of its params."""
    try:
        out = f(state.params, batch)
    except Exception:
        return
    if isinstance(out, Loss) or np.shape(out) == ():
        name = getattr(f, "__name__", "")
        make = title if title == "eval_step" else "train_step"
        raise WrongTypeError(
            title,
            "",
            got=f"{trees.describe_call(f)}, a loss function",
            expected=expected,
            fix=f"Give ts.{make}({name if name.isidentifier() else 'loss_fn'}).",
        ) from None


# {words in a message of JAX, optax or flax: their meaning in a loss function}
_MEANINGS = {
    "numpy.integer": "Integer labels have the shape (rows,); for one-hot labels use "
    "ts.losses.softmax_cross_entropy",
    "indices and arr must have the same number": "Integer labels have the shape (rows,)",
    "different trace level": "The loss function changes a flax module from outside: use "
    "model = ts.models.nnx(module) and model.apply(params, ...)",
    "'list'": "A list in a batch is a container: give np.asarray(...)",
    "2- or 3- tuple": "model.apply returns (output, model_state)",
    "'Model' object is not callable": "Call model.apply(params, ...)",
}


def note(fn, batch, error: Exception, model_state: Any = None) -> str:
    """The note on an exception of the user's code: the function, and the shapes of its batch."""
    leaf_texts = [f"{path} {trees.describe(x)}".strip() for path, x in trees.leaves_at("", batch)]
    shapes = trees.listed(leaf_texts, 4) or "None"
    fix = ". It is compiled: return values as metrics, print with jax.debug.print"
    fix = f"{fix}, branch with jnp.where" if remedy(error) else ""
    meanings = (f". {meaning}" for text, meaning in _MEANINGS.items() if text in str(error))
    fix = fix or next(meanings, "") or _rows_of_all(batch, model_state)
    fix = fix or (". Give the step or fit its data" if batch is None else "")
    return f"raised by the loss function {trees.describe_call(fn)}; its batch: {shapes}{fix}"


def _rows_of_all(batch: Any, model_state: Any) -> str:
    """The hint for model state with the rows of a batch, if `batch` is a micro-batch of it."""
    rows = rows_of(batch)
    for path, x in trees.leaves_at("model_state", model_state):
        if (n := next(iter(np.shape(x)), 0)) > rows and n % rows == 0:
            return (
                f". {path} has {n} rows, this micro-batch {rows}: model state goes from one "
                "micro-batch to the next as a whole, so give rows of it in the batch"
            )
    return ""
