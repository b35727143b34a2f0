"""Change a run while it runs: read and set hyperparameters, freeze and thaw. State in, state out.

Every function edits arrays of the state (`numbers`, `frozen`), so that the step keeps its program.
Only the first cut of a subtree and the first freeze compile the step again.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from tsunax._core import Extra, Where, patterns, trees
from tsunax._core.placement import put_on_devices_of
from tsunax._state.state_fields import frozen_words
from tsunax._step.members import chosen_members
from tsunax.errors import HyperparameterError, PatternError, RuleError, unknown
from tsunax.rules import number_checks, number_table
from tsunax.rules.live_rules import Live, LiveState
from tsunax.rules.number_table import Numbers
from tsunax.rules.subtree_numbers import Cut, recut
from tsunax.state import TrainState, check_state, check_values, trainable, trained_part
from tsunax.states import States, training_states

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
    return state.numbers.named(state.step, number_table.own_counts(state.opt_state, state.numbers))


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
    if state.numbers is None:
        fix = "Use one of tsunax.rules, or ts.rules.live(optax_factory)."
        raise HyperparameterError(
            "rule", "adjust()", "one without live numbers", "a live rule", fix
        )
    is_flat = any("@" in name for name in values) or (values and _are_of_one_rule(state, values))
    if isinstance(where, str) and where == "**" and is_flat:
        return _assign(state, _by_flat_name(state, values), _table(state).values)
    matched = _matched(state, where)
    targets = _targets(state, matched, values)
    cut = _with_cut(state, where, matched, targets)
    return _assign(cut, _by_leaf(cut, matched, targets, values), _table(state).values)


def _adjusted(run: States, where: Where, values: Mapping[str, Any]) -> States:
    """`adjust` of the member that `where` begins with, or of the members in the names."""
    if not (isinstance(where, str) and where == "**"):
        name, rest_of_name = run.member_at(where, "adjust()")
        return run.replace(**{name: adjust(run.members[name], rest_of_name, **values)})
    values_by_member: dict[str, dict[str, Any]] = {}
    for name_of_value, x in values.items():
        name, rest_of_name = run.member_at(name_of_value, "adjust()")
        values_by_member.setdefault(name, {})[rest_of_name] = x
    members = {name: adjust(run.members[name], **x) for name, x in values_by_member.items()}
    return run.replace(**members)


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
    selected = state.plan.selected or (True,) * len(flags)
    pairs = list(zip(flags, selected, strict=True))
    trained = [flag for flag, is_trained in pairs if is_trained]
    if (True, False) in pairs and not everything and (not freezes or not any(trained)):
        raise _left_out(state, pairs.index((True, False)))
    is_lbfgs = lambda x: isinstance(x, optax.ScaleByLBFGSState)
    mixes_leaves = any(map(is_lbfgs, jax.tree.leaves(state.opt_state, is_leaf=is_lbfgs)))
    if freezes and mixes_leaves and not all(trained):
        fix = "Its memory mixes all leaves. Leave them out with setup(..., trainable=...)."
        raise RuleError("rule", "freeze()", "lbfgs", "one that treats leaves apart", fix)
    is_chosen = chosen_members(state, members, caller)
    words = frozen_words(trained) * is_chosen[..., None].astype(np.uint32)
    if state.frozen is None and not freezes:
        return state
    old_words: Any = state.frozen
    if old_words is None:
        old_words = put_on_devices_of(trainable(state), jnp.zeros_like(words))
    return dataclasses.replace(state, frozen=old_words | words if freezes else old_words & ~words)


def _left_out(state: TrainState, i: int) -> PatternError:
    place = trees.access_str("params", trees.paths(state.params)[i])
    expected = "a trained leaf, as which ts.migrate can add it to a run"
    return PatternError("leaf", place, "one that setup(trainable=...) left out", expected)


# Hyperparameters


def _matched(state: TrainState, where: Where) -> frozenset[Any]:
    """Key paths of the leaves that `where` matches; if it matches all, also leaves of wrappers."""
    flags = patterns.select(where, state.params, "adjust()")
    if state.plan.selected and not any(map(min, flags, state.plan.selected)):
        raise _left_out(state, flags.index(True))
    pairs = zip(trees.paths(state.params), flags, strict=True)
    matched = frozenset(path for path, flag in pairs if flag)
    if not matched.issuperset(trees.paths(trained_part(state))):
        return matched
    return matched.union(*(s.paths for _, s in _table(state).layout.lives))


def _table(state: TrainState) -> Numbers:
    assert state.numbers is not None  # the caller has checked it
    return state.numbers


def _are_of_one_rule(state: TrainState, names: Iterable[str]) -> bool:
    """Whether each name is in the table once, for any leaves."""
    flat_names = [
        name for groups in _table(state).layout.names for names in groups for name in names
    ]
    plain_names = [name.partition("@")[0].rpartition(".")[2] for name in flat_names]
    return all(name in flat_names and plain_names.count(name) == 1 for name in names)


class _Hit(NamedTuple):
    """A live state that an adjust may set."""

    live_index: int
    rule: str  # its index in a chain
    names: tuple[str, ...]
    leaves: frozenset


def _targets(state: TrainState, matched: frozenset, values: Extra) -> dict[int, dict[str, str]]:
    """`{index of a live state: {name of a value: name in the rule}}` of the states to adjust.

    Without values: all live states that have matched leaves.
    """
    lives = _table(state).layout.lives
    visible = matched.union(trees.paths(trained_part(state)))
    hits, indices = [], number_table.chain_indices(lives)
    for live_index, (_, s) in enumerate(lives):
        leaves = matched.intersection(s.paths)
        if leaves and visible.issuperset(s.paths):
            hits.append(_Hit(live_index, indices[live_index], s.live.names, leaves))
    if not hits:
        fix = "If a wrapper hides its leaves, adjust(state, ...) sets them all."
        raise HyperparameterError(
            "rule", "adjust()", "none with live numbers for these leaves", "a live rule", fix
        )
    targets: dict[int, dict[str, str]] = {} if values else {hit.live_index: {} for hit in hits}
    for value_name in values:
        index, _, name = value_name.rpartition(".")
        named_hits = [hit for hit in hits if name in hit.names and index in ("", hit.rule)]
        if not index:  # if one rule wraps another, the plain name belongs to the outer rule
            outer = frozenset().union(*(hit.leaves for hit in named_hits if not hit.rule))
            named_hits = [hit for hit in named_hits if not hit.rule or not hit.leaves & outer]
        for hit in named_hits:
            targets.setdefault(hit.live_index, {})[value_name] = name
        for hit, second_hit in itertools.combinations(named_hits, 2):
            if hit.leaves & second_hit.leaves:
                got = f"{value_name!r}, which two rules of a chain have"
                expected = f"'{hit.rule}.{name}' or '{second_hit.rule}.{name}'"
                raise HyperparameterError("hyperparameter", "adjust()", got, expected)
        if not named_hits:
            names = sorted({name for hit in hits for name in hit.names})
            raise HyperparameterError(unknown("hyperparameter", "adjust()", value_name, names))
    return targets


def _with_cut(state: TrainState, where: Where, matched: frozenset[Any], targets: Any) -> TrainState:
    """Give the matched leaves their groups of values in the targeted live states."""
    cuts = {}
    for live_index, (_, s) in enumerate(_table(state).layout.lives):
        cut, parents = _refined(s, [path in matched for path in s.paths], _label(where))
        if live_index in targets and cut is not None:
            cuts[live_index] = cut, parents
    if not cuts:
        return state
    opt_state, numbers = recut(state.opt_state, _table(state), trained_part(state), cuts)
    return dataclasses.replace(state, opt_state=opt_state, numbers=numbers)


def _label(where: Where) -> str:
    if isinstance(where, str):
        return where
    if isinstance(where, (list, tuple)):
        return ",".join(map(str, where))
    return getattr(where, "__name__", "mask").strip("<>")


def _refined(s: LiveState, hits: Sequence[bool], label: str) -> tuple[Cut | None, tuple[int, ...]]:
    """The groups of `s` split by `hits`: (the new cut, or None if the old one will do; parents)."""
    old = s.cut or Cut((0,) * len(s.paths), ("",))
    pairs = list(zip(old.group_of_leaf, hits, strict=True))
    split = [g for g in range(s.groups) if (g, True) in pairs and (g, False) in pairs]
    if not split:
        return None, ()
    labels = list(old.labels)
    for g in split:
        name = f"{old.labels[g]} & {label}" if old.labels[g] else label
        while name in labels:
            name += "'"
        labels.append(name)
    new = {(g, True): s.groups + i for i, g in enumerate(split)}
    group_of_leaf = tuple(new.get(pair, pair[0]) for pair in pairs)
    return Cut(group_of_leaf, tuple(labels)), (*range(s.groups), *split)


def _by_leaf(state: TrainState, matched: Any, targets: Any, values: Any) -> dict[int, Any]:
    """The values to set for the matched leaves: {column of the numbers: (live, index, value)}."""
    cells = {}
    for live_index, s, group, start in _table(state).columns():
        group_of_leaf = s.cut.group_of_leaf if s.cut else (0,) * len(s.paths)
        hits = zip(group_of_leaf, [path in matched for path in s.paths], strict=True)
        if any(hit and leaf_group == group for leaf_group, hit in hits):
            for value_name, name in targets.get(live_index, {}).items():
                i = s.live.names.index(name)
                cells[start + i] = s.live, i, values[value_name]
    return cells


def _by_flat_name(state: TrainState, values: Mapping[str, Any]) -> dict[int, tuple[Any, ...]]:
    """The values to set for flat names: {column of the numbers: (live, index, value)}."""
    columns = {}
    for live_index, s, group, start in _table(state).columns():
        for i, name in enumerate(_table(state).layout.names[live_index][group]):
            columns[name] = start + i, s.live, i
    for name in values:
        if name not in columns:
            fix = "Cut it first: ts.adjust(state, pattern)." if "@" in name else ""
            raise HyperparameterError(unknown("hyperparameter", "adjust()", name, columns, fix))
    return {columns[name][0]: (*columns[name][1:], value) for name, value in values.items()}


def _on_devices_of(old: Any, host: np.ndarray) -> jax.Array:
    """`host` on the devices of `old`, committed like `old`, so that the step does not recompile."""
    if not getattr(old, "committed", False):
        return jax.device_put(host)
    return jax.make_array_from_callback(host.shape, old.sharding, lambda index: host[index])


def _check_value(live: Live, i: int, value: Any, members: tuple[int, ...]) -> None:
    name, where = live.names[i], f"{live.title}()"
    each = [value]
    if np.ndim(value) and members:  # a population takes one value per member
        if np.shape(value) != members:
            expected = f"one number, or shape {members}: one for each member"
            raise HyperparameterError(name, where, f"shape {np.shape(value)}", expected)
        if not trees.is_traced(value):
            each = np.ravel(np.asarray(value)).tolist()
    for number in each:
        number_checks.check_number(where, name, number, "a number")


def _assign(state: TrainState, cells: dict[int, tuple[Any, ...]], old: Any) -> TrainState:
    """Write values into columns, on the devices of `old`, without waiting for a step."""
    values: Any = _table(state).values
    for live, i, value in cells.values():
        if value is not None or live.schedules[i] is None:
            _check_value(live, i, value, np.shape(values)[:-2])
    is_concrete = not any(
        map(trees.is_traced, [values, *(value for _, _, value in cells.values())])
    )
    if is_concrete:
        values = np.array(values)
    elif isinstance(values, np.ndarray):
        values = _on_devices_of(old, values)
    for column, (live, i, value) in cells.items():
        # Row 2 is 1 if a value overrides a schedule. A number without a schedule keeps its 0.
        rows = {2: value is not None and live.schedules[i] is not None}
        if value is not None:  # row 1 is 1 - value: see `rules/number_table.py`
            lib, dtype = (np, np.float64) if is_concrete else (jnp, values.dtype)
            exact = lib.asarray(value, dtype)
            rows |= {0: exact, 1: 1 - exact}
        for row, x in rows.items():
            if is_concrete:
                values[..., row, column] = x
            else:
                values = values.at[..., row, column].set(x)
    values = _on_devices_of(old, values) if is_concrete else values
    return dataclasses.replace(state, numbers=dataclasses.replace(_table(state), values=values))
