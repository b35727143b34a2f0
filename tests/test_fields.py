"""Fields of the state say their role once: what a new one gets for it, without a line elsewhere."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal
from tsunax.errors import HyperparameterError, StateError, WrongTypeError
from tsunax.state import TrainState, field, split, state_class


@state_class
class TwoAverages(TrainState):
    """A state with a second average: all that it takes."""

    slow: Any = field(moves="step", like="average", shows="slow average")


@state_class
class Lagged(TrainState):
    """A state with the params of one step ago."""

    lag: Any = field(moves="step", like="trained", shows="lag")


def moved(state, batch):
    """A step that moves the field."""
    new, info = STEP.pure(state, batch, {})
    lag = jax.tree.map(lambda now, old: jnp.where(info.applied, now, old), ts.trainable(state), state.lag)
    return dataclasses.replace(new, lag=lag), info


STEP = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] + params["b"][None]) ** 2))
X = np.ones((16, 64), np.float32)


def start(**options):
    params = {"w": jnp.ones((64, 32)) / 64, "b": jnp.zeros(32)}
    state = ts.setup(ts.rules.adam(0.1), params, **options)
    return Lagged.of(state, lag=ts.trainable(state))


def test_it_is_donated_assembled_and_kept_by_a_step():
    state = start()
    old = state.lag["w"]
    after, _ = ts.train_step(STEP.loss_fn)(state, X)
    assert type(after) is Lagged and old.is_deleted() and not after.lag["w"].is_deleted()
    np.testing.assert_array_equal(after.lag["w"], np.ones((64, 32), np.float32) / 64)
    assert "lag" in Lagged._moving and len(split(after)[0]) == len(Lagged._moving)


def test_it_moves_in_the_loop_with_the_bits_of_single_steps():
    one, _ = ts.fit(moved, start(), [X] * 4, steps=4, steps_per_call=1, progress=False)
    many, _ = ts.fit(moved, start(), [X] * 4, steps=4, steps_per_call=4, progress=False)
    assert_trees_equal(one.lag, many.lag)
    assert (np.asarray(one.lag["w"]) != np.asarray(one.params["w"])).all()


def test_it_is_sharded_as_the_leaves_that_it_is_like():
    state = ts.shard(start(), ts.mesh(data=1, fsdp=-1))
    assert state.lag["w"].sharding == state.params["w"].sharding != state.lag["b"].sharding
    after, _ = ts.train_step(STEP.loss_fn)(state, X)
    assert after.lag["w"].sharding.is_equivalent_to(after.params["w"].sharding, 2)
    assert not after.lag["w"].is_fully_replicated


def test_it_is_printed_pickled_saved_and_replaced(tmp_path):
    state, _ = moved(start(), X)
    assert repr(state).startswith("Lagged(step=1") and "lag 8.1 KiB" in repr(state)
    assert_trees_equal(pickle.loads(pickle.dumps(state)), state)
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.wait()
        restored = checkpoints.restore(start())
    assert type(restored.state) is Lagged
    assert_trees_equal(restored.state, state)
    assert float(state.replace(lag=jax.tree.map(jnp.zeros_like, state.lag)).lag["w"].sum()) == 0
    with pytest.raises(StateError, match="lag"):
        state.replace(lag=None)


def test_it_has_an_axis_of_members_in_a_population():
    runs = jax.vmap(lambda rate: ts.adjust(start(), learning_rate=rate))(jnp.array([0.1, 0.2, 0.3]))
    assert runs.lag["w"].shape == (3, 64, 32)
    after, _ = ts.train_step(STEP.loss_fn)(runs, X)
    assert type(after) is Lagged and after.lag["w"].shape == (3, 64, 32)


def test_frozen_leaves_and_rejected_steps_keep_it():
    state = ts.freeze(start(), "b")
    bad = X * np.nan
    after, info = jax.jit(moved)(state, bad)
    assert not bool(info.applied)
    assert_trees_equal(after.lag, state.lag)
    kept, _ = ts.train_step(STEP.loss_fn, donate=False)(state, bad)
    assert_trees_equal(kept.lag, state.lag)


def test_a_wrong_declaration_and_wrong_fields_are_named():
    for wrong in ({"moves": "stpe"}, {"like": "tained"}):
        with pytest.raises(StateError, match=r"role at field\(\): got"):
            field(**wrong)
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    with pytest.raises(StateError, match=r"fields at Lagged\.of\(\): got , expected lag"):
        Lagged.of(state)
    with pytest.raises(StateError, match=r"got lag, lga, expected lag"):
        Lagged.of(state, lag=state.params, lga=1)


def test_a_state_is_made_of_each_field_once():
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    fields = dict(state.__dict__)
    assert_trees_equal(TrainState(**fields), state)
    wrong = {
        "unexpected keyword argument 'parms'": lambda: TrainState(**fields, parms=1),
        "missing 10 required .*'params', .* and 'plan'": lambda: TrainState(clock=state.clock),
        "keyword argument 'parms'": lambda: TrainState(**{k.replace("params", "parms"): x for k, x in fields.items()}),
        "argument 'parms'": lambda: dataclasses.replace(state, parms=1),
        "missing 1 required keyword-only argument: 'lag'": lambda: Lagged(**fields),
        "positional": lambda: TrainState(*fields.values()),
    }
    for names, make in wrong.items():
        with pytest.raises(TypeError, match=names):
            make()
    for make in (lambda: ts.StepInfo(1.0), lambda: ts.StepInfo._make([1.0]), lambda: ts.StepInfo(*range(13))):
        with pytest.raises(TypeError):
            make()


def test_the_fields_of_a_state_have_a_role_each():
    roles = {f.name: (f.metadata["moves"], f.metadata["like"]) for f in TrainState._fields}
    assert roles["params"] == ("step", "params") and roles["clock"] == ("record", "")
    assert {name for name, (moves, _) in roles.items() if not moves} == {"key", "numbers", "frozen"}


# -------------------------------------------------------------------------------------------------- a second average


def with_two(rule=None, **options):
    params = {"w": jnp.ones((64, 32)) / 64, "b": jnp.zeros(32)}
    state = ts.setup(ts.rules.sgd(0.1) if rule is None else rule, params, ema=0.5, **options)
    return TwoAverages.of(state, slow=0.9)


LOSS = STEP.loss_fn


@pytest.mark.parametrize("given", (0.9, ts.averages.ema(0.9), None))
def test_a_second_average_begins_as_the_first_one_does(given):
    """From the trained leaves alone, and from those that are not rounded."""
    params = {"w": jnp.full((64, 32), 1 / 3), "b": jnp.zeros(32)}
    options = {"trainable": "w", "precision": ts.precision.Policy("bfloat16", "bfloat16")}
    state = TwoAverages.of(ts.setup(ts.rules.sgd(0.1), params, ema=0.9, **options), slow=given)
    assert state.slow is None if given is None else state.slow.count == 0
    state, _ = ts.train_step(LOSS)(state, X)
    assert_trees_equal(state.slow, state.average if given is not None else None)


def test_a_first_value_of_other_leaves_is_named():
    params = {"w": jnp.ones((64, 32)) / 64, "b": jnp.zeros(32)}
    state = ts.setup(ts.rules.sgd(0.1), params, trainable="w")
    with pytest.raises(StateError, match=r"field at lag\['b'\]: got .*, expected .*Give ts\.trainable\(state\)"):
        Lagged.of(state, lag=params)
    with pytest.raises(StateError, match=r"field at slow.*\['b'\]: got .*, expected"):
        TwoAverages.of(state, slow=ts.averages.ema(0.9).starting_at(params))
    with pytest.raises(StateError, match=r"field at lag.*float32\[3\], expected float32\[64,32\]"):
        Lagged.of(state, lag={"w": jnp.ones(3), "b": None})
    with pytest.raises(WrongTypeError, match=r"slow at TwoAverages\.of\(\): got 'often' \(str\), expected a decay"):
        TwoAverages.of(state, slow="often")
    with pytest.raises(HyperparameterError, match="decay"):
        TwoAverages.of(state, slow=2.0)


def test_a_second_average_moves_as_the_first_one_does():
    step, state = ts.train_step(LOSS), with_two()
    alone = ts.setup(ts.rules.sgd(0.1), state.params, ema=0.9)
    for _ in range(3):
        state, alone = step(state, X)[0], step(alone, X)[0]
    assert_trees_equal(ts.averaged(state, "slow").params, ts.averaged(alone).params)
    assert not np.array_equal(ts.averaged(state).params["w"], ts.averaged(state, "slow").params["w"])
    with pytest.raises(StateError, match=r"average at averaged.*'fast'.*'average' or 'slow'\.$"):
        ts.averaged(state, "fast")
    before = jax.tree.map(np.array, state.slow)
    rejected, info = step(state, np.full_like(X, np.nan))
    assert not info.applied
    assert_trees_equal(rejected.slow, before)


def test_a_second_average_is_frozen_checked_and_spread_with_its_leaves():
    ts.testing.check_frozen(ts.train_step(LOSS), with_two(), X, "b")
    ts.testing.check_sharding(ts.train_step(LOSS), with_two(), X, ts.mesh(data=-1))
    state = ts.shard(with_two(), ts.mesh(data=1, fsdp=-1))
    assert state.slow.params["w"].sharding == state.params["w"].sharding


def test_a_second_average_is_saved_and_what_the_script_edits_wins(tmp_path):
    state, _ = ts.train_step(LOSS)(with_two(), X)
    saved = jax.tree.map(np.asarray, state.slow)
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.wait()
        assert_trees_equal(checkpoints.restore(with_two()).state.slow, saved)
        edited = dataclasses.replace(with_two(), slow=ts.averages.ema(0.99).starting_at(state.params))
        with pytest.warns(UserWarning, match="ema decay of slow: 0.9 then, 0.99 now"):
            restored = checkpoints.restore(edited).state
        np.testing.assert_array_equal(restored.slow.params["w"], saved.params["w"])
        assert float(restored.slow.rate) == np.float32(1 - 0.99)
        one = ts.setup(ts.rules.sgd(0.1), state.params, ema=0.5)
        with pytest.raises(ts.errors.CheckpointError, match=r"slow"):
            checkpoints.restore(one)
        broken = dataclasses.replace(
            state,
            slow=dataclasses.replace(state.slow, params={"w": saved.params["w"] * np.nan, "b": saved.params["b"]}),
        )
        with pytest.raises(ts.errors.SaveError, match=r"slow.params\['w'\], which is not finite"):
            checkpoints.save(broken, step=2)
            checkpoints.wait()


def test_a_second_average_migrates_by_the_names_of_leaves():
    state, _ = ts.train_step(LOSS)(with_two(), X)
    new, report = ts.migration.migrate(state, ts.rules.adam(0.1))
    assert type(new) is TwoAverages and "slow of w" in report.kept
    assert_trees_equal(new.slow, state.slow)
    params = {**state.params, "more": jnp.zeros(3)}
    new, report = ts.migration.migrate(state, ts.rules.adam(0.1), params=params)
    assert "slow of more" in report.new
    np.testing.assert_array_equal(new.slow.params["w"], state.slow.params["w"])
    lagged, _ = ts.migration.migrate(start(), ts.rules.sgd(0.1))
    assert_trees_equal(lagged.lag, start().lag)
    with pytest.raises(StateError, match=r"field 'lag' at migrate"):
        ts.migration.migrate(start(), ts.rules.sgd(0.1), params={**start().params, "more": jnp.zeros(3)})


def test_a_field_that_is_new_and_none_is_no_hindrance_for_old_checkpoints(tmp_path):
    before = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(before, step=0)
        checkpoints.wait()
        restored = checkpoints.restore(TwoAverages.of(before, slow=None)).state
    assert type(restored) is TwoAverages and restored.slow is None
