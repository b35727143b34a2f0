"""setup and TrainState: what is carried, what is copied, what it looks like."""

import copy
import dataclasses
import pickle
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal, count_compiles
from tsunax.errors import StateError

PARAMS = {
    "body": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.float32)},
    "head": np.ones(3, np.float32),
}


def jax_params():
    return jax.tree.map(jnp.asarray, PARAMS)


def loss_fn(params, x):
    return jnp.mean(((x @ params["body"]["w"] + params["body"]["b"][None]) * params["head"][None] - 1.0) ** 2)


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)


def test_a_new_state_has_not_stepped():
    state = ts.setup(ts.rules.adam(1e-3), jax_params())
    assert int(state.step) == 0 and int(state.calls) == 0
    assert_trees_equal(state.params, PARAMS)


def test_is_the_optimizer_state_that_of_plain_optax():
    plain = optax.sgd(0.1, momentum=0.9)
    state = ts.setup(plain, jax_params())
    assert_trees_equal(state.opt_state, plain.init(jax_params()))
    assert state.numbers is None
    live = ts.setup(ts.rules.sgd(0.1, momentum=0.9), jax_params())
    assert jax.tree.structure(live.opt_state) == jax.tree.structure(state.opt_state)


def test_do_the_callers_arrays_survive_a_donating_step():
    params = jax_params()
    state = ts.setup(ts.rules.adam(1e-3), params)
    ts.train_step(loss_fn)(state, X)
    assert_trees_equal(params, PARAMS)
    assert state.clock.is_deleted()


def test_copy_false_hands_the_arrays_over():
    params = jax_params()
    state = ts.setup(ts.rules.adam(1e-3), params, copy=False)
    assert state.params["head"] is params["head"]
    ts.train_step(loss_fn)(state, X)
    assert params["head"].is_deleted()


def test_tied_arrays_train_as_two_leaves():
    shared = jnp.ones(2)
    state = ts.setup(ts.rules.sgd(0.5), {"a": shared, "b": shared})
    state, _ = ts.train_step(lambda p, x: jnp.sum(p["a"] * x) + 2 * jnp.sum(p["b"]))(state, jnp.ones(2))
    np.testing.assert_array_equal(state.params["a"], [0.5, 0.5])
    np.testing.assert_array_equal(state.params["b"], [0.0, 0.0])


@pytest.mark.parametrize("rule", ["schedule_free_sgd", "prodigy", "dog"])
def test_rules_that_start_from_the_params_do_not_alias_them(rule):
    factory = getattr(ts.rules, rule)
    state = ts.setup(factory(), jax_params())
    state, info = ts.train_step(loss_fn)(state, X)  # donating one buffer twice would raise
    assert bool(info.applied)


def test_an_unselected_leaf_is_neither_copied_nor_donated():
    params = jax_params()
    state = ts.setup(ts.rules.adam(1e-3), params, trainable=["**", "!body/**"])
    assert state.params["body"]["w"] is params["body"]["w"]
    after, _ = ts.train_step(loss_fn)(state, X)
    assert after.params["body"]["w"] is params["body"]["w"]
    assert ts.trainable(after)["body"] == {"b": None, "w": None}
    assert len(jax.tree.leaves(after.opt_state)) == 3  # count, mu and nu of the head


def test_unselected_leaves_may_be_anything_that_jit_takes():
    params = {"w": jnp.ones(2), "table": jnp.arange(3), "flag": np.array(True)}
    state = ts.setup(ts.rules.sgd(0.1), params, trainable="w")
    state, _ = ts.train_step(lambda p, x: jnp.sum(p["w"]) * p["table"][1] * p["flag"])(state, X)
    np.testing.assert_allclose(state.params["w"], [0.9, 0.9], rtol=1e-6)
    assert state.params["table"].dtype == jnp.int32


def test_weak_types_and_python_floats_do_not_compile_twice():
    state = ts.setup(ts.rules.sgd(0.1), {"a": jnp.asarray(1.0), "b": 2.0})
    step = ts.train_step(lambda p, x: p["a"] * p["b"])
    state, _ = step(state, X)
    state, _ = step(state, X)
    assert step.programs[None]._cache_size() == 1
    assert state.params["b"].dtype == jnp.float32


def test_setup_runs_under_jit_vmap_scan_and_eval_shape():
    make = lambda rate: ts.setup(ts.rules.adam(rate), jax_params())
    eager = make(0.01)
    assert_trees_equal(jax.jit(make)(0.01), eager)
    many = jax.vmap(make)(jnp.array([0.01, 0.02]))
    assert many.params["head"].shape == (2, 3) and many.step.shape == (2,)
    shapes = jax.eval_shape(make, 0.01)
    assert shapes.params["body"]["w"].shape == (2, 3)
    _, inside = jax.lax.scan(lambda c, rate: (c, make(rate).params["head"]), 0, jnp.array([0.01, 0.02]))
    assert inside.shape == (2, 3)


@pytest.mark.medium
def test_shapes_are_enough_for_a_setup_under_eval_shape():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax_params())
    state = jax.eval_shape(lambda p: ts.setup(ts.rules.adam(1e-3), p), shapes)
    lowered = ts.train_step(loss_fn).lower(state, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert "stablehlo" in lowered.as_text()


def test_a_state_goes_where_it_is_told_and_stays():
    device = jax.devices()[3]
    state = ts.setup(ts.rules.adam(1e-3), jax_params(), device=device, key=0)
    state, _ = ts.train_step(lambda p, x, key: loss_fn(p, x))(state, X)
    state = ts.adjust(ts.freeze(state, "head"), learning_rate=0.1)
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {device}
    assert str(device) in repr(state)


def test_a_state_of_params_on_another_device_is_made_there():
    params = jax.device_put(jax_params(), jax.devices()[2])
    state = ts.setup(ts.rules.adam(1e-3), params)
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {jax.devices()[2]}


def test_replace_copies_and_checks():
    state = ts.setup(ts.rules.adam(1e-3), jax_params())
    mine = jax.tree.map(lambda x: x + 1, jax_params())
    other = state.replace(params=mine)
    ts.train_step(loss_fn)(other, X)
    assert_trees_equal(mine, jax.tree.map(lambda x: x + 1, PARAMS))
    with pytest.raises(ts.errors.StateError, match=r"field at replace\(\): got 'parms'.*'params'"):
        state.replace(parms=mine)
    with pytest.raises(ts.errors.StateError, match=r"params\['head'\].*float32\[4\].*float32\[3\]"):
        state.replace(params={**mine, "head": jnp.ones(4)})


def test_setting_the_step_does_not_move_the_counts_of_the_optimizer():
    step = ts.train_step(loss_fn)
    a = ts.setup(ts.rules.adam(1e-2), jax_params())
    for _ in range(3):
        a, _ = step(a, X)
    expected, _ = ts.train_step(loss_fn, donate=False)(a, X)
    b, _ = step(a.replace(step=0), X)
    assert_trees_equal(b.params, expected.params)
    assert int(b.step) == 1 and int(b.calls) == 4


def test_equal_setups_share_one_program():
    step = ts.train_step(loss_fn)
    for rate in (1e-3, 1e-2, 3):
        step(ts.setup(ts.rules.chain(ts.rules.clip_by_global_norm(rate), ts.rules.adam(rate)), jax_params()), X)
    assert step.programs[None]._cache_size() == 1


def test_a_state_can_be_copied_and_pickled():
    state = ts.setup(ts.rules.adam(1e-2), jax_params())
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert_trees_equal(other, state)
        assert other.plan is state.plan


def test_printing_shows_tree_numbers_frozen_parts_bytes_and_place():
    state = ts.setup(ts.rules.adam(1e-3), jax_params(), trainable=["**", "!head"])
    text = repr(ts.freeze(state, "**/b"))
    for part in (
        r"step=0, calls=0",
        "body/b",
        "frozen",
        "not trained",
        "float32[2, 3]",
        "learning_rate=0.001",
        "48 B",
        "76 B",
        str(jax.devices()[0]),
    ):
        assert part in text, (part, text)


@pytest.mark.medium
def test_printing_never_fails(capsys):
    state = ts.setup(ts.rules.adam(1e-3), jax_params())
    jax.jit(lambda s: print(s))(state)
    jax.eval_shape(lambda s: print(s), state)
    ts.train_step(loss_fn)(state, X)
    print(state)
    print(jax.vmap(lambda r: ts.setup(ts.rules.adam(r), jax_params()))(jnp.ones(2)))
    print(jax.eval_shape(lambda: ts.setup(ts.rules.adam(1.0), jax_params())))
    print(ts.setup(ts.rules.adam(1e-3), {f"layer{i:03}": jnp.ones(1) for i in range(60)}))
    out = capsys.readouterr().out
    assert "traced" in out and "donated" in out and "40 more" in out


def test_fields_given_together_with_the_step_all_count():
    params = {"w": jnp.ones(2)}
    a, b = (ts.setup(ts.rules.adam(rate), params) for rate in (0.1, 0.5))
    b, _ = ts.update(b, params)
    restored = a.replace(step=b.step, calls=b.calls, params=b.params, opt_state=b.opt_state, numbers=b.numbers)
    for _ in range(2):
        b, _ = ts.update(b, params)
        restored, _ = ts.update(restored, params)
    assert_trees_equal(restored.params, b.params)
    assert ts.hyperparams(restored) == ts.hyperparams(b)


def test_what_is_not_trained_is_on_the_device_after_setup():
    frozen = np.ones((4, 4), np.float32)
    state = ts.setup(ts.rules.sgd(0.1), {"a": jnp.ones(2), "b": frozen}, trainable="a")
    assert isinstance(state.params["b"], jax.Array)


def test_replace_looks_at_masters_average_and_loss_scale():
    low = ts.precision.Policy(param="bfloat16", compute="bfloat16")
    state = ts.setup(ts.rules.sgd(0.1), jax_params(), ema=0.9, precision=low, loss_scale="dynamic")
    wide = jax.tree.map(lambda x: np.asarray(x, np.float32), PARAMS)
    short = wide | {"head": np.ones(2, np.float32)}
    for fields, said in (
        ({"masters": short}, r"leaf at masters\['head'\]: got float32\[2\], expected float32\[3\]"),
        ({"masters": None}, "leaf at masters: got None"),
        ({"average": dataclasses.replace(state.average, params=short)}, r"average.params\['head'\]: got float32\[2\]"),
        ({"average": wide}, "at average: got dict"),
        ({"loss_scale": 2.0}, "at loss_scale: got 2.0"),
        ({"loss_scale": dataclasses.replace(state.loss_scale, scale=jnp.int32(2))}, "at loss_scale.scale: got int32"),
    ):
        with pytest.raises(StateError, match=said):
            state.replace(**fields)
    new = state.replace(masters=jax.tree.map(lambda x: x + 2**-10, wide))  # params are their rounding
    assert_trees_equal(new.params, jax.tree.map(lambda x: jnp.asarray(x + 2**-10, jnp.bfloat16), wide))
    scale = dataclasses.replace(state.loss_scale, scale=2.0, good=3)
    state = state.replace(loss_scale=scale, average=dataclasses.replace(state.average, params=wide))
    assert float(state.loss_scale.scale) == 2.0 and state.loss_scale.good.dtype == jnp.int32
    after, _ = ts.train_step(loss_fn, donate=False)(state, X)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_python_number_in_an_optimizer_state_compiles_no_second_step():
    def count(updates, state, params=None):
        return updates, {"n": state["n"] + 1, "x": state["x"] * 0.5}

    rule = optax.GradientTransformation(lambda params: {"n": 0, "x": 1.0}, count)
    state = ts.setup(rule, jax_params())
    assert not any(x.weak_type for x in jax.tree.leaves(state.opt_state))
    step = ts.train_step(loss_fn)
    state, _ = step(state, X)
    with count_compiles() as c:
        state, _ = step(state, X)
    assert c.compiled.count("train_step") == 0 and int(state.opt_state["n"]) == 2


def test_numpy_params_are_copied_once_and_may_be_refilled():
    w = np.full(1 << 21, 3, np.float32)
    tracemalloc.start()
    state = ts.setup(ts.rules.sgd(0.1), {"w": w})
    w.fill(-1)
    copies = tracemalloc.get_traced_memory()[1] / w.nbytes  # in NumPy's memory, which JAX's is not
    tracemalloc.stop()
    assert np.all(state.params["w"] == 3)
    assert copies < (0.5 if jax.__version_info__ >= (0, 10) else 1.5)  # `jnp.array` of 0.7.2 makes one of them
