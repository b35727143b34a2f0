"""value_and_grad, update, train_step, eval_step: against the same lines of plain JAX and optax."""

import dataclasses
import inspect
import pickle
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests import gpu_facts
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, medium_if
from tsunax import testing
from tsunax.errors import LossError, NonFiniteError, RuleError, StateError

KEY = jax.random.key(0)
ROWS, FEATURES, CLASSES = 16, 5, 3


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    layer = lambda i, o: {"w": jnp.asarray(rng.normal(size=(i, o)), jnp.float32), "b": jnp.zeros(o)}
    return {"body": layer(FEATURES, 8), "head": layer(8, CLASSES)}


def make_batch(seed=1):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(ROWS, FEATURES)), rng.integers(0, CLASSES, ROWS)
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.int32)}


def logits(params, x):
    hidden = jnp.tanh(x @ params["body"]["w"] + params["body"]["b"][None])
    return hidden @ params["head"]["w"] + params["head"]["b"][None]


def losses(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["x"]), batch["y"])


def loss_fn(params, batch):
    return losses(params, batch).mean()


def plain_steps(tx, params, n, loss_fn=loss_fn, *, guard=False, norms=False, search=False):
    """The hand-written loop; with `guard` and `norms` it computes what a step of tsunax does for them.

    XLA rounds an expression as its neighbours in the program let it contract: bits are compared between programs
    that compute the same.
    """
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        norm = optax.tree.norm(grads) if guard or norms else None
        extra = {"value": value, "grad": grads, "value_fn": lambda p: loss_fn(p, batch)} if search else {}
        updates, new_state = tx.update(grads, opt_state, params, **extra)
        new = optax.apply_updates(params, updates), new_state
        if guard:
            applied = jnp.isfinite(value) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
            new = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, (params, opt_state))
        return *new, value, (norm, optax.tree.norm(updates)) if norms else None

    opt_state, values = tx.init(params), []
    for i in range(n):
        params, opt_state, value, _ = step(params, opt_state, make_batch(i))
        values.append(value)
    return params, opt_state, values


def our_steps(rule, params, n, loss_fn=loss_fn, **options):
    step, state, infos = ts.train_step(loss_fn, **options), ts.setup(rule, params), []
    for i in range(n):
        state, info = step(state, make_batch(i))
        infos.append(info)
    return state, infos


# --------------------------------------------------------------------------------- the same as plain optax


@pytest.mark.parametrize(
    ("on_nonfinite", "norms"),
    [
        *[("skip", True), ("skip", False), ("ignore", True), ("ignore", False)],
        *[pytest.param("raise", norms, marks=pytest.mark.medium) for norms in (True, False)],
    ],
)
def test_a_step_is_the_hand_written_one_to_the_last_bit(on_nonfinite, norms):
    guard = on_nonfinite != "ignore"
    params, _, values = plain_steps(optax.adamw(1e-2), make_params(), 20, guard=guard, norms=norms)
    state, infos = our_steps(ts.rules.adamw(1e-2), make_params(), 20, norms=norms, on_nonfinite=on_nonfinite)
    gpu_facts.assert_equal_bits(state.params, params, on_gpu="step by hand")
    gpu_facts.assert_equal_bits([info.loss for info in infos], values, on_gpu="step by hand")
    assert int(state.step) == int(state.calls) == 20


def test_a_plain_optax_rule_works_as_it_is():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.cosine_decay_schedule(1e-2, 10)))
    params, opt_state, _ = plain_steps(tx, make_params(), 12, guard=True, norms=True)
    state, _ = our_steps(tx, make_params(), 12)
    assert_trees_equal(state.params, params)
    assert_trees_equal(state.opt_state, opt_state)


SEARCHING = {
    "lbfgs": (optax.lbfgs, ts.rules.lbfgs, {}),
    "polyak_sgd": (optax.polyak_sgd, ts.rules.polyak_sgd, {}),
    "momo": (optax.contrib.momo, ts.rules.momo, {}),
    "schedule_free": (optax.contrib.schedule_free_adamw, ts.rules.schedule_free_adamw, {"learning_rate": 1e-2}),
}


SLOW = {
    "lbfgs": pytest.mark.slow,
    "momo": pytest.mark.medium,
    "schedule_free": pytest.mark.medium,
}  # ten seconds, two, two


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in SEARCHING])
def test_rules_that_ask_for_the_loss_get_it(name):
    plain, live, numbers = SEARCHING[name]
    params, _, _ = plain_steps(plain(**numbers), make_params(), 4, search=True)
    for rule in (plain(**numbers), live(**numbers)):
        state, _ = our_steps(rule, make_params(), 4)
        assert_trees_close(state.params, params, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_reduce_on_plateau_sees_the_loss():
    tx = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0))
    params, _, _ = plain_steps(tx, make_params(), 8, search=True, guard=True, norms=True)
    state, _ = our_steps(tx, make_params(), 8)
    assert_trees_equal(state.params, params)
    assert float(state.opt_state[1].scale) < 1  # it did reduce


def test_a_hand_written_loop_of_the_two_halves_is_the_step():
    grads_of = ts.value_and_grad(loss_fn)

    @jax.jit
    def by_hand(state, batch):
        loss, grads = grads_of(state, batch)
        return ts.update(state, grads, loss=loss)

    state = ts.setup(ts.rules.adam(1e-2), make_params())
    for i in range(5):
        state, by_hand_info = by_hand(state, make_batch(i))
    other, infos = our_steps(ts.rules.adam(1e-2), make_params(), 5)
    assert_trees_equal(state, other)
    assert_trees_equal(tuple(by_hand_info), tuple(infos[-1]))


def test_gradients_of_the_full_tree_are_taken_too():
    state = ts.setup(ts.rules.sgd(0.1), make_params(), trainable="head/**")
    grads = jax.jit(jax.grad(loss_fn))(state.params, make_batch())
    a, _ = ts.update(state, grads)
    b, _ = ts.update(state, {"body": {"w": None, "b": None}, "head": grads["head"]})
    assert_trees_equal(a, b)
    assert_trees_equal(a.params["body"], make_params()["body"])


def test_at_evaluates_elsewhere():
    state = ts.setup(ts.rules.sgd(0.1), make_params())
    elsewhere = jax.tree.map(lambda x: x + 0.1, state.params)
    loss, grads = ts.value_and_grad(loss_fn)(state, make_batch(), at=elsewhere)
    value, expected = jax.value_and_grad(loss_fn)(elsewhere, make_batch())
    assert_trees_equal((loss.compute(), grads), (value, expected))


@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.medium)])
def test_sharpness_aware_steps_are_two_gradients_and_one_update(accumulate):
    """As written by hand; one clock, one verdict, the same random numbers in both gradients; in `fit`, too."""

    def noisy(params, batch, key):
        return loss_fn(params, batch | {"x": batch["x"] + jax.random.normal(key, batch["x"].shape)})

    gradient = ts.value_and_grad(noisy, accumulate=accumulate)
    away = lambda grads: optax.tree.scale(0.05 / optax.tree.norm(grads), grads)

    def sam(state, batch):
        loss, grads = gradient(state, batch)
        _, grads = gradient(state, batch, at=optax.tree.add(ts.trainable(state), away(grads)))
        return ts.update(state, grads, loss=loss)

    tx = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def by_hand(params, opt_state, batch, i):
        def mean(params):
            key, n = jax.random.fold_in(KEY, i), accumulate
            keys = [key] if n == 1 else [jax.random.fold_in(key, j) for j in range(n)]
            rows = lambda j: jax.tree.map(lambda x: x[j::n], batch)
            return sum(noisy(params, rows(j), key) for j, key in enumerate(keys)) / n

        at = optax.tree.add(params, away(jax.grad(mean)(params)))
        updates, opt_state = tx.update(jax.grad(mean)(at), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean(params)

    setup = lambda: ts.setup(ts.rules.sgd(0.1, momentum=0.9), make_params(), key=KEY)
    (params, opt_state), batches = (make_params(), tx.init(make_params())), [make_batch(i) for i in range(3)]
    values = []
    for i, batch in enumerate(batches):
        params, opt_state, value = by_hand(params, opt_state, batch, i)
        values.append(value)
    state, history = ts.fit(sam, setup(), batches, epochs=1, log_every=1, progress=False)
    assert_trees_close(state.params, params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(history["loss"], values, rtol=1e-5)
    assert int(state.step) == int(state.calls) == 3
    bad, info = jax.jit(sam)(state, batch | {"x": batch["x"].at[0, 0].set(jnp.nan)})
    assert not info.applied and int(bad.rejected) == 1
    assert_trees_equal(bad.params, state.params)


@pytest.mark.parametrize("remat", medium_if(callable, [True, jax.checkpoint_policies.dots_saveable]))
def test_remat_changes_no_number(remat):
    a, _ = our_steps(ts.rules.sgd(0.1), make_params(), 3, remat=remat)
    b, _ = our_steps(ts.rules.sgd(0.1), make_params(), 3)
    assert_trees_close(a.params, b.params, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------- what loss_fn names


def test_loss_fn_gets_what_it_names():
    seen = {}

    def named(params, batch, *, key, model_state, train, mask, step, teacher, scale=2.0):
        seen.update(key=key, model_state=model_state, train=train, mask=mask, step=step, teacher=teacher, scale=scale)
        return loss_fn(params, batch)

    state = ts.setup(ts.rules.sgd(0.1), make_params(), key=KEY, model_state={"mean": jnp.zeros(3)})
    ts.train_step(named)(state, make_batch(), teacher=make_params(5))
    assert seen["train"] is True and seen["scale"] == 2.0
    assert seen["mask"].shape == (ROWS,) and seen["mask"].dtype == jnp.float32
    assert seen["model_state"]["mean"].shape == (3,)
    assert jax.tree.structure(seen["teacher"]) == jax.tree.structure(make_params())


def test_every_call_has_its_own_key_and_the_same_call_the_same():
    noise = lambda params, batch, key: jnp.mean(params["w"]) * jax.random.normal(key)
    make = lambda: ts.setup(ts.rules.sgd(0.0), {"w": jnp.ones(2)}, key=KEY)
    runs = []
    for _ in range(2):
        state, step = make(), ts.train_step(noise)
        runs.append([])
        for _ in range(3):
            state, info = step(state, None)
            runs[-1].append(float(info.loss))
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3
    expected = [float(jax.random.normal(jax.random.fold_in(KEY, i))) for i in range(3)]
    np.testing.assert_allclose(runs[0], expected, rtol=1e-6)


def test_model_state_is_carried():
    def counting(params, batch, model_state):
        loss = losses(params, batch)
        return ts.Loss.mean(loss, model_state={"seen": model_state["seen"] + loss.size})

    state = ts.setup(ts.rules.sgd(0.1), make_params(), model_state={"seen": 0})
    step = ts.train_step(counting)
    for i in range(3):
        state, _ = step(state, make_batch(i))
    assert int(state.model_state["seen"]) == 3 * ROWS
    assert step.programs[None]._cache_size() == 1


def test_extra_is_neither_differentiated_nor_donated():
    teacher = make_params(7)

    def distill(params, batch, teacher):
        return jnp.mean((logits(params, batch["x"]) - logits(teacher, batch["x"])) ** 2)

    state = ts.setup(ts.rules.sgd(0.1), make_params())
    state, _ = ts.train_step(distill)(state, make_batch(), teacher=teacher)
    assert_trees_equal(teacher, make_params(7))


IGNORING = {
    "no params": lambda params, x: jnp.mean(x),
    "no trained ones": lambda params, x: jnp.mean(x @ params["kept"]),
    "stopped": lambda params, x: jnp.mean(x @ jax.lax.stop_gradient(params["w"])),
    "rounded": lambda params, x: jnp.mean(jnp.argmax(x @ params["w"], -1).astype(jnp.float32)),
    "a Loss": lambda params, x: ts.Loss.mean(x[:, 0], metrics={"w": params["w"].sum()}),
}


@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"remat": True}], ids=str)
@pytest.mark.parametrize("name", IGNORING)
def test_a_loss_that_no_trained_leaf_moves_is_an_error(name, options):
    params = {"w": jnp.ones((2, 3)), "kept": jnp.ones(2), "unused": jnp.ones(1)}
    state = ts.setup(ts.rules.sgd(0.1), params, trainable=["w", "unused"])
    with pytest.raises(LossError, match=r"loss at <lambda>\(params, x\): got one that does not depend on any trained"):
        ts.train_step(IGNORING[name], donate=False, **options)(state, jnp.ones((4, 2)))
    moved = lambda params, x: jnp.mean(x @ params["w"])  # an unused leaf is fine
    ts.train_step(moved, donate=False, **options)(state, jnp.ones((4, 2)))
    ts.eval_step(IGNORING[name])(state, jnp.ones((4, 2)))


# --------------------------------------------------------------------------------------------------- Loss, info


def test_info_says_what_happened():
    state, batch = ts.setup(ts.rules.adam(1e-2), make_params()), make_batch()
    value, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, _ = optax.adam(1e-2).update(grads, optax.adam(1e-2).init(state.params), state.params)
    _, info = ts.train_step(loss_fn, norms="update")(state, batch)
    assert bool(info.applied) and float(info.weight) == ROWS
    np.testing.assert_allclose(info.loss, value, rtol=1e-6)
    np.testing.assert_allclose(info.grad_norm, optax.tree.norm(grads), rtol=1e-6)
    np.testing.assert_allclose(info.update_norm, optax.tree.norm(updates), rtol=1e-6)
    assert info.hyperparams == {"learning_rate": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-08, "eps_root": 0.0}


def test_info_has_the_rate_that_the_step_used():
    rule = ts.rules.sgd(optax.linear_schedule(1.0, 0.0, 4))
    _, infos = our_steps(rule, make_params(), 3)
    assert [info.hyperparams["learning_rate"] for info in infos] == [1.0, 0.75, 0.5]


def test_a_loss_of_sums_and_weights_averages_under_a_mask():
    keep = (jnp.arange(ROWS) % 3 > 0).astype(jnp.float32)

    def masked(params, batch):
        loss = losses(params, batch)
        correct = jnp.argmax(logits(params, batch["x"]), -1) == batch["y"]
        return ts.Loss.mean(loss, keep, metrics={"accuracy": correct, "scalar": jnp.float32(3.0)})

    def expected(params, batch):
        return jnp.sum(losses(params, batch) * keep) / jnp.sum(keep)

    state, batch = ts.setup(ts.rules.sgd(0.1), make_params()), make_batch()
    loss, grads = ts.value_and_grad(masked)(state, batch)
    value, expected_grads = jax.jit(jax.value_and_grad(expected))(state.params, batch)
    assert_trees_close((loss.compute(), grads), (value, expected_grads), rtol=1e-6, atol=1e-7)
    correct = np.argmax(np.asarray(jax.jit(logits)(state.params, batch["x"])), -1) == np.asarray(batch["y"])
    _, info = ts.train_step(masked)(state, batch)
    np.testing.assert_allclose(info.metrics["accuracy"], np.average(correct, weights=keep), rtol=1e-6)
    assert float(info.metrics["scalar"]) == 3.0 and float(info.weight) == float(keep.sum())


def test_a_masked_nan_is_harmless():
    def fn(params, batch):
        return ts.Loss.mean(params["w"] * batch["x"], batch["x"] == batch["x"])

    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.float32(2.0)})
    loss, grads = ts.value_and_grad(fn)(state, {"x": jnp.array([np.nan, 1.0, 2.0, 6.0])})
    assert float(loss.compute()) == 6.0 and np.isnan(grads["w"])  # 0 · NaN: what makes the NaN is to be masked too

    def safe(params, batch):
        x = jnp.where(batch["x"] == batch["x"], batch["x"], 0)
        return ts.Loss.mean(params["w"] * x, batch["x"] == batch["x"])

    loss, grads = ts.value_and_grad(safe)(state, {"x": jnp.array([np.nan, 1.0, 2.0, 6.0])})
    assert float(loss.compute()) == 6.0 and float(grads["w"]) == 3.0


def test_the_raw_loss_is_a_sum_and_a_weight():
    fn = lambda params, batch: ts.Loss(losses(params, batch).sum(), ROWS)
    state = ts.setup(ts.rules.sgd(0.1), make_params())
    loss, grads = ts.value_and_grad(fn)(state, make_batch())
    value, expected = jax.value_and_grad(loss_fn)(state.params, make_batch())
    assert_trees_close((loss.compute(), grads), (value, expected), rtol=1e-6, atol=1e-7)


def test_evaluation_merges_exactly():
    fn = ts.eval_step(
        lambda params, batch, train, model_state=None: ts.Loss.mean(
            losses(params, batch), metrics={"t": jnp.float32(train)}
        )
    )
    state, batch = ts.setup(ts.rules.sgd(0.1), make_params()), make_batch()
    part = lambda rows: jax.tree.map(lambda x: x[rows], batch)
    merged = fn(state, part(slice(0, 11))).merge(fn(state, part(slice(11, None))))
    np.testing.assert_allclose(merged.compute(), loss_fn(state.params, batch), rtol=1e-6)
    assert float(merged.weight) == ROWS and float(merged.metrics["t"].compute()) == 0.0


# ------------------------------------------------------------------------------------------ rejected steps


def poisoned(params, batch):
    return loss_fn(params, batch) * batch["factor"]


@pytest.mark.parametrize("bad", medium_if(np.isinf, [np.nan, np.inf, -np.inf]))
def test_a_rejected_step_changes_nothing_but_the_tally(bad):
    def fn(params, batch, model_state, key):
        loss = poisoned(params, batch)
        return ts.Loss.mean(loss, model_state=model_state + loss)

    step = ts.train_step(fn, donate=False)
    before = ts.setup(ts.rules.adam(1e-2), make_params(), model_state=jnp.float32(0), key=0)
    before, _ = step(before, {**make_batch(), "factor": np.float32(1)})
    after, info = step(before, {**make_batch(), "factor": np.float32(bad)})
    assert not bool(info.applied)
    assert int(after.step) == int(before.step) == 1 and int(after.calls) == 2
    assert int(after.rejected) == int(after.rejected_in_a_row) == 1
    assert_trees_equal(after.replace(calls=1, rejected=0, rejected_in_a_row=0), before)
    good, info = step(after, {**make_batch(), "factor": np.float32(1)})
    assert bool(info.applied) and int(good.step) == 2


def test_a_nan_gradient_behind_a_finite_loss_is_seen():
    fn = lambda params, batch: jnp.where(params["w"] > 0, jnp.sqrt(params["w"]), 0.0).sum() + jnp.sum(params["v"])
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2), "v": jnp.ones(2)})
    after, info = ts.train_step(fn, donate=False)(state, None)
    assert np.isfinite(info.loss) and not bool(info.applied)
    assert_trees_equal(after.params, state.params)


def test_raise_names_the_leaf_and_keeps_the_state():
    fn = lambda params, batch: jnp.where(params["w"] > 0, jnp.sqrt(params["w"]), 0.0).sum() + jnp.sum(params["v"])
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2), "v": jnp.ones(2)})
    with pytest.raises(NonFiniteError, match=r"step 0 .*gradient of params\['w'\], shape \(2,\): got nan") as caught:
        ts.train_step(fn, on_nonfinite="raise")(state, None)
    np.testing.assert_array_equal(caught.value.state.params["v"], [1, 1])


def test_ignore_lets_it_through():
    state = ts.setup(ts.rules.sgd(0.1), make_params())
    after, info = ts.train_step(poisoned, on_nonfinite="ignore")(state, {**make_batch(), "factor": np.float32(np.nan)})
    assert bool(info.applied) and np.isnan(after.params["head"]["b"]).all()


# -------------------------------------------------------------------------- transformations, compilation, memory


@pytest.mark.medium
def test_the_step_works_inside_jit_scan_vmap_and_grad_and_donates_nothing_there():
    step = ts.train_step(loss_fn)
    make = lambda: ts.setup(ts.rules.adam(1e-2), make_params())
    batches = jax.tree.map(lambda *xs: np.stack(xs), *[make_batch(i) for i in range(4)])
    expected, _ = our_steps(ts.rules.adam(1e-2), make_params(), 4)
    state = make()
    scanned, stacked = jax.lax.scan(step, state, batches)
    assert_trees_close(scanned.params, expected.params, rtol=1e-5, atol=1e-6)
    assert stacked.loss.shape == (4,) and stacked.applied.shape == (4,) and stacked.weight.shape == (4,)
    jax.jit(lambda s: step(s, make_batch()))(state)
    many = jax.tree.map(lambda x: jnp.asarray(np.stack([x, x])), state)
    jax.vmap(step, in_axes=(0, None))(many, make_batch())
    assert not state.clock.is_deleted() and not many.clock.is_deleted()

    def after_two(rate):
        state = ts.setup(ts.rules.sgd(rate), make_params())
        for i in range(2):
            state, _ = step(state, make_batch(i))
        return loss_fn(state.params, make_batch(9))

    (below, _, above), slopes = jax.jit(jax.vmap(jax.value_and_grad(after_two)))(jnp.array([0.09, 0.1, 0.11]))
    np.testing.assert_allclose(slopes[1], (above - below) / 2e-2, rtol=1e-2)


@pytest.mark.medium
@pytest.mark.parametrize("stepped", [pytest.param(False, marks=pytest.mark.medium), True])
@pytest.mark.parametrize("transform", ["grad", "vmap", "jit", "jit of two"])
def test_under_a_transformation_of_the_batch_the_state_outside_survives(transform, stepped):
    step = ts.train_step(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
    state = ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(3)})
    if stepped:
        state, _ = step(state, jnp.ones((2, 3)))
    params, x = np.asarray(state.params["w"]), jnp.arange(6.0).reshape(2, 3)
    if transform == "grad":
        got = jax.grad(lambda b: step(state, b)[1].loss)(x)
        np.testing.assert_allclose(got, np.outer(x @ params, params), rtol=1e-6)
    elif transform == "vmap":
        got = jax.vmap(lambda b: step(state, b)[1].loss)(x[:, None])
        np.testing.assert_allclose(got, (x @ params) ** 2, rtol=1e-6)
    elif transform == "jit":
        assert int(jax.jit(lambda b: step(state, b)[0].calls)(x)) == stepped + 1
    else:
        assert int(jax.jit(lambda b: step(step(state, b)[0], b)[0].calls)(x)) == stepped + 2
    np.testing.assert_array_equal(state.params["w"], params)
    step(state, x)


def test_what_fails_while_it_runs_keeps_its_own_error():
    def fail(x):
        raise RuntimeError("the disk is full")

    def fn(params, batch):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), batch) + params["w"]

    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.float32(1.0)})
    with pytest.raises(Exception, match="the disk is full"):
        ts.train_step(fn)(state, jnp.float32(1.0))[1].loss.block_until_ready()


def test_a_rule_gets_arguments_that_are_none():
    """Its signature may have no default for them; only the loss and the norm are left out if there is none."""
    received = {}

    def keep(updates, state, params=None, **extra):
        received.update(extra)
        return updates, state

    rule = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), keep)
    state = ts.setup(rule, {"w": jnp.ones(2)})
    received.clear()
    ts.update(state, {"w": jnp.ones(2)}, teacher=None)
    assert received["teacher"] is None and received["weight"] is None
    assert received.keys() == {"grad", "step", "weight", "teacher"}


def test_an_extra_argument_that_is_the_state_itself_is_refused(capfd):
    def fn(params, batch, teacher):
        return jnp.mean((batch @ (params["w"] - teacher["w"])) ** 2)

    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)})
    with pytest.raises(StateError, match=r"argument 'teacher' at step\(\): got arrays of the state itself"):
        ts.train_step(fn)(state, jnp.ones((2, 3)), teacher=state.params)
    assert capfd.readouterr().err == ""  # of XLA, in its own words
    state, _ = ts.train_step(fn, donate=False)(state, jnp.ones((2, 3)), teacher=state.params)
    step = ts.train_step(fn)
    state, _ = step(state, jnp.ones((2, 3)), teacher={"w": jnp.zeros(3)})
    with pytest.raises(StateError, match=r"argument 'teacher' at step\(\): got arrays of the state itself"):
        step(state, jnp.ones((2, 3)), teacher=state.params)  # a call that compiles nothing is checked, too


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "ignore"}, {"on_nonfinite": "ignore", "norms": False}])
def test_applied_has_a_flag_for_each_member(options):
    members = ts.population(lambda key: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)}), 4, key=0)
    _, info = ts.update(members, {"w": jnp.ones((4, 3))}, **options)
    assert info.loss is None and np.array_equal(info.applied, [True] * 4)


@pytest.mark.parametrize("where", ["nowhere", "a device", "device_put"])
def test_params_that_were_put_on_a_device_compile_one_step(where):
    device, params = jax.devices()[0], {"w": jnp.ones((3, 2))}
    params = jax.device_put(params, device) if where == "device_put" else params
    state = ts.setup(ts.rules.adam(0.1), params, key=0, device=device if where == "a device" else None)
    step = ts.train_step(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
    with count_compiles() as c:
        for _ in range(3):
            state, _ = step(state, np.ones((2, 3), np.float32))
    assert c.compiled.count("train_step") == 1


def test_a_step_that_was_called_can_still_be_pickled():
    step = ts.train_step(loss_fn)
    step(ts.setup(ts.rules.sgd(0.1), make_params()), make_batch())
    assert pickle.loads(pickle.dumps(step)) == step


def test_a_vmapped_setup_over_traced_rates_is_one_trace_and_the_single_runs():
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    step, rates = ts.train_step(counted), jnp.array([1e-3, 1e-2, 1e-1])
    many = jax.vmap(lambda rate: ts.setup(ts.rules.adam(rate), make_params()))(rates)
    vstep = jax.jit(jax.vmap(step, in_axes=(0, None)))
    for i in range(5):
        many, _ = vstep(many, make_batch(i))
    assert len(traces) == 1
    for i, rate in enumerate(rates):
        one, _ = our_steps(ts.rules.adam(float(rate)), make_params(), 5)
        assert_trees_close(jax.tree.map(lambda x, i=i: np.asarray(x)[i], many.params), one.params, rtol=1e-4, atol=1e-6)


def test_a_hundred_steps_are_one_program():
    step = ts.train_step(loss_fn)
    state, _ = step(ts.setup(ts.rules.adam(optax.cosine_decay_schedule(0.1, 100)), make_params()), make_batch())
    with count_compiles() as seen:
        for _ in range(100):
            state, _ = step(state, make_batch(0))
    assert seen.compiles == 0, seen


def test_host_batches_are_taken_as_they_are():
    batch = jax.tree.map(np.asarray, make_batch())
    a, _ = ts.train_step(loss_fn)(ts.setup(ts.rules.sgd(0.1), make_params()), batch)
    b, _ = ts.train_step(loss_fn)(ts.setup(ts.rules.sgd(0.1), make_params()), make_batch())
    assert_trees_equal(a, b)


@pytest.mark.medium
def test_donation_really_aliases():
    state = ts.setup(ts.rules.adam(1e-2), make_params())
    size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state, state.clock)))
    assert testing.check_donation(ts.train_step(loss_fn), state, make_batch()) == size
    kept = ts.train_step(loss_fn, donate=False).lower(state, make_batch()).compile().memory_analysis()
    assert kept.alias_size_in_bytes == 0


def test_a_step_is_a_value():
    step = ts.train_step(loss_fn)
    assert step == ts.train_step(loss_fn) and step != ts.train_step(loss_fn, norms=False)
    assert dataclasses.replace(step, donate=False).donate is False
    assert "on_nonfinite='skip'" in repr(step)


def deep_params(layers, width=64):
    keys = jax.random.split(KEY, layers)
    return {
        f"layer{i}": {"w": jax.random.normal(k, (width, width)) / 8, "b": jnp.zeros(width)} for i, k in enumerate(keys)
    }


def deep_loss(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return jnp.mean(x**2)


@pytest.mark.medium
def test_unselected_layers_cost_no_backward_pass_and_no_moments():
    """6 of 8 layers left out: the FLOPs of a hand-written step that differentiates two, within 2 %."""
    params, x = deep_params(8), jnp.ones((32, 64))
    state = ts.setup(ts.rules.adam(1e-3), params, trainable=["layer6/**", "layer7/**"])
    cost = lambda lowered: lowered.compile().cost_analysis()["flops"]
    ours = cost(ts.train_step(deep_loss, norms=False, on_nonfinite="ignore").lower(state, x))
    top = {k: params[k] for k in ("layer6", "layer7")}
    rest = {k: v for k, v in params.items() if k not in top}
    tx = optax.adam(1e-3)

    @jax.jit
    def plain(top, rest, opt_state, x):
        value, grads = jax.value_and_grad(lambda top: deep_loss({**rest, **top}, x))(top)
        updates, opt_state = tx.update(grads, opt_state, top)
        return optax.apply_updates(top, updates), opt_state, value

    assert ours <= 1.02 * cost(plain.lower(top, rest, tx.init(top), x))
    moments = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree) if a.ndim)
    assert moments(state.opt_state) == moments(tx.init(top))
    everything = cost(
        ts.train_step(deep_loss, norms=False, on_nonfinite="ignore").lower(ts.setup(ts.rules.adam(1e-3), params), x)
    )
    assert ours < 0.55 * everything


# ------------------------------------------------------------------------------------------------- model libraries


@pytest.mark.medium
def test_flax_nnx_and_linen_and_equinox_params_train_as_they_are():
    import equinox as eqx
    from flax import linen, nnx

    x, y = jnp.ones((4, 3)), jnp.zeros((4, 2))
    graphdef, nnx_params = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    nnx_loss = lambda params, batch: jnp.mean((nnx.merge(graphdef, params)(batch[0]) - batch[1]) ** 2)
    dense = linen.Dense(2)
    variables = dense.init(jax.random.key(0), x)
    linen_loss = lambda params, batch: jnp.mean((dense.apply(params, batch[0]) - batch[1]) ** 2)
    module, static = eqx.partition(eqx.nn.Linear(3, 2, key=KEY), eqx.is_array)
    eqx_loss = lambda params, batch: jnp.mean((jax.vmap(eqx.combine(params, static))(batch[0]) - batch[1]) ** 2)
    for params, fn, where in (
        (nnx_params, nnx_loss, "kernel"),
        (variables, linen_loss, "params/kernel"),
        (module, eqx_loss, "weight"),
    ):
        state = ts.setup(ts.rules.sgd(0.05), params, trainable="**")
        state = ts.adjust(ts.freeze(state, where), where, learning_rate=0.5)
        step = ts.train_step(fn)
        first = last = None
        for _ in range(20):
            state, info = step(state, (x, y))
            first, last = first or float(info.loss), float(info.loss)
        assert last < first
        assert type(state.params) is type(params)
        half = ts.setup(ts.rules.sgd(0.05), params, trainable=where)
        half, info = ts.train_step(fn)(half, (x, y))
        assert bool(info.applied) and len(jax.tree.leaves(ts.trainable(half))) == 1


def test_an_evaluation_reads_the_signature_of_its_loss_function_once(monkeypatch):
    seen, real = [], inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda f, **more: seen.append(f) or real(f, **more))
    evaluate, state = ts.eval_step(loss_fn), ts.setup(ts.rules.sgd(0.1), make_params())
    evaluate(state, make_batch())
    del seen[:]
    evaluate(state, make_batch())
    assert loss_fn not in seen


@pytest.mark.parametrize("asks", [False, True])
def test_a_rule_that_changes_its_state_is_named_with_the_place(asks):
    """At setup; if it asks for an argument that only `ts.update` may be given, in the step."""
    rule = optax.GradientTransformation(
        lambda params: {"m": None, "n": jnp.int32(0)}, lambda g, s, p=None: (g, s | {"m": jnp.zeros(2)})
    )
    if asks:
        update = lambda g, s, p=None, *, mine, plain=rule.update: plain(g, s)
        rule = optax.GradientTransformationExtraArgs(rule.init, update)
    with pytest.raises(RuleError, match=r"at opt_state\[1\]\['m'\]: got float32\[2\], expected None"):
        state = ts.setup(ts.rules.chain(optax.identity(), rule), make_params())
        assert asks
        ts.update(state, make_params(), mine=1.0)


def test_value_and_grad_takes_what_its_signature_names():
    assert "where" not in inspect.signature(ts.value_and_grad).parameters


def test_remat_computes_twice_what_its_policy_does_not_save():
    state, batch = ts.setup(ts.rules.sgd(0.1), make_params()), make_batch()

    def counts(remat):
        jaxpr = str(jax.make_jaxpr(ts.train_step(loss_fn, remat=remat).pure)(state, batch, {}))
        return [len(re.findall(rf"= {name}\b", jaxpr)) for name in ("dot_general", "tanh")]

    dots, tanh = counts(None)
    assert counts(True) == [dots + 2, tanh + 1]  # those of the forward pass
    assert counts("dots_saveable") == [dots, tanh + 1]


@pytest.mark.medium
def test_a_checkpoint_around_each_block_needs_less_memory():
    def fn(wrap):
        block = wrap(lambda x, p: (x + jnp.tanh(jax.nn.gelu(x @ p["up"])) @ p["down"], None))
        return lambda params, x: jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)

    params = {"up": jnp.zeros((8, 64, 512)), "down": jnp.zeros((8, 512, 64))}
    lowered = lambda wrap: ts.train_step(fn(wrap)).lower(ts.setup(ts.rules.sgd(0.1), params), jnp.zeros((2048, 64)))
    temp = lambda wrap: lowered(wrap).compile().memory_analysis().temp_size_in_bytes
    assert temp(jax.checkpoint) < 0.3 * temp(lambda f: f)


def _beta_rule():
    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda u: -extra.get("beta", 1.0) * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("rule", [
    ts.rules.sgd(0.1),
    ts.rules.adam(0.1),
    ts.rules.chain(ts.rules.reject_spikes(), optax.adam(0.1)),
    optax.adam(0.1),
    optax.chain(optax.polyak_sgd(), optax.scale(2.0)),
    optax.inject_hyperparams(optax.polyak_sgd)(),
    ts.rules.partition({"**": ts.rules.chain(_beta_rule(), ts.rules.sgd(0.1))}),
])  # fmt: skip
def test_update_refuses_its_keywords_misspelled_and_what_it_gives_itself(rule):
    params = {"w": jnp.ones(2)}
    state = ts.setup(rule, params)
    for name in ("vlaue", "weigth", "params", "updates", "opt_state"):
        with pytest.raises(StateError, match=rf"^keyword at update\(\): got '{name}', expected"):
            ts.update(state, params, **{name: 1.0})
    with pytest.raises(StateError, match="'value'"):
        ts.update(state, params, vlaue=1.0)
    value, weight = jnp.ones(()), jnp.ones(())
    ts.update(state, params, value=value, grad=params, weight=weight)


def test_update_gives_rules_the_keywords_that_they_read_from_extra():
    params = {"w": jnp.ones(2)}
    for rule in (_beta_rule(), optax.chain(_beta_rule()), ts.rules.chain(_beta_rule())):
        new, _ = ts.update(ts.setup(rule, params), params, beta=3.0)
        assert_trees_equal(new.params, {"w": jnp.full(2, -2.0)})


EXPORTED = {
    "a mean": loss_fn,
    "a Loss": lambda params, batch: ts.Loss.mean(losses(params, batch)),
    "under a mask": lambda params, batch, mask: ts.Loss.mean(losses(params, batch), mask),
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", EXPORTED)
def test_a_step_is_exported_with_a_batch_of_any_size(kind):
    state, step = ts.setup(ts.rules.adam(1e-3), make_params()), ts.train_step(EXPORTED[kind])

    @jax.jit
    def trained(params, batch):
        new, info = step.pure(state.replace(params=params), batch, {})
        return new.params, info.loss, info.weight

    (rows,) = jax.export.symbolic_shape("rows")
    batch = make_batch()
    of_any_size = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    exported = jax.export.export(trained)(state.params, of_any_size)
    assert_trees_close(exported.call(state.params, batch), trained(state.params, batch), rtol=1e-6, atol=1e-7)
