"""Populations: many runs of a model in a single state, with different seeds and hyperparameters.

    make = lambda key, learning_rate: ts.setup(ts.rules.adam(learning_rate), init(key), key=key)
    runs = ts.population(make, 32, key=0, learning_rate=np.logspace(-4, -1, 32))
    runs, history = ts.fit(step, runs, data, steps=1000)      # one program, 32 runs
    best = ts.populations.member(runs, np.argmin(losses))

Every array of the state has a leading axis of members: `train_step`, `eval_step`, `fit` and
`evaluate` map over it (`program.py`). All members get the same batch, or with `each` a batch each.
"""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Function, PyTree, checks, trees
from tsunax._state.state_setup import as_key
from tsunax.errors import StateError
from tsunax.hyper import adjust, hyperparams
from tsunax.state import TrainState
from tsunax.states import States, each, members_of

_State = TypeVar("_State", bound=TrainState | States)

__all__ = ["each", "member", "population", "select"]


def population(make: Callable[..., _State], n: int, *, key: ArrayLike = 0, **values: Any) -> _State:
    """A state of n members: `make(key, **values)` for each, with its key and its entry of `values`.

    Args:
      make: returns a state from `setup`, or `States`; it is traced once and runs for one member
        after the other. Numbers reach it as tracers: members may differ in them, not in shapes or
        functions.
      n: the number of members.
      key: an int or a key, split into one for each member.
      values: arrays with first axis n (learning rates, decays, noise), passed to `make` by name.

    A member equals its single run up to rounding: a batch of matrix products rounds differently,
    and a number that is a tracer in `make` has its complement (1 - b1) rounded in float32. Raises
    StateError for an array of another length, or if `make` returns no state.

    >>> import tsunax as ts
    >>> make = lambda key, rate: ts.setup(ts.rules.sgd(rate), {"w": jax.random.normal(key, (2,))})
    >>> runs = population(make, 3, key=0, rate=np.array([0.1, 0.2, 0.3]))
    >>> runs.params["w"].shape, ts.hyperparams(runs)["learning_rate"].tolist()
    ((3, 2), [0.1..., 0.2..., 0.3...])
    """
    where = "population()"
    checks.check_count(n, where, "n")
    is_on_host = lambda x: isinstance(x, list | tuple | np.ndarray)
    values = {k: np.array(x) if is_on_host(x) else x for k, x in values.items()}
    for name, x in values.items():
        if np.shape(x)[:1] != (n,):
            raise StateError(
                repr(name),
                where,
                got=trees.describe(x),
                expected=f"an array with a first axis of {n}; bind shared values to make",
            )
    keys = jax.random.split(cast(Any, as_key(key, where)), n)
    # Not vmap: it batches decompositions, as in orthogonal initializers, and on two cores several
    # batched decompositions wait for each other forever (docs/upstream.md).
    make_member: Any = lambda arguments: make(arguments[0], **arguments[1])
    runs: Any = _run_compiled_once(
        lambda *arguments: jax.lax.map(make_member, arguments), keys, values
    )
    if not isinstance(runs, TrainState | States):
        raise StateError("result", "make", trees.describe(runs), "a TrainState, as of ts.setup()")
    if not trees.is_traced(runs.clock) and (numbers := hyperparams(runs)):
        adjust(runs, **numbers)  # checks numbers that were tracers inside `make`
    return runs  # pyright: ignore[reportReturnType]


# Programs of `population` by their text and inputs. The least recently used programs are dropped
# beyond this number: a script calls few programs, and each may be large.
_PROGRAMS: dict[Any, jax.stages.Compiled] = {}
_MAX_PROGRAMS = 16


def _run_compiled_once(f: Function, keys: jax.Array, values: dict[str, Any]) -> PyTree:
    """`jax.jit(f)(keys, values)`; programs of equal text are compiled once.

    The function is traced at every call, because the numbers that it reads may have changed. The
    static part of the result comes from this trace, because the program does not determine it.
    """
    option = lambda name: getattr(jax.config, name, None)
    # With this option the text of a program does not have the arrays that the function reads.
    if trees.is_tracing() or option("jax_use_simplified_jaxpr_constants"):
        return jax.jit(f)(keys, values)
    lowered = jax.jit(f).lower(keys, values)
    text = hashlib.sha256(lowered.as_text().encode()).digest()
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves((keys, values))]
    program_key = text, *values, *shardings, option("jax_default_device")
    compiled = _PROGRAMS[program_key] = _PROGRAMS.pop(program_key, None) or lowered.compile()
    if len(_PROGRAMS) > _MAX_PROGRAMS:
        del _PROGRAMS[next(iter(_PROGRAMS))]
    return lowered.out_tree.unflatten(jax.tree.leaves(compiled(keys, values)))


def member(runs: _State, i: int) -> _State:
    """Member `i` of `runs` as an ordinary state, with copies of its arrays.

    Raises StateError for a bad index; a traced one counts modulo the members. For example
    `member(runs, np.argmin(losses))`.
    """
    return _members_at(runs, i, 0, "member()", "an index")


def select(runs: _State, indices: ArrayLike) -> _State:
    """The population of the members at `indices`, a list of ints, in this order; one may repeat.

    For successive halving, `select(runs, np.argsort(losses)[:8])`, and to replace the worst members
    by copies of the best. Raises StateError for an index out of range; traced indices count modulo
    the members.
    """
    return _members_at(runs, indices, 1, "select()", "a list of ints")


def _members_at(runs: _State, indices: Any, ndim: int, caller: str, kind: str) -> _State:
    if (n := members_of(runs)) is None:
        raise StateError("runs", caller, trees.describe(runs), "a population of ts.population(...)")
    index = indices if trees.is_traced(indices) else np.asarray(indices)
    is_valid = index.ndim == ndim and index.size and jnp.issubdtype(index.dtype, np.integer)
    # JAX would take the last member for an index beyond it.
    if not is_valid or not (trees.is_traced(index) or -n <= index.min() <= index.max() < n):
        raise StateError("indices", caller, trees.describe(indices), f"{kind} below {n}")
    return _gathered(runs, (index % n).astype(np.int32))


@jax.jit
def _gathered(runs: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[index], runs)
