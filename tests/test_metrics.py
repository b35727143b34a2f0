"""Metrics: merged over unequal batches they are scikit-learn's on all rows, alone and inside of a step."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from sklearn import metrics as sk
from tests.helpers import assert_trees_close, assert_trees_equal, need
from tsunax import metrics
from tsunax.errors import LossError

CLASSES, CUTS = 4, (1, 7, 24)  # rows of the batches; f32 sums of so few are good to 1e-6
ROWS = sum(CUTS)
AVERAGES = ("macro", "micro", "weighted", None)


def make_rows(seed, weighting="mask"):
    """Rows as NumPy arrays; what has weight 0 is garbage."""
    rng = np.random.default_rng(seed)
    where = {
        "none": np.ones(ROWS),
        "mask": (rng.random(ROWS) < 0.6) * 1.0,
        "weights": rng.random(ROWS) * (rng.random(ROWS) < 0.8),
    }[weighting]
    where[-1] = 1.0
    rows = {
        "scores": rng.normal(size=(ROWS, CLASSES)) * 2,
        "labels": rng.integers(0, CLASSES - 1 if seed % 2 else CLASSES, ROWS),  # a class may be missing
        "binary": rng.integers(0, 2, ROWS),
        "guess": rng.integers(0, 2, ROWS),
        "y": rng.normal(size=(ROWS, 2)) * [1.0, 3.0] + [5.0, -2.0],
        "where": where,
    }
    rows["scores"][:, -1] -= 20 * (seed % 2)  # and not be predicted either
    rows["yhat"] = rows["y"] + rng.normal(size=(ROWS, 2))
    for name in ("scores", "yhat", "y"):
        rows[name][where == 0] = np.nan
    rows["labels"][where == 0] = -1
    return {k: v.astype(np.int32 if v.dtype.kind == "i" else np.float32) for k, v in rows.items()}


def ours(r):
    """Every metric on some rows."""
    w = r["where"]
    scored, binary = (r["scores"], r["labels"], w), (r["guess"], r["binary"], w)
    by_class = {
        f"{kind.__name__} {average}": kind.of(*scored, average=average)
        for kind in (metrics.Precision, metrics.Recall, metrics.F1)
        for average in AVERAGES
    }
    return by_class | {
        "mean": metrics.Mean.of(r["y"], w),
        "accuracy": metrics.Accuracy.of(*scored),
        "accuracy of ids": metrics.Accuracy.of(*binary),
        "top 2": metrics.TopK.of(*scored, k=2),
        "perplexity": metrics.Perplexity.of(*scored),
        "confusion": metrics.ConfusionMatrix.of(*scored),
        "confusion of ids": metrics.ConfusionMatrix.of(*binary, classes=2),
        "Precision binary": metrics.Precision.of(*binary),
        "Recall binary": metrics.Recall.of(*binary),
        "F1 binary": metrics.F1.of(*binary),
        "mse": metrics.MeanSquaredError.of(r["yhat"], r["y"], w),
        "r2": metrics.R2.of(r["yhat"], r["y"], w),
    }


EMPTY = lambda: (
    {
        f"{kind.__name__} {average}": kind.empty(CLASSES, average=average)
        for kind in (metrics.Precision, metrics.Recall, metrics.F1)
        for average in AVERAGES
    }
    | {f"{kind.__name__} binary": kind.empty() for kind in (metrics.Precision, metrics.Recall, metrics.F1)}
    | {
        "mean": metrics.Mean.empty(),
        "accuracy": metrics.Accuracy.empty(),
        "accuracy of ids": metrics.Accuracy.empty(),
        "top 2": metrics.TopK.empty(k=2),
        "perplexity": metrics.Perplexity.empty(),
        "confusion": metrics.ConfusionMatrix.empty(CLASSES),
        "confusion of ids": metrics.ConfusionMatrix.empty(2),
        "mse": metrics.MeanSquaredError.empty(),
        "r2": metrics.R2.empty((2,)),
    }
)


def reference(r):
    """The same by scikit-learn in float64, on the rows that count."""
    on = r["where"] != 0
    r = {name: x[on].astype(np.float64 if x.dtype.kind == "f" else int) for name, x in r.items()}
    w, labels, ids = r["where"], r["labels"], r["scores"].argmax(-1)
    weigh = {"sample_weight": w}
    every = np.arange(CLASSES)
    odds = np.exp(r["scores"]) / np.exp(r["scores"]).sum(-1, keepdims=True)
    out = {
        "mean": np.average(r["y"].mean(-1), weights=w),
        "accuracy": sk.accuracy_score(labels, ids, **weigh),
        "accuracy of ids": sk.accuracy_score(r["binary"], r["guess"], **weigh),
        "top 2": sk.top_k_accuracy_score(labels, r["scores"], k=2, labels=every, **weigh),
        "perplexity": np.exp(sk.log_loss(labels, odds, labels=every, **weigh)),
        "confusion": sk.confusion_matrix(labels, ids, labels=every, **weigh),
        "confusion of ids": sk.confusion_matrix(r["binary"], r["guess"], labels=[0, 1], **weigh),
        "mse": sk.mean_squared_error(r["y"], r["yhat"], **weigh),
        "r2": sk.r2_score(r["y"], r["yhat"], force_finite=False, **weigh),
    }
    for average in AVERAGES:
        which = {"labels": every} if average is None else {}
        found = sk.precision_recall_fscore_support(labels, ids, average=average, zero_division=0, **which, **weigh)
        out |= {f"{n} {average}": x for n, x in zip(("Precision", "Recall", "F1"), found, strict=False)}
    found = sk.precision_recall_fscore_support(r["binary"], r["guess"], average="binary", zero_division=0, **weigh)
    return out | {f"{n} binary": x for n, x in zip(("Precision", "Recall", "F1"), found, strict=False)}


of = jax.jit(ours)
merge = jax.jit(lambda a, b: {name: a[name].merge(b[name]) for name in a})
compute = jax.jit(lambda m: {name: x.compute() for name, x in m.items()})


def cut(rows):
    ends = [0, *itertools.accumulate(CUTS)]
    return [{k: v[a:b] for k, v in rows.items()} for a, b in itertools.pairwise(ends)]


@pytest.mark.medium
@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["none", "mask", "weights"]), st.permutations(range(3)), st.booleans()
)
def test_merged_over_unequal_batches_is_scikit_learn_on_all_rows(seed, weighting, order, left_first):
    rows = make_rows(seed, weighting)
    a, b, c = (of(cut(rows)[i]) for i in order)
    merged = merge(merge(a, b), c) if left_first else merge(a, merge(b, c))
    expected = reference(rows)
    if rows["where"].astype(bool).sum() == 1:
        del expected["r2"]  # of one row: not defined
    found = {name: x for name, x in compute(merged).items() if name in expected}
    assert_trees_close(found, expected, rtol=2e-5, atol=2e-5)


def test_the_battery_has_every_metric():
    public = {name for name in metrics.__all__ if name != "Loss"}
    assert {type(m).__name__ for m in EMPTY().values()} == public


@pytest.mark.medium
def test_empty_is_neutral():
    m, empty = of(cut(make_rows(3))[2]), EMPTY()
    for merged in (merge(empty, m), merge(m, empty)):
        assert_trees_equal(merged, m)


@pytest.mark.medium
def test_a_metric_is_a_carry_of_scan():
    rows = make_rows(4)
    stacked = {k: v[: ROWS // 4 * 4].reshape(4, ROWS // 4, *v.shape[1:]) for k, v in rows.items()}
    carried, _ = jax.jit(lambda xs: jax.lax.scan(lambda m, r: (merge(m, ours(r)), None), EMPTY(), xs))(stacked)
    expected = reference({k: v[: ROWS // 4 * 4] for k, v in rows.items()})
    assert_trees_close(compute(carried), expected, rtol=2e-5, atol=2e-5)


# ----------------------------------------------------------------------------------------------- inside of a step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extent:
    """A user's own: three verbs and nothing of tsunax."""

    low: jax.Array
    high: jax.Array

    @classmethod
    def empty(cls):
        return cls(jnp.float32(np.inf), jnp.float32(-np.inf))

    def merge(self, other):
        return Extent(jnp.minimum(self.low, other.low), jnp.maximum(self.high, other.high))

    def compute(self):
        return self.high - self.low


def loss_fn(params, batch, mask):
    scores = batch["x"] @ params["w"]
    values = -jnp.take_along_axis(jax.nn.log_softmax(scores), batch["y"][:, None], 1)[:, 0]
    found = {
        "acc": metrics.Accuracy.of(scores, batch["y"], mask),
        "f1": metrics.F1.of(scores, batch["y"], mask, average="macro"),
        "ppl": metrics.Perplexity(metrics.Mean.of(values, mask)),
        "extent": Extent(jnp.min(scores), jnp.max(scores)),
        "values": values,
    }
    return ts.Loss.mean(values, mask, metrics=found)


def step_rows(seed=0):
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=(3, CLASSES)).astype(np.float32)}
    x = rng.normal(size=(ROWS, 3)).astype(np.float32)
    y = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    return params, {"x": x, "y": y}, (rng.random(ROWS) < 0.7).astype(np.float32)


def step_reference(params, batch, mask):
    scores = batch["x"].astype(np.float64) @ params["w"].astype(np.float64)
    odds = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    loss = sk.log_loss(batch["y"], odds, labels=np.arange(CLASSES), sample_weight=mask)
    on = mask != 0
    return loss, {
        "acc": sk.accuracy_score(batch["y"], scores.argmax(-1), sample_weight=mask),
        "f1": sk.f1_score(batch["y"][on], scores.argmax(-1)[on], average="macro"),
        "ppl": np.exp(loss),
        "extent": np.ptp(scores),
        "values": loss,
    }


@pytest.mark.medium
def test_through_the_steps_it_is_the_metric_of_all_rows():
    params, batch, mask = step_rows()
    expected, found = step_reference(params, batch, mask)
    state = ts.setup(ts.rules.sgd(0.1), params)

    evaluate, merged = ts.eval_step(loss_fn), None
    for part in cut({**batch, "mask": mask}):
        weights = part.pop("mask")
        loss = evaluate(state, part, mask=weights)
        merged = loss if merged is None else merged.merge(loss)
    assert_trees_close(merged.compute(), expected, rtol=1e-5, atol=1e-6)
    assert_trees_close({name: m.compute() for name, m in merged.metrics.items()}, found, rtol=1e-5, atol=1e-5)

    _, info = ts.train_step(loss_fn)(state, batch, mask=mask)
    assert_trees_close(info.metrics, found, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_metrics_have_no_part_in_the_gradient():
    params, batch, mask = step_rows()
    plain = lambda params, batch, mask: dataclasses.replace(loss_fn(params, batch, mask), metrics={})
    state = ts.setup(ts.rules.sgd(0.1), params)
    with_metrics, without = (ts.value_and_grad(f)(state, batch, mask=mask)[1] for f in (loss_fn, plain))
    assert_trees_close(with_metrics, without, rtol=1e-6, atol=1e-7)


PLUGS = {  # (its metric of scores and labels, the same by scikit-learn)
    "clu.metrics": (
        lambda clu, scores, y: clu.Accuracy.from_model_output(logits=scores, labels=y),
        lambda y, scores: sk.accuracy_score(y, scores.argmax(-1)),
    ),
    "metrax": (
        lambda metrax, scores, y: metrax.MSE.from_model_output(predictions=scores[:, 0], labels=y),
        lambda y, scores: sk.mean_squared_error(y, scores[:, 0]),
    ),
}


@pytest.mark.parametrize("name", PLUGS)
def test_metrics_of_other_libraries_plug_in(name):
    library, (metric, score) = need(name), PLUGS[name]

    def loss_fn(params, batch):
        scores = batch["x"] @ params["w"]
        found = {"acc": metric(library, scores, batch["y"])}
        return ts.Loss.mean(-jax.nn.log_softmax(scores)[:, 0], metrics=found)

    params, batch, _ = step_rows()
    expected = {"acc": score(batch["y"], batch["x"] @ params["w"])}
    state, evaluate = ts.setup(ts.rules.sgd(0.1), params), ts.eval_step(loss_fn)
    a, b, c = (evaluate(state, part) for part in cut(batch))
    assert_trees_close({"acc": a.merge(b).merge(c).metrics["acc"].compute()}, expected, rtol=1e-5, atol=1e-6)
    _, info = ts.train_step(loss_fn)(state, batch)
    assert_trees_close(info.metrics, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------- rows without weight in the loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """A metric of a user that stores a mean: of no rows it is NaN, and it says nothing of its weight."""

    value: jax.Array
    rows: jax.Array

    def merge(self, other):
        rows = self.rows + other.rows
        return Stored((self.value * self.rows + other.value * other.rows) / rows, rows)

    def compute(self):
        return self.value


def partly_labeled(params, batch, mask):
    """Few rows have a label; metrics count all rows, or the rows of another mask."""
    values = jnp.sum((batch["x"] @ params["w"]) ** 2, -1)
    lengths, labels = batch["x"][:, 0], jnp.zeros(len(values), jnp.int32)
    labeled, seen = mask * batch["label"], mask * batch["seen"]
    found = {
        "mean": metrics.Mean.of(lengths, mask),
        "seen": metrics.Mean.of(lengths, seen),
        "top": metrics.Accuracy.of(batch["x"], labels, mask),
        "r2": metrics.R2.of(batch["x"][:, 1], lengths, mask),
        "pairs": metrics.ConfusionMatrix.of(batch["x"], labels, mask),
        "number": jnp.sum(lengths * labeled) / jnp.sum(labeled),
        "extent": Extent(jnp.min(lengths), jnp.max(lengths)),
        "stored": Stored(jnp.sum(lengths * labeled) / jnp.sum(labeled), jnp.sum(labeled)),
    }
    return ts.Loss.mean(values, labeled, metrics=found)


def labeled_rows(rows=12):
    x = np.random.default_rng(3).normal(size=(rows, CLASSES)).astype(np.float32)
    numbers = np.arange(rows)
    label, seen = (numbers % 4 == 0), (numbers % 4 == 1)
    return {"x": x, "label": label.astype(np.float32), "seen": seen.astype(np.float32)}


def expected_metrics(batch):
    x, label, seen = batch["x"].astype(np.float64), batch["label"] > 0, batch["seen"] > 0
    top = x.argmax(-1)
    return {
        "mean": x[:, 0].mean(),
        "seen": x[seen, 0].mean(),
        "top": np.mean(top == 0),
        "r2": sk.r2_score(x[:, 0], x[:, 1]),
        "pairs": sk.confusion_matrix(0 * top, top, labels=np.arange(CLASSES)),
        "number": x[label, 0].mean(),
        "extent": np.ptp(x[:, 0]),
        "stored": x[label, 0].mean(),
    }


def over_four_devices(step, batch):
    """The step in a shard_map; device i has the rows i, i + 4, ..."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    batch = jax.tree.map(lambda x: np.concatenate([x[i::4] for i in range(4)]), batch)
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    return lambda state: jax.jit(jax.shard_map(step, mesh=mesh, **specs))(state, batch)


SPREAD = {"axis_name": "data"}
CUT_OPTIONS = {
    "whole": {},
    "micro-batches": {"accumulate": 4},
    "padded": {"accumulate": 5},
    "rows": {"per_example": lambda g: g},
    "rows, padded": {"per_example": lambda g: g, "accumulate": 5},
    "stacked rows": {"per_example": True, "accumulate": 5},
    "devices": SPREAD,
    "devices, micro-batches": SPREAD | {"accumulate": 3},
    "devices, padded": SPREAD | {"accumulate": 2},
}


@pytest.mark.parametrize("name", CUT_OPTIONS)
def test_a_metric_counts_its_own_rows_however_the_batch_is_cut(name):
    """Also in micro-batches, rows and devices without weight in the loss: only each fourth row has a label."""
    options, batch = CUT_OPTIONS[name], labeled_rows()
    state = ts.setup(ts.rules.sgd(0.1), {"w": np.full((CLASSES, 3), 0.3, np.float32)})
    f = ts.value_and_grad(partly_labeled, check_rows=False, **options)
    call = over_four_devices(f, batch) if "axis_name" in options else lambda state: jax.jit(f)(state, batch)
    loss, _ = call(state)
    computed = {name: m.compute() for name, m in loss.metrics.items()}
    assert_trees_close(computed, expected_metrics(batch), rtol=1e-5, atol=1e-6)
    value = np.sum((batch["x"][::4] @ np.full((CLASSES, 3), 0.3)) ** 2, -1).mean()
    np.testing.assert_allclose([loss.compute(), loss.weight], [value, 3], rtol=1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Largest:
    """A metric that is no sum, and does not say its weight: without rows it is -inf."""

    value: jax.Array

    def merge(self, other):
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value


@pytest.mark.parametrize("devices", [False, True])
@pytest.mark.parametrize("of_row", [False, lambda grads: grads])
@pytest.mark.parametrize("labels", [[1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0], [0] * 8])
def test_a_largest_number_is_of_the_rows_that_count_however_the_batch_is_cut(labels, of_row, devices):
    def loss_fn(params, batch):
        x, label = batch
        found = {"largest": Largest(jnp.max(jnp.where(label > 0, -1 - x, -jnp.inf)))}
        return ts.Loss.mean(x * params["w"], label, metrics=found)

    batch = np.arange(2.0, 10.0, dtype=np.float32), np.array(labels, np.float32)
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.float32(1.0)})
    options = SPREAD if devices else {"accumulate": 2}
    f = ts.value_and_grad(loss_fn, per_example=of_row, check_rows=False, **options)
    call = over_four_devices(f, batch) if devices else lambda state: jax.jit(f)(state, batch)
    expected = -3.0 if any(labels) else -np.inf
    assert float(call(state)[0].metrics["largest"].compute()) == expected


@pytest.mark.parametrize("name", ["micro-batches", "rows", "devices"])
def test_a_nan_of_rows_without_weight_in_the_loss_is_a_nan_of_the_metric_that_counts_them(name):
    batch, options = labeled_rows(), CUT_OPTIONS[name]
    batch["x"][1] = np.nan

    def loss_fn(params, batch):
        x, label = batch["x"], batch["label"]
        found = {"all": metrics.Mean.of(x[:, 0]), "labeled": metrics.Mean.of(x[:, 0], label)}
        found["pairs"] = metrics.ConfusionMatrix.of(x, jnp.zeros(len(x), jnp.int32))
        return ts.Loss.mean(jnp.sum(jnp.where(label > 0, x.T, 0).T @ params["w"], -1), label, metrics=found)

    state = ts.setup(ts.rules.sgd(0.1), {"w": np.full((CLASSES, 3), 0.3, np.float32)})
    f = ts.value_and_grad(loss_fn, check_rows=False, **options)
    call = over_four_devices(f, batch) if "axis_name" in options else lambda state: jax.jit(f)(state, batch)
    found = {name: m.compute() for name, m in call(state)[0].metrics.items()}
    assert np.isnan(found["all"]) and np.all(np.isnan(found["pairs"]))
    np.testing.assert_allclose(found["labeled"], batch["x"][::4, 0].mean(), rtol=1e-5)


@pytest.mark.parametrize("name", ["padded", "rows, padded", "stacked rows", "devices, padded"])
def test_padding_adds_nothing_to_a_metric_without_a_mask(name):
    """Three rows have no weight in the mask, or are padding: four of five micro-batches, or two of four devices."""
    options, batch = CUT_OPTIONS[name], labeled_rows(2)
    mask = np.ones(2, np.float32)
    if "axis_name" in options:
        batch, mask = labeled_rows(8), (np.arange(8) % 4 < 2).astype(np.float32)
    keep = mask > 0
    batch["x"][~keep] = np.nan

    def loss_fn(params, batch, mask):
        first = batch["x"][:, 0]
        found = {"plain": metrics.Mean.of(first), "divided": metrics.Mean.of(first * jnp.sum(mask) / jnp.sum(mask))}
        found["extent"] = Extent(jnp.min(first), jnp.max(first))
        return ts.Loss.mean(jnp.sum(batch["x"] @ params["w"], -1), mask, metrics=found)

    state = ts.setup(ts.rules.sgd(0.1), {"w": np.full((CLASSES, 3), 0.3, np.float32)})
    f = ts.value_and_grad(loss_fn, check_rows=False, **options)
    given = {**batch, "mask": mask}
    masked = lambda state, given: f(state, {k: x for k, x in given.items() if k != "mask"}, mask=given["mask"])
    call = over_four_devices(masked, given) if "axis_name" in options else lambda state: jax.jit(masked)(state, given)
    found = {name: m.compute() for name, m in call(state)[0].metrics.items()}
    first = batch["x"][keep, 0]
    expected = {"plain": first.mean(), "divided": first.mean(), "extent": np.ptp(first)}
    assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, SPREAD])
def test_a_dropped_micro_batch_adds_nothing_to_metrics(options):
    """Also if a device drops all of its micro-batches; micro-batches without weight are not dropped."""
    batch, accumulate = labeled_rows(16), 2 if options else 4
    # Micro-batches 0, or both micro-batches of device 0, and one of device 1.
    bad = np.isin(np.arange(16), [0, 4, 1]) if options else np.arange(16) % 4 == 0
    batch["label"] = (bad | (np.arange(16) % 4 == 3)).astype(np.float32)
    batch["x"][bad] = np.inf

    def loss_fn(params, batch):
        found = {
            "mean": metrics.Mean.of(batch["x"][:, 1] * 0 + batch["n"]),
            "extent": Extent(*[jnp.max(batch["n"])] * 2),
        }
        return ts.Loss.mean(jnp.sum(batch["x"] @ params["w"], -1), batch["label"], metrics=found)

    batch["n"] = np.arange(16.0, dtype=np.float32)
    state = ts.setup(ts.rules.sgd(0.1), {"w": np.full((CLASSES, 3), 0.3, np.float32)})
    f = ts.value_and_grad(loss_fn, accumulate=accumulate, on_nonfinite="drop", check_rows=False, **options)
    call = over_four_devices(f, batch) if options else lambda state: jax.jit(f)(state, batch)
    loss, _ = call(state)
    dropped = np.zeros(16, bool)
    for i in np.flatnonzero(bad):
        # The rows of the micro-batch of row i: each fourth row, of a device each eighth row.
        dropped |= np.arange(16) % (8 if options else 4) == i % (8 if options else 4)
    np.testing.assert_allclose(loss.metrics["mean"].compute(), batch["n"][~dropped].mean(), rtol=1e-6)
    assert float(loss.dropped.sum()) > 0 and np.isfinite(loss.compute())


# ------------------------------------------------------------------------------------------------------- numbers


def test_r2_keeps_its_digits_where_the_mean_is_large():
    rng = np.random.default_rng(0)
    y = (rng.normal(size=(50, 20)) + 1e4).astype(np.float32)
    yhat = (y + rng.normal(size=y.shape) * 0.3).astype(np.float32)
    batches = jax.jit(jax.vmap(metrics.R2.of))(yhat, y)
    merge = jax.jit(metrics.R2.merge)
    total = metrics.R2.empty()
    for i in range(len(y)):
        total = merge(total, jax.tree.map(lambda x, i=i: x[i], batches))
    expected = sk.r2_score(y.ravel().astype(np.float64), yhat.ravel().astype(np.float64))
    assert abs(float(total.compute()) - expected) < 1e-5
    squares = np.sum(y * y, dtype=np.float32) - np.float32(y.size) * np.mean(y, dtype=np.float32) ** 2
    assert abs(squares / (y.size * np.var(y.astype(np.float64))) - 1) > 0.5  # what the plain formula makes of them


def test_r2_of_equal_targets_is_not_finite():
    ones = np.ones(3, np.float32)
    assert np.isneginf(metrics.R2.of(ones + 1, ones).compute()) and np.isnan(metrics.R2.of(ones, ones).compute())


def test_counts_are_exact_to_2_24_and_then_rounded():
    near = metrics.Mean(jnp.float32(0), jnp.float32(2**24 - 1))
    one, batch = metrics.Mean.of(np.ones(1)), metrics.Mean.of(np.ones(1023))
    assert float(near.merge(one).weight) == 2**24
    assert float(near.merge(one).merge(one).weight) == 2**24  # the limit that the module's docstring tells
    far = near.merge(batch).weight
    assert abs(float(far) - (2**24 + 1022)) <= 6e-8 * 2**24


def test_a_batch_of_more_than_2_24_elements_is_counted_without_loss():
    """Weights of 2¹² stand for so many rows each: one after the other, float32 sums stop at 2²⁴."""
    n, first = 5000, np.float32(2**24)
    ids = jnp.ones(n + 1, jnp.int32)
    weights = np.ones(n + 1, np.float32)
    weights[0] = first
    for where in (weights, weights[::-1]):
        counts = metrics.ConfusionMatrix.of(ids, ids, where, classes=2).compute()
        assert float(counts[1, 1]) == 2**24 + n
    matrix = metrics.Recall.of(ids, ids.at[1:].set(0), weights, classes=3, average=None)
    np.testing.assert_array_equal(matrix.counts.sum(1), [n, first, 0])


def test_equal_weights_of_many_rows_add_up():
    """One after the other, 400,000 float32 weights of 0.1 come to 40,021."""
    n = 400_000
    for classes, tolerance in ((2, 2e-7), (200, 2e-6)):
        count = lambda ids, where, classes=classes: metrics.ConfusionMatrix.of(ids, ids, where, classes=classes)
        counts = jax.jit(count)(jnp.ones(n, jnp.int32), jnp.full(n, 0.1)).counts
        assert abs(float(counts[1, 1]) / (n * float(np.float32(0.1))) - 1) < tolerance
        assert float(counts.sum()) == float(counts[1, 1])


@pytest.mark.medium
def test_26_million_elements_of_one_class_in_one_batch():
    n = 26_214_400
    ids = jnp.ones(n, jnp.int8)
    for where in (None, jnp.ones(n, bool)):
        assert float(metrics.ConfusionMatrix.of(ids, ids, where, classes=2).compute()[1, 1]) == n


@pytest.mark.medium
def test_low_precision_counts_and_sums_in_f32():
    n = 4096  # bfloat16 counts to 256
    y = jnp.asarray(np.arange(n) % 3 == 0, jnp.bfloat16)
    mse = metrics.MeanSquaredError.of(jnp.zeros(n, jnp.bfloat16), y)
    acc = metrics.Accuracy.of(jnp.stack([1 - y, y], -1), jnp.ones(n, jnp.int32))
    expected = np.float32(np.mean(np.arange(n) % 3 == 0))
    for m in (mse, acc, metrics.Mean.of(y)):
        assert {x.dtype for x in jax.tree.leaves(m)} == {np.dtype(np.float32)}
        assert m.compute() == expected


@pytest.mark.medium
def test_of_equal_scores_the_first_counts():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 3, (200, 5)).astype(np.float32)
    labels = rng.integers(0, 5, 200).astype(np.int32)
    assert_trees_close(
        metrics.Accuracy.of(scores, labels).compute(), np.mean(scores.argmax(-1) == labels), rtol=1e-6, atol=0
    )
    best = np.argsort(-scores, axis=-1, kind="stable")
    for k in (1, 3, 5):
        hits = (best[:, :k] == labels[:, None]).any(-1)
        assert_trees_close(metrics.TopK.of(scores, labels, k=k).compute(), hits.mean(), rtol=1e-6, atol=0)


@pytest.mark.medium
def test_masks_are_taken_from_the_left():
    scores = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    labels = scores.argmax(-1).astype(np.int32)
    labels[1:] = (labels[1:] + 1) % 5
    rows, tokens = np.array([1, 1, 0, 0], bool), np.zeros((4, 3))
    tokens[0], tokens[1, 0] = 1, 1
    for where, share, n in ((rows, 0.5, 6), (tokens, 0.75, 4), (None, 0.25, 12)):
        acc = metrics.Accuracy.of(scores, labels, where)
        assert (float(acc.compute()), float(acc.mean.weight)) == (share, n)
        assert float(metrics.F1.of(scores, labels, where, average="micro").compute()) == share
        assert float(jnp.sum(metrics.ConfusionMatrix.of(scores, labels, where).compute())) == n


def spoiled(name, value):
    """Rows that all count, one number of them spoiled."""
    rows = make_rows(0, "none")
    rows[name].reshape(-1)[3] = value
    return rows


@pytest.mark.parametrize("value", [-1, pytest.param(CLASSES, marks=pytest.mark.medium)])
def test_an_unknown_target_is_nan_and_not_a_guess(value):
    found, clean = compute(of(spoiled("labels", value))), compute(of(make_rows(0, "none")))
    others = {"mean", "accuracy of ids", "confusion of ids", "mse", "r2", *(k for k in found if "binary" in k)}
    for name, x in found.items():
        if name in others:
            assert_trees_equal(x, clean[name])
        else:
            assert np.isnan(x).all(), name


@pytest.mark.parametrize(("name", "touched"), [("scores", 16), ("y", 3), ("yhat", 2)])
def test_nan_that_counts_is_nan(name, touched):
    found = compute(of(spoiled(name, np.nan)))
    nan = [k for k, x in found.items() if np.isnan(x).any()]
    assert len(nan) == touched and all(np.isnan(found[k]).all() for k in nan)


def test_ids_beyond_the_classes_are_nan():
    for guess, target in (([0, 2], [0, 1]), ([0, 1], [0, 2]), ([0, -1], [0, 1])):
        guess, target = np.array(guess), np.array(target)
        assert np.isnan(metrics.ConfusionMatrix.of(guess, target, classes=2).compute()).all()
        assert np.isnan(metrics.F1.of(guess, target).compute())


def test_over_nothing():
    nan = {"mean", "accuracy", "accuracy of ids", "top 2", "perplexity", "mse", "r2"}
    for name, x in compute(EMPTY()).items():
        assert np.isnan(x).all() if name in nan else (x == 0).all(), name


# -------------------------------------------------------------------------------------------------------- errors

SCORES, IDS = np.zeros((6, 3), np.float32), np.zeros(6, np.int32)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        (lambda: metrics.Accuracy.of(SCORES, SCORES), ("class ids: got float32[6,3]", "argmax(-1)")),
        (lambda: metrics.Accuracy.of(SCORES[:, 0], IDS), ("class ids: got float32[6]", "logits > 0")),
        (lambda: metrics.Accuracy.of(SCORES[:5], IDS), ("predictions", "shape (5, 3)", "(6,)")),
        (lambda: metrics.Accuracy.of(SCORES[None], IDS), ("predictions", "(1, 6, 3)")),
        (lambda: metrics.Accuracy.of(SCORES, IDS, np.ones(5)), ("where: got float32[5]", "(6,)")),
        (lambda: metrics.Mean.of(SCORES, np.ones(5)), ("where: got float32[5]", "(6, 3)")),
        (lambda: metrics.F1.of(IDS, IDS, np.ones((6, 1)), average="micro"), ("where: got float32[6,1]",)),
        (lambda: metrics.TopK.of(SCORES, IDS), ("k at TopK.of(): got 5, expected 1 to 3",)),
        (lambda: metrics.TopK.of(SCORES, IDS, k=0), ("k", "got 0")),
        (lambda: metrics.TopK.of(IDS, IDS, k=1), ("k", "scores")),
        (lambda: metrics.ConfusionMatrix.of(IDS, IDS), ("classes: got None", "number of classes")),
        (lambda: metrics.ConfusionMatrix.of(SCORES, IDS, classes=4), ("predictions: got shape (6, 3)",)),
        (lambda: metrics.F1.of(SCORES, IDS), ("average at F1.of()", "'binary' (str) with 3 classes", "'macro'")),
        (lambda: metrics.Recall.of(SCORES, IDS, average="mean"), ("average at Recall.of()", "'mean'", "'weighted'")),
        (lambda: metrics.R2.of(SCORES, IDS), ("predictions: got float32[6,3]", "the shape of targets, (6,)")),
        (lambda: metrics.MeanSquaredError.of(SCORES + 1j, SCORES), ("got complex", "real numbers")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(wrong, texts):
    with pytest.raises(LossError) as caught:
        wrong()
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.medium
def test_under_x64_what_begins_empty_keeps_its_dtypes():
    """As the carry of a scan must."""
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable_x64(True):
        for kind in (metrics.Mean, metrics.R2):
            for dtype in (np.float32, np.float64):
                x = np.arange(3, dtype=dtype)
                batch = kind.of(x) if kind is metrics.Mean else kind.of(x, 2 * x)
                once = kind.empty().merge(batch)
                dtypes = [[leaf.dtype for leaf in jax.tree.leaves(m)] for m in (kind.empty(), once, once.merge(batch))]
                assert dtypes[0] == dtypes[1] == dtypes[2], (kind, dtype)
