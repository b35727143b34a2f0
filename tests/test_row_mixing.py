"""Losses that change under `accumulate`: which are noticed, and what is none of them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import nnx
from tests.helpers import assert_trees_close
from tsunax._step.loss_fn import GradientOptions
from tsunax._step.row_probe import row_difference
from tsunax.errors import LossError
from tsunax.loss import as_loss

N = 8
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(N, 3)).astype(np.float32),
    "z": RNG.normal(size=(N, 3)).astype(np.float32),
    "s": RNG.normal(size=(N, 5, 3)).astype(np.float32),
    "t": RNG.normal(size=N).astype(np.float32),
    "y": np.arange(N) % 3,
    "m": (np.arange(N) % 3 > 0).astype(np.float32),
}
PARAMS = {
    "w": RNG.normal(size=(3, 4)).astype(np.float32),
    "v": RNG.normal(size=(3, 4)).astype(np.float32),
    "u": RNG.normal(size=(4, 4)).astype(np.float32),
    "c": np.float32(1),
}


def features(p, b):
    return jnp.tanh(b["x"] @ p["w"])


def score(p, b):
    return features(p, b).sum(-1)


def values(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(features(p, b), b["y"])


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


# ------------------------------------------------------------------------------- of the whole batch


def clip(p, b):
    logits = unit(b["x"] @ p["w"]) @ unit(b["z"] @ p["v"]).T * jnp.exp(p["c"])
    labels = jnp.arange(len(logits))
    ce = optax.softmax_cross_entropy_with_integer_labels
    return (ce(logits, labels).mean() + ce(logits.T, labels).mean()) / 2


def in_batch_negatives(p, b):
    z = unit(jnp.concatenate([b["x"], b["z"]]) @ p["w"])
    return jax.nn.logsumexp(z @ z.T, axis=1).mean()


def ranks(p, b):
    ahead = score(p, b)[:, None] - score(p, b)[None]
    return jax.nn.softplus(-ahead * jnp.sign(b["t"][:, None] - b["t"][None])).mean()


def kernel(p, b):
    one = lambda a: jax.vmap(lambda c: jnp.exp(-jnp.sum((a - c) ** 2)))(b["z"] @ p["v"])
    return jax.vmap(one)(features(p, b)).mean()


def normalized(p, b):
    h = b["x"] @ p["w"]
    h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-5)
    return jnp.mean((h.sum(1) - b["t"]) ** 2)


def covariance(p, b):
    c = (b["x"] @ p["w"]).T @ (b["z"] @ p["v"]) / len(b["x"])
    return jnp.sum((c - jnp.eye(4)) ** 2)


def dice(p, b):
    q = jax.nn.sigmoid(score(p, b))
    return 1 - 2 * jnp.sum(q * b["m"]) / (jnp.sum(q) + jnp.sum(b["m"]))


def survival(p, b):
    return -jnp.mean(score(p, b) - jnp.log(jnp.cumsum(jnp.exp(score(p, b)))))


def centered(p, b):
    return jnp.mean(jnp.tanh((b["x"] - b["x"].mean(0, keepdims=True)) @ p["w"]))


def mixup(p, b):
    order = jax.random.permutation(jax.random.key(0), len(b["x"]))
    shuffled = jax.random.permutation(jax.random.key(1), b["z"])
    mixed = {"x": 0.3 * b["x"] + 0.5 * b["x"][order] + 0.2 * shuffled}
    return jnp.mean((score(p, mixed) - b["t"]) ** 2)


def balanced(p, b):
    counts = jax.nn.one_hot(b["y"], 3).sum(0)
    return jnp.mean(values(p, b) * (1 / jnp.maximum(counts, 1))[b["y"]])


WHOLE = {
    "pairs": [
        clip,
        in_batch_negatives,
        ranks,
        kernel,
        lambda p, b: jnp.mean(jax.nn.relu(1 - (features(p, b) * jnp.roll(features(p, b), 1, 0)).sum(-1))),
        lambda p, b: jnp.mean((score(p, b) - score(p, b)[::-1]) ** 2),
        lambda p, b: jnp.mean(jnp.abs(score(p, b) - jnp.roll(score(p, b), -1))),
    ],
    "sums": [
        lambda p, b: values(p, b).sum(),
        lambda p, b: 0.5 * jnp.sum((score(p, b) - b["t"]) ** 2),
        lambda p, b: (score(p, b) - b["t"]) @ (score(p, b) - b["t"]),
        lambda p, b: jnp.sum(jnp.mean(features(p, b), 1) * b["m"]),
        lambda p, b: values(p, b).mean() + 0.1 * jnp.sum(features(p, b) ** 2),
        lambda p, b: -jnp.sum(values(p, b)) / 2 + ts.regularize.l2(p),
        lambda p, b: jax.vmap(lambda x, t: (x @ p["v"]).sum() * t)(b["x"] / 255, b["t"]).sum(),
        lambda p, b: ts.Loss(values(p, b).sum(), 1.0).compute(),
        lambda p, b: jax.lax.scan(lambda t, x: (t + x.sum(), None), 0.0, values(p, b).reshape(2, -1))[0] / N,
    ],
    "beside": [
        lambda p, b: jnp.mean(score(p, b) ** 2) + ts.Loss.mean(values(p, b), b["m"]),
        lambda p, b: ts.Loss.mean(values(p, b), b["m"]) - 0.5 * score(p, b).mean(),
    ],
    "extremes": [
        lambda p, b: jnp.max(values(p, b)),
        lambda p, b: values(p, b).mean() - 0.1 * features(p, b).min(0).sum(),
    ],
    "statistics": [
        centered,
        lambda p, b: -jnp.mean(values(p, b) * (b["t"] - b["t"].mean())),  # a baseline of the batch
        lambda p, b: -jnp.var(features(p, b)),
    ],
    "means": [
        covariance,
        dice,
        lambda p, b: jnp.sqrt(jnp.mean((score(p, b) - b["t"]) ** 2)),
        lambda p, b: -jax.nn.log_softmax(features(p, b), axis=0).mean(),
    ],
    "weights": [
        balanced,
        lambda p, b: jnp.sum(values(p, b) * b["m"]) / jnp.maximum(jnp.sum(b["m"]), 1),
        lambda p, b: jnp.sum(values(p, b) * b["m"]) * (1 / jnp.maximum((b["m"] > 0).sum(), 1)),
        lambda p, b: jnp.where((b["m"] > 0).sum() > 0, jnp.average(values(p, b), weights=b["m"]), 0.0),
        lambda p, b: jnp.sum(values(p, b) / jnp.bincount(b["y"], length=3)[b["y"]]) / 3,
        lambda p, b: jnp.sum(values(p, b) * (1 / jnp.sum(b["m"])) * b["m"]),
        lambda p, b: jnp.mean(values(p, b), where=b["m"] > 0),
        lambda p, b: features(p, b).mean(0).sum() + jnp.vdot(values(p, b), b["m"] / b["m"].sum()),
        lambda p, b: jnp.sum(values(p, b) * (b["m"] / jnp.sum(b["m"]))),
        lambda p, b: jnp.nanmean(jnp.where(b["m"] > 0, values(p, b), jnp.nan)),
    ],
    "other rows": [
        mixup,
        lambda p, b: values(p, {"x": 0.3 * b["x"] + 0.7 * jnp.roll(b["x"], 1, 0), "y": b["y"]}).mean(),
        lambda p, b: jnp.mean((p["w"][b["y"]].sum(-1) - (b["t"] - b["t"].min())) ** 2),
    ],
    "order": [survival, lambda p, b: jax.lax.top_k(values(p, b), 3)[0].mean()],
}


# ---------------------------------------------------------------------------------- means over rows


def attention(p, b):
    rows, t, _ = b["s"].shape
    h = (b["s"].reshape(rows * t, 3) @ p["w"]).reshape(rows, t, 4)
    h = h + jax.nn.softmax(jnp.einsum("nth,nsh->nts", h, h @ p["u"])) @ h
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    return jnp.mean(jnp.cumsum(h, 1) ** 2)


def recurrent(p, b):
    read = jax.checkpoint(lambda h, row: (jnp.tanh(h @ p["u"] + row @ p["w"]), h.sum(-1)))
    h, before = jax.lax.scan(read, jnp.zeros((len(b["s"]), 4)), b["s"].swapaxes(0, 1))
    return jnp.mean((h.sum(1) - b["t"]) ** 2) + jnp.mean(before**2)


def row_by_row(p, b):
    error = lambda row: (jnp.tanh(row[0] @ p["w"]).sum() - row[1]) ** 2
    return jax.lax.map(error, (b["x"], b["t"])).mean()


def gradient_penalty(p, b):
    critic = lambda x: jnp.tanh(x @ p["w"]).sum(-1)
    slopes = jax.grad(lambda x: critic(x).sum())(b["x"])
    return critic(b["x"]).mean() + jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)


def halves(p, b):
    h = jnp.concatenate([b["x"], b["z"]]) @ p["w"]
    return jnp.mean(jnp.sum((h[: len(h) // 2] - h[len(h) // 2 :]) ** 2, -1))


def sloppy_softmax(p, b):
    e = jnp.exp(features(p, b) - features(p, b).max())
    return -jnp.log(e / e.sum(-1, keepdims=True))[jnp.arange(len(b["y"])), b["y"]].mean()


def with_metrics(p, b):
    odd = {"rmse": jnp.sqrt(values(p, b).mean()), "pairs": (b["x"] @ b["x"].T).mean()}
    odd |= {"clip": clip(p, b)}
    return ts.Loss.mean(values(p, b), b["m"], metrics=odd)


MEANS = [
    attention,
    recurrent,
    row_by_row,
    gradient_penalty,
    halves,
    sloppy_softmax,
    with_metrics,
    lambda p, b: jnp.sum(values(p, b) / len(b["t"])) + jnp.sum(b["m"]) * 0,
    lambda p, b: jnp.sum(features(p, b)) * (1 / features(p, b).size),
    lambda p, b: jnp.sum(values(p, b)) / jnp.float32(len(b["t"])),
    lambda p, b: ts.Loss(jnp.sum(values(p, b)), len(b["t"])),
    lambda p, b: ts.Loss(jnp.sum(values(p, b) * b["m"]), b["m"].sum()) + ts.regularize.l2(p),
    lambda p, b: ts.Loss.mean(features(p, b), b["m"]) * 0.5,
    lambda p, b: ts.Loss.mean(values(p, b), b["m"]) + ts.regularize.l2(p) + jnp.mean(p["w"] ** 2),
    lambda p, b: ts.Loss.mean(features(p, b), b["m"]) + 2 * ts.Loss.mean(values(p, b), b["m"]),
    lambda p, b: ts.Loss.mean(values(p, b)) + jnp.mean(features(p, b)),
    lambda p, b: ts.Loss.mean(values(p, b), b["m"]) + jnp.average(score(p, b), weights=b["m"]),
    lambda p, b: jnp.mean((score(p, b) - jnp.roll(score(p, b), len(b["x"]) // 2)) ** 2),
    lambda p, b: ts.Loss(jnp.dot(values(p, b), b["m"]), jnp.sum(b["m"])),
    lambda p, b: (score(p, b) - b["t"]) @ (score(p, b) - b["t"]) / len(b["t"]),
    lambda p, b: jnp.mean(values(p, b) + 0.1 * jnp.mean(features(p, b) ** 2)) + ts.regularize.l2(p),
    lambda p, b: jnp.exp(-p["c"]) * values(p, b).mean() + p["c"],
    lambda p, b: jnp.abs(values(p, b).mean() - 0.1) + 0.1,
    lambda p, b: values(p, b).mean() / jax.lax.stop_gradient(values(p, b).mean()),
    lambda p, b: jnp.where(jnp.isfinite(values(p, b).mean()), values(p, b).mean(), 0.0),
    lambda p, b: jax.lax.cond(p["c"] > 0, lambda: values(p, b).mean(), lambda: score(p, b).mean()),
    lambda p, b: jax.vmap(jax.jit(lambda x, t: (x @ p["v"]).sum() * t))(b["x"], b["t"]).mean(),
]


STATE = ts.setup(ts.rules.sgd(0.0), PARAMS)
ALL = [
    pytest.param(fn, id=f"{kind}{i}", marks=[] if i == 0 else pytest.mark.medium)
    for kind, fns in WHOLE.items()
    for i, fn in enumerate(fns)
]


def difference(fn, n=2, state=STATE, batch=BATCH, per_example=False, **extra):
    """What the probe measures, or its error."""
    return row_difference(GradientOptions(fn, n, per_example=per_example), state, batch, extra)


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("fn", ALL)
def test_losses_of_the_whole_batch_are_noticed(fn):
    assert difference(fn) is not None


@pytest.mark.medium
@pytest.mark.parametrize("fn", [fn for fns in WHOLE.values() for fn in fns])
def test_losses_of_the_whole_batch_are_others_than_those_of_its_parts(fn):
    @jax.jit
    def both(p, b):
        parts = [as_loss(fn(p, jax.tree.map(lambda x, i=i: x[i::2], b)), N // 2) for i in range(2)]
        return as_loss(fn(p, b), N).compute(), parts[0].merge(parts[1]).compute()

    whole, cut = both(PARAMS, BATCH)
    assert abs(float(whole) - float(cut)) > 1e-4  # it really is another loss


QUIET = [pytest.param(fn, marks=[] if i % 6 == 0 else pytest.mark.medium) for i, fn in enumerate(MEANS)]


@pytest.mark.medium
@pytest.mark.parametrize("fn", QUIET)
def test_means_over_rows_are_not(fn):
    assert difference(fn) is None
    assert difference(fn, n=4) is None


def with_statistics(fn):
    """A loss function with a new model state, whose statistics are those of the batch in training."""

    def loss_fn(params, batch, model_state, train):
        new = {"mean": batch["x"].mean(0, keepdims=True)}
        x = batch["x"] - (new if train else model_state)["mean"]
        return ts.Loss.mean(fn(params, {**batch, "x": x}), model_state=new)

    return loss_fn


def test_statistics_of_batch_norm_are_noticed_unless_they_are_model_state():
    state = ts.setup(ts.rules.sgd(0.0), PARAMS, model_state={"mean": jnp.zeros((1, 3))})
    assert difference(normalized) is not None
    assert difference(with_statistics(values), state=state) is None
    assert difference(with_statistics(clip), state=state) is not None
    in_any_mode = lambda p, b, model_state: with_statistics(values)(p, b, model_state, True)
    assert difference(in_any_mode, state=state) is None


def dropped(p, b, key, train=True):
    keep = jax.random.bernoulli(key, 0.5, b["x"].shape) if train else 0.5
    return values(p, {**b, "x": b["x"] * keep})


def test_random_losses_are_measured_without_train_or_not_at_all():
    state = ts.setup(ts.rules.sgd(0.0), PARAMS, key=0)
    assert difference(lambda p, b, key, train: dropped(p, b, key, train).mean(), state=state) is None
    assert difference(lambda p, b, key: dropped(p, b, key).mean(), state=state) is None
    masked = lambda p, b, key, train: jnp.average(dropped(p, b, key, train), weights=b["m"])
    assert difference(masked, state=state) is not None
    raw = lambda p, b, noise: jnp.mean(dropped(p, b, noise))
    assert difference(raw, noise=jax.random.PRNGKey(0)) is None
    own = lambda p, b, key, train: dropped(p, b, key if train else jax.random.key(0)).mean()
    assert difference(own, state=state) is None
    named_only = lambda p, b, key: jnp.average(values(p, b), weights=b["m"])
    assert difference(named_only, state=state) is not None


def test_zeros_at_the_start_and_sorted_rows_hide_nothing():
    zeros = ts.setup(ts.rules.sgd(0.0), jax.tree.map(np.zeros_like, PARAMS))
    masked = lambda p, b: jnp.average(values(p, b), weights=b["m"])
    values_of_rows = values(zeros.params, BATCH)
    assert float(values_of_rows.min()) == float(values_of_rows.max())
    assert difference(masked, state=zeros) is not None
    rows = {**BATCH, "m": np.array([1, 1, 0, 0, 1, 1, 0, 0], np.float32)}  # each part has as many
    assert difference(masked, batch=rows) is not None


COARSE = {
    "bfloat16 in the policy": ({"precision": "bfloat16"}, lambda x: x),
    "bfloat16 in the model": ({}, lambda x: x.astype(jnp.bfloat16)),
    "float16 in the model": ({}, lambda x: x.astype(jnp.float16)),
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", COARSE)
def test_rounding_is_no_difference(kind):
    setting, rounded = COARSE[kind]
    state = ts.setup(ts.rules.sgd(0.0), PARAMS, **setting)
    low = lambda p, b: values(jax.tree.map(rounded, p), {**b, "x": rounded(b["x"])})
    assert difference(lambda p, b: low(p, b).mean(), state=state) is None
    assert difference(lambda p, b: low(p, b).mean(dtype=low(p, b).dtype), state=state) is None
    assert difference(lambda p, b: jnp.average(low(p, b), weights=b["m"]), state=state) is not None


def test_an_error_smaller_than_bfloat16_rounds_is_noticed():
    batch = {**BATCH, "m": np.float32(1 - 0.03 * (np.arange(N) % 2))}
    state = ts.setup(ts.rules.sgd(0.0), PARAMS, precision="bfloat16")
    weighted = lambda p, b: jnp.average(values(p, b), weights=b["m"])
    whole, merged, *_ = difference(weighted, state=state, batch=batch)
    assert 1e-4 < abs(whole - merged) / whole < 0.01
    assert difference(lambda p, b: ts.Loss.mean(values(p, b), b["m"]), state=state, batch=batch) is None


def test_integers_of_a_batch_are_no_keys():
    """Other ids would be other losses, and their difference is that of other random numbers."""
    fn = lambda p, b, ids: clip(p, b) * jnp.sum(p["u"][ids % 4])
    assert difference(fn, ids=np.arange(3, dtype=np.uint32)) is not None
    noisy = lambda p, b, key: jnp.mean(values(p, b) * jax.random.normal(key, b["t"].shape))
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        assert difference(noisy, state=STATE, key=key) is None


def test_a_choice_between_equals_is_no_difference():
    """Rounding decides here which of two experts a row gets."""

    def loss_fn(p, b):
        tie = (b["x"] @ p["w"]).sum() * 1e-9  # moves with the number of rows, as rounding does
        expert = jnp.where(jnp.sin(1e8 * (score(p, b) + tie)) > 0, 1.0, 100.0)
        return jnp.mean(expert)

    assert difference(loss_fn) is None


def test_gradients_of_rows_may_be_those_of_a_sum():
    total = lambda p, b: values(p, b).sum()
    assert difference(total, per_example=True) is None
    assert difference(total) is not None
    assert difference(clip, per_example=True) is not None


def test_rows_of_padding_are_measured():
    batch = jax.tree.map(lambda x: x[:7], BATCH)
    assert difference(lambda p, b, mask: jnp.sum(values(p, b) * mask) / len(mask), batch=batch, n=2)
    assert not difference(lambda p, b, mask: ts.Loss.mean(values(p, b), mask), batch=batch, n=2)


BIG = jax.tree.map(lambda x: np.concatenate([x] * 8), BATCH)  # 64 rows: two micro-batches of 32


def of_rows(*sizes):
    def loss_fn(p, b):
        assert len(b["t"]) in sizes
        return jnp.average(values(p, b), weights=b["m"])

    return loss_fn


def test_a_loss_for_some_sizes_only_is_measured_at_its_own():
    batch = {**BIG, "m": np.float32(RNG.random(64) > 0.4)}
    for n, sizes, is_noticed in ((2, (32, 64), True), (2, (32,), False), (2, (8, 32, 64), True)):
        step = ts.train_step(of_rows(*sizes), accumulate=n)
        texts = warnings_of(lambda step=step: step(ts.setup(ts.rules.sgd(0.1), PARAMS), batch))
        assert len(texts) == is_noticed, sizes


@pytest.mark.medium
def test_an_image_model_with_dropout_and_its_batch_norm():
    class Net(nnx.Module):
        def __init__(self, norm, rngs):
            self.conv, self.norm = nnx.Conv(1, 4, (3, 3), rngs=rngs), norm
            self.drop, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))
            return self.head(self.drop(x.reshape(len(x), -1)))

    rngs, batch = nnx.Rngs(0), {"image": np.ones((4, 4, 4, 1), np.float32), "y": np.arange(4) % 3}
    for norm, carries in (
        (nnx.GroupNorm(4, num_groups=2, rngs=rngs), False),
        (nnx.BatchNorm(4, rngs=rngs), True),
        (nnx.BatchNorm(4, rngs=rngs), False),
    ):
        model = ts.models.nnx(Net(norm, rngs))

        def loss_fn(params, batch, model_state, train, key=None, model=model, carries=carries):
            given = dict(model_state=model_state, train=train, key=key)
            logits, after = model.apply(params, batch["image"], **given)
            losses = ts.losses.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return ts.Loss.mean(losses, model_state=after if carries else None)

        state = ts.setup(ts.rules.sgd(0.1), model.params, model_state=model.model_state, key=0)
        step = ts.train_step(loss_fn, accumulate=2)
        if isinstance(norm, nnx.BatchNorm) and not carries:
            with pytest.raises(LossError, match="model_state at the result of loss_fn: got none"):
                step.trace(state, batch)
        else:
            step.trace(state, batch)


@pytest.mark.medium
def test_the_warning_says_what_where_and_what_to_do_and_comes_once():
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    step = ts.train_step(clip, accumulate=4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            state, _ = step(state, BATCH)
    (text,) = [str(warning.message) for warning in seen]
    assert seen[0].filename == __file__  # not a line of JAX's
    whole, parts = clip(PARAMS, BATCH), [clip(PARAMS, jax.tree.map(lambda x, i=i: x[i::4], BATCH)) for i in range(4)]
    assert text.startswith(
        f"loss at clip(p, b): got {whole:.6g} for 8 rows and {sum(parts) / 4:.6g} for these in 4 "
        "micro-batches, expected a mean over rows under accumulate=4. Return a mean over rows; "
    )
    assert "ts.whole_batch(embed, loss)" in text
    for options in ({}, {"accumulate": 4, "check_rows": False}):
        assert not warnings_of(lambda options=options: ts.train_step(clip, donate=False, **options)(state, BATCH))


@pytest.mark.medium
def test_the_warning_names_the_option_and_the_loss():
    total = lambda p, b: values(p, b).sum()
    (text,) = warnings_of(lambda: ts.value_and_grad(total, accumulate=2)(STATE, BATCH))
    assert "for a sum ts.Loss(total, weight)" in text
    (text,) = warnings_of(lambda: ts.value_and_grad(clip, per_example=True)(STATE, BATCH))
    assert "expected a mean over rows under per_example." in text
    centered = lambda p, b: b["x"] @ p["w"] - jnp.mean(b["x"] @ p["w"], 0, keepdims=True)
    loss_fn = ts.whole_batch(centered, lambda z, b: jnp.mean((z - 1) ** 2))
    (text,) = warnings_of(lambda: ts.value_and_grad(loss_fn, accumulate=2)(STATE, BATCH))
    assert text.startswith("loss at whole_batch")


CALLS = {
    "step": lambda fn: ts.train_step(fn, accumulate=2)(ts.setup(ts.rules.sgd(0.1), PARAMS), BATCH),
    "gradient": lambda fn: ts.value_and_grad(fn, accumulate=2)(STATE, BATCH),
    "gradient inside jit": lambda fn: jax.jit(ts.value_and_grad(fn, accumulate=2))(STATE, BATCH),
    "step inside jit": lambda fn: jax.jit(ts.train_step(fn, accumulate=2))(STATE, BATCH),
    "fit": lambda fn: ts.fit(
        ts.train_step(fn, accumulate=2), ts.setup(ts.rules.sgd(0.1), PARAMS), [BATCH] * 3, steps=3, progress=False
    ),
    "run_steps": lambda fn: ts.loop.run_steps(
        ts.train_step(fn, accumulate=2),
        ts.setup(ts.rules.sgd(0.1), PARAMS),
        jax.tree.map(lambda x: np.stack([x] * 2), BATCH),
    ),
    "population": lambda fn: ts.train_step(fn, accumulate=2)(
        ts.population(lambda key, rate: ts.setup(ts.rules.sgd(rate), PARAMS), 2, key=0, rate=jnp.array([0.1, 0.2])),
        BATCH,
    ),
    "members with batches of their own": lambda fn: ts.train_step(fn, accumulate=2)(
        ts.population(lambda key: ts.setup(ts.rules.sgd(0.1), PARAMS), 2),
        ts.populations.each(jax.tree.map(lambda x: np.stack([x] * 2), BATCH)),
    ),
    "explicit mesh": lambda fn: ts.train_step(fn, accumulate=2)(
        ts.shard(ts.setup(ts.rules.sgd(0.1), PARAMS), ts.mesh(devices=jax.devices()[:2], explicit=True)), BATCH
    ),
    "mesh": lambda fn: ts.train_step(fn, accumulate=2)(
        ts.shard(ts.setup(ts.rules.sgd(0.1), PARAMS), ts.mesh(devices=jax.devices()[:2])), BATCH
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=[] if how in ("step", "fit", "gradient inside jit") else pytest.mark.medium)
        for how in CALLS
    ],
)
def test_every_way_to_train_looks_once(how):
    if how == "explicit mesh" and jax.__version_info__ >= (0, 11):
        pytest.skip("since 0.11 jax has no gradient of an index over explicit axes without out_sharding=")
    masked = lambda p, b: jnp.sum(values(p, b) * b["m"]) / jnp.maximum(jnp.sum(b["m"]), 1)
    (text,) = warnings_of(lambda: CALLS[how](masked))
    assert "expected a mean over rows under accumulate=2" in text
    assert ("if your masks are ones alone, a mean under them is right" in text) == ("inside jit" in how)
    assert not warnings_of(lambda: CALLS[how](lambda p, b: ts.Loss.mean(values(p, b), b["m"])))


def test_the_probe_raises_nothing():
    """What is wrong with the arguments is said by the step, and what only the probe does, is not."""

    def loss_fn(p, b):
        assert len(b["t"]) == 4
        return values(p, b).mean()

    assert not warnings_of(lambda: ts.train_step(loss_fn, accumulate=2)(ts.setup(ts.rules.sgd(0.1), PARAMS), BATCH))
    with pytest.raises(LossError, match="got 8 rows, expected a multiple of accumulate=3"):
        ts.train_step(clip, accumulate=3)(STATE, BATCH)
    outer = lambda c: ts.value_and_grad(lambda p, b: values(p, b).mean() * c, accumulate=2)(STATE, BATCH)[0]
    assert not warnings_of(lambda: jax.jit(outer)(2.0))  # the loss refers to a traced value


def test_callbacks_of_a_loss_run_in_steps_alone():
    calls = []

    def loss_fn(params, x):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.mean((x @ params["w"]) ** 2)

    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)})
    ts.train_step(loss_fn, accumulate=2)(state, BATCH["x"])
    jax.effects_barrier()
    assert len(calls) == 2


def test_other_rows_as_an_extra_argument_are_no_mixing():
    """What the warning advises: embeddings of the whole batch, computed before."""

    def fn(p, b, others):
        logits = unit(b["x"] @ p["w"]) @ others.T
        return ts.Loss.mean(jax.nn.logsumexp(logits, axis=1) - jnp.sum(logits * b["hot"], 1))

    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    batch = {"x": BATCH["x"], "hot": np.eye(N, dtype=np.float32)}
    others = unit(BATCH["z"] @ PARAMS["v"])
    _, grads = ts.value_and_grad(fn, accumulate=4)(state, batch, others=others)
    _, expected = ts.value_and_grad(fn)(state, batch, others=others)
    assert_trees_close(grads, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("options", [{"remat": True}, {"on_nonfinite": "drop"}])
@pytest.mark.parametrize("setting", [{}, {"precision": "bfloat16"}, {"loss_scale": 4.0}])
def test_it_looks_through_whatever_is_around_the_loss(options, setting):
    state = ts.setup(ts.rules.sgd(0.1), PARAMS, **setting)
    with pytest.warns(UserWarning, match="expected a mean over rows"):
        state, _ = ts.train_step(clip, accumulate=2, **options)(state, BATCH)
    masked = lambda p, b, mask: jnp.sum(values(p, b) * mask) / jnp.sum(mask)
    ts.train_step(masked, accumulate=2, **options)(state, BATCH, mask=jnp.asarray(BATCH["m"]))


# ------------------------------------------------------------- values: the same, or a warning


def class_weighted(p, b):
    counts = jnp.zeros(3).at[b["y"]].add(1)
    weights = (1 / jnp.maximum(counts, 1))[b["y"]]
    return jnp.sum(weights * values(p, b)) / jnp.sum(weights)


def mixed_up(p, b):
    x = 0.7 * b["x"] + 0.3 * b["x"][::-1]
    losses = lambda y: optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ p["w"]), y)
    return jnp.mean(0.7 * losses(b["y"]) + 0.3 * losses(b["y"][::-1]))


def routed(p, b):
    odds = jax.nn.softmax(b["x"] @ p["v"])
    return jnp.mean(score(p, b) ** 2) + 4 * jnp.sum(odds.mean(0) * jnp.mean(odds > 0.25, 0))


def squared_error_over_variance(p, b):
    t = b["t"]
    return jnp.sum((score(p, b) - t) ** 2) / jnp.sum((t - t.mean()) ** 2)


SILENT = {
    # a mean as a scalar whose weight is not the number of rows
    "mask of the batch": lambda p, b: jnp.sum(values(p, b) * b["m"]) / jnp.sum(b["m"]),
    "weights in the sum": lambda p, b: jnp.sum(values(p, b) * (b["m"] / jnp.sum(b["m"]))),
    "nanmean": lambda p, b: jnp.nanmean(jnp.where(b["m"] > 0, values(p, b), jnp.nan)),
    "where=": lambda p, b: jnp.mean(values(p, b), where=b["m"] > 0),
    "class weights of the batch": class_weighted,
    "a number of rows in the code": lambda p, b: jnp.sum(values(p, b)) / N,
    "mixup within the batch": mixed_up,
    # rows that are compared with other rows
    "pairs by strides": lambda p, b: jax.nn.softplus(score(p, b)[1::2] - score(p, b)[::2]).mean(),
    "pairs by reshape": lambda p, b: jax.nn.softplus(jnp.diff(score(p, b).reshape(-1, 2)).ravel()).mean(),
    "differences of neighbors": lambda p, b: jnp.mean(jnp.diff(score(p, b)) ** 2),
    # bent functions of means
    "abs": lambda p, b: jnp.abs(score(p, b).mean() - b["t"].mean()),
    "maximum": lambda p, b: jnp.maximum(score(p, b).mean(), b["t"].mean()),
    "relu": lambda p, b: jax.nn.relu(score(p, b).mean() - b["t"].mean()),
    "times a stopped mean": lambda p, b: values(p, b).mean() * jax.lax.stop_gradient(score(p, b).mean()),
    "a product of means": lambda p, b: values(p, b).mean() * score(p, b).mean(),
    "the loads of a router": routed,
    "one minus R²": squared_error_over_variance,
}


QUICK = {"mask of the batch", "pairs by strides", "abs"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.medium) for name in SILENT]
)
def test_under_accumulate_a_loss_is_the_same_or_there_is_a_warning(name):
    batch = jax.tree.map(lambda x: np.concatenate([x, -x if x.dtype.kind == "f" else x]), BATCH)
    batch["m"] = np.array([1] * 5 + [0, 1, 0] * 3 + [0, 1], np.float32)
    expected = float(SILENT[name](PARAMS, batch))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = ts.setup(ts.rules.sgd(0.0), PARAMS)
        loss, _ = ts.value_and_grad(SILENT[name], accumulate=4)(state, batch)
    assert caught or abs(float(loss.compute()) / expected - 1) < 1e-5
