"""The page for those who come from other systems: what it names exists, and what they had is tested or answered there.

`test_pages_do_what_they_print` runs its blocks, and `test_docs.py` looks for the tests of each feature.
"""

import ast
import dataclasses
import functools
import operator
import re
import types
from pathlib import Path

import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import nnx
from tests.helpers import assert_trees_close, medium_if
from tests.test_callbacks import Run, drive
from tsunax import losses, rules, schedules

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "coming-from.md").read_text(encoding="utf-8")
NAMED = {
    **{name: getattr(ts, name) for name in ("averages", "losses", "metrics", "precision", "rules", "schedules")},
    "ts": ts,
    "state": ts.TrainState,
    "info": ts.StepInfo,
    "step": ts.program.TrainStep,
}

OF_FLUX = (
    "mse mae msle huber_loss crossentropy logitcrossentropy binarycrossentropy logitbinarycrossentropy kldivergence "
    "poisson_loss hinge_loss squared_hinge_loss dice_coeff_loss tversky_loss binary_focal_loss focal_loss "
    "siamese_contrastive_loss label_smoothing ctc_loss"
).split()


def table_rows(page: str) -> list[list[str]]:
    """The cells of every line of every table, without its head."""
    heads = ("| there", "| Flux |", "| ---")
    lines = [line for line in page.splitlines() if line.startswith("|") and not line.startswith(heads)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


def names_in(page: str) -> set[str]:
    """`ts.setup`, `rules.adam`, `state.step`: what the page says that we have. First cells are the others' names."""
    ours = "\n".join(
        line if not line.startswith("|") else re.split(r"(?<!\\)\|", line, maxsplit=2)[2] for line in page.splitlines()
    )
    found = re.findall(rf"(?<![\w./])((?:{'|'.join(NAMED)})(?:\.[A-Za-z_]\w*)+)", ours)
    return {name for name in found if not name.endswith(".md")}


def exists(name: str) -> bool:
    root, _, rest = name.partition(".")
    value = NAMED[root]
    if root in ("state", "info", "step"):  # attributes of instances; what these have is not ours to say
        first = rest.split(".")[0]
        return hasattr(value, first) or first in {f.name for f in dataclasses.fields(value)}
    try:
        operator.attrgetter(rest)(value)
    except AttributeError:
        return False
    public = getattr(value, "__all__", None)
    return public is None or rest.split(".")[0] in public


@functools.cache
def names_and_texts(file: str) -> tuple[set[str], set[str]]:
    """The names of the tests of a file, and its strings: among them the ids that it gives."""
    path = TESTS / f"{file}.py"
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) if path.exists() else []
    tests = {n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
    return tests, {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def problem_with(evidence: str) -> str | None:
    """What is wrong with the `test_x::test_y[id]` of a text, or with the first cell of a row of the page."""
    nodes = re.findall(r"(test_\w+)::(\w+)(?:\[([^\]]*)\])?", evidence)
    if not nodes:
        rows = [row for row in table_rows(PAGE) if evidence in row[0]]
        return None if len(rows) == 1 and rows[0][1] else f"{len(rows)} rows of the page for {evidence}"
    for file, test, param in nodes:
        tests, texts = names_and_texts(file)
        if test not in tests or (param and param not in texts):
            return f"no test {file}::{test}[{param}]"
    return None


def test_what_is_missing_is_found():
    assert problem_with("test_parity::test_optimisers_rule[Descent] test_parity::test_optimisers_rule[Ascent]")
    assert problem_with("test_parity::test_optimizers_rule")
    assert problem_with("test_nothing::test_optimisers_rule")
    assert problem_with("`Ascent(η)`")


def test_every_loss_of_flux_has_a_row():
    assert [name for name in OF_FLUX if not any(re.search(rf"`{name}[`(]", row[0]) for row in table_rows(PAGE))] == []


def test_every_name_exists():
    names = names_in(PAGE)
    assert len(names) > 70
    assert sorted(name for name in names if not exists(name)) == []


def test_wrong_names_are_found():
    page = "| `ts.gone` | `ts.fitt`, `rules.adam` | `losses.mse`, [rules.md](rules.md) |\n`state.steps`, `ts.Loss.main`"
    assert {n for n in names_in(page) if not exists(n)} == {"ts.fitt", "losses.mse", "state.steps", "ts.Loss.main"}


def test_every_row_has_its_three_cells_and_what_is_not_there_a_way():
    for row in table_rows(PAGE):
        assert len(row) == 3 and row[0] and row[1], row
        assert "not in tsunax" not in row[1] or re.match(r"not in tsunax: .{10}", row[1]), row


def test_links_lead_somewhere():
    pages = set(re.findall(r"\]\(([\w-]+\.md)\)", PAGE))
    assert pages and all((DOCS / page).is_file() for page in pages)
    sections = re.findall(r'"([A-Z][\w ]+)" in\s+\[[\w.-]+\]\(([\w-]+\.md)\)', PAGE)
    assert len(sections) >= 3
    for title, page in sections:
        assert f"\n## {title}" in (DOCS / page).read_text(encoding="utf-8"), f"{page} has no section {title!r}"


# ------------------------------------------------------------------- rows that compute something: both sides of each

RNG = np.random.default_rng(0)
PARAMS = {"enc": RNG.normal(size=(3, 2)).astype(np.float32), "head": RNG.normal(size=2).astype(np.float32)}
GRADS = [jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), PARAMS) for _ in range(4)]
X, Y = RNG.normal(size=(10, 3)).astype(np.float32), RNG.normal(size=10).astype(np.float32)
LOGITS, LABELS = RNG.normal(size=(6, 3)), np.array([0, 2, 1, 1, 0, 2])
LOG_P = LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True))
EPOCH = 64  # batches
MEAN = jax.tree.map(lambda *grads: np.mean(grads, axis=0), *GRADS)
FIRST = {"head": 1.0}  # a rate for the head, 0 for the rest


def squared(params, batch):
    x, y = batch
    return losses.squared_error(x @ params["enc"] @ params["head"], y)


def by_optax(tx, grads=GRADS):
    params, state = PARAMS, tx.init(PARAMS)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


def by_hand(step, grads=GRADS, params=PARAMS):
    """`p ← step(t, name, p, g)` in float64, with t = 0, 1, ..."""
    params = jax.tree.map(np.float64, params)
    for t, g in enumerate(grads):
        params = {name: step(t, name, p, np.float64(g[name])) for name, p in params.items()}
    return params


def ours(rule, grads=GRADS, **options):
    state = ts.setup(rule, PARAMS, **options)
    for g in grads:
        state, _ = ts.update(state, g)
    return state


def adamw(decay, rate=1e-3, decayed=("enc", "head")):
    """PyTorch's AdamW, and that of Optimisers.jl with `couple=true`: `p -= rate · decay · p`, then Adam."""
    m, v = {}, {}

    def step(t, name, p, g):
        m[name] = 0.9 * m.get(name, 0) + 0.1 * g
        v[name] = 0.999 * v.get(name, 0) + 0.001 * g**2
        p = p * (1 - rate * decay * (name in decayed))
        return p - rate * (m[name] / (1 - 0.9 ** (t + 1))) / (np.sqrt(v[name] / (1 - 0.999 ** (t + 1))) + 1e-8)

    return step


def clipped_by_torch(grads, limit):
    """clip_grad_norm_: one norm over all arrays, and 1e-6 in the divisor."""
    norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in grads.values()))
    return {name: g * min(1, limit / (norm + 1e-6)) for name, g in grads.items()}


def on_the_page(row, **names):
    """What the code of the page is worth: the first code of the second cell, with these names."""
    (cell,) = [cells[1] for cells in table_rows(PAGE) if cells[0] == row]
    return eval(
        re.match("`(?:b1=)?([^`]+)`", cell)[1], {"ts": ts, "rules": rules, "losses": losses, "jax": jax, **names}
    )


class Bare:
    """In the place of `rules`, rules that are their first argument."""

    adam = staticmethod(lambda rate: rate)


def auxiliary():
    def there(params, batch):
        values = squared(params, batch)
        return values.mean(), {"close": (values < 1).mean()}

    def here(params, batch):
        values = squared(params, batch)
        return ts.Loss.mean(values, metrics={"close": values < 1})

    (value, aux), grads = jax.value_and_grad(there, has_aux=True)(PARAMS, (X, Y))
    loss, our_grads = ts.value_and_grad(here)(ts.setup(rules.sgd(0.1), PARAMS), (X, Y))
    return (value, aux["close"], grads), (loss.compute(), loss.metrics["close"].compute(), our_grads)


def chains():
    make = lambda of: of.chain(of.clip_by_global_norm(0.5), of.sgd(0.1))
    assert make(rules) == make(rules) and make(optax) != make(optax)
    return by_optax(make(optax)), ours(make(rules)).params


def injected():
    tx = optax.inject_hyperparams(optax.sgd)(0.1)
    opt_state, params = tx.init(PARAMS), PARAMS
    for i, g in enumerate(GRADS):
        if i == 2:
            opt_state.hyperparams["learning_rate"] = 0.01
        updates, opt_state = tx.update(g, opt_state, params)
        params = optax.apply_updates(params, updates)
    state = ours(rules.sgd(0.1), GRADS[:2])
    for g in GRADS[2:]:
        state, _ = ts.update(ts.adjust(state, learning_rate=0.01), g)
    return params, state.params


def parted():
    theirs = optax.partition({"enc": optax.sgd(0.1), "head": optax.adam(0.1)}, {"enc": "enc", "head": "head"})
    here = ours(rules.partition({"enc": rules.sgd(0.1), "head": rules.adam(0.1)})).params
    # in front of a group, the norm of the clip is over all groups
    clip = rules.partition({"enc": rules.chain(rules.clip_by_global_norm(0.5), rules.sgd(0.1)), "head": rules.sgd(0.1)})
    scale = 0.5 / np.sqrt(sum((g**2).sum() for g in GRADS[0].values()))
    there = {"enc": PARAMS["enc"] - 0.1 * scale * GRADS[0]["enc"], "head": PARAMS["head"] - 0.1 * GRADS[0]["head"]}
    return (by_optax(theirs), there), (here, ours(clip, GRADS[:1]).params)


def masked():
    flags = {"enc": False, "head": True}
    theirs = optax.chain(optax.masked(optax.add_decayed_weights(0.1), flags), optax.sgd(0.1))
    chained = rules.chain(rules.add_decayed_weights(0.1, where="head"), rules.sgd(0.1))
    there = by_optax(theirs), by_optax(optax.adamw(0.1, weight_decay=0.1, mask=flags))
    return there, (ours(chained).params, ours(rules.adamw(0.1, weight_decay=0.1, mask=["head"])).params)


def frozen():
    theirs = optax.partition({"on": optax.adamw(0.1), "off": optax.set_to_zero()}, {"enc": "off", "head": "on"})
    state = ts.freeze(ts.setup(rules.adamw(0.1), PARAMS), "enc")
    for g in GRADS:
        state, _ = ts.update(state, g)
    return [by_optax(theirs)] * 2, [ours(rules.adamw(0.1), trainable="head").params, state.params]


def clips():
    pairs = [(getattr(optax, name), getattr(rules, name)) for name in ("clip", "clip_by_global_norm")]
    pairs.append((optax.add_decayed_weights, rules.add_decayed_weights))
    there = [by_optax(optax.chain(f(0.3), optax.sgd(0.1))) for f, _ in pairs]
    return there, [ours(rules.chain(f(0.3), rules.sgd(0.1))).params for _, f in pairs]


def several_calls():
    loss_fn = lambda params, batch: squared(params, batch).mean()
    state, rows = ts.setup(rules.sgd(0.1), PARAMS), (X[:8], Y[:8])
    means = optax.microbatching.AccumulationType.MEAN
    micro = optax.microbatching.microbatch(jax.grad(loss_fn), 1, 2, means)(PARAMS, rows)
    windows = ours(rules.accumulate(rules.adam(0.1), every=2)).params
    there = by_optax(optax.MultiSteps(optax.adam(0.1), 2)), micro
    return there, (windows, ts.value_and_grad(loss_fn, accumulate=4)(state, rows)[1])


def bad_steps():
    bad = jax.tree.map(lambda g: g * np.nan, GRADS[0])
    theirs = optax.apply_if_finite(optax.sgd(0.1), 2)
    assert np.isnan(by_optax(theirs, [bad] * 3)["head"]).all()  # the third in a row is applied
    state = ours(rules.sgd(0.1), [bad] * 3)
    assert int(state.rejected_in_a_row) == 3
    return by_optax(theirs, [bad, bad, GRADS[0]]), ours(rules.sgd(0.1), [bad, bad, bad, GRADS[0]]).params


def averaged():
    """optax's, on the params: from 0, and divided by what is missing. Ours begins with the first params."""
    tx, state = optax.ema(0.9), ts.setup(rules.sgd(0.1), PARAMS, ema=0.9)
    ema_state, sums = tx.init(PARAMS), jax.tree.map(np.zeros_like, PARAMS)
    for g in GRADS:
        state, _ = ts.update(state, g)
        theirs, ema_state = tx.update(state.params, ema_state)
        sums = jax.tree.map(lambda s, p: 0.9 * s + 0.1 * np.asarray(p), sums, state.params)
    past = 0.9 ** len(GRADS)
    debiased = jax.tree.map(lambda s: s / (1 - past), sums)
    begun = jax.tree.map(lambda s, p: s + past * p, sums, PARAMS)
    return (theirs, begun), (debiased, ts.averaged(state).params)


def of_torch():
    """AveragedModel copies the params at its first update, and averages from the second on."""
    row = "`EMAWeightAveraging(decay=0.999)`, `StochasticWeightAveraging`"
    setup = lambda _, ema: ts.setup(rules.sgd(0.1), PARAMS, ema=ema)
    walk, state = [], on_the_page(row, ts=types.SimpleNamespace(setup=setup, averages=ts.averages))
    mean, uniform = None, ts.setup(rules.sgd(0.1), PARAMS, ema=ts.averages.swa(0, 2))
    for g in GRADS:
        state, uniform = ts.update(state, g)[0], ts.update(uniform, g)[0]
        walk.append(state.params)
        mean = walk[0] if mean is None else jax.tree.map(lambda a, p: 0.999 * a + 0.001 * p, mean, walk[-1])
    of_cycles = jax.tree.map(lambda a, b: (a + b) / 2, walk[1], walk[3])
    return (mean, of_cycles), (ts.averaged(state).params, ts.averaged(uniform).params)


def same_names():
    steps, predictions = np.arange(12), jnp.asarray(LOGITS[:, 0])
    theirs = [optax.warmup_cosine_decay_schedule(0.0, 1.0, 3, 9), optax.exponential_decay(1.0, 3, 0.5)]
    here = [schedules.warmup_cosine_decay_schedule(0.0, 1.0, 3, 9), schedules.exponential_decay(1.0, 3, 0.5)]
    ours_of = [losses.huber_loss(predictions, 0.5), losses.l2_loss(predictions)]
    theirs_of = [optax.losses.huber_loss(predictions, 0.5), optax.losses.l2_loss(predictions)]
    return ([np.array([f(t) for t in steps]) for f in theirs], theirs_of), ([f.values(12) for f in here], ours_of)


def train_state():
    state = flax.training.train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1))
    for g in GRADS:
        state = state.apply_gradients(grads=g)
    here = ours(rules.adam(0.1))
    return (state.params, state.step), (here.params, here.step)


def of_nnx():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    graph, params, _ = nnx.split(model, nnx.Param, ...)
    loss = lambda model: jnp.mean((model(X)[:, 0] - Y) ** 2)
    state = ts.setup(rules.sgd(0.1), params)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = ts.value_and_grad(lambda params, batch: loss(nnx.merge(graph, params)))(state, X)[1]
    optimizer.update(model, nnx.grad(loss)(model))
    plain = lambda tree: {"/".join(map(str, path[:1])): np.asarray(x) for path, x in nnx.to_flat_state(tree)}
    return plain(nnx.state(model, nnx.Param)), plain(ts.update(state, grads)[0].params)


def exact_means():
    """With a mask and batches of 4, 4 and 2 rows: one mean over what is not masked."""
    mask = np.arange(10) % 3 > 0
    loss_fn = lambda params, batch: ts.Loss.mean(squared(params, batch[:2]), batch[2])
    parts = [loss_fn(PARAMS, (X[i : i + 4], Y[i : i + 4], mask[i : i + 4])) for i in (0, 4, 8)]
    values = (X @ PARAMS["enc"] @ PARAMS["head"] - Y) ** 2
    return values[mask].mean(), functools.reduce(ts.Loss.merge, parts).compute()


def scheduled():
    """By hand: a rate of updates that were applied. The NaN in between does not count."""
    bad = jax.tree.map(lambda g: g * np.nan, GRADS[0])
    rate = schedules.piecewise_constant_schedule(1.0, {1: 0.1, 2: 0.1})
    there = by_hand(lambda t, name, p, g: p - 0.1**t * g, GRADS[:3])
    return there, ours(rules.sgd(rate), [GRADS[0], bad, *GRADS[1:3]]).params


def ported():
    """OneCycleLR over twelve updates, gradient clipping and windows of two batches, beside plain optax."""
    rates = [of.cosine_onecycle_schedule(12 - 1, 0.1) for of in (optax, schedules)]
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rates[0], weight_decay=1e-2))
    rule = rules.chain(rules.clip_by_global_norm(0.5), rules.adamw(rates[1], weight_decay=1e-2))
    there = by_optax(optax.MultiSteps(tx, 2), GRADS * 6)
    return there, ours(rules.accumulate(rule, every=2), GRADS * 6).params


def stepping_batches():
    """Two epochs of 4 batches in windows of 3."""
    state = ours(rules.accumulate(rules.sgd(0.1), every=3), GRADS * 2)
    return 2 * 4 // 3, state.step


def short_window():
    """7 batches, K = 4: Lightning scales each gradient by 1 / K, also in the short last window."""
    grads = [*GRADS, *GRADS[:3]]
    by_lightning = lambda g, k: jax.tree.map(lambda p, *gs: p - 0.1 * sum(gs) / k, PARAMS, *g)
    state = ours(rules.accumulate(rules.sgd(0.1), every=4), grads)
    moved = jax.tree.map(lambda a, b: a - b, ts.flush(state).params, state.params)
    last = jax.tree.map(lambda *gs: -0.1 * sum(gs) / 4, *GRADS[:3])  # and ours by the 3 that are there
    return (by_lightning(GRADS, 4), jax.tree.map(lambda x: x * 4 / 3, last)), (state.params, moved)


def windows_by_epoch():
    """Updates in each of eight epochs, counted as Lightning does: by the batches that were read."""
    windows, updates = {0: 8, 4: 4, 6: 2}, []
    for epoch in range(8):
        window = windows[max(e for e in windows if e <= epoch)]
        updates.append(sum((batch + 1) % window == 0 for batch in range(EPOCH)))
    rule = on_the_page("`GradientAccumulationScheduler({0: 8, 4: 4, 6: 2})`", rule=rules.sgd(0.0))
    state = ts.setup(rule, {"w": np.zeros(1, np.float32)})
    call = lambda state, _: (lambda new: (new, new.step))(ts.update(state, state.params, norms=False)[0])
    _, steps = jax.jit(lambda state: jax.lax.scan(call, state, None, length=8 * EPOCH))(state)
    return updates, np.diff(np.asarray(steps)[EPOCH - 1 :: EPOCH], prepend=0).tolist()


def clipped():
    clip = rules.clip_by_global_norm(0.5)
    there = by_hand(lambda t, name, p, g: p - 0.1 * clipped_by_torch(GRADS[t], 0.5)[name])
    of_window = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, clipped_by_torch(MEAN, 0.5))
    inside = rules.accumulate(rules.chain(clip, rules.sgd(0.1)), every=4)
    return (there, of_window), (ours(rules.chain(clip, rules.sgd(0.1))).params, ours(inside).params)


def of_groups():
    """The first pattern that matches decides."""
    rule = rules.partition({"head": rules.sgd(0.1), "**": rules.sgd(0.01)})
    return by_hand(lambda t, name, p, g: p - {"head": 0.1, "enc": 0.01}[name] * g), ours(rule).params


def on_plateau():
    """PyTorch's: `num_bad_epochs > patience`. The same values, in which a bad one is far from the threshold."""
    values = [1.0, 0.9] + [1.0] * 10 + [0.5] + [0.6] * 25
    rate, best, bad, expected = 0.1, np.inf, 0, []
    for value in values:
        best, bad = (value, 0) if value < best * (1 - 1e-4) else (best, bad + 1)
        if bad > 10:
            rate, bad = rate * 0.1, 0
        expected.append(rate)
    rates = []
    for n in (23, 24, 34, 35, len(values)):
        run = Run(state=ts.setup(rules.sgd(0.1), PARAMS))
        run = drive(ts.callbacks.plateau("val/loss", factor=0.1, patience=11), values[:n], run=run)
        rates.append(ts.hyperparams(run.state)["learning_rate"])
    return [expected[n - 1] for n in (23, 24, 34, 35, len(values))], rates


def rate_in_info():
    rate = schedules.exponential_decay(0.1, 1, 0.5)
    state, _ = ts.update(ts.setup(rules.sgd(rate), PARAMS), GRADS[0])
    return 0.05, ts.update(state, GRADS[1])[1].hyperparams["learning_rate"]


def torch_adamw():
    assert rules.adamw(1e-3) == rules.adamw(1e-3, weight_decay=1e-4) != rules.adamw(1e-3, weight_decay=1e-2)
    return by_hand(adamw(1e-2)), ours(rules.adamw(1e-3, weight_decay=1e-2)).params


def adjusted():
    """Another rate for all, and one for the head."""
    state = ts.adjust(ours(rules.sgd(0.1), GRADS[:1]), learning_rate=0.01)
    state, _ = ts.update(state, GRADS[1])
    state, _ = ts.update(ts.adjust(state, "head", learning_rate=1.0), GRADS[2])
    rates = lambda t, name: (0.1, 0.01, 1.0 if name == "head" else 0.01)[t]
    return by_hand(lambda t, name, p, g: p - rates(t, name) * g, GRADS[:3]), state.params


def smoothed():
    """PyTorch's: `(1 - ε) nll + ε / K · Σ -log p`."""
    nll = -LOG_P[np.arange(6), LABELS]
    row = "`F.cross_entropy(logits, y, label_smoothing=0.1)`"
    smooth = on_the_page(row, logits=jnp.asarray(LOGITS), y=LABELS, n=3)
    plain = losses.softmax_cross_entropy_with_integer_labels(jnp.asarray(LOGITS), LABELS)
    return (0.9 * nll - 0.1 / 3 * LOG_P.sum(1), nll), (smooth, plain)


def channels_last():
    """A convolution in NumPy over NCHW, and flax's over the transposed images."""
    images, kernel = RNG.normal(size=(2, 3, 5, 5)), RNG.normal(size=(4, 3, 2, 2))
    patches = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(2, 3))
    layer = nn.Conv(4, (2, 2), padding="VALID", use_bias=False)
    outputs = layer.apply({"params": {"kernel": kernel.transpose(2, 3, 1, 0)}}, images.transpose(0, 2, 3, 1))
    return np.einsum("ncijhw,ochw->noij", patches, kernel), np.asarray(outputs).transpose(0, 3, 1, 2)


def batch_norm():
    """The running mean is PyTorch's, the running variance lacks its n / (n - 1)."""
    norm = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
    outputs, n = norm(X, use_running_average=False), len(X)
    unbiased = 0.9 + 0.1 * X.var(0, ddof=1)
    normal = (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5)
    here = 0.9 + (norm.var[...] - 0.9) * n / (n - 1)
    return (0.1 * X.mean(0), unbiased, normal), (norm.mean[...], here, outputs)


def annealed():
    t = np.arange(21)
    here = on_the_page("`lr_scheduler.CosineAnnealingLR(optimizer, T)`", T=20, rules=Bare)
    assert here.values(30)[29] == 0  # PyTorch's rises again
    return 1e-3 * (1 + np.cos(np.pi * t / 20)) / 2, here.values(21)


CYCLED = "`OneCycleLR` with `cycle_momentum=True`, the default"


def one_cycle():
    """PyTorch's formula: phases end at `0.3 T - 1` and `T - 1`, and the parts between are half cosines."""
    row = "`lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=T, cycle_momentum=False)`"
    there, here, block = [], [], {}
    exec(re.search(r"```python\n((?:(?!```).)*def torch_onecycle.*?)```", PAGE, re.S)[1], block)
    for total in (10, 50, 65, 100):
        top, t = 0.3 * total - 1, np.arange(total)
        between = lambda a, b, part: b + (a - b) / 2 * (1 + np.cos(np.pi * part))
        up, down = between(4e-5, 1e-3, t / top), between(1e-3, 4e-9, (t - top) / (total - 1 - top))
        there.append(np.where(t <= top, up, down))
        here.append(block["torch_onecycle"](total, 4e-5, 1e-3, 4e-9).values(total))
        if total == 65:  # its peak lies between two steps, where the rows differ
            continue
        there.append(there[-1])
        here.append(on_the_page(row, T=total, rules=Bare).values(total))
        up, down = between(0.95, 0.85, t / top), between(0.85, 0.95, (t - top) / (total - 1 - top))
        there.append(np.where(t <= top, up, down))
        here.append(on_the_page(CYCLED, T=total).values(total))
    return there, here


def class_weights():
    """Keras divides by the rows, ours by the weights: times their mean they are equal."""
    weights, values = np.array([0.5, 2.0, 1.0])[LABELS], -LOG_P[np.arange(6), LABELS]
    return (weights * values).mean(), ts.Loss.mean(jnp.asarray(values), weights).compute() * weights.mean()


def spaces():
    """Every number that randint(1, 4) can give, and no other."""
    entry, half_open = ts.tuning.spaces.integer(1, 3), np.random.default_rng(0).integers(1, 4, 200)
    here = sorted({entry.at(u) for u in np.linspace(0, 1, 200, endpoint=False)})
    return (np.unique(half_open).tolist(), 0.25), (here, ts.tuning.spaces.uniform(0, 1).at(0.25))


def with_result():
    def f(params, batch):
        result = batch[0] @ params["enc"]
        return ((result @ params["head"] - batch[1]) ** 2).mean(), result

    state = ts.setup(rules.sgd(0.1), PARAMS)
    (loss, result), grads = jax.value_and_grad(f, has_aux=True)(state.params, (X, Y))
    state, info = ts.update(state, grads, loss=loss)
    errors = X.astype(np.float64) @ PARAMS["enc"] @ PARAMS["head"] - Y
    slope = 2 * errors[:, None] / len(X)
    by_formula = {
        "enc": PARAMS["enc"] - 0.1 * X.T @ (slope * PARAMS["head"]),
        "head": PARAMS["head"] - 0.1 * (slope * (X @ PARAMS["enc"])).sum(0),
    }
    with pytest.raises(ts.errors.LossError, match="expected a scalar, an object with merge and compute"):
        ts.value_and_grad(lambda p, b: ts.Loss.mean(squared(p, b), metrics={"result": b[0] @ p["enc"]}))(state, (X, Y))
    return ((errors**2).mean(), X @ PARAMS["enc"], by_formula), (info.loss, result, state.params)


def mapped():
    descended = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, GRADS[0])
    there = {name: np.float64(p) - 0.1 * GRADS[0][name] for name, p in PARAMS.items()}
    return (there, there), (descended, ours(rules.sgd(0.1)).replace(params=descended).params)


def resident():
    shuffled = lambda **where: list(ts.batches((X, Y), 4, shuffle=True, seed=1, **where))
    assert all(isinstance(x, jax.Array) for batch in shuffled(device=True) for x in batch)
    return shuffled(), shuffled(device=True)


def moved():
    tree = {"w": PARAMS["enc"]}
    assert all(isinstance(x, jax.Array) for batch in ts.prefetch([(X, Y)], jax.devices()[0]) for x in batch)
    return tree, ts.to_host(ts.to_device(tree, jax.devices()[0]))


def every_epoch():
    """A rate by hand at each epoch of two updates, and the schedule of epochs."""
    epochs = schedules.exponential_decay(0.1, 1, 0.5)
    state = ts.setup(rules.sgd(0.1), PARAMS)
    for i, g in enumerate(GRADS):
        state, _ = ts.update(ts.adjust(state, learning_rate=float(epochs(i // 2))), g)
    there = by_hand(lambda t, name, p, g: p - 0.1 * 0.5 ** (t // 2) * g)
    return (there, there), (state.params, ours(rules.sgd(schedules.interpolate(epochs, 2))).params)


def begun_again():
    """After `replace(step=0)` the schedule starts anew."""
    state = ours(rules.sgd(schedules.exponential_decay(0.1, 1, 0.5)), GRADS[:2]).replace(step=0)
    for g in GRADS[2:]:
        state, _ = ts.update(state, g)
    return by_hand(lambda t, name, p, g: p - 0.1 * 0.5 ** (t % 2) * g), state.params


def overridden():
    state = ours(rules.sgd(schedules.exponential_decay(0.1, 1, 0.5), momentum=0.0), GRADS[:1])
    state, _ = ts.update(ts.adjust(state, learning_rate=1.0), GRADS[1])
    state, _ = ts.update(ts.adjust(state, learning_rate=None), GRADS[2])
    return by_hand(lambda t, name, p, g: p - (0.1, 1.0, 0.025)[t] * g, GRADS[:3]), state.params


def shortened():
    return 0.5 ** np.minimum(np.arange(8), 3), schedules.exponential_decay(1.0, 1, 0.5, end_value=0.125).values(8)


def accumulated_adamw():
    rule = rules.accumulate(rules.adamw(1e-3, weight_decay=0.0), every=4)
    return by_hand(adamw(0.0), [MEAN]), ours(rule).params


def clipped_adamw():
    step = adamw(0.0)
    there = by_hand(lambda t, name, p, g: step(t, name, p, np.clip(g, -0.1, 0.1)))
    return there, ours(rules.chain(rules.clip(0.1), rules.adamw(1e-3, weight_decay=0.0))).params


# Of each row that computes something, by its first cell: a function that computes both sides, or the tests that do.
BOTH_SIDES = {
    "`tx.init(params)`, `tx.update`, `apply_updates`": lambda: (
        by_optax(optax.adam(0.1)),
        ours(optax.adam(0.1)).params,
    ),
    "`jax.value_and_grad(f, has_aux=True)`": auxiliary,
    "`chain`": chains,
    '`inject_hyperparams(adam)(f)`, `state.hyperparams["learning_rate"] = 0.1`': injected,
    "`partition`, `multi_transform`": parted,
    "`masked`, `mask=`": masked,
    "`freeze`, `set_to_zero`": frozen,
    "`clip`, `clip_by_global_norm`, `add_decayed_weights`": clips,
    "`MultiSteps(tx, n)`, `microbatching`": several_calls,
    "`apply_if_finite(tx, n)`": bad_steps,
    "`ema` of the params, `contrib.reduce_on_plateau`": averaged,
    "schedules, losses": same_names,
    "`TrainState.create(apply_fn=f, params=p, tx=tx)`": train_state,
    "`state.apply_gradients(grads=g)`": train_state,
    "`nnx.Optimizer(model, tx, wrt=nnx.Param)`": of_nnx,
    "`DynamicScale`": "test_precision::test_the_scale_halves_where_it_overflows_and_doubles_after_its_interval",
    "`jax_utils.replicate`, `pmap`, `pmean`": "test_axes::test_pmap_gives_the_numbers_of_the_whole_batch",
    "fp8's `_overwrite_with_gradient`": "test_overwrite::test_the_gradient_replaces_them_as_in_flax",
    "`training_step`, `validation_step`, `self.log`": exact_means,
    "`configure_optimizers`": ported,
    "`estimated_stepping_batches`": stepping_batches,
    "`trainer.test(model, loader)`": "test_step::test_evaluation_merges_exactly",
    "`torchmetrics`": "test_metrics::test_merged_over_unequal_batches_is_scikit_learn_on_all_rows",
    "`accumulate_grad_batches=K`": short_window,
    "`GradientAccumulationScheduler({0: 8, 4: 4, 6: 2})`": windows_by_epoch,
    "`gradient_clip_val=v`": clipped,
    '`gradient_clip_algorithm="value"`': lambda: (
        by_hand(lambda t, name, p, g: p - 0.1 * np.clip(g, -0.5, 0.5)),
        ours(rules.chain(rules.clip(0.5), rules.sgd(0.1))).params,
    ),
    "gradients that are NaN while clipping": "test_parity::test_a_clip_does_not_hide_what_is_not_finite",
    '`precision="bf16-mixed"`, `"16-mixed"`': "test_precision::test_in_bfloat16_it_is_the_hand_written_cast",
    '`precision="bf16-true"`': (
        "test_precision::test_updates_below_the_rounding_add_up_in_a_master_copy_and_are_lost_without"
    ),
    "parameter groups": of_groups,
    "schedulers": scheduled,
    '`ReduceLROnPlateau` with `monitor="val_loss"`': on_plateau,
    "`LearningRateMonitor`": rate_in_info,
    "manual optimization": "test_step::test_a_hand_written_loop_of_the_two_halves_is_the_step",
    "`EMAWeightAveraging(decay=0.999)`, `StochasticWeightAveraging`": of_torch,
    "`BackboneFinetuning`": "test_hyper::test_a_thawed_leaf_goes_on_with_its_momentum",
    "`SpikeDetection`, `detect_anomaly`": "test_guard::test_the_band_is_that_of_its_formula",
    "`EarlyStopping(patience=3)`": "test_callbacks::test_early_stopping_stops_where_plain_counting_does",
    '`scale_batch_size`, `auto_scale_batch_size="power"` or `"binsearch"`': (
        "test_search::test_the_answer_is_that_of_plain_jax"
    ),
    "`lr_find`": "test_search::test_rates_and_losses_are_those_of_a_loop_by_hand",
    "`Dataset` with `DataLoader(dataset, 64, shuffle=True)`": (
        "test_data::test_a_data_set_of_records_is_read_record_by_record"
    ),
    "`optimizer.zero_grad()`, `loss.backward()`, `optimizer.step()`": (
        "test_step::test_a_step_is_the_hand_written_one_to_the_last_bit"
    ),
    "`torch.optim.AdamW(model.parameters(), lr=1e-3)`": torch_adamw,
    '`param_groups[0]["lr"] = 1e-4`': adjusted,
    "`p.requires_grad_(False)`": frozen,
    "`model.train()`, `model.eval()`": "test_modes::test_train_mode_drops_and_moves_the_statistics",
    "parameter groups without decay": lambda: (
        by_hand(adamw(0.01, decayed=["enc"])),
        ours(rules.adamw(1e-3, weight_decay=0.01, mask=["**/enc"])).params,
    ),
    "`F.cross_entropy(logits, y, label_smoothing=0.1)`": smoothed,
    "images as NCHW": channels_last,
    "`BatchNorm2d(c, momentum=0.1)`": batch_norm,
    "`torch.nn.utils.clip_grad_norm_(params, 1.0)`": clipped,
    "`torch.autocast`, `GradScaler`": "test_precision::test_small_gradients_survive_by_the_scale",
    "`lr_scheduler.CosineAnnealingLR(optimizer, T)`": annealed,
    "`lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=T, cycle_momentum=False)`": one_cycle,
    CYCLED: one_cycle,
    "`DataLoader(dataset, 64, shuffle=True, drop_last=True)`": "test_data::test_batches_are_numpy_indexing",
    "`DistributedDataParallel`, `FSDP`": "test_sharding::test_the_numbers_of_one_device",
    '`Trainer(devices=4, strategy="ddp")`, `"fsdp"`': "test_sharding::test_the_numbers_of_one_device",
    "weights of a torch model in a safetensors file": ("test_transforms::test_torchs_modules_compute_the_same_in_flax"),
    "`model.evaluate(x, y)`": exact_means,
    "`model.predict(x)`": "test_prediction::test_the_outputs_are_those_of_a_jitted_loop",
    "`trainer.predict(model, loader)`": "test_prediction::test_the_outputs_are_those_of_a_jitted_loop",
    "`class_weight`, `sample_weight`": class_weights,
    "`EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`": on_plateau,
    "`layer.trainable = False`": frozen,
    "`optimizer.learning_rate = 1e-4`": adjusted,
    '`mixed_precision.set_global_policy("mixed_bfloat16")`': (
        "test_precision::test_in_bfloat16_it_is_the_hand_written_cast"
    ),
    "`accelerate(amp=True)`, `prepare_optimizer`, `backward`": (
        "test_precision::test_clipping_and_norms_see_unscaled_gradients"
    ),
    "`prepare_model`, `prepare_data_loader`": "test_sharding::test_the_numbers_of_one_device",
    "`tune.uniform(0, 1)`, `tune.randint(1, 4)`, `TuneConfig(num_samples=12)`": spaces,
    "`Flux.setup(rule, model)`": "test_state::test_is_the_optimizer_state_that_of_plain_optax",
    "`Flux.update!(opt_state, model, grads)`": (
        "test_parity::test_optimisers_rule test_parity::test_every_rule_of_ours_has_a_row"
    ),
    "`gradient`, `withgradient`": auxiliary,
    "`return my_loss(result, label), result`, inside `withgradient`": with_result,
    "`fmap(f, model)`, `fmap(model, grads)`": mapped,
    "`train!(loss, model, data, opt_state)`": "test_loop::test_run_epoch",
    "`trainstep!`, `trainstep_withgradient!`, `if !isfinite(val) continue`": bad_steps,
    "`DataLoader((X, Y), batchsize=32)`": "test_data::test_batches_are_numpy_indexing",
    "`DataLoader((X, Y) \\|> gpu)`": resident,
    "`DataLoader(...) \\|> gpu`, `mapobs`, `CuIterator`": moved,
    "`gpu`, `cpu`": moved,
    "`cu(x)`, `fmap(cu, model)`, `model \\|> device`": moved,
    "`OptimiserChain(a, b)`": (
        "test_parity::test_optimisers_rule[OptimiserChain: clip, then decay] "
        "test_parity::test_optimisers_rule[OptimiserChain: decay, then clip] "
        "test_parity::test_an_empty_chain_is_the_identity"
    ),
    "`WeightDecay(λ)`, `SignDecay(λ)`": (
        "test_parity::test_optimisers_rule[WeightDecay] test_parity::test_optimisers_rule[SignDecay with WeightDecay]"
    ),
    "`AdamW(η, β, λ; couple)`": (
        "test_parity::test_optimisers_rule[AdamW couple=true] "
        "test_parity::test_optimisers_rule[AdamW couple=false] "
        "test_parity::test_adamw_without_couple_does_not_follow_the_rate"
    ),
    "`Descent`, `Momentum`, `Adam` and all other rules": (
        "test_parity::test_optimisers_rule test_parity::test_every_rule_of_ours_has_a_row"
    ),
    "`init`, `apply!` of your own rule": "test_rules::test_a_partial_factory_is_its_function_with_other_defaults",
    "a penalty over `Flux.trainables(m)`": (
        "test_regularize::test_a_penalty_in_the_loss_is_decay_first_in_the_chain "
        "test_regularize::test_where_they_stop_agreeing "
        "test_regularize::test_an_array_at_two_paths_counts_once"
    ),
    "`ClipGrad(δ)`": "test_parity::test_optimisers_rule[ClipGrad] test_rules::test_clip_value_clamps_and_keeps_nan",
    "`ClipNorm(ω, p; throw)`": (
        "test_parity::test_optimisers_rule[ClipNorm] "
        "test_parity::test_clip_per_array_and_globally[p=inf] "
        "test_rules::test_clip_array_norm_scales_each_array_to_its_p_norm "
        "test_rules::test_clip_array_norm_rejects_a_step_whose_norm_overflows_and_says_which"
    ),
    "`AccumGrad(n)` in front of `a`": "test_parity::test_accum_grad_with_decay_and_descent",
    "`MixedPrecision(Float32, a)` of `bf16(model)`": (
        "test_precision::test_masters_stay_true_when_params_are_replaced_and_frozen_ones_stay"
    ),
    "`adjust!(opt_state, η)`": adjusted,
    "`adjust!(opt_state; beta=(0.8, 0.99))`": "test_hyper::test_new_betas_work_on_the_old_moments",
    "`adjust!(opt_state.layers.enc, η)`": adjusted,
    "a new β in the middle of a run": "test_parity::test_adam_and_a_b1_that_changes",
    "a new η under `Momentum`": "test_parity::test_momentum_and_a_rate_that_changes",
    "`freeze!(opt_state.layers.enc)`, `thaw!`": frozen,
    "`@layer T trainable=(weight,)`": frozen,
    "`trainmode!`, `testmode!`, `Dropout(p)`": (
        "test_modes::test_train_mode_drops_and_moves_the_statistics "
        "test_modes::test_nothing_and_everything_dropped "
        "test_modes::test_a_key_given_to_an_evaluation_is_monte_carlo_dropout"
    ),
    "`early_stopping(f, n)`, `plateau(f, n)`": (
        "test_callbacks::test_early_stopping test_callbacks::test_plateau_lowers_the_rate_each_time_and_stops_at_the_floor"
    ),
    "`patience(predicate, n)`": "test_callbacks::test_patience_counts_each_step_once",
    "`throttle(f, seconds)`": "test_callbacks::test_throttle",
    "`DistributedDataContainer(backend, data)`": "test_data::test_processes_share_a_batch",
    "`FluxDistributedModel`, `synchronize!!(backend, x; root)`": "test_distributed::test_two_processes",
    "`DistributedOptimizer(backend, rule)`": "test_sharding::test_the_numbers_of_one_device",
    "`Cos(λ0 = 1e-4, λ1 = 1e-2, period = 10)`, now `CosAnneal`": lambda: (
        1e-4 + (1e-2 - 1e-4) * (1 + np.cos(np.pi * (np.arange(25) % 10) / 10)) / 2,
        on_the_page("`Cos(λ0 = 1e-4, λ1 = 1e-2, period = 10)`, now `CosAnneal`").values(25),
    ),
    "`for (η, epoch) in zip(s, 1:100)`, `adjust!`": every_epoch,
    "`Stateful(s)`, `next!`, `reset!`": begun_again,
    "`Stateful(s; advance=plateau(...))`": "test_step::test_reduce_on_plateau_sees_the_loss",
    "`Scheduler(AdamW, ...)`": overridden,
    "`Shortened(s, n)`": shortened,
    "batch, update or epoch as the unit": scheduled,
    "`configure_optimisers(model, trainer)`": every_epoch,
    "`OptimiserChain(AccumGrad(5), AdamW(1e-3))`": accumulated_adamw,
    "`OptimiserChain(ClipGrad(0.1), AdamW(1e-3))`": clipped_adamw,
    "`Trainer(precision=:bf16)`": "test_precision::test_in_bfloat16_it_is_the_hand_written_cast",
    "`Trainer(freeze=[KeyPath(:layers, 1)])`": frozen,
    "`train_step`, `val_step`, `log`": exact_means,
}
BOTH_SIDES |= {  # the losses of Flux, several of them in some rows
    row[0]: " ".join(f"test_losses::test_flux_{name}" for name in OF_FLUX if re.search(rf"`{name}[`(]", row[0]))
    for row in table_rows(PAGE)
    if any(re.search(rf"`{name}[`(]", row[0]) for name in OF_FLUX)
}
# Rows that say where a thing is, when something happens, or that nothing is needed: there are no numbers to compare.
WITHOUT_NUMBERS = {
    "`ModelCheckpoint(every_n_train_steps=500)`, `train_time_interval=timedelta(minutes=10)`",
    "fields of a subclass: `batch_stats`, `dropout_rng`",
    "`max_epochs`, `max_steps`",
    "`check_val_every_n_epoch=5`, `val_check_interval=100`",
    "`log_every_n_steps=50`",
    "`fast_dev_run=True`",
    "`CSVLogger`, `TensorBoardLogger`, `WandbLogger`",
    '`ModelCheckpoint(monitor="val/acc", mode="max", save_top_k=3, save_last=True)`',
    '`ckpt_path="last"`',
    '`ckpt_path="best"`',
    "`load_from_checkpoint(path)`",
    "`Trainer(...)`, `fit`, `ModelCheckpoint`",
    "`max_trials`, `init_val`, `max_val` of `scale_batch_size`",
    "`steps_per_trial`",
    "`hparams.batch_size`, `batch_arg_name`",
    "`hparams`, `save_hyperparameters`",
    "`on_train_epoch_end` and other hooks, `Callback`",
    '`max_time="00:08:00:00"`, `Timer`',
    "`limit_train_batches`, `overfit_batches=1`",
    "`train_dataloader`, `val_dataloader`, `LightningDataModule`",
    "`seed_everything(seed)`",
    "`torch.save(state_dict)`, `load_state_dict`",
    "`torch.compile(model)`",
    "`model.compile(optimizer, loss, metrics)`",
    "`model.fit(x, y, batch_size=64, epochs=10, validation_data=...)`",
    "`BackupAndRestore`",
    "`CSVLogger`, `TensorBoard`",
    "`enable_reproducibility(seed)`",
    "`sampler.set_epoch(epoch)`",
    "`get_dataset_shard`, `iter_torch_batches`",
    "`report(metrics)`",
    '`Trainer(backend="torch", num_workers=12, use_gpu=True)`',
    "`to_tune_trainable`, `Tuner(...).fit()`",
    "`[(x, y), (x, y)]`, `zip(eachslice(X; dims=3), eachcol(Y))`",
    "`Chain(Dense(10 => 5, relu), Dense(5 => 2))`",
    "`loadmodel!`",
    "a negative η",
    "`CUDA.functional()`, `AMDGPU.functional()`, `Metal.functional()`",
    '`Flux.get_device(; verbose=true)`, `Flux.get_device("CUDA", 0)`',
    "`Flux.supported_devices()`, `CUDA.devices()`",
    "`FluxCPUDevice`, `FluxCUDADevice`, `device.deviceID`",
    '`Flux.gpu_backend!("CUDA")`, `Flux.GPU_BACKEND`',
    "`CUDA_VISIBLE_DEVICES`",
    "`CUDA.allowscalar(false)`",
    "`cpu(model)`, then `BSON.@save`",
    "`DistributedUtils.initialize(NCCLBackend)`, `MPIBackend`, `get_distributed_backend`",
    "`mpiexecjl -n 4 julia train.jl`",
    "`FluxDistributedMPICUDAAware`",
    "`Trainer(accelerator = :auto)`, `:gpu`, `:cpu`; `devices=[1]`",
    "`Foil(; accelerator, devices, precision)`",
    "`fit!`, hooks, `max_epochs`, the checkpointer",
}
COMPUTED = list(dict.fromkeys(sides for sides in BOTH_SIDES.values() if callable(sides)))


def names_of(sides):
    return next(row for row, other in BOTH_SIDES.items() if other is sides).replace("`", "")


# Those whose numbers other fast tests compare too, or that compile most.
LONG = {several_calls, of_nnx, same_names, batch_norm, channels_last, parted, masked, bad_steps, averaged}


@pytest.mark.parametrize("sides", medium_if(LONG.__contains__, COMPUTED), ids=names_of)
def test_both_sides_of_a_row_have_the_same_numbers(sides):
    there, here = sides()
    assert_trees_close(jax.tree.map(np.asarray, here), jax.tree.map(np.asarray, there), rtol=5e-6, atol=1e-8)


def test_every_row_that_computes_has_both_its_sides():
    cells = [row[0] for row in table_rows(PAGE)]
    assert len(set(cells)) == len(cells) and not BOTH_SIDES.keys() & WITHOUT_NUMBERS
    assert sorted(set(cells) ^ (BOTH_SIDES.keys() | WITHOUT_NUMBERS)) == []
    named = [sides for sides in BOTH_SIDES.values() if isinstance(sides, str)]
    assert [problem for sides in named if (problem := problem_with(sides))] == []


# What the guides of Flux, Optimisers.jl, Tsunami, Lightning and Ray call the things that they explain.
OF_THE_GUIDES = """
accelerator devices AccumGrad AdamW configure_optimisers ClipGrad ClipNorm precision freeze
accumulate_grad_batches gradient_clip_val auto_scale_batch_size power binsearch scale_batch_size hparams batch_size
max_trials steps_per_trial
accelerate prepare_optimizer backward prepare_model prepare_data_loader enable_reproducibility iter_torch_batches
report to_tune_trainable Tuner num_samples uniform randint num_workers use_gpu
functional gpu_backend! GPU_BACKEND cu fmap gpu cpu mapobs CuIterator BSON CUDA_VISIBLE_DEVICES get_device
supported_devices FluxCPUDevice FluxCUDADevice deviceID allowscalar
initialize NCCLBackend MPIBackend get_distributed_backend mpiexecjl DistributedDataContainer FluxDistributedModel
synchronize!! DistributedOptimizer FluxDistributedMPICUDAAware
setup update! gradient withgradient train! mse crossentropy Descent Momentum Adam zip eachslice DataLoader isfinite
WeightDecay SignDecay trainables OptimiserChain Dropout trainmode! testmode! adjust! beta Cos Stateful next! freeze!
thaw! @layer trainable early_stopping
""".split()


@pytest.mark.parametrize("name", OF_THE_GUIDES)
def test_every_name_of_the_guides_has_a_row(name):
    inside = rf"`[^`]*(?<!\w){re.escape(name)}(?![\w!])[^`]*`"
    assert any(re.search(inside, row[0]) for row in table_rows(PAGE)), name
