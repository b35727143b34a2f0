"""Checks of params and other trees, before anything compiles, on concrete arrays only."""

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import trees
from tsunax.errors import (
    DataError,
    HyperparameterError,
    ParamsError,
    StateError,
    WrongTypeError,
    hide_own_frames,
    listed,
    unknown,
)

_F = TypeVar("_F", bound=Callable[..., Any])


def check_arrays(tree: Any, root: str, fix: str = "") -> None:
    """Raise for a leaf that is no array of numbers, or that JAX cannot take.

    Raises WrongTypeError, DataError for its dtype, or StateError for a deleted array.
    """
    is_live = lambda x: isinstance(x, jax.Array) and not trees.is_gone(x)
    if all(map(is_live, jax.tree.leaves(tree))):  # paths of many leaves take milliseconds
        return
    for where, leaf in trees.leaves_at(root, tree):
        check_dtype(trees.dtype_of(leaf), where)
        if not is_numeric(leaf):
            raise WrongTypeError("leaf", where, trees.describe(leaf), "an array of numbers", fix)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise WrongTypeError("leaf", where, "a ShapeDtypeStruct", "an array", fix)
        check_alive(leaf, where)


_CONSUMED = "An earlier step consumed (donated) it: use what the step returned."


def check_alive(leaf: Any, where: str) -> None:
    """Raise StateError for a deleted array, with its path and the reason."""
    if trees.is_gone(leaf):
        raise StateError("leaf", where, "a deleted array", "a live one", _CONSUMED)


def check_not_tracing(where: str, fix: str) -> None:
    """Raise StateError inside jit, vmap, grad or scan, where there are no values to read."""
    if trees.is_tracing():
        raise StateError("call", where, "one inside jit, vmap, grad or scan", "one outside", fix)


def is_numeric(leaf: Any) -> bool:
    """Whether it has numbers, bools or keys."""
    return trees.is_a(leaf, np.number, np.bool_, jax.dtypes.prng_key)


def dtype_fault(dtype: Any) -> tuple[str, str, str] | None:
    """`got, expected, fix` for numbers of a dtype that JAX does not have; None for other dtypes."""
    is_refused = lambda: not dtype.isnative or dtype.char in "gGm"  # long doubles, spans of time
    if not (isinstance(dtype, np.dtype) and is_refused() and jnp.issubdtype(dtype, np.number)):
        return None
    fix = "Cast it: x.astype(np.float32), or x.dtype.newbyteorder('=') for another byte order."
    return f"dtype {dtype}", "one that JAX has", fix


def check_dtype(dtype: Any, where: str) -> None:
    """Raise DataError for numbers of a dtype that JAX does not have."""
    if fault := dtype_fault(dtype):
        raise DataError("leaf", where, *fault)


_MODEL = (
    "Give the arrays alone: setup(rule, model.params, model_state=model.model_state) with "
    "model = ts.models.nnx(module) or linen; eqx.partition(model, eqx.is_array) for equinox."
)


def _leaf_fault(leaf: Any, name: trees.Names) -> tuple[str, ...] | None:
    """The parts of an error for a leaf that cannot be trained: `what, got, expected, fix`."""
    dtype, floats = trees.dtype_of(leaf), "a float or complex array"
    fix = f"Leave it out, trainable=['**', {'!' + '/'.join(name)!r}], or keep it in model_state."
    if dtype is None:
        return "leaf that is no number", trees.describe(leaf), floats, _MODEL
    if not trees.is_inexact(leaf):
        return "leaf that cannot be trained", f"dtype {dtype}", floats, fix
    # NumPy's longdouble
    shorter_dtype = {"g": "float32", "G": "complex64"}.get(getattr(dtype, "char", ""))
    canonical = jax.dtypes.canonicalize_dtype(shorter_dtype or dtype)
    if canonical != dtype:
        cast = f"It would be cut to {canonical}: cast it yourself, or set jax_enable_x64."
        return "leaf too wide for JAX", f"dtype {dtype}", str(canonical), cast
    if fault := dtype_fault(dtype):
        return "leaf", *fault
    if 0 in np.shape(leaf):
        return "leaf without elements", f"shape {np.shape(leaf)}", "no 0 in the shape", fix
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "leaf", "a ShapeDtypeStruct", "an array", "For shapes use jax.eval_shape."
    if trees.is_gone(leaf):
        return "leaf without a buffer", "a deleted array", "a live one", _CONSUMED
    return None


def _repeat(keys: Iterable[Any], flags: trees.Flags) -> tuple[int, int] | None:
    """The first two places with the same key, if at least one is selected."""
    first_places: dict[Any, int] = {}
    for i, key in enumerate(keys):
        j = first_places.setdefault(key, i)
        if i != j and (flags[i] or flags[j]):
            return j, i
    return None


@jax.jit
def _count_beyond(x: jax.Array, limit: jax.typing.ArrayLike) -> jax.Array:
    return jnp.sum(~(jnp.abs(x) < limit))


def count_beyond(leaf: Any, limit: float = np.inf) -> Any:
    """The number of elements of a leaf that are NaN, or at least `limit`; 0 for a traced leaf."""
    if trees.is_traced(leaf):
        return 0
    devices = leaf.devices() if isinstance(leaf, jax.Array) else ()
    if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
        with jax.ensure_compile_time_eval():
            return _count_beyond(trees.on_device(leaf), limit)
    # A view of the buffer. It must not outlive this call: meanwhile no step can donate the buffer.
    x = np.asarray(leaf)
    x = np.abs(x) if np.iscomplexobj(x) else x
    limit = np.float64(limit)  # a Python float would be cast to the dtype of x, with a warning
    if not x.size or (x.max() < limit and x.min() > -limit):  # neither makes a copy
        return 0
    return np.count_nonzero(~(np.abs(x) < limit))


def _has_statistics(params: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(params, nnx.Module | nnx.State):  # a State is a Mapping, too
        state = params if isinstance(params, nnx.State) else nnx.state(params)
        return bool(jax.tree.leaves(nnx.filter_state(state, nnx.BatchStat)))
    return isinstance(params, Mapping) and {"params", "batch_stats"} <= params.keys()


def check_params(params: Any, flags: trees.Flags) -> None:
    """Raise `ParamsError` for a selected leaf that cannot be trained, or shares its name."""
    if all(flags) and _has_statistics(params):
        expected = "parameters: batch statistics are not trained"
        raise ParamsError("params", "setup()", trees.describe(params), expected, _MODEL)
    leaves = trees.leaves_with_names(params)
    places = [trees.access_str("params", path) for _, path, _ in leaves]
    for (name, _, leaf), place, flag in zip(leaves, places, flags, strict=True):
        is_refused = not is_numeric(leaf) or dtype_fault(trees.dtype_of(leaf))
        if (flag or is_refused) and (fault := _leaf_fault(leaf, name)):
            title, *parts = fault
            raise ParamsError(title, place, *parts)
    for joint in "/.":
        if pair := _repeat([joint.join(name) for name, _, _ in leaves], flags):
            where = " and ".join(places[i] for i in pair)
            got = f"{joint.join(leaves[pair[0]][0])!r} for both"
            raise ParamsError("names that collide", where, got, "different names")
    chosen = [i for i, flag in enumerate(flags) if flag]
    counts = jax.device_get([count_beyond(leaves[i][2]) for i in chosen])
    for i, count in zip(chosen, counts, strict=True):
        if count:
            got = f"{count} of {np.size(leaves[i][2])} not finite"
            raise ParamsError("leaf with NaN or inf", places[i], got, "finite numbers")


def check_aliases(params: Any, flags: trees.Flags, **donated: Any) -> None:
    """Raise `ParamsError` if two leaves are one array, and one is selected or in `donated`."""
    trees_by_name = {"params": params, **donated}
    leaves = [x for name, tree in trees_by_name.items() for x in trees.leaves_at(name, tree)]
    flags = [*flags, *[True] * (len(leaves) - len(flags))]
    ids = [id(x) if trees.is_array(x) else -1 - i for i, (_, x) in enumerate(leaves)]
    if pair := _repeat(ids, flags):
        where = " and ".join(leaves[i][0] for i in pair)
        fix = "Copy one of them, or let setup copy (copy=True)."
        raise ParamsError("leaves", where, "one array for both", "an array for each", fix)


def check_like(root: str, new, old, fix: str = "", title: str = "leaf") -> None:
    """Raise StateError unless two trees agree in structure, shape and dtype."""
    if difference := trees.first_difference(new, old, root):
        raise StateError(f"{title} {difference}. {fix}".rstrip())
    for (place, a), b in zip(trees.leaves_at(root, new), jax.tree.leaves(old), strict=True):
        dtype = trees.dtype_of(a)
        if dtype is None or dtype != trees.dtype_of(b) or np.shape(a) != np.shape(b):
            raise StateError(title, place, trees.describe(a), trees.describe(b), fix)


def is_real(x: Any) -> bool:
    """Whether this is a real number, or an array of real numbers; bools are not."""
    return trees.is_a(x, np.floating, np.integer)


def check_count(n: Any, where: str, name: str, least: int = 1) -> int:
    """An int, also of NumPy or JAX (`state.step`), as Python's.

    Raises WrongTypeError, or HyperparameterError below `least`.
    """
    try:
        count = operator.index(n)
    except TypeError:
        count = None
    if count is None or isinstance(n, bool):
        raise WrongTypeError(name, where, trees.describe(n), f"an int ≥ {least}") from None
    if count < least:
        raise HyperparameterError(name, where, count, f"an int ≥ {least}")
    return count


def check_choice(value: Any, where: str, name: str, choices: Iterable[str]) -> None:
    """Raise HyperparameterError unless `value` is one of the `choices`."""
    if not isinstance(value, str) or value not in choices:  # `in` would fail for arrays
        expected = " or ".join(map(repr, choices))
        raise HyperparameterError(name, where, trees.describe(value), expected)


def check_flags(where: str, **flags) -> None:
    """Raise for a flag that is not True or False: "no" would count as true."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise WrongTypeError(name, where, trees.describe(value), "True or False")


# Signatures


def parameters_of(f: Callable) -> list[inspect.Parameter]:
    """The parameters of a function; none for builtins without a signature."""
    try:
        return list(inspect.signature(f).parameters.values())
    except (ValueError, TypeError):
        return []


def check_takes(what: str, where: str, f: Callable, expected: str, *args: Any, **kw: Any) -> None:
    """Raise WrongTypeError unless `f` is a function that accepts these arguments."""
    try:
        inspect.signature(f, follow_wrapped=False).bind(*args, **kw)
    except TypeError:
        got = trees.describe_call(f) if callable(f) else trees.describe(f)
        raise WrongTypeError(what, where, got, expected) from None
    except ValueError:  # some builtins have no signature
        pass


def naming_arguments(f: _F, *, fix: str = "") -> _F:
    """The function, but its errors for wrong arguments name the arguments that it has.

    `fix` is for arguments that do not fit its signature. From exceptions of other code our frames
    are removed, except the frame of the call.
    """
    signature = inspect.signature(f)
    where = f"{f.__qualname__.removesuffix('.__init__')}()"

    @functools.wraps(f)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return f(*args, **keywords)
        except Exception as error:
            is_of_this_call = cast(types.TracebackType, error.__traceback__).tb_next is None
            if isinstance(error, TypeError) and is_of_this_call:
                raise wrong_call(where, signature, args, keywords, error, fix) from None
            hide_own_frames(error)
            raise

    return cast(_F, call)


def wrong_call(
    where: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    keywords: Iterable[str],
    error: TypeError,
    fix: str = "",
) -> WrongTypeError:
    """The error for arguments that do not fit a signature; `error` is the TypeError of Python."""
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind in _NAMED and p.name not in ("self", "cls")]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if wrong := [x for x in keywords if not takes_any and x not in signature.parameters]:
        return WrongTypeError(unknown("argument", where, wrong[0], names))
    return WrongTypeError("arguments", where, str(error), listed(names, 16), fix)


_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def keyword_names(f: Callable, first: int = 1) -> tuple[str, ...] | None:
    """The keywords that a function takes behind its first arguments; None: any."""
    parameters = parameters_of(f)
    if not parameters or any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters[first:] if p.kind in _NAMED)


def accepting(f: Callable, names) -> Callable:
    """The function, but it ignores these keywords. optax's line searches read its signature."""
    parameters = parameters_of(f)
    ignored = [name for name in names if name not in {p.name for p in parameters}]
    if not parameters or not ignored:
        return f

    @functools.wraps(f)
    def accepting_call(*args, **kwargs):
        return f(*args, **{name: x for name, x in kwargs.items() if name not in ignored})

    place = len(parameters) - (parameters[-1].kind == inspect.Parameter.VAR_KEYWORD)
    keyword = lambda name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    signature = [*parameters[:place], *map(keyword, ignored), *parameters[place:]]
    accepting_call.__signature__ = inspect.Signature(signature)  # pyright: ignore[reportAttributeAccessIssue]
    return accepting_call


SEARCHES = ("value_fn", "obj_fn", "grad_fn")  # extra arguments that are functions of params
