"""Losses of the whole batch in two parts: exact under `accumulate`, in the memory of one micro-batch."""

import dataclasses
import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import linen
from jax.sharding import PartitionSpec
from tests.helpers import assert_trees_close, assert_trees_equal, relative
from tsunax.errors import LossError, StateError, WrongTypeError

ROWS = 24
RNG = np.random.default_rng(0)
normal = lambda *shape: RNG.normal(size=shape).astype(np.float32)
BATCH = {"image": normal(ROWS, 5), "text": normal(ROWS, 6), "m": (np.arange(ROWS) % 5 > 0).astype(np.float32)}
PARAMS = {"image": normal(5, 4), "text": normal(6, 4), "scale": np.float32(1)}


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def embed(params, rows):
    return {"a": unit(jnp.tanh(rows["image"] @ params["image"])), "b": unit(rows["text"] @ params["text"])}


def clip(z, batch, params):
    """CLIP's loss with a learned temperature; rows without weight are neither anchors nor negatives."""
    logits = jnp.exp(params["scale"]) * z["a"] @ z["b"].T
    logits = jnp.where((batch["m"] > 0)[None], logits, -1e9)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits)))
    return ts.Loss.mean(values, batch["m"], metrics={"hits": logits.argmax(1) == jnp.arange(len(logits))})


def composed(params, batch):
    return clip(embed(params, batch), batch, params)


CLIP = ts.whole_batch(embed, clip)


def setup(**options):
    return ts.setup(ts.rules.adam(1e-2), PARAMS, **options)


def gradient(loss_fn, n=1, state=None, batch=BATCH):
    return _gradient(loss_fn, n)(state or setup(), batch)


@functools.cache
def _gradient(loss_fn, n):
    return jax.jit(ts.value_and_grad(loss_fn, accumulate=n))


# ------------------------------------------------------------------------------------------------------ equivalences


@pytest.mark.parametrize(
    "n", [pytest.param(2, marks=pytest.mark.medium), 5, pytest.param(24, marks=pytest.mark.medium)]
)
def test_micro_batches_have_the_gradient_of_the_whole_batch(n):
    """Also if the rows do not divide (5); with a mask, a learned temperature, and metrics."""
    loss, grads = gradient(CLIP, n)
    whole, expected = gradient(composed)
    assert relative(grads, expected) <= 1e-6 and float(grads["scale"]) != 0
    assert loss.weight == whole.weight == BATCH["m"].sum()
    assert loss.metrics["hits"].compute() == whole.metrics["hits"].compute()
    np.testing.assert_allclose(loss.compute(), whole.compute(), rtol=1e-6)


def test_without_accumulation_it_is_the_composed_loss_to_the_bit():
    assert_trees_equal(gradient(CLIP), gradient(composed))
    (a, one), (b, other) = (ts.train_step(f)(setup(), BATCH) for f in (CLIP, composed))
    assert_trees_equal((a.params, one.loss), (b.params, other.loss))
    evaluations = [ts.eval_step(f)(setup(), BATCH) for f in (CLIP, composed)]
    assert_trees_equal(*evaluations)


@pytest.mark.medium
def test_both_passes_of_a_micro_batch_draw_the_same_numbers():
    def noisy(params, rows, key):
        return embed(params, rows | {"image": rows["image"] * jax.random.bernoulli(key, 0.5, rows["image"].shape)})

    state, n = setup(key=0), 4
    key = jax.random.fold_in(state.key, 0)

    def by_hand(params, batch):  # of rows in turn, each with the key of its micro-batch
        order = np.concatenate([np.arange(i, ROWS, n) for i in range(n)])
        part = lambda i: jax.tree.map(lambda x: x[i::n], batch)
        parts = [noisy(params, part(i), jax.random.fold_in(key, i)) for i in range(n)]
        z = jax.tree.map(lambda *x: jnp.concatenate(x)[np.argsort(order)], *parts)
        return clip(z, batch, params)

    loss, grads = gradient(ts.whole_batch(noisy, clip), n, state)
    whole, expected = gradient(by_hand, state=state)
    assert relative(grads, expected) <= 1e-6
    np.testing.assert_allclose(loss.compute(), whole.compute(), rtol=1e-6)


@pytest.mark.medium
def test_the_loss_has_a_key_of_its_own():
    seen = {}
    look = lambda name, key: seen.setdefault(name, jax.random.key_data(key))

    def loss(z, batch, key):
        look("loss", key)
        return jnp.mean(z)

    def one(params, rows, key):
        look("embed", key)
        return rows["image"] @ params["image"]

    with jax.disable_jit():
        ts.value_and_grad(ts.whole_batch(one, loss))(setup(key=0), BATCH)
    assert (seen["loss"] != seen["embed"]).any()


def counted(params, rows, model_state):
    """A model whose state follows its rows, and that reads it."""
    z = jnp.tanh(rows["image"] @ params["image"] * (1 + model_state["mean"]))
    return {"a": unit(z), "b": unit(rows["text"] @ params["text"])}, {
        "mean": 0.9 * model_state["mean"] + 0.1 * rows["image"].mean(),
        "n": model_state["n"] + 1,
    }


@pytest.mark.medium
def test_each_micro_batch_has_the_model_state_of_the_one_before():
    start, n = {"mean": jnp.float32(0.5), "n": jnp.int32(0)}, 3
    state = setup(model_state=start)

    def by_hand(params, batch, model_state):
        parts = []
        for i in range(n):
            rows = jax.tree.map(lambda x, i=i: x[i::n], batch)
            z, model_state = counted(params, rows, model_state)
            parts.append(z)
        z = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(ROWS, -1), *parts)
        return dataclasses.replace(clip(z, batch, params), model_state=model_state)

    fn = ts.whole_batch(counted, clip)
    (loss, grads), (whole, expected) = gradient(fn, n, state), gradient(by_hand, state=state)
    assert relative(grads, expected) <= 1e-6
    assert_trees_close(loss.model_state, whole.model_state, rtol=1e-6, atol=0)
    new, _ = ts.train_step(fn, accumulate=n)(state, BATCH)
    assert int(new.model_state["n"]) == n
    assert float(ts.eval_step(fn)(new, BATCH).compute()) > 0


@pytest.mark.medium
def test_a_mask_reaches_both_parts():
    def masked_embed(params, rows, mask):
        assert mask.shape == rows["image"].shape[:1]
        return jax.tree.map(lambda z: jnp.where(mask[:, None] > 0, z, 7), embed(params, rows))

    def masked_clip(z, batch, params, mask):
        assert mask.shape == (ROWS,)
        return clip(z, batch | {"m": batch["m"] * mask}, params)

    fn, mask = ts.whole_batch(masked_embed, masked_clip), (np.arange(ROWS) < 20).astype(np.float32)
    run = lambda n: jax.jit(ts.value_and_grad(fn, accumulate=n))(setup(), BATCH, mask=mask)
    (loss, grads), (whole, expected) = run(5), run(1)
    assert relative(grads, expected) <= 1e-6 and loss.weight == whole.weight == 16
    few = jax.tree.map(lambda x: x[:20], BATCH)
    assert relative(grads, gradient(composed, batch=few)[1]) <= 1e-6


@pytest.mark.medium
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"precision": "bfloat16"}, 2**-7),
        pytest.param({"precision": "float16", "loss_scale": 1024.0}, 2**-9, marks=pytest.mark.medium),
        pytest.param(
            {"precision": ts.precision.Policy(param="bfloat16", compute="bfloat16")}, 2**-7, marks=pytest.mark.medium
        ),
    ],
)
def test_precision_and_loss_scale_are_those_of_the_whole_batch(options, tolerance):
    state = setup(**options)
    (_, grads), (_, expected) = gradient(CLIP, 4, state), gradient(composed, state=state)
    assert [x.dtype for x in jax.tree.leaves(grads)] == [x.dtype for x in jax.tree.leaves(expected)]
    assert relative(grads, expected) <= tolerance
    exact = gradient(composed)[1]
    assert relative(grads, exact) <= 2 * max(relative(expected, exact), tolerance)


def test_micro_batches_are_summed_in_float32():
    """In bfloat16, 1 + 2^-9 is 1: of many small parts of a gradient nothing would be left."""
    rows = np.full((512, 1), 2.0**-9, np.float32)
    rows[0] = 1
    fn = ts.whole_batch(lambda p, x: x @ p["w"], lambda z, x: jnp.sum(z.astype(jnp.float32)))
    state = ts.setup(ts.rules.sgd(0.1), {"w": np.ones((1, 1), np.float32)}, precision="bfloat16")
    loss_of = lambda n: float(jax.jit(ts.value_and_grad(fn, accumulate=n))(state, rows)[1]["w"][0, 0])
    assert loss_of(512) == pytest.approx(1 + 511 * 2.0**-9, rel=2**-8)


@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=pytest.mark.medium)])
def test_over_many_devices_it_is_that_of_one(explicit):
    batch = jax.tree.map(lambda x: np.concatenate([x, x[:8] * 2]), BATCH)
    place = lambda x: jax.sharding.NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())
    reshard = lambda x: jax.sharding.reshard(x, place(x)) if jax.typeof(x).sharding.mesh.axis_names else x
    whole = functools.partial(jax.tree.map, reshard)  # with explicit axes
    step = ts.train_step(ts.whole_batch(embed, lambda z, b, params: clip(whole(z), whole(b), params)), accumulate=4)
    alone, info = ts.train_step(CLIP)(setup(), batch)
    spread, seen = step(ts.shard(setup(), ts.mesh(explicit=explicit)), batch)
    np.testing.assert_allclose(seen.loss, info.loss, rtol=1e-6)
    np.testing.assert_allclose(seen.grad_norm, info.grad_norm, rtol=1e-5)
    assert_trees_close(spread.params, alone.params, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_inside_shard_map_the_loss_gathers_the_embeddings():
    def gathered(z, batch, params):
        z, batch = jax.tree.map(lambda x: jax.lax.all_gather(x, "data", tiled=True), (z, batch))
        return clip(z, batch, params)

    fn = ts.whole_batch(counted, gathered)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    step = ts.train_step(fn, accumulate=3, axis_name="data", norms=True)
    spec = PartitionSpec()
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, PartitionSpec("data")), out_specs=spec))
    still = lambda params, rows, model_state: (counted(params, rows, model_state)[0], model_state)
    start = {"mean": jnp.float32(0), "n": jnp.int32(0)}
    _, info = ts.train_step(ts.whole_batch(still, clip))(setup(model_state=start), BATCH)
    state, seen = step(setup(model_state=start), BATCH)
    assert int(state.model_state["n"]) == 3
    np.testing.assert_allclose(seen.loss, info.loss, rtol=0.1)  # the state moves from part to part


def test_many_steps_in_one_call_are_the_same_to_the_bit():
    step = ts.train_step(CLIP, accumulate=4)
    batches = [jax.tree.map(lambda x, k=k: x * np.float32(k), BATCH) | {"m": BATCH["m"]} for k in (1, 2, 3)]
    run = lambda k: ts.fit(step, setup(), batches, epochs=1, steps_per_call=k, progress=False)[0].params
    assert_trees_equal(run(1), run(3))


@pytest.mark.medium
def test_a_member_of_a_population_is_a_single_run():
    step = ts.train_step(CLIP, accumulate=4)
    runs = ts.population(lambda key, rate: ts.setup(ts.rules.adam(rate), PARAMS), 2, rate=jnp.array([1e-2, 1e-3]))
    runs, infos = step(runs, BATCH)
    single, info = step(setup(), BATCH)
    assert_trees_close(jax.tree.map(lambda x: x[0], runs.params), single.params, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(infos.loss[0], info.loss, rtol=1e-6)


@pytest.mark.medium
def test_only_trained_and_thawed_leaves_have_a_gradient():
    state = setup(trainable=["**", "!text"], freezable=True)
    _, grads = gradient(CLIP, 4, state)
    assert grads["text"] is None and relative(grads["image"], gradient(composed)[1]["image"]) <= 1e-6
    step = ts.train_step(CLIP, accumulate=4)
    new, _ = step(ts.freeze(state, "image"), BATCH)
    assert_trees_equal(new.params["image"], PARAMS["image"])


@pytest.mark.medium
def test_values_that_gradients_replace_are_the_maximum_of_all_micro_batches():
    net = linen.Dense(4, dot_general_cls=functools.partial(linen.Fp8DirectDotGeneralOp, amax_history_length=4))
    model = ts.models.linen(net, net.init(jax.random.key(0), BATCH["image"]))
    one = lambda params, rows: model.apply(params, rows["image"])[0]
    fn = ts.whole_batch(one, lambda z, batch: jnp.mean((z @ z.T) ** 2))
    state = ts.setup(ts.rules.sgd(0.1), model.params)
    cut, whole = (gradient(fn, n, state)[0].overwritten for n in (4, 1))
    history = lambda tree: tree["_overwrite_with_gradient"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    assert float(history(cut)[0]) == float(history(whole)[0]) == np.abs(BATCH["image"]).max()
    assert_trees_close(cut["_overwrite_with_gradient"], whole["_overwrite_with_gradient"], rtol=1e-2, atol=1e-6)


@pytest.mark.medium
def test_convolutions_stay_fast_in_the_loop():
    x = normal(8, 6, 6, 3)
    params = {"w": normal(3, 3, 3, 4)}

    def conv(params, x):
        z = jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return unit(jnp.tanh(z).mean((1, 2)))

    fn, state = ts.whole_batch(conv, lambda z, x: jnp.mean((z @ z.T) ** 2)), ts.setup(ts.rules.sgd(0.1), params)
    step = ts.train_step(fn, accumulate=2)
    assert str(step.trace(state, x).jaxpr).count("convolution_in_loop") >= 1
    assert relative(gradient(fn, 2, state, x)[1], gradient(fn, 1, state, x)[1]) <= 1e-6


# ------------------------------------------------------------------------------------------------------------ memory


def test_memory_is_that_of_one_micro_batch_and_the_embeddings():
    params = {"a": jnp.zeros((64, 1024)), "b": jnp.zeros((1024, 16))}
    rows = lambda n: jnp.zeros((n, 64))
    deep = lambda params, x: jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
    pairs = lambda z, x: jnp.mean(jax.nn.logsumexp(z @ z[:32].T, axis=1))
    fn, state = ts.whole_batch(deep, pairs), ts.setup(ts.rules.sgd(0.1), params)

    def temporary(n, size):
        step = ts.train_step(fn, accumulate=n)
        return step.lower(state, rows(size)).compile().memory_analysis().temp_size_in_bytes

    gradient, embeddings = sum(x.nbytes for x in jax.tree.leaves(params)), 4096 * (16 + 32) * 4
    assert temporary(16, 4096) <= 1.1 * (temporary(1, 256) + gradient + 4 * embeddings)
    assert temporary(1, 4096) > 5 * temporary(16, 4096)


# --------------------------------------------------------------------------------------------------- what it says


def test_the_warning_for_mixed_rows_names_the_way_and_the_way_does_not_warn():
    with pytest.warns(UserWarning, match=r"expected a mean over rows.*ts\.whole_batch\(embed, loss\)"):
        jax.eval_shape(ts.value_and_grad(composed, accumulate=4), setup(), BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(ts.value_and_grad(CLIP, accumulate=4), setup(), BATCH)


@pytest.mark.medium
def test_the_check_of_accumulation_passes():
    assert ts.testing.check_accumulation(ts.train_step(CLIP), setup(), BATCH, n=4) <= 1e-5


def test_it_is_a_value():
    again = ts.whole_batch(embed, clip)
    assert again == CLIP and hash(again) == hash(CLIP)
    assert ts.train_step(again, accumulate=4) == ts.train_step(CLIP, accumulate=4)
    assert pickle.loads(pickle.dumps(ts.train_step(CLIP))).loss_fn == CLIP


BAD = {
    "scalars": (lambda p, x: jnp.float32(1) * p["scale"], clip, LossError, r"leaf at embeddings: got float32\[\]"),
    "a mean": (lambda p, x: {"a": x["image"].mean(0) @ p["image"]}, clip, LossError, r"embeddings\['a'\]: got"),
    "a vector": (embed, lambda z, b: z["a"].sum(1), LossError, r"result at loss_fn: got float32\[24\]"),
    "a tuple": (embed, lambda z, b: (z["a"].mean(), {}), LossError, r"result at loss_fn: got tuple of 2"),
    "nothing": (embed, lambda z, b: None, LossError, r"result at loss_fn: got None"),
    "no embeddings": (lambda p, x: None, clip, LossError, r"leaf at embeddings: got None, expected an array with"),
    "stopped": (lambda p, x: jax.lax.stop_gradient(embed(p, x)), lambda z, b: z["a"].mean(), LossError, "not depend"),
    "a name": (lambda p, x, ket: embed(p, x), clip, LossError, r"keyword at loss_fn: got 'ket'"),
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", BAD)
def test_wrong_parts_are_told(name, n):
    one, loss, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        ts.value_and_grad(ts.whole_batch(one, loss), accumulate=n)(setup(), BATCH)


def test_wrong_arguments_are_told_before_anything_is_compiled():
    for first, second in (
        (embed, composed), (lambda params, rows, batch: rows, clip), (embed, lambda params, z, b: z), (embed, lambda: 0.0)
    ):  # fmt: skip
        with pytest.raises(
            LossError, match=r"signatures at whole_batch\(\): got .*, expected embed\(params, rows, ...\), loss"
        ):
            ts.whole_batch(first, second)
    with pytest.raises(
        WrongTypeError, match=r"options at train_step\(\): got per_example or noise_scale of a whole_batch"
    ):
        ts.train_step(CLIP, per_example=True)
    with pytest.raises(
        WrongTypeError, match=r"options at train_step\(\): got per_example or noise_scale of a whole_batch"
    ):
        ts.train_step(CLIP, accumulate=2, noise_scale=True)
    with pytest.raises(LossError, match=r"leaf at batch\['t'\]: got a scalar"):
        gradient(CLIP, 2, batch=BATCH | {"t": np.float32(1)})
    fn = ts.whole_batch(lambda p, x, model_state: embed(p, x), clip)
    with pytest.raises(LossError, match=r"result at embed: got dict with a, b, expected \(embeddings, model_state\)"):
        gradient(fn, 2, setup(model_state={"n": jnp.int32(0)}))
    fn = ts.whole_batch(lambda p, x, model_state: (embed(p, x), {}), clip)
    with pytest.raises(StateError, match=r"leaf at model_state\[.n.\]: got nothing"):
        gradient(fn, 2, setup(model_state={"n": jnp.int32(0)}))


def test_an_embed_that_mixes_rows_is_warned_of():
    centered = lambda params, rows: embed(params, rows | {"image": rows["image"] - rows["image"].mean(0)[None]})
    fn = ts.whole_batch(centered, clip)
    with pytest.warns(UserWarning, match=r"loss at whole_batch.*expected a mean over rows"):
        jax.eval_shape(ts.value_and_grad(fn, accumulate=4), setup(), BATCH)


def test_two_means_with_weights_of_their_own_add_up():
    """A supervised term over the rows with labels, beside one over all rows: exact in micro-batches."""
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 10
    batch = {"x": x, "labeled": np.array([1, 0, 0, 1, 1, 1, 0, 0], np.float32)}

    def loss(z, batch):
        return ts.Loss.mean(jnp.sin(z), batch["labeled"]) + ts.Loss.mean(z**2)

    def mean_of(z, batch):
        return loss(z, batch).compute()

    def plain(params):
        z = x @ params["w"]
        return jnp.sum(jnp.sin(z) * batch["labeled"]) / 4 + jnp.mean(z**2)

    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)})
    expected = jax.value_and_grad(plain)({"w": jnp.ones(3)})
    embed = lambda params, batch: batch["x"] @ params["w"]
    alone = lambda params, batch: loss(embed(params, batch), batch)
    for n in (1, 2, 8):
        for fn in (ts.whole_batch(embed, loss), ts.whole_batch(embed, mean_of), alone):
            mean, grads = jax.jit(ts.value_and_grad(fn, accumulate=n))(state, batch)
            assert_trees_close((mean.compute(), grads), expected, rtol=1e-5, atol=0)
