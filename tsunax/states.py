"""Several training states as one run: a GAN, an actor and its critic, an agent and its environment.

    run = ts.States(generator=g, critic=c)

    def step(run, batch):
        c, c_info = critic_step(run.critic, batch, generator=run.generator.params)
        g, g_info = generator_step(run.generator, batch, critic=c.params)
        return run.advance(generator=g, critic=c), {"generator": g_info, "critic": c_info}

    run, history = ts.fit(step, run, data, steps=1000)

A run is a pytree with a clock. The step function defines everything that happens in a step.

Below `States` are functions of any state: a single state, a run, or a population, with a leading
axis of members in every array.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from tsunax import guard
from tsunax._core import PyTree, placement, tables, trees
from tsunax._core.trees import own
from tsunax.errors import DeviceError, StateError, WrongTypeError, unknown
from tsunax.state import Clocked, TrainState, assemble, split

__all__ = ["States"]


# Not a dataclass, because the user chooses the names of its fields.
@jax.tree_util.register_pytree_with_keys_class
class States(Clocked):
    """Named training states as a single value, with a shared clock and other arrays.

    `ts.States(generator=g, critic=c)`: a pytree with `run.generator` and `run.critic`, to which
    `fit`, `Checkpoints`, `shard`, `adjust` and the like apply as to a single state. `carry=` is
    any tree of arrays: environments, a replay buffer. A step is a function of run and batch that
    returns `(run, info)` and ends with `run.advance(...)`, which counts the call:

    - `run.step`: calls in which no update of a member was rejected. `fit`, logs and
      checkpoints count these.
    - `run.calls`: every call of the step, not the calls of its members.
    - `run.rejected`, `run.rejected_in_a_row`: calls in which the update of a member was rejected.

    Each member has a clock of its updates: its schedules, averages and keys follow that clock.

    Members of populations of one size make a population of runs. Raises WrongTypeError for a member
    that is no state, StateError for a name that cannot be an attribute and for populations of
    different sizes.

    >>> import tsunax as ts
    >>> state = lambda rate: ts.setup(ts.rules.sgd(rate), {"w": jnp.ones(2)})
    >>> run = ts.States(actor=state(0.1), critic=state(0.3))
    >>> run = ts.adjust(run, "critic", learning_rate=0.2)
    >>> ts.hyperparams(run), int(run.step)
    ({'actor/learning_rate': 0.1, 'critic/learning_rate': 0.2}, 0)
    """

    # int32 (members,): each member's `rejected` at the last advance(). A copy, because outside of
    # jit the members of the old run may have been donated.
    tally: jax.Array
    carry: PyTree  # the step replaces it, also if a verdict rejects an update
    members: Mapping[str, TrainState]
    _repr_html_ = tables.folded

    def __init__(self, *, carry: PyTree = None, **members: TrainState) -> None:
        _check_members(members)
        tally = _rejected_counts(members.values())
        first_member = next(iter(members.values()))
        clock = jnp.zeros_like(first_member.clock)
        clock = placement.put_on_devices_of(first_member.params, clock)
        seen_ids: set[int] = set()  # two states may share a key, which must not be donated twice

        def copied_if_shared(x: Any) -> Any:
            is_shared = id(x) in seen_ids and isinstance(x, jax.Array)
            seen_ids.add(id(x))
            return own(x) if is_shared else x

        members = {name: jax.tree.map(copied_if_shared, state) for name, state in members.items()}
        carry = jax.tree.map(copied_if_shared, carry)
        self.__dict__.update(clock=clock, tally=tally, carry=carry, members=members)

    def __getattr__(self, name: str) -> TrainState:
        members = self.__dict__.get("members", {})
        if name not in members:
            if name.startswith("__"):  # copy, pickle and inspect probe for dunder methods
                raise AttributeError(name)
            raise AttributeError(unknown("member", "States", name, members))
        return members[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"States are frozen: run = run.replace({name}=...).")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.members]

    def replace(self, **new: Any) -> "States":
        """The run with `new` members or carry: `run.replace(critic=state)`; not counted as a call.

        Raises StateError for an unknown name, WrongTypeError for a member that is no state.
        """
        known_names = [*self.members, "carry"]
        if unknown_names := [name for name in new if name not in known_names]:
            raise StateError(unknown("member", "States", unknown_names[0], known_names))
        members = {name: new.get(name, x) for name, x in self.members.items()}
        _check_members(members, self)
        rejected_counts = dict(zip(members, jnp.moveaxis(self.tally, -1, 0), strict=True))
        rejected_counts |= {name: members[name].rejected for name in members if name in new}
        tally = jnp.stack([*rejected_counts.values()], -1)
        return _assembled_run(self.clock, tally, new.get("carry", self.carry), members)

    def advance(self, *, all_or_none: bool = False, **new: Any) -> "States":
        """The run after a call of its step: `new` members and carry, and the call counted.

        Each member follows its own verdict: if the critic's update was rejected, the generator may
        have moved. With `all_or_none` all updates of a call are rejected if one is: then only
        counts and loss scales move in any member. The carry moves in any case.

        Raises as `replace`.
        """
        run = self.replace(**new)
        is_rejected = jnp.any(run.tally > self.tally, -1)  # `replace` has counted rejected calls
        clock = guard.count(self.clock, None, is_rejected[..., None].astype(jnp.int32))
        if not all_or_none:
            return _assembled_run(clock, run.tally, run.carry, run.members)
        for name, old in self.members.items():
            if difference := trees.first_difference(run.members[name], old, name):
                fix = "With all_or_none, freeze, adjust or migrate before the step."
                raise StateError(f"member {difference}. {fix}")
        choose = jax.vmap(_old_if_bad) if is_rejected.ndim else _old_if_bad  # in a population
        pairs = zip(run.members.items(), self.members.values(), strict=True)
        members = {name: choose(is_rejected, new, old) for (name, new), old in pairs}
        return _assembled_run(clock, _rejected_counts(members.values()), run.carry, members)

    def member_at(self, where: object, caller: str) -> tuple[str, str]:
        """The member that a pattern begins with, and the pattern in it, both strings.

        For "critic/encoder/**" these are `("critic", "encoder/**")`. Raises StateError, with the
        name of the `caller`, unless `where` is a string that begins with a member.
        """
        name, _, inner_pattern = where.partition("/") if isinstance(where, str) else ("", "", "")
        if name not in self.members:
            raise StateError(
                unknown(
                    "member",
                    caller,
                    str(where),
                    self.members,
                    fix="Give a member, or 'member/pattern'.",
                )
            )
        return name, inner_pattern or "**"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """The clock, the carry and each member, by name; called by JAX."""
        parts = {"clock": self.clock, "tally": self.tally, "carry": self.carry, **self.members}
        return [(GetAttrKey(name), x) for name, x in parts.items()], tuple(self.members)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], parts: Sequence[Any]) -> "States":
        """The inverse of `tree_flatten_with_keys`; called by JAX."""
        clock, tally, carry, *members = parts
        return _assembled_run(clock, tally, carry, dict(zip(names, members, strict=True)))

    def __repr__(self) -> str:
        has_values = trees.is_array(self.clock) and not trees.is_traced(self.clock)
        is_concrete = has_values and not trees.is_gone(self.clock) and jnp.ndim(self.step) == 0
        counts = f"step={int(self.step)}, calls={int(self.calls)}" if is_concrete else "..."
        parts = [f"{name}: {state!r}" for name, state in self.members.items()]
        if carry_leaves := jax.tree.leaves(self.carry):
            parts.append(f"carry: {trees.listed([trees.describe(x) for x in carry_leaves], 6)}")
        return "\n".join([f"States({counts})", *(textwrap.indent(x, "  ") for x in parts)])


def _assembled_run(clock: Any, tally: Any, carry: PyTree, members: Mapping[str, Any]) -> States:
    run = object.__new__(States)
    run.__dict__.update(clock=clock, tally=tally, carry=carry, members=members)
    return run


def _rejected_counts(states: Iterable[TrainState]) -> Any:
    return jnp.stack([state.rejected for state in states], -1)


def _check_members(members: Mapping[str, object], run: States | None = None) -> None:
    """Raise unless these are states of one size, also of the size of the run that they join."""
    reserved_names = {*dir(States), "clock", "tally", "carry", "members"}
    if not members:
        raise StateError("members", "States()", "none", "TrainStates by name")
    for name, state in members.items():
        if not name.isidentifier() or name.startswith("_") or name in reserved_names:
            raise StateError("name", "States()", repr(name), "a name that can be an attribute")
        if not isinstance(state, TrainState):
            raise WrongTypeError(
                f"member {name!r}",
                "States",
                got=trees.describe(state),
                expected="a TrainState; what no rule trains is carry=",
            )
    sizes = {members_of(state) for state in (*members.values(), run) if state is not None}
    if len(sizes) > 1:
        texts = sorted("one state" if n is None else f"a population of {n}" for n in sizes)
        expected = "single states, or populations of one size"
        fix = "A population beside single states is carry=."
        raise StateError("members", "States", " and ".join(texts), expected, fix)


def _old_if_bad(is_rejected: Any, new: TrainState, old: TrainState) -> TrainState:
    """`new`, or `old` with the counts of a rejected call if `is_rejected`."""
    if new is old:
        return old
    calls = new.calls - old.calls
    counts = [old.step, new.calls, old.rejected + calls, old.rejected_in_a_row + calls]
    clock = jnp.where(is_rejected, jnp.stack(counts), new.clock)
    chosen = guard.choose(~is_rejected, new, old)
    return dataclasses.replace(chosen, clock=clock, loss_scale=new.loss_scale)


def training_states(tree: PyTree) -> dict[str, TrainState]:
    """The training states of a run by name with a slash, "critic/"; "" for a single state."""
    if isinstance(tree, TrainState):
        return {"": tree}
    members = tree.members if isinstance(tree, States) else {}
    return {f"{name}/": state for name, state in members.items()}


def numbers_of(tree: PyTree) -> dict[str, Any]:
    """The live numbers of each training state, by the names of `training_states`."""
    return {title: state.numbers for title, state in training_states(tree).items()}


def split_any(state: PyTree) -> tuple[Any, PyTree, PyTree]:
    """`(kind, moving, fixed)`: types for `assemble_any`, and two parts. A step changes `moving`."""
    if isinstance(state, TrainState):
        return (type(state), state.plan), *split(state)
    if not isinstance(state, States):
        return None, state, ()
    parts = [split(x) for x in state.members.values()]
    kind = tuple((name, type(x), x.plan) for name, x in state.members.items())
    moving = state.clock, state.tally, state.carry, [moving for moving, _ in parts]
    return kind, moving, [fixed for _, fixed in parts]


def assemble_any(kind: Any, moving: PyTree, fixed: PyTree) -> Any:
    """The inverse of `split_any`."""
    if kind is None:
        return moving
    if isinstance(kind[0], type):
        return assemble(kind, moving, fixed)
    clock, tally, carry, parts = moving
    members = {
        name: assemble((cls, plan), new, old)
        for (name, cls, plan), new, old in zip(kind, parts, fixed, strict=True)
    }
    return _assembled_run(clock, tally, carry, members)


def members_of(state: Any) -> int | None:
    """How many members a population has; None for a single state or another object."""
    if not isinstance(state, Clocked):
        return None
    shape: tuple[int, ...] = state.clock.shape
    return shape[0] if len(shape) > 1 else None


def refuse_population(
    state: Any, where: str, fix: str = "Give ts.populations.member(state, i)."
) -> None:
    """Raise StateError for a population."""
    if members_of(state) is not None:
        raise StateError("state", where, got="a population", expected="one state", fix=fix)


def divides_rows(state: Any) -> bool:
    """Whether devices divide the rows of a batch; each member of a population gets all rows."""
    return members_of(state) is None


def row_axes(state: Any, mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh that divide the rows of a batch."""
    return placement.data_axes(mesh) if divides_rows(state) else ()


def member_axes(state: Any, mesh: Any) -> tuple[str, ...] | None:
    """The axes of a mesh over which the members of a population are spread; None for another tree.

    Raises DeviceError for members that the devices do not divide.
    """
    n = members_of(state)
    if n is not None and n % mesh.size:
        expected = f"a multiple of {mesh.size} devices"
        raise DeviceError("population", "shard()", f"{n} members", expected)
    return None if n is None else mesh.axis_names


def chosen_members(state: TrainState, members: ArrayLike | None, caller: str) -> np.ndarray:
    """A flag for each member of a population: all, or the members at indices or of a mask.

    The flag of a single state has no axis. Raises StateError for other indices.
    """
    flags, n = np.ones(state.clock.shape[:-1], bool), members_of(state)
    if members is None:
        return flags
    indices = np.array(members, ndmin=1)
    is_mask = indices.dtype == bool
    if n is None or is_mask:
        fits = indices.shape == (n,)
    else:
        is_int = indices.dtype.kind in "iu" or not indices.size  # NumPy reads [] as floats
        fits = is_int and np.all((-n <= indices) & (indices < n))
    if not fits or (not is_mask and len({*indices.flat}) < indices.size):
        expected = f"a mask, or different indices of members below {n or 0}"
        raise StateError("members", caller, trees.describe(members), expected)
    flags[()] = False
    flags[indices if indices.size else ()] = indices.size > 0
    return flags


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class each:
    """A tree with one value, such as a batch, for each member of a population.

    Its arrays have a first axis of members: `step(runs, ts.populations.each(batches))`.

    >>> each(jax.numpy.zeros((3, 8))).tree.shape
    (3, 8)
    """

    tree: Any


def check_local_members(state: Any, where: str) -> None:
    """Raise StateError for a population with members on devices of several processes."""
    if members_of(state) is not None and not state.clock.is_fully_addressable:
        got, expected = "members on devices of several processes", "members of its own for each"
        fix = "Write ts.shard(population, ts.mesh(devices=jax.local_devices()))."
        raise StateError("population", where, got, expected, fix)


def over_members(f: Callable, state: TrainState | States, *args, group_size: int | None = None):
    """Map `f(state, *trees)` over the members of a population, in groups of `group_size`.

    A tree in `each` has one value for each member; the members share all other trees.
    """
    n = members_of(state)
    if n is None:
        return f(state, *args)
    leaves, treedef = jax.tree.flatten(args, is_leaf=_is_each)

    def call_member(parts):
        state, own_values = parts[0], iter(parts[1])
        own_leaves = [next(own_values) if _is_each(x) else x for x in leaves]
        return f(state, *treedef.unflatten(own_leaves))

    parts = state, [x.tree for x in leaves if _is_each(x)]
    for path, x in trees.leaves_at("each", parts[1]):
        if np.shape(x)[:1] != (n,):
            expected = f"an array with a first axis of {n} members"
            raise StateError("value", path, trees.describe(x), expected)
    if group_size is None:
        return placement.constants_like(state.clock, jax.vmap(call_member)(parts))
    return jax.lax.map(call_member, parts, batch_size=group_size)


def with_own_values(f: Callable, state: TrainState | States, values: tuple, *shared) -> Any:
    """`f(state, *values, *shared)`; for a population with the state and values of each member."""
    own_values = values if members_of(state) is None else map(each, values)
    return over_members(f, state, *own_values, *shared)


def of_first_member(state: TrainState, *args: Any) -> tuple[Any, ...]:
    """`(state, *args)` of the first member of a population; of a single state all as they are."""
    if members_of(state) is None:
        return state, *args
    first = jax.jit(lambda tree: jax.tree.map(lambda x: x[0], tree))
    of_first = lambda x: first(x.tree) if _is_each(x) else x
    return first(state), *jax.tree.map(of_first, args, is_leaf=_is_each)


def _is_each(x) -> bool:
    return isinstance(x, each)
