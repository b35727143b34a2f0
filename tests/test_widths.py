"""scale_by_width: the rates of a narrow model fit a wide one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles
from tsunax.errors import CheckError, DataError, RuleError

BATCH = tuple(np.random.default_rng(0).normal(size=(32, n)).astype(np.float32) for n in (8, 1))
WIDTHS = [64, 128, 256, 512]


def mlp(width, *, last=None):
    """Weights of variance 1/fan-in; of the last layer 1/fan-in squared, unless it is told."""
    keys, sizes = jax.random.split(jax.random.key(0), 3), [(8, width), (width, width), (width, 1)]
    scales = [8**-0.5, width**-0.5, last or 1 / width]
    return [
        {"w": jax.random.normal(key, size) * scale, "b": jnp.zeros(size[1])}
        for key, size, scale in zip(keys, sizes, scales, strict=True)
    ]


def outputs(params, batch):
    first = jnp.tanh(batch[0] @ params[0]["w"] + params[0]["b"][None])
    second = jnp.tanh(first @ params[1]["w"] + params[1]["b"][None])
    return {"first": first, "second": second, "out": second @ params[2]["w"] + params[2]["b"][None]}


STEP = ts.train_step(lambda params, batch: jnp.mean((outputs(params, batch)["out"] - batch[1]) ** 2))


def scaled(width, narrow=64):
    rule = ts.rules.chain(ts.rules.adam(3e-3), ts.rules.scale_by_width(mlp(narrow)))
    return STEP, ts.setup(rule, mlp(width)), outputs


@pytest.mark.medium
def test_what_training_changes_does_not_follow_the_width():
    powers = ts.testing.check_coordinates(scaled, WIDTHS, BATCH)
    assert powers.keys() == {"first", "second", "out"} and max(map(abs, powers.values())) < 0.25
    plain = lambda width: (STEP, ts.setup(ts.rules.adam(3e-3), mlp(width, last=width**-0.5)), outputs)
    with pytest.raises(
        CheckError, match=r"outputs\['(first|second|out)'\] at check_coordinates\(\): got a change that goes with"
    ):
        ts.testing.check_coordinates(plain, WIDTHS, BATCH)
    with pytest.raises(DataError, match="two or more"):
        ts.testing.check_coordinates(scaled, [64], BATCH)


@pytest.mark.medium
def test_a_model_of_the_same_width_trains_as_without_it():
    same = ts.setup(ts.rules.adam(3e-3), mlp(64))
    assert_trees_equal(STEP(scaled(64)[1], BATCH)[0].params, STEP(same, BATCH)[0].params)


@pytest.mark.medium
def test_updates_are_those_of_optax_by_the_ratio_of_fans():
    """Against multi_transform with a rate for each matrix."""
    rates = {"same": 3e-3, "less": 3e-3 * 64 / 256}
    labels = [{"w": "same", "b": "same"}, {"w": "less", "b": "same"}, {"w": "less", "b": "same"}]
    rule = optax.multi_transform({name: optax.adam(rate) for name, rate in rates.items()}, labels)
    ours, theirs = scaled(256)[1], ts.setup(rule, mlp(256))
    for _ in range(3):
        (ours, _), (theirs, _) = STEP(ours, BATCH), STEP(theirs, BATCH)
    assert_trees_close(ours.params, theirs.params, rtol=1e-5, atol=1e-7)


def test_shapes_do_selections_and_other_setups_share_a_program():
    shapes = jax.eval_shape(lambda: mlp(64))
    make = lambda rate: ts.setup(
        ts.rules.chain(ts.rules.adam(rate), ts.rules.scale_by_width(shapes)), mlp(128), trainable="1/**"
    )
    state, _ = STEP(make(1e-2), BATCH)
    assert float(ts.hyperparams(state)["learning_rate"]) == 0.01
    other = make(1e-3)
    with count_compiles() as compiled:
        STEP(other, BATCH)
    assert compiled.compiles == 0


def test_a_leaf_without_a_counterpart_is_told():
    with pytest.raises(RuleError, match=r"leaf 2/b at scale_by_width\(\): got no axes in narrow, expected 1 axes"):
        ts.setup(ts.rules.scale_by_width([*mlp(64)[:2], {"w": mlp(64)[2]["w"]}]), mlp(128))
