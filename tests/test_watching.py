"""Numbers of layers from inside the step, media of loggers, and profiles with step numbers."""

import functools
import gzip
import json
import struct
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import medium_if, need
from tsunax.errors import HyperparameterError, PatternError, RowError

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
KINDS = ("grads", "params", "updates", "moments")


def loss_fn(params, x):
    def layer(h, kernel):
        return jnp.tanh(h @ kernel), None

    h, _ = jax.lax.scan(layer, x, params["blocks"]["kernel"])
    return jnp.mean((h @ params["out"]["kernel"] + params["out"]["bias"][None]) ** 2)


def new_state(key=0, **options):
    k1, k2 = jax.random.split(jax.random.key(key))
    blocks, out = jax.random.normal(k1, (3, 4, 4)), jax.random.normal(k2, (4, 2))
    params = {"blocks": {"kernel": blocks}, "out": {"kernel": out, "bias": jnp.zeros(2)}}
    return ts.setup(ts.rules.adam(1e-2), params, **options)


PLAIN = ts.train_step(loss_fn)


@functools.cache  # equal ones are compiled once
def watching(*, every=3, of=KINDS, **options):
    return ts.train_step(loss_fn, watch=ts.Watch("**", of, every, stacked="blocks/**", **options))


@functools.cache
def first_grads():
    return jax.jit(ts.value_and_grad(loss_fn))(new_state(), X)[1]


def norm_of(x, axis=None):
    return np.sqrt(np.sum(np.square(np.asarray(x, np.float64)), axis))


def assert_close(named, expected):
    assert named.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(named[name], x, rtol=1e-5, atol=1e-7, err_msg=name)


def test_each_number_is_that_of_numpy_and_scanned_layers_are_split():
    state, grads = new_state(), first_grads()
    before = jax.tree.map(np.array, state.params)
    after, info = watching(numbers=("norm", "rms", "zeros", "max"))(state, X)
    adam = after.opt_state[0]
    trees = {"grads": grads, "params": after.params, "mu": adam.mu, "nu": adam.nu}
    trees["updates"] = jax.tree.map(lambda new, old: np.asarray(new, np.float64) - old, after.params, before)
    expected = {}
    for kind, tree in trees.items():
        for path, axis in (("blocks/kernel", (1, 2)), ("out/kernel", None), ("out/bias", None)):
            layer, leaf = path.split("/")
            x = np.asarray(tree[layer][leaf])
            expected[f"{path}/{kind}_norm"] = norm_of(x, axis)
            expected[f"{path}/{kind}_rms"] = np.sqrt(np.mean(np.square(x), axis))
            expected[f"{path}/{kind}_zeros"] = np.mean(x == 0, axis)
            expected[f"{path}/{kind}_max"] = np.max(np.abs(x), axis)
    named = info.watch.named()
    for name in [name for name in expected if "updates" in name]:  # a difference of rounded params
        np.testing.assert_allclose(named.pop(name), expected.pop(name), rtol=1e-3)
    assert_close(named, expected)


def test_a_layer_is_all_leaves_of_a_parent_and_a_pattern_must_match():
    grads = first_grads()
    watch = ts.Watch(["**", "!blocks/**"], "grads", unit="layer")
    _, info = ts.train_step(loss_fn, watch=watch)(new_state(), X)
    both = np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads["out"])])
    assert_close(info.watch.named(), {"out/grads_norm": norm_of(both)})
    with pytest.raises(PatternError, match="head"):
        ts.train_step(loss_fn, watch=ts.Watch("head/**"))(new_state(), X)
    with pytest.raises(HyperparameterError, match="of"):
        ts.Watch(of="gradients")


def test_the_maximum_of_a_large_leaf_with_a_nan_is_nan():
    bad = np.ones((2, 5000), np.float32)
    bad[1, 3000] = np.nan
    step = ts.train_step(lambda params, x: jnp.mean(x @ params["w"]), watch=ts.Watch(numbers=("max",)), donate=False)
    make = lambda key: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(5000)})
    for state in (make(0), ts.population(make, 2)):
        _, info = step(state, bad)
        assert np.all(np.isnan(info.watch.named()["w/grads_max"]))


def test_only_due_calls_measure_by_the_calls_of_the_state_and_others_are_the_same_step():
    plain, watched, step = new_state(), new_state(), watching()
    for call in range(1, 8):
        plain, _ = PLAIN(plain, X)
        watched, info = step(watched, X)
        assert int(info.watch.due) == (call in (1, 3, 6))
        assert bool(np.any(info.watch.values)) == (call in (1, 3, 6))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(plain.params), jax.device_get(watched.params))


def test_a_rejected_step_reports_the_gradient_that_it_saw():
    bad = X.copy()
    bad[0] = np.nan
    state, step = new_state(), watching(every=1, of=("grads", "params", "updates"))
    kernel = np.array(state.params["out"]["kernel"])
    _, info = step(state, bad)
    named = info.watch.named()
    assert not info.applied and np.isnan(named["out/kernel/grads_norm"]) and np.isnan(named["out/kernel/updates_norm"])
    np.testing.assert_allclose(named["out/kernel/params_norm"], norm_of(kernel), rtol=1e-5)


def test_histograms_count_as_numpy_does():
    grads = first_grads()
    _, info = watching(of="grads", histogram=5)(new_state(), X)
    counts, edges = info.watch.histograms()["blocks/kernel/grads_histogram"]
    for i in range(3):
        expected, expected_edges = np.histogram(grads["blocks"]["kernel"][i], 5)
        np.testing.assert_array_equal(counts[i], expected)
        np.testing.assert_allclose(edges[i], expected_edges, rtol=1e-5)


def test_each_member_reports_its_own_numbers_under_one_condition():
    step, members = watching(), ts.population(lambda key: new_state(), 3)
    members = members.replace(
        params=jax.tree.map(lambda x: x * jnp.arange(1.0, 4).reshape(-1, *[1] * (x.ndim - 1)), members.params)
    )
    alone = step(ts.populations.member(members, 1), X)[1].watch.named()
    new, info = step(members, X)
    assert_close({name: x[1] for name, x in info.watch.named().items()}, alone)
    new, info = step(new, X)
    assert not np.any(info.watch.values)
    conditions = [str(f.trace(new, X).jaxpr).count("cond[") for f in (step, PLAIN)]
    assert conditions[0] > conditions[1]  # `vmap` would make a select of a condition with an axis


def test_a_mesh_reports_the_numbers_of_one_device():
    step = watching(numbers=("norm", "max", "zeros"))
    expected = step(new_state(), X)[1].watch.named()
    state = ts.shard(new_state(), ts.mesh(data=2, fsdp=4))
    new, info = step(state, X)
    for name, x in expected.items():
        np.testing.assert_allclose(info.watch.named()[name], x, rtol=1e-4, atol=1e-6, err_msg=name)
    assert not np.any(step(new, X)[1].watch.values)


@pytest.mark.parametrize("steps_per_call", ["auto", None])
def test_rows_have_the_columns_at_due_calls_only(steps_per_call):
    rows = {}
    logger = lambda row, step: rows.update({step: row})
    y = np.tile(X, (2, 1))
    y[25] = np.nan  # the batch of call 7
    with pytest.warns(RuntimeWarning, match="rejected"):
        _, history = ts.fit(
            watching(every=7, of="grads", histogram=4), new_state(), ts.batches(y, 4), steps=15, log_every=5,
            progress=False, logger=logger, steps_per_call=steps_per_call,
        )  # fmt: skip
    name = "watch/out/kernel/grads_norm"
    steps, values = history.series(name)
    assert steps.tolist() == [1, 6, 13] and np.isnan(values[1]) and np.isfinite(values[[0, 2]]).all()
    assert history["step"].tolist() == [1, 5, 6, 10, 13, 15]
    assert {step for step, row in rows.items() if name in row} == {1, 6, 13}
    assert "loss" not in rows[6] and np.isfinite(rows[13]["loss"])
    assert "watch/blocks/kernel/grads_norm/2" in history
    assert not any("histogram" in name for row in rows.values() for name in row)


def test_values_from_inside_scan_and_vmap_come_out_as_metrics():
    def loss(params, x):
        def layer(h, kernel):
            h = jnp.tanh(h @ kernel)
            return h, jnp.max(jnp.abs(h), -1)  # of each row: f32 (rows,)

        of_row = lambda row: jax.lax.scan(layer, row, params["blocks"]["kernel"])
        h, largest = jax.vmap(of_row, out_axes=(0, 1))(x)  # (layers, rows)
        out = h @ params["out"]["kernel"] + params["out"]["bias"][None]
        metrics = {f"largest/{i}": ts.metrics.Mean.of(largest[i]) for i in range(3)}
        return ts.Loss.mean(jnp.mean(out**2, -1), metrics=metrics)

    h, expected = X, []
    for kernel in np.asarray(new_state().params["blocks"]["kernel"]):
        h = np.tanh(h @ kernel)
        expected.append(np.mean(np.max(np.abs(h), -1)))
    for accumulate in (1, 4):
        _, info = ts.train_step(loss, accumulate=accumulate)(new_state(), X)
        np.testing.assert_allclose([info.metrics[f"largest/{i}"] for i in range(3)], expected, rtol=1e-5)


def test_a_custom_backward_pass_reports_as_the_gradient_of_a_probe():
    """The sum of absolute cotangents behind each layer, from inside `scan` and `vmap`."""

    @jax.custom_vjp
    def activation(x, probe):
        return jnp.sin(x)

    activation.defvjp(
        lambda x, probe: (jnp.sin(x), x), lambda x, cotangent: (cotangent * jnp.cos(x), jnp.sum(jnp.abs(cotangent)))
    )
    kernels = np.asarray(new_state().params["blocks"]["kernel"])

    def loss(params, x):
        layer = lambda h, both: (activation(h @ both[0], both[1]), None)
        h = jax.vmap(lambda row: jax.lax.scan(layer, row, (params["kernels"], params["probe"]))[0])(x)
        return jnp.mean(h**2)

    def shifted(shifts):
        h = X
        for kernel, shift in zip(kernels, shifts, strict=True):
            h = jnp.sin(h @ kernel) + shift
        return jnp.mean(h**2)

    expected = np.abs(jax.grad(shifted)(jnp.zeros((3, *X.shape)))).sum((1, 2))
    rule = ts.rules.partition({"probe": ts.rules.sgd(0.0), "**": ts.rules.adam(1e-2)})
    for accumulate in (1, 4):
        state = ts.setup(rule, {"kernels": jnp.asarray(kernels), "probe": jnp.zeros(3)})
        watch = ts.Watch("probe", every=1, numbers=("max",), stacked="probe")
        state, info = ts.train_step(loss, accumulate=accumulate, watch=watch)(state, X)
        np.testing.assert_allclose(info.watch.named()["probe/grads_max"], expected, rtol=1e-5)
        assert not np.any(state.params["probe"])


# ------------------------------------------------------------------------------------------------------------- media


def read_png(content):
    """The pixels of a PNG file without filters."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, _, color_type = struct.unpack(">2I2B", content[16:26])
    at = content.index(b"IDAT")
    size = struct.unpack(">I", content[at - 4 : at])[0]
    assert zlib.crc32(content[at : at + 4 + size]) == struct.unpack(">I", content[at + 4 + size : at + 8 + size])[0]
    rows = np.frombuffer(zlib.decompress(content[at + 4 : at + 4 + size]), np.uint8).reshape(height, -1)
    return rows[:, 1:].reshape(height, width, {0: 1, 2: 3, 6: 4}[color_type])


def media_row():
    image = np.random.default_rng(0).integers(0, 255, (5, 3, 3), np.uint8)
    values = np.array([0.0, 1.0, 1.0, np.nan])
    return image, {
        "sample": ts.loggers.Text("a < b"),
        "seen/image": ts.loggers.Image(image),
        "values": ts.loggers.Histogram(values, bins=2),
    }


def test_only_loggers_with_media_get_them_and_the_history_keeps_numbers(tmp_path):
    image, media = media_row()
    plain, rows = {}, {}
    taker = lambda row, step: rows.update({step: row})
    taker.media = True
    log = lambda run: run.log(number=run.step, **media) if run.step == 7 else None
    path = tmp_path / "rows.jsonl"
    _, history = ts.fit(
        ts.train_step(loss_fn), new_state(), ts.batches(X, 4), steps=10, progress=False,
        callbacks=ts.callbacks.every(7, log),
        logger=[lambda row, step: plain.update({step: row}), taker, ts.loggers.jsonl(path)],
    )  # fmt: skip
    assert plain[7] == {"number": 7.0} and rows[7] == {"number": 7.0, **media}
    assert history["number"][history["step"] == 7] == 7 and "sample" not in history
    lines = {line["step"]: line for line in map(json.loads, path.read_text().splitlines()) if "step" in line}
    assert lines[7]["sample"] == "a < b" and lines[7]["values"] == {"counts": [1, 2], "edges": [0, 0.5, 1]}
    np.testing.assert_array_equal(read_png((tmp_path / lines[7]["seen/image"]).read_bytes()), image)


def test_each_image_of_a_jsonl_file_has_its_own_file(tmp_path):
    """Names that differ in a sign, and runs without a checkpoint, which have no folder of their own."""
    images = [np.full((2, 2), level, np.uint8) for level in (1, 2, 3)]
    path = tmp_path / "rows.jsonl"
    for row in ({"a/b": images[0], "a_b": images[1]}, {"a/b": images[2]}):
        logger = ts.loggers.jsonl(path)
        logger({name: ts.loggers.Image(image) for name, image in row.items()}, step=5)
        logger.close()
    rows = list(map(json.loads, path.read_text().splitlines()))
    saved_images = [
        read_png((tmp_path / rows[i][name]).read_bytes()) for i, name in ((0, "a/b"), (0, "a_b"), (1, "a/b"))
    ]
    np.testing.assert_array_equal(np.squeeze(saved_images), images)


def test_a_tracker_converts_media_for_its_library():
    _, media = media_row()
    logged = []
    library = types.SimpleNamespace(
        log=lambda row, step: logged.append((step, row)), Image=lambda x: ("image", x.shape),
        Histogram=lambda np_histogram: ("histogram", np_histogram[0].tolist()), Html=lambda text: ("html", text),
    )  # fmt: skip
    ts.loggers.tracker(library)({"loss": 0.5, **media}, step=3)
    expected = {"sample": ("html", "a &lt; b"), "seen/image": ("image", (5, 3, 3)), "values": ("histogram", [1, 2])}
    assert logged == [(3, {"loss": 0.5, **expected})]


def test_tensorboard_reads_media(tmp_path):
    accumulators = need("tensorboard.backend.event_processing.event_accumulator")
    image, media = media_row()
    logger = ts.loggers.tensorboard(tmp_path)
    for steps, rows_from in (((1, 2, 3), 0), ((3,), 3)):  # resumed: the rows from step 3 on come again
        logger.start({"run_id": "a", "rows_from": rows_from})
        for step in steps:
            logger(media, step=step)
        logger.close()
    events = accumulators.EventAccumulator(
        str(tmp_path), size_guidance=dict.fromkeys(("images", "histograms", "tensors"), 0)
    )
    events.Reload()
    assert [x.step for x in events.Images("seen/image")] == [1, 2, 3]
    np.testing.assert_array_equal(read_png(events.Images("seen/image")[0].encoded_image_string), image)
    assert events.Histograms("values")[0].histogram_value.bucket == [1, 2]
    assert b"a < b" in events.Tensors("sample/text_summary")[0].tensor_proto.string_val[0]


def test_media_of_other_shapes_are_errors():
    with pytest.raises(RowError, match="height, width"):
        ts.loggers.Image(np.zeros((2, 2, 2)))
    with pytest.raises(RowError, match="uint8"):
        ts.loggers.Image(np.zeros((2, 2), np.int32))
    with pytest.raises(RowError, match="edges"):
        ts.loggers.Histogram([1, 2], edges=[0, 1])


# ---------------------------------------------------------------------------------------------------------- profiles


def test_a_profile_has_the_number_of_each_step(tmp_path):
    step, state = ts.train_step(loss_fn), new_state()
    _, history = ts.fit(
        step, state, ts.batches(X, 4), steps=12, progress=False, steps_per_call=1,
        callbacks=ts.callbacks.profile((6, 9), tmp_path),
    )  # fmt: skip
    (path,) = tmp_path.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    numbers = {int(x["args"]["step_num"]) for x in events if "step_num" in x.get("args", {})}
    assert numbers == {7, 8, 9}
    assert (9, "profile", str(tmp_path)) in history.marks
    with pytest.raises(HyperparameterError, match="first, last"):
        ts.callbacks.profile((5, 5), tmp_path)


@pytest.mark.parametrize("name", ["of", "numbers"])
def test_nothing_to_watch_is_refused(name):
    with pytest.raises(ts.errors.HyperparameterError, match=rf"{name} at Watch\(\): got \(\), expected some of"):
        ts.Watch("**", **{name: ()})


MOMENT_PARAMS = {"mu": {"w": np.full((4, 3), 0.5, np.float32)}, "w": np.ones((4, 3), np.float32), "s": np.float32(0.5)}
MOMENTS = {
    "momentum": (lambda: ts.rules.sgd(0.1, momentum=0.9), "**", {"trace": lambda s: s[0].trace}),
    "adam": (lambda: ts.rules.adam(0.1), "**", {"mu": lambda s: s[0].mu, "nu": lambda s: s[0].nu}),
    "one leaf": (lambda: ts.rules.adam(0.1), "w", {"mu": lambda s: s[0].mu, "nu": lambda s: s[0].nu}),
    "a scalar": (lambda: optax.adam(0.1), "s", {"mu": lambda s: s[0].mu, "nu": lambda s: s[0].nu}),
    "two of a name": (
        lambda: ts.rules.chain(ts.rules.adam(0.1), optax.trace(0.5), optax.trace(0.9)),
        "mu/w",
        {"mu": lambda s: s[0][0].mu, "nu": lambda s: s[0][0].nu, "1.trace": lambda s: s[1].trace}
        | {"2.trace": lambda s: s[2].trace},
    ),
}


@pytest.mark.parametrize("name", medium_if(lambda name: name not in ("adam", "a scalar"), MOMENTS))
def test_moments_are_those_of_their_parameter_whatever_its_name_and_shape(name):
    """A group of parameters is called like a moment, and its leaf like another leaf."""
    rule, where, moments = MOMENTS[name]
    f = lambda params, x: jnp.mean((x @ params["w"] * params["s"]) ** 2) + jnp.mean((x @ params["mu"]["w"]) ** 2)
    state = ts.setup(rule(), jax.tree.map(jnp.asarray, MOMENT_PARAMS))
    after, info = ts.train_step(f, watch=ts.Watch(where, "moments"))(state, X)
    expected = {}
    for moment, tree_of in moments.items():
        tree = tree_of(after.opt_state)
        leaves = {"mu/w": tree["mu"]["w"], "w": tree["w"], "s": tree["s"]}
        expected |= {f"{path}/{moment}_norm": norm_of(x) for path, x in leaves.items() if where in ("**", path)}
    assert_close(info.watch.named(), expected)


def test_a_rule_without_moments_is_refused_unless_there_is_something_else_to_watch():
    f = lambda params, x: jnp.mean((x @ params["w"]) ** 2) + params["b"] ** 2
    params = {"w": jnp.ones((4, 3)), "b": jnp.float32(1)}
    half = ts.rules.partition({"w": ts.rules.adam(0.1), "b": ts.rules.sgd(0.1)})
    for rule, where in ((ts.rules.sgd(0.1), "**"), (half, "b")):
        step = ts.train_step(f, watch=ts.Watch(where, "moments"))
        with pytest.raises(HyperparameterError, match=r"of at Watch\(\): got \('moments',\), .*no moments"):
            step(ts.setup(rule, params), X)
    _, info = ts.train_step(f, watch=ts.Watch("b", ("moments", "updates")))(ts.setup(half, params), X)
    assert_close(info.watch.named(), {"b/updates_norm": 0.2})
