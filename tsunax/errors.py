"""The exceptions that tsunax raises, and the words of their messages.

Every error derives from `TsunaxError` and from the built-in that plain Python would have raised, so
that `except ts.errors.TsunaxError` and `except ValueError` both catch it. `message` makes all
messages, in one form: `<what> at <where>: got <got>, expected <expected>. <fix>`.
"""

import contextlib
import difflib
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Never

import jax

from tsunax._core import PyTree

__all__ = [
    "ConfigError", "DataError", "DeviceError", "DoesNotFitError", "CheckError", "CheckpointError",
    "HyperparameterError", "KeywordError", "LossError", "MissingLibraryError", "NonFiniteError",
    "ParamsError", "PatternError", "ProcessError", "RowError", "RuleError", "SaveError",
    "StateError", "TrialError", "TsunaxError", "WrongTypeError", "message", "remedy", "told",
]  # fmt: skip


class TsunaxError(Exception):
    """Any error that tsunax raises on purpose: of a text, or of the parts of `message`.

    >>> str(ParamsError("leaf", "params['w']", got="int32", expected="a float"))
    "leaf at params['w']: got int32, expected a float."
    """

    def __init__(self, text: str, *parts: Any, **named_parts: Any) -> None:
        super().__init__(message(text, *parts, **named_parts) if parts else text)


class ParamsError(TsunaxError, ValueError):
    """The parameters cannot be trained: none, no floats, not finite, or ambiguous names."""


class RuleError(TsunaxError, ValueError):
    """The rule is not an optax transformation, or does not fit the parameters."""


class LossError(TsunaxError, TypeError):
    """The loss function has a wrong signature, or its result is no loss."""


class KeywordError(LossError):
    """The loss function does not name the keyword `name` that a call hands on to it."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


class PatternError(TsunaxError, ValueError):
    """A pattern, predicate or mask is malformed, selects nothing, or does not fit its tree."""


class StateError(TsunaxError, ValueError):
    """A training state, or trees that belong to it, do not fit together or cannot be used again."""


class ConfigError(TsunaxError, ValueError):
    """The file `.tsunax-device`, or the variable TSUNAX_DEVICE, names an unknown kind of device."""


class DeviceError(TsunaxError, ValueError):
    """A device is not available, or devices cannot be used together."""


class ProcessError(TsunaxError, RuntimeError):
    """Processes did not connect, ended, or do not agree; or a call came at the wrong time."""


class DataError(TsunaxError, ValueError):
    """Data has no batch, a batch that cannot be trained on, or no way to a saved position."""


class RowError(TsunaxError, ValueError):
    """A row of numbers cannot be logged, or a history has no column of that name."""


class HyperparameterError(TsunaxError, ValueError):
    """A hyperparameter or setting is unknown, out of its range, or not a number."""


class WrongTypeError(TsunaxError, TypeError):
    """An argument has the wrong type."""


class MissingLibraryError(TsunaxError, ModuleNotFoundError):
    """An optional library is not installed."""


class CheckpointError(TsunaxError, ValueError):
    """A checkpoint is missing, damaged or of another run or state, or its directory is unusable."""


class SaveError(TsunaxError, OSError):
    """A checkpoint, a file of arrays or a log could not be written."""


class TrialError(TsunaxError, LookupError):
    """A sweep has no such column, or no trial to choose."""


class CheckError(TsunaxError, AssertionError):
    """A check of `tsunax.testing` found a difference: in which leaf, and how large."""


class DoesNotFitError(TsunaxError, MemoryError):
    """Not even the smallest batch fits into memory."""


class NonFiniteError(TsunaxError, ArithmeticError):
    """Loss or gradients stayed non-finite; `state` and `info` are the last ones."""

    def __init__(self, message: str, state: PyTree = None, info: Any = None) -> None:
        super().__init__(message)
        self.state = state
        self.info = info


def message(what: str, where: str, got: object, expected: object, fix: str = "") -> str:
    """`<what> at <where>: got <got>, expected <expected>. <fix>`, without a part that is empty.

    >>> message("leaf", "params['w']", "int32", "a float", "Leave it out with trainable=.")
    "leaf at params['w']: got int32, expected a float. Leave it out with trainable=."
    """
    place = f" at {where}" if where else ""
    return f"{what}{place}: got {got}, expected {expected}. {fix}".rstrip()


def told(error: BaseException) -> str:
    """An exception of other code as a string of one line, for the `got` of a message.

    >>> told(KeyError("kernel"))
    "KeyError 'kernel'"
    """
    text = re.sub(r"(?s) \[(tensorstore_spec|source locations|os_error_code)=.*", "", str(error))
    text = re.sub(r"\w*Tracer\b", "a traced array", re.sub(r"<class '([\w.]+)'>", r"\1", text))
    line = " ".join(text.split())
    line = f"{line[:80]} … {line[-76:]}" if len(line) > 160 else line  # the cause often comes last
    return f"{type(error).__name__} {line}".rstrip(" .")


def remedy(error: BaseException) -> str:
    """How to avoid `if`, `float` or NumPy on a traced value, if `error` is JAX's error for it."""
    kind = type(error).__name__
    is_conversion = "Concret" in kind or ("Tracer" in kind and kind.endswith("ConversionError"))
    return "For if use jnp.where or jax.lax.cond, for np use jnp." if is_conversion else ""


# ------------------------------------------------------------------------ lines of the user's code

OUR_FOLDER = os.path.join(os.path.dirname(__file__), "")
_JAX_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")
_NOT_THE_USERS = (OUR_FOLDER, _JAX_FOLDER, contextlib.__file__)
LIBRARIES = "<frozen", os.path.join(os.path.dirname(os.__file__), ""), OUR_FOLDER  # and Python's


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line of the user's code, at any depth of the call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def hide_own_frames(error: BaseException) -> None:
    """Remove tsunax's frames from the traceback of an exception of other code, as JAX does.

    They stay if the exception comes from tsunax, or from JAX called by it: they show the fault.
    """
    if jax.config.jax_traceback_filtering == "off":  # type: ignore[attr-defined]
        return
    tb, frames = error.__traceback__, []
    while tb is not None:
        frames.append((tb, tb.tb_frame.f_code.co_filename))
        tb = tb.tb_next
    jax_and_jaxlib = os.path.dirname(jax.__file__)  # the folder of jaxlib begins with the same name
    files_outside_jax = [name for _, name in frames if not name.startswith(jax_and_jaxlib)]
    if files_outside_jax and not files_outside_jax[-1].startswith(OUR_FOLDER):
        traceback = None
        for tb, name in reversed(frames):
            if not name.startswith(OUR_FOLDER):
                traceback = types.TracebackType(traceback, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
        error.__traceback__ = traceback


# ----------------------------------------------------------------------------------- nearest names


def listed(items: Sequence[str], limit: int, joint: str = ", ") -> str:
    ending = [f"and {len(items) - limit} more"] if len(items) > limit else []
    return joint.join([*items[:limit], *ending])


def nearest(name: str, known_names: Iterable[str], n: int = 3) -> list[str]:
    """The `n` of `known_names` most like `name`, best first."""
    return difflib.get_close_matches(name, list(known_names), n, cutoff=0)


def unknown(kind: str, where: str, name: str, known_names: Iterable[str], fix: str = "") -> str:
    """The message for an unknown name, with the known name that was probably meant.

    >>> unknown("name", "adam()", "lr", ["learning_rate", "b1"])
    "name at adam(): got 'lr', expected one of learning_rate, b1. Did you mean 'learning_rate'?"
    """
    known_names = list(known_names)
    expected = (
        f"one of {listed(known_names, 20)}"
        if len(known_names) > 1
        else "".join(known_names) or "none"
    )
    return message(kind, where, repr(name), expected, f"{hint(name, known_names)} {fix}".strip())


def hint(name: str, known_names: Sequence[str]) -> str:
    """The question whether a known name was meant, or where else its effect is; "" for neither.

    >>> hint("eta", ["b1", "learning_rate"])
    "Did you mean 'learning_rate'?"
    """
    from tsunax._core.other_words import elsewhere, synonyms

    name = name.strip()
    lower = {word.lower(): word for word in known_names}
    like = lambda cutoff: difflib.get_close_matches(name.lower(), lower, 1, cutoff)
    words = synonyms(name, known_names) + [lower[word] for word in like(0.8)]
    if not words and (advice := elsewhere(name)):
        return advice
    # Most typing errors keep the first letter. Three of four letters agree by chance: temp, step.
    words += [lower[word] for word in like(0.65) if word[:1] == name[:1].lower()]
    return "".join(f"Did you mean {word!r}?" for word in words[:1])


def missing_name(owner: str, names: Sequence[str]) -> Callable[[str], Never]:
    """The `__getattr__` of a module or class: an AttributeError with names like the missing one.

    Set it in `globals()`: type checkers that see a `__getattr__` accept every name.
    """

    def fail(name: str) -> Never:
        if name.startswith("_"):
            raise AttributeError(f"{owner!r} has no attribute {name!r}")
        expected = f"one of {', '.join(nearest(name, names, 8))}"
        raise AttributeError(message("name", owner, repr(name), expected, hint(name, names)))

    return fail
