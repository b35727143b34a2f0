"""A training state under another rule, selection or precision.

    rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adamw(3e-4))
    state, report = ts.migrate(state, rule)

A new state is set up, and the arrays that both states have are carried over; the report lists the
rest. Arrays of an optimizer state are matched by name, `ScaleByAdamState.mu of encoder/kernel`, not
by place.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.typing import ArrayLike

from tsunax._core import Maybe, PyTree, Where, tables, trees
from tsunax._core.placement import beside, offloaded
from tsunax._state.state_fields import averages_of, frozen_flags, frozen_words
from tsunax._step.finite_state import warn_if_not_finite
from tsunax._step.members import members_of
from tsunax.averages import Average
from tsunax.checkpoints import state_facts
from tsunax.errors import StateError, WrongTypeError
from tsunax.hyper import hyperparams
from tsunax.precision import LossScale, Policy
from tsunax.rules import live_rules, number_table
from tsunax.rules.combining import PartitionState
from tsunax.rules.leaf_owners import owners_in
from tsunax.rules.subtree_numbers import recut as recut_numbers
from tsunax.state import TrainState, base, check_state, own, setup, trained_part
from tsunax.states import States

__all__ = ["Report", "migrate"]

KEEP: Any = ...
_State = TypeVar("_State", bound=TrainState | States)
_Notes = dict[str, list[str]]  # a `Report` in the making, to which each step of a migration adds


@dataclass(frozen=True)
class Report:
    """What became of each array and number, by name (`ScaleByAdamState.mu of head/bias`).

    `kept` are carried over, `new` begin anew, `dropped` are not in the new state; `notes` are on
    edited numbers, shared counts, and lost cuts, averages and freezes. `leaf head/bias` is a leaf
    of params that is new or gone, or has another shape.
    """

    kept: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]
    _repr_html_ = tables.folded

    def __repr__(self) -> str:
        lines = [f"kept {len(self.kept)}, new {len(self.new)}, dropped {len(self.dropped)}"]
        for what, names in (("new", self.new), ("dropped", self.dropped), ("note", self.notes)):
            more = [f"... and {len(names) - 20} more"] if len(names) > 20 else []
            lines += [f"  {what:<7}  {name}" for name in (*names[:20], *more)]
        return "\n".join(lines)


class _Slot(NamedTuple):
    """An array of an optimizer state, with what tells it from others."""

    what: str  # "ScaleByAdamState.mu"
    owner: str | None  # the name of its parameter; None for counts
    parent: tuple  # key path of the state that it is a field of
    value: Any

    @property
    def name(self) -> str:
        return self.what if self.owner is None else f"{self.what} of {self.owner}"

    @property
    def kind(self) -> tuple:
        return self.what, self.owner, jnp.shape(self.value), trees.dtype_of(self.value)


def migrate(
    state: _State,
    rule: optax.GradientTransformation | Mapping[str, optax.GradientTransformation],
    *,
    params: PyTree = KEEP,
    trainable: Where = KEEP,
    ema: ArrayLike | Average | None = KEEP,
    precision: str | Policy | None = KEEP,
    loss_scale: ArrayLike | LossScale | str | None = KEEP,
    model_state: PyTree = KEEP,
    key: Maybe = KEEP,
) -> tuple[_State, Report]:
    """The state under another rule, and a report of kept, new and dropped arrays.

    Options that are not given stay as they were. Arrays are matched by their field, the name of
    their parameter, shape and dtype; a count goes with the moments beside it. An array with several
    matches begins anew, and is reported. A live number that was adjusted is kept if both rules were
    given the same one; else that of the new rule is used, and reported. Frozen leaves stay frozen.

    Args:
      rule: the new rule, or the old one for a change of something else. Of `States` a dict of rules
        by member; the others stay as they are.
      params: another tree, for example a model with LoRA: leaves of the same name and shape keep
        their optimizer state.
      trainable, ema, precision, loss_scale, model_state, key: as in `setup`.

    The old state is not consumed. Raises the errors of `setup`, and StateError for populations,
    traced and donated states, and for new leaves without `trainable=` if the old state trains only
    a part.

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
    where = "migrate()"
    options: dict[str, Any] = {"ema": ema, "precision": precision, "loss_scale": loss_scale}
    options |= {"trainable": trainable, "model_state": model_state, "key": key}
    if isinstance(state, States):
        first = next(iter(state.members))
        if not isinstance(rule, Mapping) or not rule:
            got, fix = trees.describe(rule), f"Give ts.migrate(run, {{{first!r}: rule}})."
            raise WrongTypeError("rule", where, got, "a rule by member", fix)
        new: dict[str, Any] = {}
        parts: dict[str, tuple[str, ...]] = {f.name: () for f in dataclasses.fields(Report)}
        for name, of_member in rule.items():
            member = state.members[state.member_at(name, where)[0]]
            new[name], report = migrate(member, of_member, params=params, **options)
            for kind in parts:
                parts[kind] += tuple(f"{name}/{x}" for x in getattr(report, kind))
        return cast(_State, state.replace(**new)), Report(**parts)
    check_state(state, where)
    if members_of(state) is not None:
        fix = "Migrate each member: ts.populations.member(runs, i)."
        raise StateError("state", where, "a population", "one state", fix)
    if any(map(trees.is_traced, jax.tree.leaves(state))):
        fix = "Call it outside of jit."
        raise StateError("state", where, "a traced state", "a concrete one", fix)
    given, plan = state.params if params is KEEP else params, state.plan
    average, loss_scale = jax.tree.map(own, (state.average, state.loss_scale))
    kept = {"model_state": state.model_state, "key": state.key, "ema": average}
    kept |= {"precision": plan.precision, "loss_scale": loss_scale}
    if trainable is KEEP:
        kept["trainable"] = _trained_by_name(given, state)
    options |= {name: kept[name] for name, x in options.items() if x is KEEP}
    fresh = setup(cast(Any, rule), _with_masters(given, state), **options)
    found: _Notes = {f.name: [] for f in dataclasses.fields(Report)}
    full = number_table.lower(fresh.opt_state, fresh.numbers)
    full = _filled(full, [*_slots(state).values()], _slots(fresh), found)
    opt_state, numbers = number_table.hoist(full)
    if any(map(trees.is_offloaded, jax.tree.leaves(state.opt_state))):
        opt_state = jax.tree.map(offloaded, opt_state)
    clock = beside(fresh.params, own(state.clock))
    fresh = dataclasses.replace(fresh, clock=clock, opt_state=opt_state, numbers=numbers)
    _compare_fields(state, fresh, found)
    fresh = _with_own_fields(state, fresh)
    for carry in (_carry_cuts, _carry_numbers, _carry_averages, _carry_frozen):
        fresh = carry(state, fresh, found)
    warn_if_not_finite(fresh, where)
    return fresh, Report(**{kind: tuple(names) for kind, names in found.items()})


def _slots(state: TrainState) -> dict[int, _Slot]:
    """The leaves of an optimizer state by index, without tables of numbers and shared clocks."""
    named, slots = trees.leaves_with_names(base(state)), {}
    full = number_table.lower(state.opt_state, state.numbers)
    keyed = jtu.tree_flatten_with_path(full)[0]
    skeleton = state.opt_state if state.numbers is None else state.numbers.layout.skeleton
    owners = owners_in(state.plan.init, skeleton, base(state))
    for i, ((path, x), owner) in enumerate(zip(keyed, owners, strict=True)):
        name, end = (None, ()) if owner is None else ("/".join(named[owner][0]), named[owner][1])
        inside = path[: len(path) - len(end)] if end and path[-len(end) :] == tuple(end) else path
        if (slot := _slot(full, inside, name, x)) is not None:
            slots[i] = slot
    return slots


def _slot(full, path: tuple, owner: str | None, value) -> _Slot | None:
    node, what, parent = full, "state", ()
    for i, entry in enumerate(path):
        if live_rules.is_live(node):
            if entry.name in ("table", "extra") or (entry.name == "count" and not node.own_clock):
                return None
            if entry.name == "count":
                what, parent = f"{node.live.title}.count", path[:i]
        elif isinstance(entry, jtu.DictKey):
            if owner is None and i == len(path) - 1:  # a number, as in `inject_hyperparams`
                what = f"{what}[{entry.key!r}]"
        elif not isinstance(node, PartitionState) and type(node) not in (tuple, list):
            what, parent = f"{type(node).__name__}.{trees.key_name(entry)}", path[:i]
        node = dict(trees.children_of(node))[(entry,)]
    return _Slot(what, owner, parent, value)


def _with_masters(params, known: TrainState):
    if known.masters is None:
        return params
    stored, masters = map(jax.tree.leaves, (trained_part(known), known.masters))
    wide = dict(zip(map(id, stored), masters, strict=True))
    return jax.tree.map(lambda x: wide.get(id(x), x), params)


def _trained_by_name(params, old: TrainState) -> Any:
    """The leaves of a tree that the old state trains. Raises StateError for unknown leaves."""
    selected = old.plan.selected
    if selected is None:
        return "**"
    here = _leaves_by_name(params)
    trained = dict(zip(_leaves_by_name(old.params), selected, strict=True))
    if unknown := [f"leaf {name!r}" for name in here if name not in trained]:
        fix = "The old state trains only some leaves: give trainable= to choose among the new ones."
        raise StateError(unknown[0], "migrate()", "a new one", "those of the state", fix)
    return jax.tree.unflatten(jax.tree.structure(params), [trained[name] for name in here])


def _filled(full, old: list[_Slot], slots: dict[int, _Slot], report: _Notes) -> Any:
    found = _match_parameters(old, slots, report)
    _match_counts(old, slots, found)
    leaves, treedef = jax.tree.flatten(full)
    fresh = lambda x: x if np.ndim(x) else own(x)  # counts may be one array, and are donated each
    leaves = [_there(found[i].value, x) if i in found else fresh(x) for i, x in enumerate(leaves)]
    used, kinds = {id(slot) for slot in found.values()}, {slots[i].kind for i in found}
    report["kept"] += [slot.name for i, slot in slots.items() if i in found]
    report["new"] += [slot.name for i, slot in slots.items() if i not in found]
    report["dropped"] += [s.name for s in old if id(s) not in used and s.kind not in kinds]
    for i, slot in found.items():
        if slot.what.endswith("]") and not np.array_equal(slot.value, slots[i].value):
            values = state_facts.then_and_now(slot.value, slots[i].value)
            report["notes"].append(f"{slot.what}: {values}; the old one goes on")
    return treedef.unflatten(leaves)


def _match_parameters(
    old: list[_Slot], slots: dict[int, _Slot], report: _Notes
) -> dict[int, _Slot]:
    """The old array of each new one that belongs to a parameter; ambiguous ones are left out."""
    here: dict[tuple, list[int]] = {}
    for i, slot in slots.items():
        if slot.owner is not None:
            here.setdefault(slot.kind, []).append(i)
    found = {}
    for kind, places in here.items():
        known = [slot for slot in old if slot.kind == kind]
        if len(known) == len(places):
            found.update(zip(places, known, strict=True))
        elif known:
            counts = f"{len(known)} there and {len(places)} here"
            report["notes"] += [f"{slots[i].name}: begins anew, {counts}" for i in places]
    return found


def _match_counts(old: list[_Slot], slots: dict[int, _Slot], found: dict[int, _Slot]) -> None:
    """Add counts and other arrays without a parameter, from the states that gave the moments."""
    origins: dict[tuple, set] = {}  # the old states that the moments of each new state came from
    for i, slot in found.items():
        origins.setdefault(slots[i].parent, set()).add(slot.parent)
    owned = {slot.parent for slot in slots.values() if slot.owner is not None}
    for i, slot in [(i, slot) for i, slot in slots.items() if slot.owner is None]:
        origin = origins.get(slot.parent, set()) if slot.parent in owned else None
        same = [o for o in old if o.kind == slot.kind and (origin is None or o.parent in origin)]
        n = len({trees.on_host(o.value).tobytes() for o in same})
        alike = [j for j, s in slots.items() if s.kind == slot.kind]
        if n > 1 and len(same) == len(alike):
            same = [same[alike.index(i)]]
        elif n > 1:  # of several the largest
            same.sort(key=lambda o: trees.on_host(o.value).sum())
        if same:
            found[i] = same[-1]


def _there(x, like):
    """A copy of an array, on the devices of `like` if that is committed to them."""
    x = own(x)
    moves = isinstance(like, jax.Array) and like.committed
    moves = moves and x.sharding.device_set != like.sharding.device_set
    return jax.device_put(x, like.sharding) if moves else x


def _with_own_fields(old: TrainState, new: TrainState) -> TrainState:
    """The new state in the class of the old one, with the fields that this class adds."""
    values, averages = {}, averages_of(old)
    shapes = lambda s: [(k, x.shape) for k, x in _leaves_by_name(trained_part(s)).items()]
    for f in (f for f in old._fields if f.name not in new.__dict__):
        values[f.name] = getattr(old, f.name)
        if f.name in averages:
            values[f.name] = averages[f.name].of(base(new))
        elif f.metadata["like"] in ("params", "trained") and shapes(old) != shapes(new):
            got = "values for the leaves of the old params"
            fix = f"Make it anew: {type(old).__name__}.of(ts.migration.migrate(...)[0], ...)."
            raise StateError(f"field {f.name!r}", "migrate()", got, "the same leaves", fix)
    return type(old).of(new, **values)


def _compare_fields(old: TrainState, new: TrainState, report: _Notes) -> None:
    """Report leaves of params, model state, key and loss scale that came or went."""
    shapes = lambda s: {f"leaf {k}": np.shape(x) for k, x in _leaves_by_name(s.params).items()}
    here, there = shapes(new), shapes(old)
    report["new"] += [name for name, shape in here.items() if there.get(name) != shape]
    report["dropped"] += [name for name, shape in there.items() if here.get(name) != shape]
    for name in ("model_state", "key", "loss_scale"):
        x = getattr(old, name)
        if (x is None) != (getattr(new, name) is None):
            report["new" if x is None else "dropped"].append(name)


def _carry_cuts(old: TrainState, new: TrainState, report: _Notes) -> TrainState:
    """Cuts into subtrees with their own numbers, if both rules have the same live rule there."""
    there, here = ([s for _, s in x.numbers.layout.lives] if x.numbers else [] for x in (old, new))
    cuts = {}
    for s in (s for s in there if s.cut is not None):
        alike = lambda t, s=s: (t.live.title, t.paths) == (s.live.title, s.paths)
        places = [at for at, t in enumerate(here) if alike(t)]
        if len(places) == sum(map(alike, there)) == 1:
            cuts[places[0]] = s.cut, (0,) * s.groups
        else:
            labels = ", ".join(s.cut.labels[1:])
            report["notes"].append(f"{s.live.title}: the numbers of {labels} alone are gone")
    if new.numbers is None or not cuts:
        return new
    recut = recut_numbers(new.opt_state, new.numbers, trained_part(new), cuts)
    opt_state, numbers = (beside(new.params, tree) for tree in recut)
    return dataclasses.replace(new, opt_state=opt_state, numbers=numbers)


def _carry_numbers(old: TrainState, new: TrainState, report: _Notes) -> TrainState:
    """Live numbers by name; notes on those that the new rule changes or lacks."""
    if old.numbers is None or new.numbers is None:
        return new
    then, now = (state_facts.facts_of(state) for state in (old, new))
    values = [np.asarray(numbers.values) for numbers in (old.numbers, new.numbers)]
    merged, edited = state_facts.merged_numbers(values[0], then, values[1], now)
    names, mine = ([name for name, _ in facts["columns"]] for facts in (then, now))
    numbers, known = hyperparams(old), {*mine, *then["schedules"]}
    report["notes"] += [note for note in edited if re.split(r":| \(", note)[0] in names]
    for name, given in zip(names, values[0][3], strict=True):
        if name not in known and (x := numbers[name]) != given:
            report["notes"].append(f"{name}: {x:.6g} by adjust then, no such number now")
    placed = _there(jnp.asarray(merged), new.numbers.values)
    return dataclasses.replace(new, numbers=dataclasses.replace(new.numbers, values=placed))


def _carry_averages(old: TrainState, new: TrainState, report: _Notes) -> TrainState:
    """The averages of each leaf by name, if both states average alike."""
    befores, averages = averages_of(old), averages_of(new)
    for field in befores | averages:
        before, average = befores.get(field), averages.get(field)
        there = {} if before is None else _trained_by_name_of(old, before.params)
        here = {} if average is None else _trained_by_name_of(new, average.params)
        titled = lambda names, field=field: [f"{field} of {name}" for name in names]
        if before and average and before.uniform != average.uniform:
            report["new"] += titled(here)
            report["notes"].append(f"{field}: of another kind, begins anew")
            continue
        fits = {name for name, x in here.items() if name in there and there[name].shape == x.shape}
        report["kept"] += titled(name for name in here if name in fits)
        report["new"] += titled(name for name in here if name not in fits)
        report["dropped"] += titled(name for name in there if name not in here)
        if before and average:
            leaves = [_there(there[name], x) if name in fits else x for name, x in here.items()]
            params = jax.tree.unflatten(jax.tree.structure(average.params), leaves)
            count = _there(before.count, average.count)
            averages[field] = dataclasses.replace(average, params=params, count=count)
    return dataclasses.replace(new, **averages)


def _carry_frozen(old: TrainState, new: TrainState, report: _Notes) -> TrainState:
    if old.frozen is None:
        return new
    flags = dict(zip(_trained_by_name_of(old, trained_part(old)), frozen_flags(old), strict=True))
    here = _trained_by_name_of(new, trained_part(new))
    gone = [name for name, on in flags.items() if on and name not in here]
    report["notes"] += [f"{name}: frozen then, not trained now" for name in gone]
    words = frozen_words([bool(flags.get(name)) for name in here])
    return dataclasses.replace(new, frozen=beside(new.params, words))


def _trained_by_name_of(state: TrainState, tree) -> dict[str, Any]:
    """The leaves of a tree like the trained params, by their names."""
    return dict(zip(_leaves_by_name(trained_part(state)), jax.tree.leaves(tree), strict=True))


def _leaves_by_name(params) -> dict[str, Any]:
    return {"/".join(name): x for name, _, x in trees.leaves_with_names(params)}
