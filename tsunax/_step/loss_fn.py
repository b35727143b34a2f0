"""Calling a loss function: it is given the keywords that it names, and answers with a `Loss`.

Here is what a loss function may ask for, and what is said when it asks for something else, fails,
or returns something else. It knows nothing of gradients.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import patterns, trees
from tsunax._core.source_lines import LIBRARIES, OURS
from tsunax.errors import LossError, TsunaxError, WrongTypeError, message
from tsunax.loss import Loss, as_loss, check_scalar, rows_of, uneven
from tsunax.metrics import as_array
from tsunax.state import TrainState, averaged_params, in_precision

_OFFERED = ("key", "model_state", "train", "mask", "step", "ema")
# what the step gives to loss_fn or to the rule itself: no name for what a user gives
_TAKEN = (
    *(
        "model_state",
        "train",
        "step",
        "state",
        "params",
        "batch",
        "at",
        "grads",
        "loss",
        "on_nonfinite",
        "norms",
    ),
    *("weight", "value", "grad", "value_fn", "obj_fn", "grad_fn", "updates", "outside", "flush"),
)


@dataclass(frozen=True)
class LossFn:
    """A loss function and the keywords that it names; it is given what it names and nothing
    else.
    """

    fn: Callable
    names: tuple[str, ...]
    optional: frozenset[str]
    takes_any: bool

    @classmethod
    def of(cls, fn, where: str = "train_step()") -> LossFn:
        if not callable(fn) or isinstance(fn, type):
            got = f"{trees.describe(fn)}, not callable" if not callable(fn) else trees.describe(fn)
            raise WrongTypeError(
                message("loss_fn", where, got, "a function loss_fn(params, batch, ...)")
            )
        if type(fn).__module__.startswith("tsunax.") and hasattr(fn, "loss_fn"):
            got, fix = f"a {type(fn).__name__}", "Its loss function is step.loss_fn."
            raise WrongTypeError(
                message("loss_fn", where, got, "a function loss_fn(params, batch, ...)", fix)
            )
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (ValueError, TypeError):  # builtins without a signature
            return cls(fn, (), frozenset(), False)
        kinds = inspect.Parameter
        positional = [
            p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        starred = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
        if (len(positional) < 2 and not starred) or [p.name for p in positional[:2]] == [
            "batch",
            "params",
        ]:
            got, fix = (
                trees.describe_call(fn),
                f"After these two it may name {', '.join(_OFFERED)}.",
            )
            raise LossError(
                message("signature", where, f"{got:.120}", "loss_fn(params, batch, ...)", fix)
            )
        rest = positional[2:] + [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
        return cls(
            fn,
            tuple(p.name for p in rest),
            frozenset(p.name for p in rest if p.default is not kinds.empty),
            any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        )

    def keywords(self, state: TrainState, batch, extra, *, train: bool) -> dict[str, Any]:
        """What this function names, from the state and `extra`.

        Raises LossError for what is not there.
        """
        _check_extra(state, extra, train)
        if (
            extra.get("mask") is not None
        ):  # NumPy's is the one that nobody gave: known to let every row through
            extra = extra | {"mask": as_array("mask", extra["mask"], "the step")}
        offered = {"train": train, "step": state.step, "mask": None, **extra}
        if train and state.key is not None:
            offered["key"] = jax.random.fold_in(state.key, state.calls)
        if state.model_state is not None:
            offered["model_state"] = state.model_state
        if state.average is not None and "ema" in self.names:
            offered["ema"] = in_precision(state, averaged_params(state, "loss_fn"), train=train)
        out = dict(extra) if self.takes_any else {}
        for name in self.names:
            if name == "mask" and "mask" not in extra:
                out[name] = np.ones(rows_of(batch), np.float32)
            elif name in offered:
                out[name] = offered[name]
            elif name not in self.optional:
                raise LossError(self._missing(name, train, extra))
        unread = [name for name in extra if name not in out]
        if unread:
            fix = "loss_fn does not name it: add it to its signature, or leave it out."
            raise LossError(patterns.unknown("keyword", "the step", unread[0], self.names, fix))
        return out

    def _missing(self, name, train, extra) -> str:
        what = f"keyword {name!r}"
        if name == "key" and not train:
            fix = "Write key=None in its signature."
            return message(what, "loss_fn", "an evaluation, which has no key", "a default", fix)
        if name in ("key", "model_state", "ema"):
            value = {"key": "jax.random.key(0)", "ema": "0.999"}.get(name, "...")
            return message(
                what,
                "loss_fn",
                "a state without one",
                "one",
                f"Give it: setup(..., {name}={value}).",
            )
        fix = f"Or give it yourself, step(state, batch, {name}=...), or take it out of batch."
        return patterns.unknown("keyword", "loss_fn", name, [*_OFFERED, *extra], fix)

    def __call__(self, params, batch, keywords, *, merges: bool = False) -> Loss:
        """The `Loss` of one batch; a scalar weighs its rows, those that `mask` lets through where
        it is given.

        Where leaves of the batch differ in rows nobody knows how many there are: it weighs 1, and
          raises where it
        `merges` with others.
        """
        mask, rows = keywords.get("mask"), rows_of(batch)
        # containers of its own: flax NNX refuses to merge what was made in an outer trace
        keywords = jax.tree.map(lambda x: x, keywords)
        if isinstance(mask, np.ndarray):
            keywords["mask"] = jnp.asarray(mask)
        try:
            out = self.fn(params, batch, **keywords)
        except Exception as error:
            if not isinstance(error, TsunaxError):
                error.add_note(_note(self.fn, batch, error))
            raise
        if isinstance(mask, jax.Array) and np.shape(mask) == (rows,):
            out = _weighed(out, jnp.sum(mask, dtype=jnp.float32))
        if (mask is not None or not isinstance(out, Loss) or out.weight is None) and (
            found := uneven(batch)
        ):
            if merges or mask is not None:
                raise LossError(f"{found} Return ts.Loss.mean(values) or ts.Loss(total, weight).")
            rows = 1
        return as_loss(out, rows)


def noting(mean, found: list):
    """`mean` as it is. Its differentiation adds to `found` if it depends on what it is
    differentiated by.
    """

    @jax.custom_jvp
    def same(x):
        return x

    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        if isinstance(t, jax.custom_derivatives.SymbolicZero):
            return x, jnp.zeros_like(x)
        found.append(True)
        return x, t

    same.defjvp(rule, symbolic_zeros=True)
    return same(mean)


def check_noted(found: list, fn: LossFn) -> None:
    """Raise LossError for a loss that no trained leaf moves: its gradient is zero, whatever the
    batch.
    """
    if not found:
        got, expected = "one that does not depend on any trained leaf of params", "one that does"
        fix = (
            "Compute it from the params that loss_fn is given, without stop_gradient, argmax or "
            "rounding."
        )
        raise LossError(message("loss", trees.describe_call(fn.fn), got, expected, fix))


def _weighed(out, weight):
    """What a loss function returned under a mask, weighing the rows that it lets through."""
    if isinstance(out, Loss):
        return out if out.weight is not None else dataclasses.replace(out, weight=weight)
    check_scalar("result", "loss_fn", out)
    return Loss(out, weight, mean_value=out)


def _check_extra(state: TrainState, extra, train: bool) -> None:
    for name in extra:
        if name in _TAKEN or (name == "key" and train and state.key is not None):
            fix = "The step gives this one itself."
            raise LossError(
                message("keyword", "the step", repr(name), "another name for what you give it", fix)
            )


A_STEP = "a function (state, batch) -> (state, info)"


def check_no_loss_fn(f: Callable, state, batch, what: str, expected: str) -> None:
    """Raise WrongTypeError if `f`, which failed on a state, is a loss function of its params."""
    try:
        out = f(state.params, batch)
    except Exception:
        return
    if isinstance(out, Loss) or np.shape(out) == ():
        got = f"{trees.describe_call(f)}, a loss function"
        fix = (
            "Give "
            f"ts.{what if what == 'eval_step' else 'train_step'}({getattr(f, '__name__', 'loss_fn')})."
        )
        raise WrongTypeError(
            message(what, "", got, expected, fix.replace("<lambda>", "loss_fn"))
        ) from None


def _note(fn, batch, error: Exception) -> str:
    """The note on an exception of the user's code: its line, and the shapes of its batch."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [
        f
        for f in frames
        if "site-packages" not in f.filename and not f.filename.startswith(LIBRARIES)
    ]
    frame = [*frames[:1], *own][-1] if frames else None
    place = f", in {frame.name} ({frame.filename}:{frame.lineno})" if frame else ""
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    given = [f"{trees.access_str('', path)} {trees.describe(x)}".strip() for path, x in leaves]
    shapes = trees.listed(given, 4) or "None"
    return f"raised by the loss function {trees.describe_call(fn)}{place}; its batch: {shapes}"


def hide_own_frames(error: BaseException) -> None:
    """Remove tsunax's frames from the traceback of an exception of other code, as JAX removes its
    own.

    They stay if the exception comes from tsunax, or from JAX called by it: then they show the
    fault.
    """
    if jax.config.jax_traceback_filtering == "off":  # type: ignore[attr-defined]
        return
    ours, jaxs = OURS, os.path.dirname(jax.__file__)
    frames = [(tb, tb.tb_frame.f_code.co_filename) for tb in _each(error.__traceback__)]
    foreign = [name for _, name in frames if not name.startswith(jaxs)]
    if foreign and not foreign[-1].startswith(ours):
        kept = None
        for tb, name in reversed(frames):
            if not name.startswith(ours):
                kept = types.TracebackType(kept, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
        error.__traceback__ = kept


def _each(tb: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
