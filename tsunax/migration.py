"""A training state under another rule, selection or precision.

    rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adamw(3e-4))
    state, report = ts.migrate(state, rule)

A new state is set up, and the arrays that both states have are carried over; the report lists all
other arrays. Arrays of an optimizer state are matched by name, such as `ScaleByAdamState.mu of
encoder/kernel`, not by place.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.typing import ArrayLike

from tsunax._core import Maybe, PyTree, Where, tables, trees
from tsunax._core.placement import offloaded, put_on_devices_of
from tsunax._state import averages_of, frozen_flags, frozen_words
from tsunax._state.state_setup import masters_of
from tsunax._step.finite_state import warn_if_not_finite
from tsunax.averages import Average
from tsunax.checkpoints import merging, state_facts
from tsunax.errors import StateError
from tsunax.hyper import hyperparams
from tsunax.precision import LossScale, Policy
from tsunax.rules import number_table, subtree_numbers
from tsunax.rules.combining import PartitionState
from tsunax.rules.leaf_owners import owners_in
from tsunax.state import TrainState, check_state, master_params, setup, trained_part
from tsunax.states import refuse_population

__all__ = ["Report", "migrate"]

KEEP: Any = ...
_State = TypeVar("_State", bound=TrainState)
_ReportLists = dict[str, list[str]]  # the fields of a `Report`, while the migration adds to them


@dataclass(frozen=True)
class Report:
    """The outcome for each array and number, by name (`ScaleByAdamState.mu of head/bias`).

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
        for title, names in (("new", self.new), ("dropped", self.dropped), ("note", self.notes)):
            last_line = [f"... and {len(names) - 20} more"] if len(names) > 20 else []
            lines += [f"  {title:<7}  {name}" for name in (*names[:20], *last_line)]
        return "\n".join(lines)


class _Slot(NamedTuple):
    """An array of an optimizer state, with the names by which it is matched."""

    field: str  # "ScaleByAdamState.mu"
    owner: str | None  # the name of its parameter; None for counts
    parent: tuple  # key path of the state that has this field
    value: Any
    is_injected: bool  # whether it is a number of `optax.inject_hyperparams`

    @property
    def name(self) -> str:
        return self.field if self.owner is None else f"{self.field} of {self.owner}"

    @property
    def kind(self) -> tuple:
        return self.field, self.owner, jnp.shape(self.value), trees.dtype_of(self.value)


def migrate(
    state: _State,
    rule: optax.GradientTransformation,
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

    Options that are not given stay unchanged. Arrays are matched by their field, the name of their
    parameter, shape and dtype; a count is matched with the moments of its state. An array with
    several matches begins anew, and is reported. A live number that was adjusted is kept if both
    rules were given the same number; else the new rule's number is used, and reported. Frozen
    leaves stay frozen.

    Args:
      rule: the new rule, or the old rule to change only other options.
      params: another tree, for example a model with LoRA: leaves of the same name and shape keep
        their optimizer state. Schedule-free rules and Prodigy have copies of params in it, and
        the next step computes params from these: for leaves with other values, call `setup`.
      trainable, ema, precision, loss_scale, model_state, key: as in `setup`.

    The old state is not consumed. Raises the errors of `setup`, and StateError for populations,
    donated states, and for new leaves without `trainable=` if the old state trains only a part.

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
    check_state(state, where)
    refuse_population(state, where, "Migrate each member: ts.populations.member(runs, i).")
    new_params = state.params if params is KEEP else params
    old_options = {
        "trainable": _trained_by_name(new_params, state) if trainable is KEEP else None,
        "ema": jax.tree.map(trees.own, state.average),
        "precision": state.plan.precision,
        "loss_scale": jax.tree.map(trees.own, state.loss_scale),
        "model_state": state.model_state,
        "key": state.key,
    }
    options |= {name: old_options[name] for name, x in options.items() if x is KEEP}
    fresh = setup(rule, _with_masters(new_params, state), **options)
    notes: _ReportLists = {f.name: [] for f in dataclasses.fields(Report)}
    with_tables = number_table.join_numbers(fresh.opt_state, fresh.numbers)
    with_tables = _with_old_arrays(with_tables, [*_slots(state).values()], _slots(fresh), notes)
    opt_state, numbers = number_table.split_numbers(with_tables)
    if any(map(trees.is_offloaded, jax.tree.leaves(state.opt_state))):
        opt_state = jax.tree.map(offloaded, opt_state)
    clock = put_on_devices_of(fresh.params, trees.own(state.clock))
    fresh = dataclasses.replace(fresh, clock=clock, opt_state=opt_state, numbers=numbers)
    _compare_fields(state, fresh, notes)
    fresh = _with_own_fields(state, fresh)
    for carry in (_carry_cuts, _carry_numbers, _carry_averages, _carry_frozen):
        fresh = carry(state, fresh, notes)
    warn_if_not_finite(fresh, where)
    return cast(_State, fresh), Report(**{kind: tuple(names) for kind, names in notes.items()})


def _slots(state: TrainState) -> dict[int, _Slot]:
    """The leaves of an optimizer state by index, without tables of numbers and shared clocks."""
    named_leaves = enumerate(trees.leaves_with_names(master_params(state)))
    name_and_path: Any = {k: ("/".join(name), (*path,)) for k, (name, path, _) in named_leaves}
    slots = {}
    with_tables = number_table.join_numbers(state.opt_state, state.numbers)
    leaves_with_paths = jtu.tree_flatten_with_path(with_tables)[0]
    skeleton = state.opt_state if state.numbers is None else state.numbers.layout.skeleton
    owners = owners_in(state.plan.init, skeleton, master_params(state))
    for i, ((path, x), owner) in enumerate(zip(leaves_with_paths, owners, strict=True)):
        name, suffix = name_and_path.get(owner, (None, ()))
        depth = len(path) - len(suffix)
        state_path = path[:depth] if path[depth:] == suffix else path
        if (slot := _slot(with_tables, state_path, name, x)) is not None:
            slots[i] = slot
    return slots


def _slot(opt_state, path: tuple, owner: str | None, value) -> _Slot | None:
    node, title, parent, is_injected = opt_state, "state", (), False
    for i, entry in enumerate(path):
        if number_table.is_live(node):
            if entry.name in ("table", "extra") or (
                entry.name == "count" and not node.scope.own_clock
            ):
                return None
            if entry.name == "count":
                title, parent = f"{node.live.title}.count", path[:i]
        elif isinstance(entry, jtu.DictKey):
            if owner is None and i == len(path) - 1:
                title, is_injected = f"{title}[{entry.key!r}]", True
        elif not isinstance(node, PartitionState) and type(node) not in (tuple, list):
            title, parent = f"{type(node).__name__}.{trees.key_name(entry)}", path[:i]
        node = dict(trees.children_of(node))[(entry,)]
    return _Slot(title, owner, parent, value, is_injected)


def _with_masters(params, old: TrainState):
    """`params` with the old masters of stored leaves, and of leaves of their names and values."""
    if old.masters is None:
        return params
    by_id, by_name = dict[Any, Any](), dict[Any, Any]()
    stored = trees.leaves_with_names(trained_part(old))
    for (name, _, x), master in zip(stored, jax.tree.leaves(old.masters), strict=True):
        by_id[id(x)] = by_name["/".join(name), np.shape(x), trees.dtype_of(x)] = master

    def with_master(name: tuple[str, ...], x: Any) -> Any:
        master = by_name.get(("/".join(name), np.shape(x), trees.dtype_of(x)))
        is_stored = id(x) in by_id
        return by_id.get(id(x), x) if is_stored or master is None else masters_of(x, master)

    leaves = [with_master(name, x) for name, _, x in trees.leaves_with_names(params)]
    return jax.tree.structure(params).unflatten(leaves)


def _trained_by_name(params, old: TrainState) -> Any:
    """The leaves of a tree that the old state trains. Raises StateError for unknown leaves."""
    selected = old.plan.selected
    if selected is None:
        return "**"
    leaves_by_name = _leaves_by_name(params)
    is_trained = dict(zip(_leaves_by_name(old.params), selected, strict=True))
    if unknown := [f"leaf {name!r}" for name in leaves_by_name if name not in is_trained]:
        fix = "The old state trains only some leaves: give trainable= to choose among the new ones."
        raise StateError(unknown[0], "migrate()", "a new one", "those of the state", fix)
    return jax.tree.structure(params).unflatten(is_trained[name] for name in leaves_by_name)


def _with_old_arrays(
    opt_state, old: list[_Slot], slots: dict[int, _Slot], report: _ReportLists
) -> Any:
    old_slot_of = _match_parameters(old, slots, report)
    _match_counts(old, slots, old_slot_of)
    leaves, treedef = jax.tree.flatten(opt_state)
    # Counts may share an array, but a step must not donate an array twice.
    own_copy = lambda x: x if np.ndim(x) else trees.own(x)
    leaves = [
        _placed_like(old_slot_of[i].value, x) if i in old_slot_of else own_copy(x)
        for i, x in enumerate(leaves)
    ]
    used_ids = {id(slot) for slot in old_slot_of.values()}
    carried_kinds = {slots[i].kind for i in old_slot_of}
    report["kept"] += [slot.name for i, slot in slots.items() if i in old_slot_of]
    report["new"] += [slot.name for i, slot in slots.items() if i not in old_slot_of]
    report["dropped"] += [
        s.name for s in old if id(s) not in used_ids and s.kind not in carried_kinds
    ]
    for i, slot in old_slot_of.items():
        if slot.is_injected and not np.array_equal(slot.value, slots[i].value):
            values = merging.then_and_now(slot.value, slots[i].value)
            report["notes"].append(f"{slot.field}: {values}; the old one goes on")
    return treedef.unflatten(leaves)


def _match_parameters(
    old: list[_Slot], slots: dict[int, _Slot], report: _ReportLists
) -> dict[int, _Slot]:
    """The old array for each new array of a parameter; ambiguous arrays are left out."""
    places_by_kind: dict[tuple, list[int]] = {}
    for i, slot in slots.items():
        if slot.owner is not None:
            places_by_kind.setdefault(slot.kind, []).append(i)
    old_slot_of = {}
    for kind, places in places_by_kind.items():
        candidates = [slot for slot in old if slot.kind == kind]
        if len(candidates) == len(places):
            old_slot_of.update(zip(places, candidates, strict=True))
        elif candidates:
            counts = f"{len(candidates)} there and {len(places)} here"
            report["notes"] += [f"{slots[i].name}: begins anew, {counts}" for i in places]
    return old_slot_of


def _match_counts(old: list[_Slot], slots: dict[int, _Slot], old_slot_of: dict[int, _Slot]) -> None:
    """Add counts and other arrays without a parameter, from the states that gave the moments."""
    origins: dict[tuple, set] = {}  # the old states that the moments of each new state came from
    for i, slot in old_slot_of.items():
        origins.setdefault(slots[i].parent, set()).add(slot.parent)
    owned = {slot.parent for slot in slots.values() if slot.owner is not None}
    for i, slot in [(i, slot) for i, slot in slots.items() if slot.owner is None]:
        origin = origins.get(slot.parent, set()) if slot.parent in owned else None
        candidates = [
            o for o in old if o.kind == slot.kind and (origin is None or o.parent in origin)
        ]
        n_values = len({trees.on_host(o.value).tobytes() for o in candidates})
        equal_places = [j for j, s in slots.items() if s.kind == slot.kind]
        if n_values > 1 and len(candidates) == len(equal_places):
            candidates = [candidates[equal_places.index(i)]]
        elif n_values > 1:  # if several counts differ, take the largest
            candidates.sort(key=lambda o: trees.on_host(o.value).sum())
        if candidates:
            old_slot_of[i] = candidates[-1]


def _placed_like(x, like):
    """A copy of an array, on the devices of `like` if `like` is committed to them."""
    x = trees.own(x)
    must_move = isinstance(like, jax.Array) and like.committed
    must_move = must_move and x.sharding.device_set != like.sharding.device_set
    return jax.device_put(x, like.sharding) if must_move else x


def _with_own_fields(old: TrainState, new: TrainState) -> TrainState:
    """The new state in the class of the old one, with the fields that this class adds."""
    values, averages = {}, averages_of(old)
    named_shapes = lambda s: [(k, x.shape) for k, x in _leaves_by_name(trained_part(s)).items()]
    for f in (f for f in old._fields if f.name not in new.__dict__):
        values[f.name] = getattr(old, f.name)
        if f.name in averages:
            values[f.name] = averages[f.name].starting_at(master_params(new))
        elif f.metadata["like"] in ("params", "trained") and named_shapes(old) != named_shapes(new):
            got, expected = "values for the leaves of the old params", "the same leaves"
            raise StateError(f"field {f.name!r}", "migrate()", got, expected)
    return type(old).of(new, **values)


def _compare_fields(old: TrainState, new: TrainState, report: _ReportLists) -> None:
    """Report leaves of params, model state, key and loss scale that came or went."""
    shapes_in = lambda s: {k: np.shape(x) for k, x in _leaves_by_name(s.params).items()}.items()
    new_shapes, old_shapes = shapes_in(new), shapes_in(old)
    report["new"] += [f"leaf {pair[0]}" for pair in new_shapes if pair not in old_shapes]
    report["dropped"] += [f"leaf {pair[0]}" for pair in old_shapes if pair not in new_shapes]
    for name in ("model_state", "key", "loss_scale"):
        x = getattr(old, name)
        if (x is None) != (getattr(new, name) is None):
            report["new" if x is None else "dropped"].append(name)


def _carry_cuts(old: TrainState, new: TrainState, report: _ReportLists) -> TrainState:
    """Cuts into subtrees with their own numbers, if both rules have the same live rule there."""
    old_lives, new_lives = (
        [s for _, s in number_table.live_states(number_table.join_numbers(x.opt_state, x.numbers))]
        for x in (old, new)
    )
    cuts, counters = {}, {}
    for s in (s for s in old_lives if s.cut is not None):
        is_same_rule = lambda t, s=s: (t.live.title, t.scope.paths) == (s.live.title, s.scope.paths)
        matches = [index for index, t in enumerate(new_lives) if is_same_rule(t)]
        if len(matches) == sum(map(is_same_rule, old_lives)) == 1:
            cuts[matches[0]] = s.cut, (0,) * s.groups
            counters[matches[0]] = subtree_numbers.counters_by_group(s, trained_part(old))
        else:
            labels = ", ".join(s.cut.labels[1:])
            report["notes"].append(f"{s.live.title}: the numbers of {labels} alone are gone")
    if new.numbers is None or not cuts:
        return new
    parts = new.opt_state, new.numbers, trained_part(new)
    recut = subtree_numbers.recut(*parts, cuts, counters)
    opt_state, numbers = (put_on_devices_of(new.params, tree) for tree in recut)
    return dataclasses.replace(new, opt_state=opt_state, numbers=numbers)


def _carry_numbers(old: TrainState, new: TrainState, report: _ReportLists) -> TrainState:
    """Carry live numbers over by name; note the numbers that the new rule changes or lacks."""
    if old.numbers is None or new.numbers is None:
        return new
    old_facts, new_facts = (state_facts.facts_of(state) for state in (old, new))
    values = [np.asarray(numbers.values) for numbers in (old.numbers, new.numbers)]
    merged, notes = merging.merged_table(old_facts, new_facts, None, *values)
    old_names, new_names = (
        [name for name, _ in facts["columns"]] for facts in (old_facts, new_facts)
    )
    numbers, known_names = hyperparams(old), {*new_names, *old_facts["schedules"]}
    report["notes"] += [note for name, note in notes.items() if name in old_names]
    for name, setup_value in zip(old_names, values[0][3], strict=True):
        if name not in known_names and (x := numbers[name]) != setup_value:
            report["notes"].append(f"{name}: {x:.6g} by adjust then, no such number now")
    placed = _placed_like(jnp.asarray(merged), new.numbers.values)
    return dataclasses.replace(new, numbers=dataclasses.replace(new.numbers, values=placed))


def _carry_averages(old: TrainState, new: TrainState, report: _ReportLists) -> TrainState:
    """The averages of each leaf by name, if both states average alike."""
    old_averages, new_averages = averages_of(old), averages_of(new)
    leaves_of = lambda state, x: {} if x is None else _trained_by_name_of(state, x.params)
    for field in old_averages | new_averages:
        old_average, new_average = old_averages.get(field), new_averages.get(field)
        if old_average and new_average and old_average.uniform != new_average.uniform:
            report["notes"].append(f"{field}: of another kind, begins anew")
            old_average = None
        old_leaves, new_leaves = leaves_of(old, old_average), leaves_of(new, new_average)
        has_shape = lambda name, x, leaves=old_leaves: (
            name in leaves and leaves[name].shape == x.shape
        )
        carried = {name: old_leaves[name] for name, x in new_leaves.items() if has_shape(name, x)}
        report["kept"] += [f"{field} of {name}" for name in carried]
        report["new"] += [f"{field} of {name}" for name in new_leaves if name not in carried]
        report["dropped"] += [f"{field} of {name}" for name in old_leaves if name not in new_leaves]
        if old_average and new_average:
            leaves = [
                _placed_like(carried[name], x) if name in carried else x
                for name, x in new_leaves.items()
            ]
            new_averages[field] = dataclasses.replace(
                new_average,
                params=jax.tree.unflatten(jax.tree.structure(new_average.params), leaves),
                count=_placed_like(old_average.count, new_average.count),
            )
    return dataclasses.replace(new, **new_averages)


def _carry_frozen(old: TrainState, new: TrainState, report: _ReportLists) -> TrainState:
    if old.frozen is None:
        return new
    names_of = lambda state: _trained_by_name_of(state, trained_part(state))
    frozen_names = {*itertools.compress(names_of(old), frozen_flags(old))}
    new_names = names_of(new)
    for name in sorted(frozen_names.difference(new_names)):
        report["notes"].append(f"{name}: frozen then, not trained now")
    words = frozen_words([name in frozen_names for name in new_names])
    return dataclasses.replace(new, frozen=put_on_devices_of(new.params, words))


def _trained_by_name_of(state: TrainState, tree) -> dict[str, Any]:
    """The leaves of a tree like the trained params, by their names."""
    return dict(zip(_leaves_by_name(trained_part(state)), jax.tree.leaves(tree), strict=True))


def _leaves_by_name(params) -> dict[str, Any]:
    return {"/".join(name): x for name, _, x in trees.leaves_with_names(params)}
