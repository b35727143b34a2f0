"""Gradients of each row: those of `jax.vmap(jax.grad(...))`, for private training and statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import linen
from jax.sharding import PartitionSpec
from tests.helpers import assert_trees_close, assert_trees_equal
from tsunax.errors import LossError, RuleError, StateError, WrongTypeError

ROWS = 12
RNG = np.random.default_rng(0)
normal = lambda *shape: RNG.normal(size=shape).astype(np.float32)
BATCH = {"x": normal(ROWS, 5), "y": np.arange(ROWS) % 3}
PARAMS = {"w": normal(5, 4), "v": normal(4, 3), "scale": np.float32(1)}
CROSS = optax.softmax_cross_entropy_with_integer_labels


def values(params, batch):
    return CROSS(jnp.tanh(batch["x"] @ params["w"]) @ params["v"] * params["scale"], batch["y"])


def loss_fn(params, batch):
    return values(params, batch).mean()


def masked(params, batch, mask):
    return ts.Loss.mean(values(params, batch), mask, metrics={"worst": values(params, batch).max()})


def by_row(loss, batch=BATCH):
    """Plain JAX: a gradient for each row, of a batch that has only it."""
    one = lambda params, row: loss(params, jax.tree.map(lambda x: x[None], row))
    return jax.jit(jax.vmap(jax.grad(one), (None, 0)))(PARAMS, batch)


def clip(grads, norm=0.5):
    return jax.tree.map(lambda g: g * jnp.minimum(1, norm / optax.tree.norm(grads)), grads)


def setup(rule=None, **options):
    return ts.setup(ts.rules.sgd(0.1) if rule is None else rule, PARAMS, **options)


def gradient(loss, state=None, batch=BATCH, extra=(), **options):
    return jax.jit(ts.value_and_grad(loss, **options))(state or setup(), batch, **dict(extra))


# ------------------------------------------------------------------------------------------------- a stack of them


def test_they_are_those_of_vmap_to_the_bit():
    loss, grads = gradient(loss_fn, per_example=True)
    assert_trees_equal(grads, by_row(loss_fn))
    np.testing.assert_allclose(loss.compute(), loss_fn(PARAMS, BATCH), rtol=1e-6)
    assert loss.weight == ROWS


@pytest.mark.parametrize("n", [pytest.param(3, marks=pytest.mark.medium), 5])
def test_micro_batches_give_the_same_stack_in_the_order_of_rows(n):
    _, grads = gradient(loss_fn, per_example=True, accumulate=n)
    assert_trees_close(grads, by_row(loss_fn), rtol=1e-5, atol=1e-6)


def test_rows_without_weight_have_no_gradient_and_others_are_not_touched():
    mask = (np.arange(ROWS) % 4 > 0).astype(np.float32)
    batch = BATCH | {"x": np.where(mask[:, None] > 0, BATCH["x"], np.nan)}
    for n in (3,):
        loss, grads = gradient(masked, batch=batch, extra={"mask": mask}, per_example=True, accumulate=n)
        expected = jax.tree.map(lambda g: jnp.where(mask.reshape(-1, *[1] * (g.ndim - 1)) > 0, g, 0), by_row(loss_fn))
        assert_trees_close(grads, expected, rtol=1e-5, atol=1e-6)
        whole = masked(PARAMS, BATCH, mask)
        assert loss.weight == mask.sum() == whole.weight
        np.testing.assert_allclose(loss.compute(), whole.compute(), rtol=1e-6)
        worst = np.sum(np.asarray(values(PARAMS, BATCH)) * mask) / mask.sum()
        np.testing.assert_allclose(loss.metrics["worst"].compute(), worst, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 5])
def test_a_function_that_divides_by_the_norm_gets_no_weight_from_rows_without_weight(n):
    """Their gradient is 0 before the function, and 0/0 after it; with n = 5 there are three rows of padding."""
    normalized = lambda grads: jax.tree.map(lambda g: g / optax.tree.norm(grads), grads)
    mask = (np.arange(ROWS) % 4 > 0).astype(np.float32)
    extra = {"mask": mask} if n == 1 else {}
    loss, grads = gradient(masked, extra=extra, per_example=normalized, accumulate=n)
    weights = extra.get("mask", np.ones(ROWS))
    rows = jax.tree.map(np.asarray, jax.vmap(normalized)(by_row(loss_fn)))
    expected = jax.tree.map(lambda g: np.tensordot(weights / weights.sum(), g, 1), rows)
    assert_trees_close(grads, expected, rtol=1e-4, atol=1e-6)
    assert loss.weight == weights.sum()


@pytest.mark.medium
def test_each_row_has_a_key_however_the_batch_is_cut():
    def noisy(params, batch, key):
        return loss_fn(params, batch | {"x": batch["x"] * jax.random.bernoulli(key, 0.5, batch["x"].shape)})

    state = setup(key=0)
    one, cut = (gradient(noisy, state, per_example=True, accumulate=n)[1] for n in (1, 3))
    assert_trees_close(one, cut, rtol=1e-5, atol=1e-6)
    same = jax.tree.map(lambda x: np.repeat(x[:1], ROWS, 0), BATCH)
    _, grads = gradient(noisy, state, same, per_example=True)
    assert len({float(x) for x in grads["scale"]}) > 3


@pytest.mark.medium
def test_precision_loss_scale_and_frozen_leaves():
    exact = by_row(loss_fn)
    _, grads = gradient(loss_fn, setup(precision="float16", loss_scale=512.0), per_example=True)
    assert_trees_close(grads, exact, rtol=0.1, atol=5e-3)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    _, grads = gradient(loss_fn, setup(trainable="w"), per_example=True)
    assert grads["v"] is None
    np.testing.assert_array_equal(grads["w"], exact["w"])


@pytest.mark.medium
def test_statistics_of_gradients_are_a_line():
    norms = jax.jit(jax.vmap(optax.tree.norm))(gradient(loss_fn, per_example=True)[1])
    norm = jax.jit(lambda row: optax.tree.norm(jax.grad(loss_fn)(PARAMS, row)))
    for i in (0, 7):
        np.testing.assert_allclose(norms[i], norm(jax.tree.map(lambda x, i=i: x[i : i + 1], BATCH)), rtol=1e-5)


# ------------------------------------------------------------------------------------------------ private training


def private(module, key=0):
    aggregate = optax.contrib.differentially_private_aggregate(0.5, 1.1, key)
    return module.chain(aggregate, module.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize("module", [ts.rules, pytest.param(optax, marks=pytest.mark.medium)])
def test_private_sgd_is_plain_optax_to_the_bit(module):
    state, step = setup(private(module)), ts.train_step(loss_fn, per_example=True)
    plain = private(optax)
    params, opt_state = PARAMS, plain.init(PARAMS)

    @jax.jit
    def by_hand(params, opt_state):
        one = lambda params, row: loss_fn(params, jax.tree.map(lambda x: x[None], row))
        grads = jax.vmap(jax.grad(one), (None, 0))(params, BATCH)
        updates, opt_state = plain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(3):
        state, info = step(state, BATCH)
        params, opt_state = by_hand(params, opt_state)
    assert_trees_equal(state.params, params)
    assert info.applied and int(state.step) == 3
    mean = jax.tree.map(lambda g: g.mean(0), gradient(loss_fn, setup(), per_example=True)[1])
    _, info = step(setup(private(module)), BATCH)
    np.testing.assert_allclose(info.grad_norm, optax.tree.norm(mean), rtol=1e-5)


@pytest.mark.medium
def test_one_rule_starts_two_runs_also_with_a_key_of_its_own():
    rule = private(ts.rules, jax.random.key(3))
    step = ts.train_step(loss_fn, per_example=True)
    (one, _), (two, _) = (step(setup(rule), BATCH) for _ in range(2))
    assert_trees_equal(one.params, two.params)


def test_by_halves_and_in_micro_batches_it_is_one_step():
    rule = private(ts.rules)
    loss, grads = gradient(loss_fn, setup(rule), per_example=True, accumulate=3)
    half, _ = jax.jit(ts.update)(setup(rule), grads, loss=loss)
    whole, _ = ts.train_step(loss_fn, per_example=True)(setup(rule), BATCH)
    assert_trees_close(half.params, whole.params, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_many_steps_in_one_call_and_members_of_a_population():
    rule, step = private(ts.rules), ts.train_step(loss_fn, per_example=True, accumulate=3)
    run = lambda k: ts.fit(step, setup(rule), [BATCH] * 4, steps_per_call=k, epochs=1, progress=False)[0]
    assert_trees_equal(run(1).params, run(4).params)
    runs, _ = step(ts.population(lambda key: setup(rule), 2), BATCH)
    alone, _ = step(setup(rule), BATCH)
    assert_trees_close(jax.tree.map(lambda x: x[1], runs.params), alone.params, rtol=1e-5, atol=1e-6)


def test_a_rejected_step_is_rejected():
    step, bad = ts.train_step(loss_fn, per_example=True), np.where(np.arange(ROWS)[:, None] == 3, np.inf, BATCH["x"])
    state, info = step(setup(private(ts.rules)), BATCH | {"x": bad})
    assert not info.applied and int(state.rejected) == 1
    assert_trees_equal(state.params, PARAMS)


@pytest.mark.parametrize("options", [{"per_example": lambda g: g}, {"per_example": False}])
def test_a_rejected_step_that_cannot_drop_micro_batches_says_what_was_wrong(options):
    """Its message looks for the bad micro-batch with "drop", which rows and losses of the whole batch exclude."""
    embed, loss = lambda params, x: x @ params["w"][:, None], lambda out, x: jnp.mean(jnp.log(out))
    mean = lambda params, x: loss(embed(params, x), x)
    step = ts.train_step(
        mean if options["per_example"] else ts.whole_batch(embed, loss), accumulate=2, on_nonfinite="raise", **options
    )
    with pytest.raises(ts.errors.NonFiniteError, match=r"step 0 \(call 0\) was rejected: loss: got nan"):
        step(ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)}), -jnp.ones((4, 3)))


@pytest.mark.medium
def test_over_many_devices_they_are_those_of_one():
    batch = jax.tree.map(lambda x: np.concatenate([x, x[:4]]), BATCH)
    step = ts.train_step(loss_fn, per_example=True)
    alone, _ = step(setup(private(ts.rules)), batch)
    spread, _ = step(ts.shard(setup(private(ts.rules)), ts.mesh()), batch)
    assert_trees_close(spread.params, alone.params, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------- each changed, and then the mean of all


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.medium), 3])
def test_the_mean_of_clipped_gradients_is_optax_s(n):
    _, grads = gradient(loss_fn, per_example=clip, accumulate=n)
    aggregate = optax.contrib.differentially_private_aggregate(0.5, 0.0, 0)
    expected, _ = aggregate.update(by_row(loss_fn), aggregate.init(PARAMS))
    assert_trees_close(grads, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.medium), 5])
def test_unchanged_their_mean_by_weight_is_the_gradient_of_the_batch(n):
    weights = RNG.random(ROWS).astype(np.float32) * (np.arange(ROWS) > 2)
    extra = {"mask": weights}
    loss, grads = gradient(masked, extra=extra, per_example=lambda g: g, accumulate=n)
    whole, expected = gradient(masked, extra=extra)
    assert_trees_close(grads, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss.weight, whole.weight, rtol=1e-6)


def test_the_function_sees_gradients_without_the_loss_scale():
    grads = [gradient(loss_fn, setup(loss_scale=scale), per_example=clip, accumulate=3)[1] for scale in (None, 4096.0)]
    assert_trees_close(*grads, rtol=1e-6, atol=1e-7)


@pytest.mark.medium
def test_inside_shard_map_they_are_averaged():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    put = functools.partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")))
    step = ts.train_step(loss_fn, per_example=clip, axis_name="data")
    state, _ = jax.jit(put(step, out_specs=PartitionSpec()))(setup(), BATCH)
    alone, _ = ts.train_step(loss_fn, per_example=clip)(setup(), BATCH)
    assert_trees_close(state.params, alone.params, rtol=1e-6, atol=1e-7)
    with pytest.raises(WrongTypeError, match=r"options at train_step\(\): got per_example=True over an axis"):
        step = ts.train_step(loss_fn, per_example=True, axis_name="data")
        put(step, out_specs=PartitionSpec())(setup(), BATCH)


def test_memory_is_that_of_one_micro_batch():
    params = {"a": jnp.zeros((64, 256)), "b": jnp.zeros((256, 16))}
    loss = lambda params, x: jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)
    state, x = ts.setup(ts.rules.sgd(0.1), params), jnp.zeros((512, 64))

    def temporary(**options):
        return ts.train_step(loss, **options).lower(state, x).compile().memory_analysis().temp_size_in_bytes

    gradient = sum(x.nbytes for x in jax.tree.leaves(params))
    assert temporary(per_example=clip, accumulate=64) < 40 * gradient
    assert temporary(per_example=clip) > 400 * gradient


# --------------------------------------------------------------------------------------------------- what it says


def test_rows_for_a_rule_that_does_not_take_them():
    with pytest.raises(
        RuleError, match=r"result of the rule at updates\['scale'\]: got \(12,\).*take the gradients of rows"
    ):
        ts.train_step(loss_fn, per_example=True)(setup(), BATCH)
    aggregate = ts.rules.live(optax.contrib.differentially_private_aggregate)(0.5, 1.1, key=0)
    window = ts.rules.accumulate(aggregate, every=2)
    rows_first = r"result of the rule at .*got \(12,.*take the gradients of rows"
    with jax.numpy_rank_promotion("allow"), pytest.raises(RuleError, match=rows_first):
        ts.train_step(loss_fn, per_example=True)(setup(window), BATCH)
    _, grads = gradient(loss_fn, per_example=True)
    mixed = grads | {"v": grads["v"][:3]}
    with pytest.raises(StateError, match=r"gradient at grads\['v'\]: got float32\[3,4,3\], expected float32\[4,3\]"):
        ts.update(setup(private(ts.rules)), mixed)


def stateful(params, batch, model_state):
    return ts.Loss.mean(values(params, batch), model_state=model_state)


BAD = {
    "another tree": (StateError, r"leaf at grads: got float32.*per_example changes", lambda g: g["w"], loss_fn),
    "a number": (StateError, r"leaf at grads\['scale'\]", lambda g: g | {"scale": g["w"]}, loss_fn),
    "a vector": (LossError, r"result at loss_fn: got float32\[1\]", True, values),
    "a model state": (LossError, r"model_state at loss_fn: got one, expected none under per_example", True, stateful),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_uses_are_told(name):
    kind, text, value, loss = BAD[name]
    state = setup(model_state={"n": jnp.int32(0)}) if loss is stateful else setup()
    with pytest.raises(kind, match=text):
        ts.train_step(loss, per_example=value)(state, BATCH)


def test_rows_of_a_batch():
    with pytest.raises(LossError, match=r"leaf at batch\['t'\]: got a scalar"):
        gradient(loss_fn, batch=BATCH | {"t": np.float32(1)}, per_example=True)
    with pytest.raises(LossError, match=r"rows at batch: got batch\['x'\] \(5, 5\)"):
        gradient(loss_fn, batch=BATCH | {"x": BATCH["x"][:5]}, per_example=True)


def test_a_loss_that_mixes_rows_is_warned_of_and_a_sum_is_not():
    def pairs(params, batch):
        z = batch["x"] @ params["w"]
        return jnp.mean(jax.nn.logsumexp(z @ z.T, 1))

    with pytest.warns(UserWarning, match="got .* micro-batches, expected a mean over rows under per_example"):
        jax.eval_shape(ts.value_and_grad(pairs, per_example=True), setup(), BATCH)
    jax.eval_shape(ts.value_and_grad(lambda p, b: values(p, b).sum(), per_example=True), setup(), BATCH)


@pytest.mark.medium
def test_values_that_gradients_replace_are_the_maximum_of_all_rows():
    net = linen.Dense(4, dot_general_cls=functools.partial(linen.Fp8DirectDotGeneralOp, amax_history_length=4))
    model = ts.models.linen(net, net.init(jax.random.key(0), BATCH["x"]))
    loss = lambda params, batch: jnp.mean(model.apply(params, batch["x"])[0] ** 2)
    state = ts.setup(ts.rules.sgd(0.1), model.params)
    for of_row, n in ((True, 1), (clip, 3)):
        found = gradient(loss, state, per_example=of_row, accumulate=n)[0].overwritten
        history = found["_overwrite_with_gradient"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
        assert float(history[0]) == np.abs(BATCH["x"]).max()


@pytest.mark.parametrize("batch", [None, {}])
def test_without_a_batch_there_is_no_row(batch):
    step = ts.value_and_grad(lambda params, batch: jnp.sum(params["w"] ** 2), per_example=True)
    with pytest.raises(LossError, match=r"got no arrays, expected the same number in every leaf"):
        step(ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}), batch)


@pytest.mark.parametrize("n", [1, 2])
def test_a_function_of_the_gradient_of_a_row_sees_no_frozen_leaf(n):
    params = {"body": jnp.ones(3), "head": jnp.ones(3)}
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    loss_fn = lambda params, x: ts.Loss.mean((10 * (x @ params["body"]) + x @ params["head"]) ** 2)
    clip = lambda g: jax.tree.map(lambda x: x / jnp.maximum(1, optax.tree.norm(g)), g)
    step = ts.train_step(loss_fn, per_example=clip, accumulate=n, donate=False)
    frozen, info = step(ts.freeze(ts.setup(ts.rules.sgd(1.0), params), "body"), x)
    selected, expected = step(ts.setup(ts.rules.sgd(1.0), params, trainable="head"), x)
    assert_trees_close(frozen.params, selected.params, rtol=1e-6, atol=0)
    np.testing.assert_allclose(info.grad_norm, expected.grad_norm, rtol=1e-6)
