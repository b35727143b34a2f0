"""Change a run while it runs: read and set hyperparameters, freeze and thaw. State in, state out.

Every function edits arrays of the state (`numbers`, `frozen`), so that the step keeps its program.
Only the first cut of a subtree and the first freeze compile the step again.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from tsunax._core import Extra, Where, patterns, trees
from tsunax._core.placement import put_on_devices_of
from tsunax._state import frozen_words
from tsunax.errors import HyperparameterError, PatternError, RuleError, unknown
from tsunax.rules import number_checks, number_table
from tsunax.rules.live_rules import Cut, LiveState
from tsunax.rules.number_table import LiveNumber, Numbers
from tsunax.rules.subtree_numbers import recut
from tsunax.state import TrainState, check_state, check_values, trainable, trained_part
from tsunax.states import States, chosen_members, training_states

_State = TypeVar("_State", bound=TrainState | States)


def hyperparams(state: TrainState | States) -> dict[str, Any]:
    """Every live hyperparameter that the next step of `state` will use, by flat name.

    The name is `learning_rate` if it is unique, `learning_rate@encoder/**` in a group of rules or a
    subtree that `adjust` cut, and `0.max_norm` if a chain repeats it. Values are Python floats, as
    they were given, and arrays under tracing. Only a schedule waits for the device, to read the
    step. Schedules in a wrapper that does not pass the step on (`optax.MultiSteps`) have their own
    count; `info.hyperparams` omits them. With `States` the member is first: `critic/learning_rate`.
    Raises StateError for a state that a step has consumed.

    >>> import tsunax as ts
    >>> ts.hyperparams(ts.setup(ts.rules.sgd(0.1, momentum=0.9), {"w": jnp.ones(2)}))
    {'learning_rate': 0.1, 'momentum': 0.9}
    """
    if isinstance(state, States):
        return {
            prefix + name: value
            for prefix, member in training_states(state).items()
            for name, value in hyperparams(member).items()
        }
    check_values(state, "hyperparams()")
    if state.numbers is None:
        return {}
    return state.numbers.named(state.step, state.opt_state)


def adjust(state: _State, where: Where = "**", /, **values: Any) -> _State:
    """Set hyperparameters on all leaves, or on the leaves that `where` matches. Moments are kept.

    A value is a number, traced or not; `None` gives a number back to its schedule. A new value
    never compiles the step again. The first cut of a subtree does, once: `adjust(state, where)`
    without values is that cut alone. `adjust(a, **hyperparams(b))` copies into cuts that `a` has.
    The result shares its arrays with `state`: a step that gets either state donates both. With
    `States`, `where` begins with the member, `adjust(run, "critic/head", learning_rate=0.1)`, or
    the names do, `adjust(run, **hyperparams(other))`.

    Raises HyperparameterError for an unknown name (with the known ones), a value out of range, or a
    name that a chain repeats; PatternError if `where` matches nothing; WrongTypeError for a value
    that is no number. For a schedule, `ts.migrate(state, rule)` to a rule that has it.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.adam(1e-3), {"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> state = adjust(state, "head", learning_rate=0.01)
    >>> {k: v for k, v in hyperparams(state).items() if "rate" in k}
    {'learning_rate': 0.001, 'learning_rate@head': 0.01}
    """
    if isinstance(state, States):
        return cast(_State, _adjusted(state, where, values))
    check_values(state, "adjust()", where)
    numbers = state.numbers
    if numbers is None:
        raise HyperparameterError(
            "rule",
            "adjust()",
            got="one without live numbers",
            expected="a live rule",
            fix="Use one of tsunax.rules, or ts.rules.live(optax_factory).",
        )
    names = [number.name for number in numbers.layout.numbers]
    is_unique = lambda name: names.count(name) == 1
    is_flat = any("@" in name for name in values) or (values and all(map(is_unique, values)))
    if is_flat and isinstance(where, str) and where == "**":
        return _assign(state, _by_flat_name(numbers, values), numbers.values)
    matched = _matched(state, numbers, where)
    targets = _targets(state, numbers, matched, values)
    cut = _with_cut(state, numbers, matched, targets, _label(where))
    return _assign(cut, _by_leaf(cast(Numbers, cut.numbers), matched, targets), numbers.values)


def _adjusted(run: States, where: Where, values: Mapping[str, Any]) -> States:
    """`adjust` of the member that `where` begins with, or of the members in the names."""
    if not (isinstance(where, str) and where == "**"):
        name, rest_of_name = run.member_at(where, "adjust()")
        return run.replace(**{name: adjust(run.members[name], rest_of_name, **values)})
    values_by_member: dict[str, dict[str, Any]] = {}
    for name_of_value, x in values.items():
        name, rest_of_name = run.member_at(name_of_value, "adjust()")
        values_by_member.setdefault(name, {})[rest_of_name] = x
    return run.replace(
        **{name: adjust(run.members[name], **x) for name, x in values_by_member.items()}
    )


def freeze(state: _State, where: Where, *, members: ArrayLike | None = None) -> _State:
    """Stop the leaves that `where` matches: params, moments, decay and averages stay bit-identical.

    Their gradients are still computed (`setup(trainable=...)` saves that), but count as zero in
    norms and global clipping. The first freeze of a state compiles the step again, unless
    `setup(freezable=True)` made room for it; later freezes and thaws never do, also under jit, scan
    and vmap. The result shares its arrays with `state`: a step that gets either state donates
    both. Of `States`, `where` begins with the member: "critic/head". Of a population, `members` are
    the indices, or a mask, of the members that stop; by default all.

    Raises PatternError if `where` matches nothing that is trained, StateError for other `members`.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> freeze(state, "body")
    TrainState(step=0, calls=0)
      body  float32[2]  frozen
      head  float32[2]
      learning_rate=0.1
      params 16 B, optimizer 0 B, on ...
    """
    return _set_frozen(state, where, True, members)


def thaw(state: _State, where: Where = "**", *, members: ArrayLike | None = None) -> _State:
    """Train the frozen leaves that `where` matches again, with the moments that they had.

    The count of a rule (Adam's bias correction) has gone on meanwhile: leaves frozen from the start
    take larger first steps after a late thaw, up to 6 × the rate at step 2000 with Adam's defaults.
    Warm up their rate to avoid that. The result shares its arrays with `state`, as in `freeze`,
    and `members` are members of a population, as there.

    Raises PatternError for leaves that `setup(trainable=...)` left out: they have no moments.
    """
    return _set_frozen(state, where, False, members)


# Freezing


def _set_frozen(state: _State, where: Where, freezes: bool, members: ArrayLike | None) -> _State:
    caller = "freeze()" if freezes else "thaw()"
    everything = isinstance(where, str) and where == "**"
    if isinstance(state, States):
        new_members = {}
        for pattern in state.members if everything else [where]:
            name, inner_pattern = state.member_at(pattern, caller)
            new_members[name] = _set_frozen(state.members[name], inner_pattern, freezes, members)
        return cast(_State, state.replace(**new_members))
    check_state(state, caller, where)
    flags = patterns.select(where, state.params, caller)
    pairs = list(zip(flags, state.plan.selected or (True,) * len(flags), strict=True))
    trained = [flag for flag, is_trained in pairs if is_trained]
    if (True, False) in pairs and not everything and (not freezes or not any(trained)):
        raise _left_out(state, pairs.index((True, False)))
    is_lbfgs = lambda x: isinstance(x, optax.ScaleByLBFGSState)
    mixes_leaves = any(map(is_lbfgs, jax.tree.leaves(state.opt_state, is_leaf=is_lbfgs)))
    if freezes and mixes_leaves and not all(trained):
        raise RuleError(
            "rule",
            "freeze()",
            got="lbfgs",
            expected="one that treats leaves apart",
            fix="Its memory mixes all leaves. Leave them out with setup(..., trainable=...).",
        )
    is_chosen = chosen_members(state, members, caller)
    words = frozen_words(trained) * is_chosen[..., None].astype(np.uint32)
    if state.frozen is None and not freezes:
        return state
    old_words: Any = state.frozen
    if old_words is None:
        old_words = put_on_devices_of(trainable(state), jnp.zeros_like(words))
    return dataclasses.replace(state, frozen=old_words | words if freezes else old_words & ~words)


def _left_out(state: TrainState, i: int) -> PatternError:
    return PatternError(
        "leaf",
        trees.access_str("params", trees.paths(state.params)[i]),
        got="one that setup(trainable=...) left out",
        expected="a trained leaf, as which ts.migrate can add it to a run",
    )


# Hyperparameters


def _matched(state: TrainState, numbers: Numbers, where: Where) -> frozenset[Any]:
    """Key paths of the leaves that `where` matches; if it matches all, also leaves of wrappers."""
    flags = patterns.select(where, state.params, "adjust()")
    if state.plan.selected and not any(map(min, flags, state.plan.selected)):
        raise _left_out(state, flags.index(True))
    matched = frozenset(itertools.compress(trees.paths(state.params), flags))
    if not matched.issuperset(trees.paths(trained_part(state))):
        return matched
    return matched.union(*(s.scope.paths for _, s in numbers.layout.lives))


def _targets(
    state: TrainState, numbers: Numbers, matched: frozenset, values: Extra
) -> dict[int, dict[str, Any]]:
    """`{index of a live state: {name in the rule: value}}` of the states to adjust.

    Without values: all live states that have matched leaves.
    """
    lives = numbers.layout.lives
    rule_indices = number_table.chain_indices(lives)
    visible = matched.union(trees.paths(trained_part(state)))
    leaves_of: dict[int, frozenset] = {}  # by the index of a live state that may be adjusted
    for live_index, (_, s) in enumerate(lives):
        leaves = matched.intersection(s.scope.paths)
        if leaves and visible.issuperset(s.scope.paths):
            leaves_of[live_index] = leaves
    if not leaves_of:
        raise HyperparameterError(
            "rule",
            "adjust()",
            got="none with live numbers for these leaves",
            expected="a live rule",
            fix="If a wrapper hides its leaves, adjust(state, ...) sets them all.",
        )
    names_of = lambda live_index: lives[live_index][1].live.names
    targets: dict[int, dict[str, Any]] = {} if values else {i: {} for i in leaves_of}
    for value_name, value in values.items():
        rule_index, _, name = value_name.rpartition(".")
        owners = [i for i in leaves_of if name in names_of(i)]
        if rule_index:
            owners = [i for i in owners if rule_indices[i] == rule_index]
        else:  # if one rule wraps another, the plain name belongs to the outer rule
            outer = frozenset().union(*(leaves_of[i] for i in owners if not rule_indices[i]))
            owners = [i for i in owners if not rule_indices[i] or not leaves_of[i] & outer]
        for i in owners:
            targets.setdefault(i, {})[name] = value
        for i, j in itertools.combinations(owners, 2):
            if leaves_of[i] & leaves_of[j]:
                raise HyperparameterError(
                    "hyperparameter",
                    "adjust()",
                    got=f"{value_name!r}, which two rules of a chain have",
                    expected=f"'{rule_indices[i]}.{name}' or '{rule_indices[j]}.{name}'",
                )
        if not owners:
            names = sorted({name for i in leaves_of for name in names_of(i)})
            raise HyperparameterError(unknown("hyperparameter", "adjust()", value_name, names))
    return targets


def _with_cut(
    state: TrainState, numbers: Numbers, matched: frozenset, targets: Iterable[int], label: str
) -> TrainState:
    """Give the matched leaves their groups of values in the targeted live states."""
    refined = {i: _refined(numbers.layout.lives[i][1], matched, label) for i in targets}
    if not (cuts := {i: cut for i, cut in refined.items() if cut is not None}):
        return state
    opt_state, numbers = recut(state.opt_state, numbers, trained_part(state), cuts)
    return dataclasses.replace(state, opt_state=opt_state, numbers=numbers)


def _label(where: Where) -> str:
    if isinstance(where, (str, list, tuple)):
        return where if isinstance(where, str) else ",".join(map(str, where))
    return getattr(where, "__name__", "mask").strip("<>")


def _refined(s: LiveState, matched: frozenset, label: str) -> tuple[Cut, tuple[int, ...]] | None:
    """The groups of `s` split by `matched`, and their parents; None if the old groups will do."""
    labels = [*s.group_labels]
    pairs = [(g, path in matched) for path, g in s.group_of_path.items()]
    split = [g for g in range(s.groups) if (g, True) in pairs and (g, False) in pairs]
    for g in split:
        name = f"{labels[g]} & {label}" if labels[g] else label
        while name in labels:
            name += "'"
        labels.append(name)
    new = {(g, True): s.groups + i for i, g in enumerate(split)}
    group_of_leaf = tuple(new.get(pair, pair[0]) for pair in pairs)
    return (Cut(group_of_leaf, tuple(labels)), (*range(s.groups), *split)) if split else None


# A number to set, with its value; None for the value of its schedule.
Edits: TypeAlias = list[tuple[LiveNumber, Any]]


def _by_leaf(
    numbers: Numbers, matched: frozenset, targets: Mapping[int, Mapping[str, Any]]
) -> Edits:
    """The values to set for the matched leaves."""
    edits: Edits = []
    for number in numbers.layout.numbers:
        values = targets.get(number.live_index, {})
        group_of_path = number.state.group_of_path
        has_match = any(group_of_path.get(path) == number.group for path in matched)
        if number.name in values and has_match:
            edits.append((number, values[number.name]))
    return edits


def _by_flat_name(numbers: Numbers, values: Mapping[str, Any]) -> Edits:
    number_by_name = {number.flat_name: number for number in numbers.layout.numbers}
    for name in values:
        if name not in number_by_name:
            raise HyperparameterError(
                unknown(
                    "hyperparameter",
                    "adjust()",
                    name,
                    number_by_name,
                    fix="Cut it first: ts.adjust(state, pattern)." if "@" in name else "",
                )
            )
    return [(number_by_name[name], value) for name, value in values.items()]


def _on_devices_of(old: Any, host: np.ndarray) -> jax.Array:
    """`host` on the devices of `old`, committed like `old`, so that the step does not recompile."""
    if not getattr(old, "committed", False):
        return jax.device_put(host)
    return jax.make_array_from_callback(host.shape, old.sharding, lambda index: host[index])


def _check_value(number: LiveNumber, value: Any, members: tuple[int, ...]) -> None:
    where, each = f"{number.state.live.title}()", [value]
    if np.ndim(value) and members:  # a population takes one value per member
        if np.shape(value) != members:
            raise HyperparameterError(
                number.name,
                where,
                got=f"shape {np.shape(value)}",
                expected=f"one number, or shape {members}: one for each member",
            )
        if not trees.is_traced(value):
            each = np.ravel(np.asarray(value)).tolist()
    for x in each:
        number_checks.check_number(where, number.name, x, "a number")


def _assign(state: TrainState, edits: Edits, like: Any) -> TrainState:
    """Write values into columns, on the devices of `like`, without waiting for a step."""
    numbers: Any = state.numbers
    values = numbers.values
    for number, value in edits:
        if value is not None or number.schedule is None:
            _check_value(number, value, np.shape(values)[:-2])
    is_concrete = not any(map(trees.is_traced, [values, *(value for _, value in edits)]))
    if is_concrete:
        values = np.array(values)
    elif isinstance(values, np.ndarray):
        values = _on_devices_of(like, values)
    lib, dtype = (np, np.float64) if is_concrete else (jnp, values.dtype)
    for number, value in edits:
        # Row 2 is 1 if a value overrides a schedule. A number without a schedule keeps its 0.
        rows = {2: value is not None and number.schedule is not None}
        if value is not None:  # row 1 is 1 - value: see `rules/number_table.py`
            exact = lib.asarray(value, dtype)
            rows |= {0: exact, 1: 1 - exact}
        for row, x in rows.items():
            if is_concrete:
                values[..., row, number.column] = x
            else:
                values = jnp.asarray(values).at[..., row, number.column].set(x)
    values = _on_devices_of(like, np.asarray(values)) if is_concrete else values
    return dataclasses.replace(state, numbers=dataclasses.replace(numbers, values=values))
