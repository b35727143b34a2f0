"""A run carried over to another rule, selection or precision: what has the same name goes on, the
rest is told.

    state, report = migrate(state, ts.rules.chain(ts.rules.clip_by_global_norm(1.0),
    ts.rules.adamw(3e-4)))

A new state is set up, and every array of the old one that it also has takes its place. Arrays of an
optimizer state are told by what they are, not by where they stand in a chain: `ScaleByAdamState.mu`
of `encoder/kernel`.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tsunax._core import checks, trees
from tsunax._core.placement import beside
from tsunax._step.members import members_of
from tsunax._step.roles import frozen_flags, frozen_words
from tsunax.checkpoints import manifest
from tsunax.errors import HyperparameterError, StateError, WrongTypeError, message
from tsunax.hyper import hyperparams
from tsunax.rules import live_rules, number_table
from tsunax.rules.combining import PartitionState
from tsunax.rules.cuts import recut
from tsunax.rules.owners import owners as owners_of_init
from tsunax.rules.owners import owners_by_suffix, owners_of
from tsunax.state import (
    TrainState,
    base,
    check_state,
    own,
    setup,
    trained_part,
)

__all__ = ["Report", "migrate"]

KEEP: Any = ...
FLAX = "step", "apply_fn", "params", "tx", "opt_state"  # the fields of its TrainState


@dataclass(frozen=True)
class Report:
    """What became of each array and number, by names as `ScaleByAdamState.mu of head/bias`; prints
    as a list.

    `leaf head/bias` is one of params that is new or gone, or has another shape.
    """

    kept: tuple[str, ...]
    new: tuple[str, ...]  # begins anew: the old state has none, or several and nothing tells which
    dropped: tuple[str, ...]  # the new state has none
    notes: tuple[
        str, ...
    ]  # numbers that the script changed, cuts, averages and freezes that ended, shared counts

    def __repr__(self) -> str:
        lines = [f"kept {len(self.kept)}, new {len(self.new)}, dropped {len(self.dropped)}"]
        for what, names in (("new", self.new), ("dropped", self.dropped), ("note", self.notes)):
            shown = [*names[:20], *([f"... and {len(names) - 20} more"] if len(names) > 20 else [])]
            lines += [f"  {what:<7}  {name}" for name in shown]
        return "\n".join(lines)

    def joined(self, other: Report) -> Report:
        """Both in one."""
        parts = (getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self))
        return Report(*parts)


class _Slot(NamedTuple):
    """An array of an optimizer state, and what tells it from the others."""

    what: str  # "ScaleByAdamState.mu"
    owner: str | None  # the name of its parameter; None for counts
    home: tuple  # key path of the state that it is a field of
    groups: tuple[str, ...]  # of rules, in which that stands
    value: Any

    @property
    def name(self) -> str:
        return self.what if self.owner is None else f"{self.what} of {self.owner}"

    @property
    def kind(self) -> tuple:
        return self.what, self.owner, jnp.shape(self.value), trees.dtype_of(self.value)


@dataclass(frozen=True)
class _Old:
    """What is carried over, whatever library made it."""

    params: Any
    slots: list[_Slot]
    step: int
    state: TrainState | None
    model_state: Any = None
    key: Any = None
    beside: tuple[str, ...] = ()  # what else it has, and no TrainState has a place for


def migrate(
    state: Any,
    rule: Any,
    *,
    params: Any = KEEP,
    trainable: Any = KEEP,
    ema: Any = KEEP,
    precision: Any = KEEP,
    loss_scale: Any = KEEP,
    model_state: Any = KEEP,
    key: Any = KEEP,
    step: int | None = None,
) -> tuple[TrainState, Report]:
    """The state under another rule, and what was kept, is new, and was dropped: `(state, report)`.

    What is not named stays as it is. Arrays are matched by what they are, the name of their
    parameter, shape and dtype; a count goes with the moments beside it. A live number goes on if
    both rules were given the same one; where the script has another the script's is used, and the
    report says so. Frozen leaves stay frozen, by name. What could be one of several begins anew,
    and the report says so: nothing is guessed.

    Args:
      state: a `TrainState`; a flax `TrainState`; or an optax state, with its `params=`.
      rule: the new rule, or the old one for a change of something else.
      params: another tree, as a model with LoRA has: leaves of the same name and shape keep their
        optimizer state.
      trainable, ema, precision, loss_scale, model_state, key: as in `setup`.
      step: the number of updates so far, of an optax state without counts.

    The old state is not consumed. Raises StateError for populations, traced and donated states, and
    for new leaves that no `trainable=` tells of; and what `setup` raises.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.adam(1e-3), {"w": jnp.ones(2)})
    >>> state, _ = ts.update(state, {"w": jnp.ones(2)})
    >>> rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adam(1e-3))
    >>> state, report = migrate(state, rule, ema=0.99)
    >>> report
    kept 3, new 1, dropped 0
      new      average of w
    >>> int(state.step), ts.hyperparams(state)["max_norm"]
    (1, 1.0)
    """
    old = _as_old(state, params, rule, step)
    known, given = old.state, old.params if params is KEEP else params
    options = {
        "trainable": _trained_by_name(given, old) if trainable is KEEP else trainable,
        "model_state": old.model_state if model_state is KEEP else model_state,
        "key": old.key if key is KEEP else key,
        "ema": known and jax.tree.map(own, known.average) if ema is KEEP else ema,
        "precision": known and known.plan.precision if precision is KEEP else precision,
        "loss_scale": known and jax.tree.map(own, known.loss_scale)
        if loss_scale is KEEP
        else loss_scale,
    }
    fresh = setup(rule, _wide(given, known), **options)
    full = number_table.lower(fresh.opt_state, fresh.numbers)
    full, report = _filled(full, old.slots, _slots(full, _owners_of(fresh), base(fresh)))
    opt_state, numbers = number_table.hoist(full)
    counts = (
        own(known.clock) if known is not None else jnp.array([old.step, old.step, 0, 0], jnp.int32)
    )
    fresh = dataclasses.replace(
        fresh, clock=beside(fresh.params, counts), opt_state=opt_state, numbers=numbers
    )
    report = report.joined(_around(old, fresh))
    if known is not None:
        for carry in (_cuts, _numbers, _average, _frozen):
            fresh, more = carry(known, fresh)
            report = report.joined(more)
    return fresh, report


# ----------------------------------------------------------------------------------- what there was


def _as_old(state, params, rule, step) -> _Old:
    where = "migrate()"
    if isinstance(state, TrainState):
        check_state(state, where)
        if step is not None:
            fix = "state.replace(step=...) changes it."
            raise WrongTypeError(
                message("step", where, step, "None: a TrainState knows its own", fix)
            )
        if members_of(state) is not None:
            raise StateError(
                message(
                    "state",
                    where,
                    "a population",
                    "one state",
                    "Each alone: ts.populations.member(runs, i).",
                )
            )
        if any(map(trees.is_traced, jax.tree.leaves(state))):
            raise StateError(
                message(
                    "state", where, "a traced state", "a concrete one", "Call it outside of jit."
                )
            )
        full = number_table.lower(state.opt_state, state.numbers)
        slots = _told(_slots(full, _owners_of(state), base(state)))
        return _Old(state.params, slots, int(state.step), state, state.model_state, state.key)
    if step is not None:
        checks.check_count(step, where, "step", least=0)
        if step >= 2**31:
            raise HyperparameterError(message("step", where, step, "one that int32 holds"))
    if all(hasattr(state, name) for name in ("opt_state", "tx", "params", "step")):  # flax
        owners = owners_of_init(state.tx.init, state.params)[2]
        slots = _told(_slots(state.opt_state, owners, state.params))
        more = [name for name, x in vars(state).items() if name not in FLAX and jax.tree.leaves(x)]
        return _Old(
            state.params, slots, int(state.step) if step is None else step, None, beside=tuple(more)
        )
    if params is KEEP:
        fix = "Of an optax state give params=, too."
        raise WrongTypeError(message("state", where, trees.describe(state), "a TrainState", fix))
    slots = _told(_slots(state, _owners_in(state, rule, params), params))
    counts = {
        int(slot.value)
        for slot in slots
        if slot.what.endswith(".count") and not np.ndim(slot.value)
    }
    if step is None and len(counts) != 1:
        got = f"an optax state with {len(counts) or 'no'} counts"
        raise StateError(
            message("step", where, got, "one that tells the number of updates", "Give step=.")
        )
    return _Old(params, slots, counts.pop() if step is None else step, None)


def _told(slots: list[_Slot | None]) -> list[_Slot]:
    return [slot for slot in slots if slot is not None]


def _owners_of(state: TrainState) -> list[int | None]:
    """For each leaf of the whole optimizer state, with its tables and clocks, the place of its
    parameter.
    """
    owners = owners_of(state.plan.init, state.opt_state, state.numbers, base(state))
    if state.numbers is None:
        return owners
    layout, known = state.numbers.layout, iter(owners)
    gone = {*layout.tables, *layout.clocks}
    return [None if i in gone else next(known) for i in range(layout.full.num_leaves)]


def _owners_in(opt_state, rule, params) -> list[int | None]:
    """Those of a bare optax state: as the rule's init says, if it makes the like; else by where
    they stand in it.
    """
    shapes, _, owners = owners_of_init(rule.init, params)
    numbered = jax.tree.unflatten(jax.tree.structure(shapes), range(len(owners)))
    for made in (numbered, _without_numbers(numbered)):
        if jax.tree.structure(made) == jax.tree.structure(opt_state):
            return [owners[i] for i in jax.tree.leaves(made)]
    owners = _owners_by_field(opt_state, params)
    if any(owner is not None for owner in owners):
        return owners
    return owners_by_suffix(params, jtu.tree_flatten_with_path(opt_state)[0])


def _owners_by_field(opt_state, params) -> list[int | None]:
    """Of each leaf the parameter in whose place it stands, alone or in a list, in a field with the
    tree of the params.

    So the shape says nothing: moments may be factored, or one number for each parameter.
    """
    places = {path: i for i, (path, _) in enumerate(jtu.tree_flatten_with_path(params)[0])}
    treedef = jax.tree.structure(params)

    @functools.cache
    def has_params(field: tuple) -> bool:
        try:
            treedef.flatten_up_to(functools.reduce(trees.child, field, opt_state))
        except (TypeError, ValueError):
            return False
        return () not in places  # a single array would be anything

    def owner(path: tuple) -> int | None:
        ends = [i + 1 for i, entry in enumerate(path) if isinstance(entry, jtu.GetAttrKey)]
        if (end := next((i for i in reversed(ends) if has_params(path[:i])), None)) is None:
            return None
        at = next((i for i in range(end, len(path) + 1) if path[end:i] in places), None)
        is_there = at is not None and all(isinstance(entry, jtu.SequenceKey) for entry in path[at:])
        return places[path[end:at]] if is_there else None

    return [owner(path) for path, _ in jtu.tree_flatten_with_path(opt_state)[0]]


def _without_numbers(opt_state):
    """With plain optax's states in the place of live ones."""
    bare = lambda x: _without_numbers(x.inner) if live_rules.is_live(x) else x
    return jax.tree.map(bare, opt_state, is_leaf=live_rules.is_live)


def _slots(full, owners: list[int | None], params) -> list[_Slot | None]:
    """One for each leaf of an optimizer state; None for tables of numbers, and counters of cuts."""
    named = trees.leaves_with_names(params)
    out: list[_Slot | None] = []
    for (path, x), owner in zip(jtu.tree_flatten_with_path(full)[0], owners, strict=True):
        name, end = (None, ()) if owner is None else ("/".join(named[owner][0]), named[owner][1])
        inside = path[: len(path) - len(end)] if end and path[-len(end) :] == tuple(end) else path
        out.append(_slot(full, inside, name, x))
    return out


def _slot(full, path: tuple, owner: str | None, value) -> _Slot | None:
    node, what, home, groups = full, "state", (), []
    for i, entry in enumerate(path):
        if live_rules.is_live(node):
            if entry.name in ("table", "extra") or (entry.name == "count" and not node.own_clock):
                return None
            if entry.name == "count":
                what, home = f"{node.live.title}.count", path[:i]
        elif isinstance(entry, jtu.DictKey):
            groups.append(str(entry.key))
            if (
                owner is None and i == len(path) - 1
            ):  # a number of its own, as one of `inject_hyperparams`
                what = f"{what}[{entry.key!r}]"
        elif not isinstance(node, PartitionState) and type(node) not in (tuple, list):
            what, home = f"{type(node).__name__}.{trees.key_name(entry)}", path[:i]
        node = trees.child(node, entry)
    return _Slot(what, owner, home, tuple(groups), value)


# ------------------------------------------------------------------------------- what there will be


def _wide(params, known: TrainState | None):
    """Params with master copies in the place of those that the state rounded."""
    if known is None or known.masters is None:
        return params
    stored = jax.tree.leaves(trained_part(known))
    wide = {id(x): master for x, master in zip(stored, jax.tree.leaves(known.masters), strict=True)}
    return jax.tree.map(lambda x: wide.get(id(x), x), params)


def _trained_by_name(params, old: _Old) -> Any:
    """Which leaves of a tree the old state trains. Raises StateError for one that it has not."""
    plan = old.state and old.state.plan
    if plan is None or plan.selected is None:
        return "**"
    names = ["/".join(name) for name, _, _ in trees.leaves_with_names(old.params)]
    trained = dict(zip(names, plan.selected, strict=True))
    here = ["/".join(name) for name, _, _ in trees.leaves_with_names(params)]
    if unknown := [name for name in here if name not in trained]:
        fix = "Of the others the state trains a part only: give trainable=."
        raise StateError(
            message(f"leaf {unknown[0]!r}", "migrate()", "a new one", "those of the state", fix)
        )
    return jax.tree.unflatten(jax.tree.structure(params), [trained[name] for name in here])


def _filled(full, old: list[_Slot], new: list[_Slot | None]) -> tuple[Any, Report]:
    """A whole optimizer state with the arrays of the old one."""
    slots = {i: slot for i, slot in enumerate(new) if slot is not None}
    found, notes = _of_parameters(old, slots)
    homes: dict[tuple, set] = {}  # of each new state those that its arrays come from
    for i, slot in found.items():
        homes.setdefault(slots[i].home, set()).add(slot.home)
    owned = {slot.home for slot in slots.values() if slot.owner is not None}
    for i, slot in slots.items():
        if slot.owner is None:
            from_there = lambda o, slot=slot: (
                slot.home not in owned or o.home in homes.get(slot.home, ())
            )
            same = [o for o in old if o.kind == slot.kind and from_there(o)]
            values = {trees.on_host(o.value).tobytes() for o in same}
            if len(values) > 1 and len(same) == sum(s.kind == slot.kind for s in slots.values()):
                same = [same[[j for j, s in slots.items() if s.kind == slot.kind].index(i)]]
            elif len(values) > 1:
                same = sorted(same, key=lambda o: trees.on_host(o.value).sum())[-1:]
                notes.append(f"{slot.name}: one of {len(values)} values there, the largest taken")
            if same:
                found[i] = same[-1]
    for i, slot in slots.items():
        beside = [
            j for j, other in slots.items() if other.home == slot.home and other.owner is not None
        ]
        if slot.owner is None and i in found and (anew := sum(j not in found for j in beside)):
            notes.append(f"{slot.name}: goes on, also for {anew} arrays beside it that begin anew")
    used = {id(slot) for slot in found.values()}
    leaves, treedef = jax.tree.flatten(full)
    fresh = lambda x: x if np.ndim(x) else own(x)  # counts may be one array, and are donated each
    leaves = [_there(found[i].value, x) if i in found else fresh(x) for i, x in enumerate(leaves)]
    kept, anew = (
        [slot.name for i, slot in slots.items() if (i in found) == known] for known in (True, False)
    )
    dropped = [
        slot.name
        for slot in old
        if id(slot) not in used and slot.kind not in {slots[i].kind for i in found}
    ]
    return treedef.unflatten(leaves), Report(tuple(kept), tuple(anew), tuple(dropped), tuple(notes))


def _of_parameters(old: list[_Slot], slots: dict[int, _Slot]) -> tuple[dict[int, _Slot], list[str]]:
    """For the arrays that belong to parameters those of the old state, by their places; and what
    was ambiguous.
    """
    there: dict[tuple, list[_Slot]] = {}
    here: dict[tuple, list[int]] = {}
    for slot in old:
        there.setdefault(slot.kind, []).append(slot)
    for i, slot in slots.items():
        if slot.owner is not None:
            here.setdefault(slot.kind, []).append(i)
    found, notes = {}, []
    for kind, places in here.items():
        known = there.get(kind, [])
        if len(known) == len(places):
            found.update(zip(places, known, strict=True))
        elif known:
            for i in places:
                same = [slot for slot in known if slot.groups == slots[i].groups]
                rivals = [j for j in places if slots[j].groups == slots[i].groups]
                if len(same) == len(rivals) == 1:
                    found[i] = same[0]
                else:
                    notes.append(
                        f"{slots[i].name}: begins anew, {len(known)} there and {len(places)} here"
                    )
    return found, notes


def _there(x, like):
    """A copy of an array where another one is, if that is bound to devices."""
    x = own(x)
    if (
        not isinstance(like, jax.Array)
        or not like.committed
        or x.sharding.device_set == like.sharding.device_set
    ):
        return x
    return jax.device_put(x, like.sharding)


# ----------------------------------------------------------------------------------------- the rest


def _around(old: _Old, new: TrainState) -> Report:
    """What came and went of params, model state, key and loss scale."""
    here, there = (
        {"/".join(name): np.shape(x) for name, _, x in trees.leaves_with_names(s.params)}
        for s in (new, old)
    )
    anew = [f"leaf {name}" for name, shape in here.items() if there.get(name) != shape]
    gone = [f"leaf {name}" for name, shape in there.items() if here.get(name) != shape]
    had = {
        "model_state": old.model_state,
        "key": old.key,
        "loss_scale": old.state and old.state.loss_scale,
    }
    for name, x in had.items():
        now = getattr(new, name)
        anew += [name] if x is None and now is not None else []
        gone += [name] if x is not None and now is None else []
    return Report((), tuple(anew), (*gone, *old.beside), ())


def _cuts(old: TrainState, new: TrainState) -> tuple[TrainState, Report]:
    """Subtrees with numbers of their own, where both rules have the same live rule over the same
    leaves.
    """
    if old.numbers is None or not any(s.cut for _, s in old.numbers.layout.lives):
        return new, Report((), (), (), ())
    there = [s for _, s in old.numbers.layout.lives]
    numbers = new.numbers
    here = [] if numbers is None else [s for _, s in numbers.layout.lives]
    alike = lambda lives, s: [
        at for at, t in enumerate(lives) if (t.live.title, t.paths) == (s.live.title, s.paths)
    ]
    cuts, notes = {}, []
    for s in there:
        if s.cut is None:
            continue
        places = alike(here, s)
        if len(places) == len(alike(there, s)) == 1:
            cuts[places[0]] = s.cut, (0,) * s.groups
        else:
            notes.append(
                f"{s.live.title}: the numbers of {', '.join(s.cut.labels[1:])} alone are gone"
            )
    if numbers is not None and cuts:
        opt_state, numbers = recut(new.opt_state, numbers, trained_part(new), cuts)
        new = dataclasses.replace(
            new, opt_state=beside(new.params, opt_state), numbers=beside(new.params, numbers)
        )
    return new, Report((), (), (), tuple(notes))


def _numbers(old: TrainState, new: TrainState) -> tuple[TrainState, Report]:
    if old.numbers is None or new.numbers is None:
        return new, Report((), (), (), ())
    facts = [manifest.state_facts(state) for state in (old, new)]
    values = [np.asarray(numbers.values) for numbers in (old.numbers, new.numbers)]
    merged, edited = manifest.merged_numbers(values[0], facts[0], values[1], facts[1])
    known = {name for name, _ in facts[0]["columns"]}
    notes = [note for note in edited if note.partition(":")[0] in known]
    mine, then = {name for name, _ in facts[1]["columns"]}, hyperparams(old)
    given = dict(zip((name for name, _ in facts[0]["columns"]), values[0][3], strict=True))
    adjusted = [
        name
        for name, x in given.items()
        if name not in mine | set(facts[0]["schedules"]) and then[name] != x
    ]
    notes += [f"{name}: {then[name]:.6g} by adjust then, no such number now" for name in adjusted]
    numbers = dataclasses.replace(
        new.numbers, values=_there(jnp.asarray(merged), new.numbers.values)
    )
    return dataclasses.replace(new, numbers=numbers), Report((), (), (), tuple(notes))


def _average(old: TrainState, new: TrainState) -> tuple[TrainState, Report]:
    average, before = new.average, old.average
    there = {} if before is None else _by_name(old, before.params)
    if average is None:
        return new, Report((), (), tuple(f"average of {name}" for name in there), ())
    here = _by_name(new, average.params)
    if before is not None and before.uniform != average.uniform:
        note = "average: of another kind, begins anew"
        return new, Report((), tuple(f"average of {name}" for name in here), (), (note,))
    fits = [name in there and np.shape(there[name]) == np.shape(x) for name, x in here.items()]
    leaves = [
        _there(there[name], x) if fit else x
        for (name, x), fit in zip(here.items(), fits, strict=True)
    ]
    params = jax.tree.unflatten(jax.tree.structure(average.params), leaves)
    count = average.count if before is None else _there(before.count, average.count)
    average = dataclasses.replace(average, params=params, count=count)
    kept, anew = (
        tuple(f"average of {name}" for name, fit in zip(here, fits, strict=True) if fit == known)
        for known in (True, False)
    )
    gone = tuple(f"average of {name}" for name in there if name not in here)
    return dataclasses.replace(new, average=average), Report(kept, anew, gone, ())


def _by_name(state: TrainState, tree) -> dict[str, Any]:
    """The leaves of a tree like the trained params, by their names."""
    named = trees.leaves_with_names(trained_part(state))
    return {"/".join(name): x for (name, _, _), x in zip(named, jax.tree.leaves(tree), strict=True)}


def _frozen(old: TrainState, new: TrainState) -> tuple[TrainState, Report]:
    if old.frozen is None:
        return new, Report((), (), (), ())
    flags = dict(zip(_moving_names(old), frozen_flags(old), strict=True))
    here = _moving_names(new)
    words = frozen_words([bool(flags.get(name, False)) for name in here])
    notes = tuple(
        f"{name}: frozen then, not trained now"
        for name, on in flags.items()
        if on and name not in here
    )
    return dataclasses.replace(new, frozen=beside(new.params, words)), Report((), (), (), notes)


def _moving_names(state: TrainState) -> list[str]:
    return ["/".join(name) for name, _, _ in trees.leaves_with_names(trained_part(state))]
