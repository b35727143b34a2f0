"""A run that goes on under another rule: 30 edits of 10 rules, and what no edit may lose."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import nnx
from tests.helpers import assert_trees_equal
from tsunax.errors import ParamsError, StateError, WrongTypeError
from tsunax.migration import migrate

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
chain, clip = ts.rules.chain, ts.rules.clip_by_global_norm(1e9)

RULES: dict[str, Callable[[float], Any]] = {
    "sgd": lambda rate: ts.rules.sgd(rate, momentum=0.9),
    "adam": ts.rules.adam,
    "adamw": lambda rate: ts.rules.adamw(rate, weight_decay=0.01),
    "nadam": ts.rules.nadam,
    "amsgrad": ts.rules.amsgrad,
    "adabelief": ts.rules.adabelief,
    "rmsprop": lambda rate: ts.rules.rmsprop(rate, momentum=0.5),
    "adagrad": ts.rules.adagrad,
    "lion": lambda rate: ts.rules.lion(rate / 10),
    "adamax": ts.rules.adamax,
}


def init(extra: bool = False):
    rng = np.random.default_rng(0)
    kernel = lambda: jnp.asarray(rng.normal(size=(4, 4)) / 2, jnp.float32)
    params = {name: {"kernel": kernel(), "bias": jnp.full(4, 0.1)} for name in ALL}
    return {**params, "lora": {"a": jnp.ones((4, 2))}} if extra else params


def loss_fn(params, x):
    """Two models beside each other, so that neither sees what the other does; what else there is has no gradient."""
    rest = sum(jnp.sum(leaf) * 0 for leaf in jax.tree.leaves(params.get("lora")))
    outs = [jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"][None]) for name in ("body", "head")]
    return sum(jnp.mean((out - x[:, :1]) ** 2) for out in outs) + rest


STEP = ts.train_step(loss_fn, donate=False)


def step(state, x):
    """Operation by operation: where XLA fuses two programs of the same ones otherwise, it rounds otherwise."""
    with jax.disable_jit():
        return STEP.pure(state, x, {})


ALL, BODY, HEAD = ("body", "head"), ("body",), ("head",)
same = lambda rule: rule


@dataclasses.dataclass(frozen=True)
class Edit:
    """A run set up with `before` goes on with `after`; the leaves that train on as without it are `untouched`."""

    before: Callable = same
    after: Callable = same
    setup: Mapping = dataclasses.field(default_factory=dict)
    migrate: Mapping = dataclasses.field(default_factory=dict)
    untouched: tuple = ALL
    rate: float = 0.01  # of the new rule
    then: Callable = same  # done to the state before


def both(name, one: Edit, other: str, **changes) -> dict[str, Edit]:
    """An edit, and the way back."""
    back = dataclasses.replace(one, before=one.after, after=one.before, setup=one.migrate, migrate=one.setup, **changes)
    return {name: one, other: back}


parts = lambda rule: ts.rules.partition({"body/**": rule, "**": rule})
halves = lambda rule: ts.rules.partition({"head/kernel": rule, "*/bias": rule, "**": rule})
decayed = lambda rule: ts.rules.partition({"body/**": chain(ts.rules.add_decayed_weights(0.1), rule), "**": rule})
replaced = lambda rule: ts.rules.partition({"body/**": ts.rules.sgd(0.1), "**": rule})
EDITS: dict[str, Edit] = {
    **both("add a clip", Edit(after=lambda rule: chain(clip, rule)), "drop a clip"),
    "another bound": Edit(lambda rule: chain(clip, rule), lambda rule: chain(ts.rules.clip_by_global_norm(1e8), rule)),
    **both("add two clips", Edit(after=lambda r: chain(ts.rules.clip(1e9), clip, r)), "drop two clips"),
    "another clip": Edit(lambda rule: chain(clip, rule), lambda rule: chain(ts.rules.clip(1e9), rule)),
    **both("a chain in a chain", Edit(after=lambda rule: chain(chain(rule))), "no chain"),
    **both("add an average", Edit(setup={"ema": None}, migrate={"ema": 0.9}), "drop an average"),
    "another average": Edit(setup={"ema": 0.9}, migrate={"ema": 0.5}),
    **both("split into groups", Edit(after=parts), "merge groups"),
    "other groups": Edit(parts, halves),
    "the way back": Edit(halves, parts),
    **both("another rule for a part", Edit(after=replaced, untouched=HEAD), "the same rule for all"),
    **both("decay of a part", Edit(after=decayed, untouched=HEAD), "no decay of a part"),
    **both("add accumulation", Edit(after=lambda rule: ts.rules.accumulate(rule, 1)), "drop accumulation"),
    **both("add a loss scale", Edit(setup={"loss_scale": None}, migrate={"loss_scale": 1024.0}), "drop a loss scale"),
    "another loss scale": Edit(setup={"loss_scale": 1024.0}, migrate={"loss_scale": 4096.0}),
    **both("train a part", Edit(migrate={"trainable": "head/**"}, untouched=HEAD), "train all", untouched=HEAD),
    "train another part": Edit(
        setup={"trainable": "*/bias"}, migrate={"trainable": ["*/bias", "head/**"]}, untouched=()
    ),
    "add a lora": Edit(migrate={"params": "lora"}),
    "drop a lora": Edit(setup={"params": init(True)}, migrate={"params": "no lora"}),
    "add a key": Edit(setup={"key": None}, migrate={"key": 1}),
    "skip zeros": Edit(after=ts.rules.skip_zero),
    "after an adjustment": Edit(then=lambda state: ts.adjust(state, learning_rate=0.003)),
    "after a freeze": Edit(then=lambda state: ts.freeze(state, "body/**"), after=lambda rule: chain(clip, rule)),
    "another rate for a part": Edit(
        after=lambda rule: rule, then=lambda s: ts.adjust(s, "head/**", learning_rate=0.02)
    ),
}
assert len(EDITS) >= 30
SOME = "drop a clip", "add an average", "split into groups", "another rule for a part", "add accumulation"
FAST = [("adam", edit) for edit in (*SOME, "train a part", "add a lora", "after a freeze", "another rate for a part")]
FAST += [("sgd", "add a clip"), ("rmsprop", "add a clip")]
REST = [(rule, edit) for rule in RULES for edit in EDITS if (rule, edit) not in FAST]


def before(rule: str, edit: Edit):
    given = {"params": init(), **edit.setup}
    state = ts.setup(edit.before(RULES[rule](0.01)), given.pop("params"), **given)
    for _ in range(4):
        state, _ = step(state, X)
    return edit.then(state)


def after(rule: str, edit: Edit, state):
    given = dict(edit.migrate)
    if "params" in given:
        here = {name: state.params[name] for name in ALL}
        given["params"] = {**here, "lora": init(True)["lora"]} if given["params"] == "lora" else here
    return migrate(state, edit.after(RULES[rule](edit.rate)), **given)


def check(rule: str, edit: Edit):
    state = before(rule, edit)
    held = jax.tree.map(np.array, state)
    new, report = after(rule, edit, state)
    assert int(new.step) == 4
    for _ in range(3):
        state, _ = step(state, X)
        new, _ = step(new, X)
    assert int(new.step) == 7
    for name in edit.untouched:
        assert_trees_equal(new.params[name], state.params[name])
    assert_trees_equal(jax.tree.map(np.array, before(rule, edit)), held)  # the old one is as it was
    return report


QUICK = ("add an average", "split into groups", "add accumulation", "train a part")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rule", "edit"), [pair if pair[1] in QUICK else pytest.param(*pair, marks=pytest.mark.medium) for pair in FAST]
)
def test_what_an_edit_leaves_alone_trains_on_to_the_bit(rule, edit):
    check(rule, EDITS[edit])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_what_an_edit_leaves_alone_in_full(rule):
    for edit in [edit for of, edit in REST if of == rule]:
        check(rule, EDITS[edit])


def trained(rule, n=4, **given):
    state = ts.setup(rule, given.pop("params", None) or init(), **given)
    for _ in range(n):
        state, _ = STEP(state, X)
    return state


@pytest.mark.medium
def test_the_report_names_what_it_kept_what_is_new_and_what_is_gone():
    state = trained(ts.rules.adam(0.01), ema=0.9)
    new, report = migrate(state, replaced(ts.rules.adam(0.01)), ema=None)
    gone = ["body/bias", "body/kernel"]
    assert report.new == () and "ScaleByAdamState.mu of head/kernel" in report.kept
    assert [x for x in report.dropped if x.startswith("Scale")] == [
        f"ScaleByAdamState.{moment} of {name}" for moment in ("mu", "nu") for name in gone
    ]
    assert "average of head/bias" in report.dropped and "learning_rate" not in repr(report.notes)
    assert repr(report).splitlines()[0] == f"kept {len(report.kept)}, new 0, dropped 8"

    _, report = migrate(new, ts.rules.rmsprop(0.01))
    assert set(report.new) == {f"ScaleByRmsState.nu of {part}/{name}" for part in ALL for name in ("bias", "kernel")}


@pytest.mark.medium
def test_a_count_goes_with_the_moments_beside_it():
    """Moments that begin anew are corrected as young ones, and schedules run on."""
    schedule = optax.linear_schedule(0.1, 0.0, 100)
    state = trained(ts.rules.partition({"body/**": ts.rules.sgd(0.1), "**": ts.rules.adam(schedule)}))
    both_adam = ts.rules.partition({"body/**": ts.rules.adam(0.01), "**": ts.rules.adam(schedule)})
    new, report = migrate(state, both_adam)
    assert "ScaleByAdamState.mu of body/bias" in report.new and "ScaleByAdamState.nu of head/bias" in report.kept
    grads = jax.tree.map(jnp.ones_like, new.params)
    after_one, _ = ts.update(new, grads)
    np.testing.assert_allclose(after_one.params["body"]["bias"], new.params["body"]["bias"] - 0.01, rtol=1e-5)
    assert ts.hyperparams(new)["learning_rate@**"] == pytest.approx(0.096)
    for _ in range(3):  # it is donated, saved and compiled as any other
        new, info = ts.train_step(loss_fn)(new, X)
    assert int(new.step) == 7 and np.isfinite(info.loss)


def test_what_could_be_one_of_several_begins_anew():
    twice = chain(ts.rules.live(optax.trace)(decay=0.9), ts.rules.live(optax.trace)(decay=0.5), ts.rules.sgd(0.1))
    state = trained(twice)
    one = chain(ts.rules.live(optax.trace)(decay=0.9), ts.rules.sgd(0.1))
    new, report = migrate(state, one)
    assert len(report.new) == 4 and len(report.notes) >= 4
    assert any("begins anew, 2 there and 1 here" in note for note in report.notes)
    assert all(not np.any(x) for x in jax.tree.leaves(new.opt_state) if np.ndim(x))
    _, report = migrate(state, twice)
    assert report.new == () and len(report.kept) == 8


def test_numbers_that_were_adjusted_go_on_and_those_that_the_script_changed_are_its_own():
    state = ts.adjust(trained(ts.rules.adam(0.01, b1=0.8)), learning_rate=0.002)
    new, report = migrate(state, chain(clip, ts.rules.adam(0.01, b1=0.7)))
    found = ts.hyperparams(new)
    assert found["learning_rate"] == pytest.approx(0.002) and found["b1"] == pytest.approx(0.7)
    assert report.notes == ("b1: 0.8 then, 0.7 now",)


@pytest.mark.medium
def test_an_injected_number_that_differs_from_the_new_rules_is_told():
    inject = lambda rate: optax.inject_hyperparams(optax.adam)(learning_rate=rate)
    state, report = ts.migrate(ts.setup(inject(0.1), {"w": jnp.ones(2)}), inject(0.3))
    assert float(state.opt_state.hyperparams["learning_rate"]) == np.float32(0.1)
    assert [note.partition(": ")[2] for note in report.notes] == ["0.1 then, 0.3 now; the old one goes on"]


def test_parts_with_numbers_of_their_own_and_frozen_ones():
    state = ts.freeze(ts.adjust(trained(ts.rules.adam(0.01)), "head/**", learning_rate=0.02), "body/kernel")
    new, report = migrate(state, chain(clip, ts.rules.adam(0.01)))
    assert ts.hyperparams(new) == {**ts.hyperparams(state), "max_norm": pytest.approx(1e9)} and report.notes == ()
    moved, _ = STEP(new, X)
    assert_trees_equal(moved.params["body"]["kernel"], state.params["body"]["kernel"])
    assert not np.array_equal(moved.params["body"]["bias"], state.params["body"]["bias"])
    _, report = migrate(state, halves(ts.rules.adam(0.01)))
    assert report.notes[0] == "adam: the numbers of head/** alone are gone"


@pytest.mark.parametrize(
    "rule", [ts.rules.prodigy(1.0), ts.rules.schedule_free_adamw(0.1), ts.rules.noisy_sgd(0.1, key=0)]
)
def test_parts_with_numbers_of_their_own_keep_their_counts(rule):
    """Such a part has step sizes and sums of weights of its own, which are no moments of a leaf."""
    state = ts.adjust(trained(rule), "head/**", learning_rate=0.5)
    for _ in range(3):
        state, _ = STEP(state, X)
    new, _ = migrate(state, rule)
    assert_trees_equal(STEP(new, X)[0].params, STEP(state, X)[0].params)


def test_parts_of_another_shape_count_from_zero():
    state = ts.adjust(trained(ts.rules.adam(0.1)), "head/**", learning_rate=0.5)
    wide = jax.tree.map(lambda x: jnp.concatenate([x, x]), state.params)
    new, _ = migrate(state, ts.rules.adam(0.1), params=wide)
    counts = [int(x) for x in jax.tree.leaves(new.opt_state) if x.dtype == jnp.int32]
    assert counts == [0, 0]


def test_master_copies_survive_another_precision():
    state = trained(ts.rules.adam(0.01), precision="bfloat16")
    masters = state.params if state.masters is None else state.masters
    wide, _ = migrate(state, ts.rules.adam(0.01), precision=None)
    assert wide.masters is None
    assert_trees_equal(wide.params, masters)
    stored = ts.precision.Policy(compute="bfloat16", param="bfloat16")
    low, _ = migrate(wide, ts.rules.adam(0.01), precision=stored)
    assert low.params["body"]["bias"].dtype == jnp.bfloat16
    assert_trees_equal(low.masters, wide.params)
    again, _ = migrate(low, chain(clip, ts.rules.adam(0.01)))
    assert_trees_equal((again.params, again.masters), (low.params, low.masters))
    copied, _ = migrate(low, ts.rules.adam(0.01), params=jax.tree.map(jnp.copy, low.params))
    assert_trees_equal(copied.masters, low.masters)  # as `replace` keeps them
    integers = {**low.params, "head": jax.tree.map(lambda x: x.astype(int), low.params["head"])}
    with pytest.raises(ParamsError, match="cannot be trained"):
        migrate(low, ts.rules.adam(0.01), params=integers)
    moved, _ = migrate(low, ts.rules.adam(0.01), params={"trunk": low.params})
    assert_trees_equal(moved.masters["trunk"], low.masters)


@pytest.mark.medium
def test_what_came_and_went_beside_the_rule():
    state = trained(ts.rules.adam(0.01), ema=0.9, loss_scale=1024.0, key=0, model_state=np.ones(2, np.float32))
    state = ts.freeze(state, "body/**")
    other = {"trunk": state.params["body"], "head": {**state.params["head"], "kernel": jnp.ones((4, 3))}}
    gone = {"loss_scale": None, "key": None, "model_state": None}
    new, report = migrate(state, ts.rules.adam(0.01), params=other, **gone)
    leaves = lambda names: {name for name in names if not name.startswith(("Scale", "average"))}
    assert leaves(report.dropped) == {"leaf body/bias", "leaf body/kernel", "leaf head/kernel", *gone}
    assert leaves(report.new) == {"leaf trunk/bias", "leaf trunk/kernel", "leaf head/kernel"}
    assert {"average of body/bias", "average of body/kernel"} < set(report.dropped)
    assert "body/bias: frozen then, not trained now" in report.notes and "frozen" in repr(report)
    _, report = migrate(new, ts.rules.adam(0.01), loss_scale=1024.0, key=1, model_state=np.ones(2, np.float32))
    assert set(report.new) == set(gone) and report.notes == ()
    _, report = migrate(new, ts.rules.adam(0.01), trainable="head/**")
    assert {"average of trunk/bias", "average of trunk/kernel"} < set(report.dropped) and report.new == ()


@pytest.mark.medium
def test_an_adjusted_number_that_has_no_place_any_more_is_told():
    state = ts.adjust(trained(ts.rules.adam(0.01)), learning_rate=0.5)
    new, report = migrate(state, parts(ts.rules.adam(0.01)))
    assert ts.hyperparams(new)["learning_rate@**"] == pytest.approx(0.01)
    assert report.notes == ("learning_rate: 0.5 by adjust then, no such number now",)
    again = ts.adjust(new, "body/**", learning_rate=0.25)
    _, report = migrate(again, ts.rules.adam(0.01))
    assert report.notes == ("learning_rate@body/**: 0.25 by adjust then, no such number now",)
    assert migrate(trained(ts.rules.adam(0.01)), parts(ts.rules.adam(0.01)))[1].notes == ()
    scheduled = trained(ts.rules.adam(optax.linear_schedule(0.1, 0.0, 100)))
    assert migrate(scheduled, parts(ts.rules.adam(0.01)))[1].notes == ()


def test_averages_keep_what_they_know():
    state = trained(ts.rules.adam(0.01), ema=ts.averages.ema(0.9, warmup=True))
    new, report = migrate(state, ts.rules.sgd(0.01))
    assert_trees_equal(new.average.params, state.average.params)
    assert int(new.average.count) == 4 and "average of body/bias" in report.kept
    other, report = migrate(state, ts.rules.sgd(0.01), ema=ts.averages.polyak())
    assert_trees_equal(other.average.params, state.params)
    assert report.notes[-1] == "average: of another kind, begins anew"


@pytest.mark.medium
def test_a_rule_with_a_key_of_its_own():
    rule = ts.rules.noisy_sgd(0.01, key=jax.random.key(3))
    state = ts.setup(rule, init())
    for _ in range(2):
        state, _ = step(state, X)
    edited, report = migrate(state, chain(clip, rule), ema=0.9)
    assert not report.dropped
    for _ in range(2):
        state, edited = step(state, X)[0], step(edited, X)[0]
    assert_trees_equal(edited.params, state.params)


@pytest.mark.medium
def test_the_old_state_and_the_new_one_own_their_arrays():
    state = trained(ts.rules.adam(0.01), ema=0.9)
    new, _ = migrate(state, chain(clip, ts.rules.adam(0.01)))
    new, _ = ts.train_step(loss_fn)(new, X)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    state, _ = ts.train_step(loss_fn)(state, X)
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))


@pytest.mark.medium
def test_on_a_mesh():
    mesh, spread = ts.mesh(fsdp=4), jax.sharding.PartitionSpec("fsdp")
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    state = ts.shard(ts.setup(ts.rules.adam(0.01), {"w": jnp.eye(64)}), mesh)
    state, _ = step(state, np.ones((8, 64), np.float32))
    new, report = migrate(state, chain(clip, ts.rules.adam(0.01)), ema=0.5)
    assert report.new == ("average of w",)
    for _ in range(2):
        wide = [x for x in jax.tree.leaves(new) if x.ndim == 2 and x.shape[0] == 64]
        assert len(wide) == 4 and {x.sharding.spec for x in wide} == {spread}
        new, _ = step(new, np.ones((8, 64), np.float32))


ERRORS: dict[str, tuple] = {
    "population": (
        lambda rule: migrate(ts.population(lambda key: ts.setup(rule, init(), key=key), 2), rule),
        StateError,
        r"state at migrate\(\): got a population, expected one state. Migrate each member: ts.populations.member",
    ),
    "another library's": (
        lambda rule: migrate(nnx.Optimizer(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param), rule),
        WrongTypeError,
        r"state at migrate\(\): got ",
    ),
    "new leaf": (
        lambda rule: migrate(ts.setup(rule, init(), trainable="head/**"), rule, params=init(True)),
        StateError,
        r"leaf 'lora/a' at migrate\(\): got a new one, .*give trainable=",
    ),
    "donated": (
        lambda rule: (lambda state: [ts.train_step(loss_fn)(state, X), migrate(state, rule)])(ts.setup(rule, init())),
        StateError,
        r"state at migrate\(\): got one that was donated",
    ),
    "rule": (lambda rule: migrate(ts.setup(rule, init()), ts.rules.adam), WrongTypeError, r"rule at setup\(\)"),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        call(ts.rules.adam(0.01))


def test_moments_stay_in_host_memory_when_a_run_migrates():
    params = {"a": np.ones((64, 64), np.float32)}
    try:
        state = ts.shard(ts.setup(ts.rules.adam(1e-2), params), ts.mesh(data=1, fsdp=-1), host="moments")
    except ts.errors.DeviceError as error:
        pytest.skip(str(error))
    for rule in (ts.rules.lion(1e-3), ts.rules.amsgrad(1e-3)):
        new, _ = ts.migrate(state, rule)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(new.opt_state) if x.size > 1000}
        assert kinds == {"pinned_host"}
        new, _ = ts.train_step(lambda params, x: jnp.mean((x @ params["a"]) ** 2))(new, np.ones((8, 64), np.float32))


@pytest.mark.parametrize("rule", [optax.adam(0.1), ts.rules.adam(0.1)], ids=["optax", "live"])
def test_a_running_optimizer_of_nnx_goes_on_with_its_moments(rule):
    network = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(network, optax.adam(0.1), wrt=nnx.Param)
    x = jnp.ones((4, 2))

    def train():
        grads = nnx.grad(lambda network: jnp.mean(network(x) ** 2))(network)
        optimizer.update(network, grads)

    for _ in range(3):
        train()
    model = ts.models.nnx(network)
    state = ts.setup(rule, model.params)
    opt_state = jax.tree.unflatten(jax.tree.structure(state.opt_state), jax.tree.leaves(optimizer.opt_state))
    state = state.replace(opt_state=opt_state, step=3)
    state, _ = ts.train_step(lambda params, x: jnp.mean(model.apply(params, x)[0] ** 2))(state, x)
    train()
    assert state.step == 4
    np.testing.assert_allclose(state.params["kernel"], network.kernel[...], rtol=1e-6, atol=1e-7)
    fresh = ts.setup(rule, model.params)
    assert not np.allclose(fresh.opt_state[0].mu["kernel"], state.opt_state[0].mu["kernel"])


def test_leaves_that_a_run_stops_to_train_are_left_out_of_the_program():
    params = {"encoder": jnp.ones((64, 64)), "head": jnp.ones((64, 8))}
    x, rule = jnp.ones((32, 64)), ts.rules.adam(0.1)
    step = ts.train_step(lambda p, x: jnp.mean((jnp.tanh(x @ p["encoder"]) @ p["head"]) ** 2), donate=False)
    state, _ = step(ts.setup(rule, params), x)
    stopped, _ = migrate(state, rule, trainable="head")
    frozen = ts.freeze(state, "encoder")
    flops = lambda state: ts.describe(step, state, x).flops
    fewer = ts.setup(rule, params, trainable="head")
    assert flops(stopped) == flops(fewer) < 0.6 * flops(frozen)
    assert_trees_equal(step(stopped, x)[0].params, step(frozen, x)[0].params)
