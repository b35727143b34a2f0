"""`plan`: the best of all candidates, as each compiled by itself says, from a few compilations and no execution."""

import dataclasses
import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests import helpers, toys
from tsunax.errors import DeviceError, DoesNotFitError, HyperparameterError, WrongTypeError
from tsunax.insight import Peaks, _cost, _memory, _roofline, find_accumulation, planning
from tsunax.insight._layouts import Layout
from tsunax.insight._roofline import Work
from tsunax.insight.batch_size import Search

PEAKS = Peaks(flops=1e12, memory=1e11, wire=1e10, host=1e10)
ROW = jax.ShapeDtypeStruct((1, 256), jnp.float32)


def loss_fn(params, x):
    for w in params["blocks"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def make():
    draw = lambda i: 0.01 * jnp.cos(jnp.arange(256 * 256.0) * (i + 1)).reshape(256, 256)
    return ts.setup(ts.rules.adam(1e-3), {"blocks": [draw(i) for i in range(2)]})


STEP = ts.train_step(loss_fn)


def compiled_rows(report):
    return [row for row in report.rows if not row.reason]


def test_the_micro_batches_are_those_of_find_accumulation():
    options = dict(memory=64 << 20, margin=0.0)
    report = ts.plan(STEP, make, ROW, 8192, vary="accumulate", **options)
    n, trials = find_accumulation(STEP, jax.eval_shape(make), ROW, 8192, **options)
    assert report.best.accumulate == n > 1
    needs = {8192 // row.accumulate: row.need for row in compiled_rows(report)}
    assert needs == {trial.size: trial.need for trial in trials.trials}
    assert len(report.rows) == 14 and report.limit == trials.limit
    assert report.varied["remat"] == "none" and "devices=" in report.varied["layout"]


def test_a_step_with_the_noise_scale_has_two_micro_batches_at_least():
    step = dataclasses.replace(STEP, accumulate=4, noise_scale=True)
    report = ts.plan(step, make, ROW, 64, memory="1 GiB", vary=("accumulate", "remat"), peaks=PEAKS)
    n, trials = find_accumulation(step, jax.eval_shape(make), ROW, 64, memory="1 GiB")
    assert report.best.accumulate == n == 2 and trials.trials[0].size == 32
    assert report.varied["accumulate"] == "2, 4, 8, 16, 32, 64" and report.best.step.noise_scale
    for find in (functools.partial(ts.plan, step, make), functools.partial(find_accumulation, step, make())):
        with pytest.raises(HyperparameterError, match=r"batch_size.*: got 1, expected 2 or more micro-batches"):
            find(ROW, 1, memory="1 GiB")


def test_a_row_is_ready_to_call():
    """And computes what the plain step does, up to rounding."""
    rows = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    expected, _ = STEP(make(), rows)
    devices = jax.devices()[:2]
    report = ts.plan(STEP, make, ROW, 64, devices=devices, memory="1 GiB", peaks=PEAKS, vary="layout")
    assert report.varied["layout"] == "data 2; data 2, zero1; fsdp 2"
    for row in compiled_rows(report):
        state = row.shard(make if row is report.best else make())
        for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(row.layout.state), strict=True):
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
        found, _ = row.step(state, rows)
        helpers.assert_trees_close(found.params, expected.params, rtol=1e-5, atol=1e-5)
    text = repr(report)
    assert f"{len(compiled_rows(report))} of 3 candidates compiled" in text and "peaks from as given" in text


def test_figures_are_those_of_the_program():
    """FLOPs and bytes in closed form: 5 products of 2 layers, and an all-reduce of gradients and the loss."""
    mesh = ts.mesh(devices=jax.devices()[:4])
    (row,) = ts.plan(STEP, make, ROW, 64, devices=mesh, memory="1 GiB", peaks=PEAKS, vary=()).rows
    about = ts.describe(STEP, row.layout.state, jax.ShapeDtypeStruct((64, 256), jnp.float32))
    assert row.flops == about.flops == 5 * 2 * 64 * 256 * 256 and row.recomputed == 0
    assert row.need == about.memory
    assert row.wire == pytest.approx(2 * 3 / 4 * 4 * 2 * 256 * 256, rel=0.01)
    assert row.rows_per_second == pytest.approx(64 / row.seconds)
    work = Work(flops=4e12, moved=3e11, wire=1e9, host=2e9, devices=2)
    assert work.seconds(PEAKS) == pytest.approx(3 + 0.1 + 0.2)
    assert dataclasses.replace(work, moved=0.0).seconds(PEAKS) == pytest.approx(2 + 0.1 + 0.2)
    cached = dataclasses.replace(PEAKS, cache=1e6)
    work = dataclasses.replace(work, update=1e11)
    assert dataclasses.replace(work, temporary=2e6).seconds(cached) == pytest.approx(2 + 3 + 0.1 + 0.2)
    assert dataclasses.replace(work, temporary=1e6).seconds(cached) == pytest.approx(2 + 1 + 0.1 + 0.2)


@pytest.mark.parametrize("cache, expected", [(0, 1), (64, 1), (63, 2), (8, 8), (9, 8), (1, 64), (0.5, 1)])
def test_on_a_cpu_the_largest_micro_batch_within_the_cache_is_chosen(cache, expected, monkeypatch):
    """A row has 1 byte of temporary values; if no micro-batch is within the cache, the largest moves the least."""

    def measure(self, layout, step):
        temporary = 64 // step.accumulate
        moved = 100.0 + step.accumulate
        return _memory.Need(1, 0, temporary, 0, 0), Work(1e12, moved, 0.0, 0.0, 1, update=2.0, temporary=temporary)

    monkeypatch.setattr(planning._Candidates, "_measure", measure)
    peaks = dataclasses.replace(PEAKS, cache=cache)
    report = ts.plan(STEP, make, ROW, 64, memory=10**6, peaks=peaks, vary="accumulate")
    assert report.best.accumulate == expected and len(compiled_rows(report)) <= 2
    if expected > 1:
        assert "more than the cache" in report.why(next(row for row in report.rows if row.accumulate == 1))


def test_nothing_fits():
    report = ts.plan(STEP, make, ROW, 2, memory="41 MiB", vary="accumulate")
    with pytest.raises(DoesNotFitError, match=r"nearest plan \(accumulate=\d+, remat=.*\) at plan\(\)") as caught:
        _ = report.best
    nearest = min(compiled_rows(report), key=lambda row: row.need.total)
    assert repr(nearest) in str(caught.value)
    assert report.why(nearest).startswith(f"{nearest!r} does not fit: ") and "too much" in report.why(nearest)


def test_nothing_is_executed_or_allocated():
    ran = []

    def noisy(params, x):
        jax.debug.callback(lambda: ran.append(1))
        return loss_fn(params, x)

    def noisy_make():
        jax.debug.callback(lambda: ran.append(1))
        return make()

    gc.collect()
    arrays = len(jax.live_arrays())
    report = ts.plan(ts.train_step(noisy), noisy_make, ROW, 16, memory="1 GiB", vary="accumulate")
    jax.effects_barrier()
    assert report.best.accumulate == 1 and not ran and len(jax.live_arrays()) <= arrays


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (dict(vary=("acumulate",)), HyperparameterError, "vary.*'acumulate'"),
        (dict(example=np.float32(1)), WrongTypeError, "example"),
        (dict(step=loss_fn), WrongTypeError, "step.*train_step"),
        (dict(margin=1.0), HyperparameterError, "margin"),
        (dict(batch_size=6, devices="cpu"), HyperparameterError, "batch_size.*got 6, expected a multiple of 8"),
        (dict(devices="v9:2x2x2x2"), (DeviceError, ts.errors.MissingLibraryError), "topology"),
    ],
)
def test_wrong_arguments(arguments, kind, text):
    arguments = {"step": STEP, "state": make, "example": ROW, "batch_size": 8, "memory": 1 << 30, **arguments}
    with pytest.raises(kind, match=text):
        ts.plan(**arguments)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_is_that_of_all_candidates_and_few_are_compiled(seed, monkeypatch):
    """Of bytes and seconds by a model in which more micro-batches, remat and host memory need less and take longer."""
    draw = np.random.default_rng(seed)
    share_of_layout = {"data": 1.0, "zero1": 0.5, "fsdp": 0.2}
    layouts = [Layout(name, {}, host=host) for host in ((), ("moments",)) for name in share_of_layout]
    monkeypatch.setattr(planning, "layouts_of", lambda *_: (layouts, {"layout": "", "host": ""}))
    costs = {None: (1.0, 1.0), "dots_saveable": (0.6, 1.1), True: (0.2, 1.35)}  # activations, FLOPs
    state_bytes, row_bytes = 10 ** draw.uniform(6, 9), 10 ** draw.uniform(4, 7)
    flops, moved, wire, host_bytes = (10 ** draw.uniform(*bounds) for bounds in [(10, 13), (9, 11), (8, 11), (8, 10)])
    wire_of_layout = {"data": wire, "zero1": wire * draw.uniform(1, 2), "fsdp": wire * draw.uniform(1, 3)}

    def measure(self, layout, step):
        share, factor = costs[step.remat]
        state = int(state_bytes * share_of_layout[layout.name] * (0.5 if layout.host else 1))
        need = _memory.Need(state, 0, int(row_bytes * share * (512 // step.accumulate)), 0, 0)
        moved_bytes = moved * (1 + 0.02 * step.accumulate)
        return need, Work(flops * factor, moved_bytes, wire_of_layout[layout.name], len(layout.host) * host_bytes, 1)

    monkeypatch.setattr(planning._Candidates, "_measure", measure)
    monkeypatch.setattr(planning._Candidates, "_flops_of", lambda self, remat, layout: flops * costs[remat][1])
    limit = int(state_bytes * draw.uniform(0.15, 1.2) + row_bytes * 10 ** draw.uniform(0, 3))
    report = ts.plan(STEP, {}, ROW, 512, memory=limit, margin=0.0, peaks=PEAKS)
    assert len(report.rows) == 10 * 3 * 6
    measured = [measure(None, row.layout, row.step) for row in report.rows]
    fitting = [work.seconds(PEAKS) for need, work in measured if need.total <= limit]
    assert not fitting or report.best.seconds == min(fitting)
    assert {row.fits for row in compiled_rows(report)} <= ({True, False} if fitting else {False})
    assert len(compiled_rows(report)) <= len(report.rows) / 3


def test_a_size_is_not_ruled_out_by_memory_that_was_assumed():
    """Bytes of a transformer on a v5e, whose code takes more if its micro-batches are large."""
    needs = {
        4: _memory.Need(2_757_616, 2_064, 1_556_480, 2_048, 3_661_312),
        8: _memory.Need(2_757_616, 2_064, 1_486_848, 2_048, 3_877_376),
        16: _memory.Need(2_757_616, 2_064, 1_310_720, 2_048, 4_798_464),
    }
    trials = Search("", 8_130_000, "").trials([*needs], needs.__getitem__, 2)
    assert max(trial.size for trial in trials if trial.fits) == 8


@pytest.mark.slow
def test_moments_in_the_memory_of_the_host_of_a_topology():
    """They take less of each of four TPUs, though not enough here: the gradient takes their room."""
    helpers.need("libtpu")
    draw = lambda: ts.setup(ts.rules.adam(1e-3), {"w": jnp.ones((512, 1024)), "v": jnp.ones((1024, 512))})
    step = ts.train_step(lambda params, x: jnp.mean((jax.nn.relu(x @ params["w"]) @ params["v"]) ** 2))
    row = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    report = ts.plan(step, draw, row, 1024, devices="v5e:2x2", memory="15 MiB", vary=("host",))
    assert report.varied["host"] == "moments" and report.peaks.source == "its data sheet"
    with pytest.raises(
        DoesNotFitError, match=r"nearest plan \(accumulate=1, remat=none, host=moments, layout=data 4\)"
    ):
        _ = report.best


def transformer_loss(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    n, t, width = x.shape
    normed = lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    for p in params["blocks"]:
        q, k, v = jnp.split((normed(x) @ p["qkv"]).reshape(n, t, 4, -1), 3, -1)
        attention = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", q, k) / 8)
        x = x + jnp.einsum("nhqk,nkhd->nqhd", attention, v).reshape(n, t, width) @ p["out"]
        x = x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]
    return ts.losses.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, tokens[:, 1:]).mean()


def make_transformer(width=256):
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    block = {name: jnp.zeros(size) for name, size in sizes.items()}
    return ts.setup(ts.rules.adam(1e-3), {"embed": jnp.zeros((512, width)), "blocks": [block]})


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "library"), [("v5e:2x2", "libtpu"), ("h100:4", "jax_cuda13_plugin")])
def test_the_best_on_a_topology_is_that_of_all_candidates_as_users_compile_them(devices, library, monkeypatch):
    """Micro-batches, remat, moments on the host (of a TPU) and layouts of a transformer, under six limits."""
    helpers.need(library)
    programs = {}  # {candidate: its need and its work}, each compiled once

    def measure(self, layout, step):
        key = repr(planning.PlanRow(step.accumulate, step.remat, layout, step))
        if key not in programs:
            batch, _ = _memory.as_shapes(layout.state, self.batch, {})
            traced = step.trace(layout.state, batch)
            compiled = traced.lower().compile()
            need = _memory.need_in(compiled, layout.state, batch)
            programs[key] = need, _roofline.work_of(_cost.flops_of(traced.jaxpr), compiled, need, 4)
        return programs[key]

    step, row = ts.train_step(transformer_loss), jax.ShapeDtypeStruct((1, 129), jnp.int32)
    search = functools.partial(ts.plan, step, make_transformer, row, 16, devices=devices, margin=0.0)
    as_planned = search(memory="11 MB")  # compiled as `plan` compiles
    monkeypatch.setattr(planning._Candidates, "_measure", measure)
    candidates = planning._Candidates(step, jax.ShapeDtypeStruct((16, 129), jnp.int32), {}, None, None, 4)
    for candidate in as_planned.rows:
        need, _ = measure(candidates, candidate.layout, candidate.step)
        assert candidate.need is None or candidate.need == need
    needs = sorted(need.total for need, _ in programs.values())
    for share in (0.02, 0.2, 0.4, 0.6, 0.8, 0.98):
        report = search(memory=round(1.01 * needs[int(share * len(needs))]))
        fitting = [work for need, work in programs.values() if need.total <= report.limit]
        assert report.best.seconds == min(work.seconds(report.peaks) for work in fitting)
        print(f"limit {report.limit}: {len(compiled_rows(report))} of {len(report.rows)} compiled")


@pytest.mark.parametrize("layout", [None, {"data": 8}])
def test_a_run_logs_how_much_of_its_devices_it_uses(layout, monkeypatch):
    """FLOPs counted by hand, over the time of a step and the peaks of all devices."""
    x = np.ones((32, 64), np.float32)
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((64, 32))})
    state = state if layout is None else ts.shard(state, ts.mesh(**layout))
    flops, devices = 2 * 2 * 32 * 64 * 32, 1 if layout is None else 8
    callback = ts.callbacks.every(10, ts.insight.usage(step, state, x, peak=1e12))
    state, history = ts.fit(step, state, [x] * 4, steps=200, log_every=10, progress=False, callbacks=callback)
    steps, mfu = history.series("mfu")
    rates = dict(zip(*history.series("steps_per_second"), strict=True))
    assert len(steps) > 10 and "peak_bytes" not in history
    expected = [rates[i] * flops / (devices * 1e12) for i in steps]
    np.testing.assert_allclose(mfu, expected)
    unknown = ts.insight.usage(step, state, x)  # a CPU has no data sheet
    assert unknown.peak is None
    logged = {}
    run = types.SimpleNamespace(metrics={"steps_per_second": 10.0}, log=logged.update)
    device = types.SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 7})
    monkeypatch.setattr(jax, "local_devices", lambda: [device, jax.devices()[0]])
    unknown(run)
    assert logged == {"peak_bytes": 7}


@pytest.mark.parametrize("name", ["flops", "memory", "wire", "host"])
@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_peaks_are_above_zero(name, rate):
    with pytest.raises(ts.errors.HyperparameterError, match=f"{name} at Peaks: got {rate}"):
        Peaks(**{"flops": 1e12, "memory": 1e11, "wire": 1e10, "host": 1e10, name: rate})


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), None])
def test_a_cache_has_a_size(size):
    with pytest.raises(ts.errors.HyperparameterError, match=f"cache at Peaks: got {size}"):
        Peaks(flops=1e12, memory=1e11, wire=1e10, host=1e10, cache=size)


def test_usage_counts_the_calls_of_an_accumulated_step():
    step, x, rates = (
        ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2)),
        np.ones((64, 32), np.float32),
        {},
    )
    for name, rule in (("plain", ts.rules.sgd(1e-6)), ("gathered", ts.rules.accumulate(ts.rules.sgd(1e-6), 4))):
        state = ts.setup(rule, {"w": jnp.ones((32, 32))})
        usage = ts.insight.usage(step, state, x[:8], peak=1e12)
        steps, callbacks = 40 if name == "plain" else 10, [ts.callbacks.every(5, usage)]
        _, history = ts.fit(
            step, state, ts.batches(x, 8), steps=steps, callbacks=callbacks, log_every=5, progress=False
        )
        calls_a_second = history["mfu"] * 1e12 / usage.flops
        rates[name] = (calls_a_second / history["steps_per_second"])[1:]  # the first row has no rate yet
    np.testing.assert_allclose(rates["plain"], 1)
    np.testing.assert_allclose(rates["gathered"], 4)


def test_a_batch_has_the_micro_batches_of_its_step():
    step, make = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), accumulate=4), toys.state
    for rows in (10, 3):
        with pytest.raises(
            ts.errors.HyperparameterError, match=f"batch_size .*got {rows}, expected a multiple of accum"
        ):
            ts.plan(step, make, jax.ShapeDtypeStruct((1, 8), jnp.float32), rows, memory="1 GiB", vary="remat")


@pytest.mark.parametrize(
    ("temporary", "expected"),
    [({}, None), ({64: 7}, None), ({64: 16}, 32), ({64: 16, 1: 9}, None), ({64: 39, 4: 9}, 2), ({64: 71, 8: 15}, 1)],
)
def test_the_size_within_the_cache_is_on_the_line_through_the_trials(temporary, expected):
    assert planning._size_in_cache([1, 2, 4, 8, 16, 32, 64], temporary, 8) == expected


def test_usage_keeps_no_state_of_an_ended_run_alive():
    step, x = ts.train_step(toys.loss_fn), np.ones((64, 8), np.float32)
    usage, runs = ts.insight.usage(step, toys.state(), x[:8], peak=1e12), []
    callbacks = [ts.callbacks.every(2, usage), ts.callbacks.every(2, lambda run: runs.append(weakref.ref(run)))]
    ts.fit(step, toys.state(), ts.batches(x, 8), steps=40, log_every=2, callbacks=callbacks, progress=False)
    gc.collect()
    assert usage.last_row and runs[0]() is None
