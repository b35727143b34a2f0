"""The searches before a run, against brute force, plain JAX, and steps that fail where they are told to."""

import dataclasses
import gc
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import toys
from tests.helpers import assert_trees_equal
from tsunax.errors import DoesNotFitError, HyperparameterError, WrongTypeError
from tsunax.insight import _memory
from tsunax.insight.batch_size import find_accumulation, find_batch_size
from tsunax.insight.learning_rate import find_learning_rate

MIB = 1 << 20
X = jax.ShapeDtypeStruct((1, 512), jnp.float32)


def loss_fn(params, x, key=None):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


@pytest.fixture(scope="module")
def state():
    """63 MiB with Adam: XLA plans memory on a CPU only for programs of some size."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(512, 5376)), "v": rng.normal(size=(5376, 512))}
    params = {name: x.astype(np.float32) / 64 for name, x in params.items()}
    return ts.setup(ts.rules.adam(1e-3), params, key=0)


class Fake:
    """A step of which XLA says that it needs `bytes_of(rows)`, arguments and all; compiling fails above `refuses`."""

    def __init__(self, bytes_of, refuses=math.inf):
        self.bytes_of, self.refuses, self.seen = bytes_of, refuses, []

    def __call__(self, state, batch):
        raise AssertionError("executed")

    def lower(self, state, batch):
        self.seen.append(batch.shape[0])
        return self

    def compile(self, compiler_options=None):
        if self.seen[-1] > self.refuses:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while autotuning")
        return self

    def as_text(self):
        return ""

    def memory_analysis(self):
        rows = self.seen[-1]
        return dataclasses.make_dataclass("Stats", [
            (f"{name}_in_bytes", int, size)
            for name, size in {
                "argument_size": 4 * rows, "output_size": 0, "alias_size": 0,
                "temp_size": int(self.bytes_of(rows)) - 4 * rows - _memory.CPU_SCRATCH, "generated_code_size": 0,
            }.items()
        ])()  # fmt: skip


ROW = jax.ShapeDtypeStruct((1,), jnp.float32)
TINY = {"w": np.zeros(1, np.float32)}
SIX = np.ones((6, 4), np.float32)


def by_analysis(bytes_of, limit, **options):
    fake = Fake(bytes_of, options.pop("refuses", math.inf))
    size, report = find_batch_size(fake, TINY, ROW, memory=int(limit), margin=0.0, **options)
    assert [t.size for t in report.trials] == fake.seen
    assert any(t.size == size and t.fits for t in report.trials)
    return size, report


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_maximum_and_multiples_hold_in_both_modes(mode):
    for most, unit, expected in [(100, 1, 100), (100, 8, 96), (7, 1, 7), (8, 8, 8), (1, 1, 1)]:
        size, report = by_analysis(lambda n: 50 * MIB + n, 1 << 30, mode=mode, max_size=most, multiple_of=unit)
        assert size == expected
        assert all(t.size <= most and t.size % unit == 0 for t in report.trials)


# -------------------------------------------------------------------------------------------------- what the line finds


@given(
    fixed=st.integers(50 * MIB, 500 * MIB),
    per_row=st.integers(1000, 100 * MIB),
    limit=st.integers(600 * MIB, 1 << 37),
    unit=st.sampled_from([1, 8, 24]),
)
def test_three_compiles_where_memory_is_affine(fixed, per_row, limit, unit):
    largest = (limit - fixed) // per_row // unit * unit
    if largest < unit:
        with pytest.raises(DoesNotFitError, match=f"smallest batch size {unit} at"):
            by_analysis(lambda n: fixed + per_row * n, limit, mode="binsearch", multiple_of=unit)
        return
    size, report = by_analysis(lambda n: fixed + per_row * n, limit, mode="binsearch", multiple_of=unit)
    assert size == largest
    assert len(report.trials) <= (3 if largest >= 16 * unit else 5)


@settings(max_examples=60)
@given(
    parts=st.lists(st.tuples(st.integers(50 * MIB, 2000 * MIB), st.integers(100, 30 * MIB)), min_size=2, max_size=4),
    limit=st.integers(2100 * MIB, 1 << 36),
    mode=st.sampled_from(["power", "binsearch"]),
)
@hypothesis.example(parts=[(50 * MIB, 2367), (2_091_215_153, 105)], limit=2_202_009_600, mode="power")
@hypothesis.example(parts=[(50 * MIB, 2367), (2_067_693_570, 100)], limit=2_202_009_649, mode="binsearch")
def test_the_largest_where_memory_is_the_peak_of_several_phases(parts, limit, mode):
    bytes_of = lambda n: max(fixed + row * n for fixed, row in parts)
    largest = min((limit - fixed) // row for fixed, row in parts)
    if largest < 1:
        return
    size, report = by_analysis(bytes_of, limit, mode=mode)
    assert size == (largest if mode == "binsearch" else 1 << (largest.bit_length() - 1))
    assert len(report.trials) <= 25


def test_steps_of_memory_are_followed_to_the_last_row():
    bytes_of = lambda n: 100 * MIB + 2 * MIB * n + 70 * MIB * (n // 50)  # a jump at every 50 rows
    limit = 1000 * MIB
    largest = max(n for n in range(1, 1000) if bytes_of(n) <= limit)
    assert by_analysis(bytes_of, limit, mode="binsearch")[0] == largest


@pytest.mark.parametrize(
    ("unit", "rows", "fixed", "limit", "largest"),
    [
        (16, [8, 20, 4], 50_026_755, 69_887_374, 620_644),
        (16, [8], 47_868_460, 106_660_576, 7_349_014),
        (128, [36], 51_690_150, 107_081_530, 1_538_648),
    ],
)
def test_rounded_sizes_of_buffers_hide_no_row(unit, rows, fixed, limit, largest):
    bytes_of = lambda n: fixed + sum(-(-n * row // unit) * unit for row in rows)
    assert bytes_of(largest) <= limit < bytes_of(largest + 1)
    assert by_analysis(bytes_of, limit, mode="binsearch")[0] == largest


def test_programs_that_xla_cannot_build_do_not_fit():
    size, report = by_analysis(lambda n: 50 * MIB + n, 1 << 30, mode="binsearch", refuses=1000)
    assert size == 1000
    assert all(t.need is None and not t.fits for t in report.trials if t.size > 1000)


def test_the_margin_stays_free():
    find = lambda **options: find_batch_size(Fake(lambda n: MIB * (100 + n)), TINY, ROW, mode="binsearch", **options)
    size, report = find(memory=1000 << 20, margin=0.1)
    assert (size, report.limit) == (800, 900 * MIB)
    assert find(memory=1000 << 20)[0] == 850


# ----------------------------------------------------------------------------------------------------------- real steps


def bytes_by_hand(state, rows):
    """What plain JAX says of the step, written out."""
    step = ts.train_step(loss_fn)
    program = jax.jit(step.pure, donate_argnums=0).lower(state, jax.ShapeDtypeStruct((rows, 512), jnp.float32), {})
    stats = program.compile().memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes + results + _memory.CPU_SCRATCH


@pytest.mark.slow
def test_the_answer_is_that_of_plain_jax(state):
    limit = 300 * MIB
    size, report = find_batch_size(ts.train_step(loss_fn), state, X, mode="binsearch", memory=limit, margin=0.0)
    small = 4096  # what the two programs hand out beside the state
    assert bytes_by_hand(state, size) <= limit + small
    assert bytes_by_hand(state, size + 1) > limit - small
    assert len(report.trials) <= 6 and size > 1000


@pytest.mark.medium
@pytest.mark.parametrize("more", [{}, {"accumulate": 4}, {"remat": True}], ids=str)
def test_compiled_quickly_it_needs_what_the_real_program_does(state, more):
    convolved = lambda params, x: jnp.mean(jnp.convolve(loss_fn(params, x) * x[0], x[0]))
    for loss in (loss_fn, convolved):
        step, x = ts.train_step(loss, **more), jax.ShapeDtypeStruct((64, 512), jnp.float32)
        real = _memory.need_in(step.lower(state, x).compile(), state, x)
        assert _memory.need_of(step, state, x, {}) == real


def test_an_option_that_this_xla_does_not_have_is_left_out(state, monkeypatch):
    step, x = ts.train_step(loss_fn), jax.ShapeDtypeStruct((64, 512), jnp.float32)
    before = _memory.need_of(step, state, x, {})
    monkeypatch.setitem(_memory.FAST_COMPILER_OPTIONS, "cpu", {"xla_an_option_of_the_past": 1})
    assert _memory.need_of(step, state, x, {}) == before


def test_a_gpu_runs_no_kernels_to_choose_the_fastest(monkeypatch):
    """They would take its memory, and most of the time of a trial."""
    options = []

    class Noted(Fake):
        def compile(self, compiler_options=None):
            options.append(compiler_options)
            return self

    gpu = dataclasses.make_dataclass("Device", [("platform", str, "gpu")])()
    monkeypatch.setattr(_memory, "device_of_state", lambda state: gpu)
    size, report = find_batch_size(Noted(lambda n: 50 * MIB + n), TINY, ROW, memory=1 << 30, max_size=64)
    assert size == 64 and options == [{"xla_gpu_autotune_level": 0}] * len(report.trials)


def test_memory_in_words():
    words = {"128MiB": 128 << 20, "1.5 GiB": 3 << 29, "16GB": 16 * 10**9, "2TiB": 2 << 40, "64KB": 64000, "7B": 7}
    assert {text: _memory.limit_of(text, {}, "")[0] for text in words} == words


@pytest.mark.medium
def test_nothing_is_executed_or_held(state):
    ran = []

    def told(params, x):
        jax.debug.callback(lambda: ran.append(1))
        return loss_fn(params, x)

    example = np.ones((3, 512), np.float32)
    gc.collect()  # what other tests have left would go meanwhile
    before, arrays = jax.tree.map(np.array, jax.tree.leaves(state.params)), len(jax.live_arrays())
    find_batch_size(ts.train_step(told), state, example, memory=256 << 20, max_size=64)
    jax.effects_barrier()
    assert not ran and len(jax.live_arrays()) == arrays
    assert_trees_equal(jax.tree.leaves(state.params), before)


@pytest.mark.slow
def test_sharded_states_count_the_bytes_of_one_device(state):
    step, mesh = ts.train_step(loss_fn), ts.mesh(data=2, fsdp=4)
    sharded = ts.shard(state, mesh)
    size, report = find_batch_size(step, sharded, X, mode="binsearch", memory=100 << 20, max_size=4096)
    one = report.trials[0].need
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((sharded.params, sharded.opt_state)))
    assert held <= one.state <= held + 4096 and size % 8 == 0
    assert one.batch == report.trials[0].size // 8 * 512 * 4
    cut, report = find_batch_size(
        dataclasses.replace(step, accumulate=4), sharded, X, mode="binsearch", memory=100 << 20, max_size=1000
    )
    assert cut == 992 and all(t.size % 32 == 0 for t in report.trials)


# ------------------------------------------------------------------------------------------------------------- examples


@pytest.mark.slow
def test_other_steps_that_can_be_lowered():
    @jax.jit
    def step(params, batch, scale):
        return jax.tree.map(lambda p: p - scale * batch.mean(), params), batch.sum()

    size, _ = find_batch_size(step, {"w": jnp.ones(4)}, np.ones((2, 3), np.float32), max_size=32, scale=0.1)
    assert size == 32


# --------------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.slow
def test_accumulation_is_the_least_that_fits(state):
    step, rows, limit = ts.train_step(loss_fn), 4096, 300 * MIB
    n, report = find_accumulation(step, state, X, rows, memory=limit, margin=0.0)
    needs = {}
    for k in (n // 2, n):
        cut = dataclasses.replace(step, accumulate=k).lower(state, jax.ShapeDtypeStruct((rows, 512), jnp.float32))
        stats = cut.compile().memory_analysis()
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        needs[k] = stats.argument_size_in_bytes + stats.temp_size_in_bytes + results + _memory.CPU_SCRATCH
    assert needs[n] <= limit < needs[n // 2]
    assert report.trials[0].size == rows  # uncut first
    assert find_accumulation(step, state, X, rows, memory=2 << 30)[0] == 1
    with pytest.raises(DoesNotFitError, match=r"smallest batch size 512 at find_accumulation"):
        find_accumulation(step, state, X, rows, memory=100 << 20, multiple_of=512)


# ---------------------------------------------------------------------------------------------------- memory, arguments


def test_free_memory_of_the_machine(monkeypatch):
    free = _memory.free_on_host()
    assert free is not None and 1 << 27 < free < 1 << 44
    state = {"w": jnp.ones((256, 1024))}  # 1 MiB that is there already, and that a step counts
    monkeypatch.setattr(_memory, "free_on_host", lambda: 10 * MIB)
    assert _memory.limit_of(None, state, "") == (11 * MIB, "free on this machine")


STEP = ts.train_step(loss_fn)
ANY = lambda **options: find_batch_size(Fake(lambda n: 60 * MIB + n), TINY, ROW, **{"memory": 1 << 30, **options})


@pytest.mark.parametrize(
    ("call", "kind", "parts"),
    [
        (lambda: ANY(max_size=0), HyperparameterError, ["max_size", "got 0"]),
        (lambda: ANY(max_size=4, multiple_of=8), HyperparameterError, ["max_size", "got 4", "≥ 8"]),
        (lambda: ANY(multiple_of=-8), HyperparameterError, ["multiple_of", "-8"]),
        (lambda: ANY(mode="linear"), HyperparameterError, ["mode", "'linear'", "'power' or 'binsearch'"]),
        (lambda: ANY(margin=1.0), HyperparameterError, ["margin", "1.0"]),
        (lambda: ANY(margin=-0.1), HyperparameterError, ["margin"]),
        (lambda: ANY(memory="80 apples"), WrongTypeError, ["memory", "'80 apples'"]),
        (lambda: ANY(memory="0.2 B"), HyperparameterError, ["memory", "0"]),
        (lambda: ANY(memory=-1), HyperparameterError, ["memory", "-1"]),
        (lambda: ANY(memory=1.5), WrongTypeError, ["memory", "1.5"]),
        (lambda: ANY(memory=MIB), DoesNotFitError, ["batch size 1 at", "got 60.0 MiB", "at most 972.8 KiB"]),
        (lambda: find_accumulation(lambda s, b: s, TINY, ROW, 8), WrongTypeError, ["step", "train_step"]),
        (lambda: find_accumulation(STEP, TINY, X, 10, multiple_of=16), HyperparameterError, ["got 10", "of 16"]),
    ],
)  # fmt: skip
def test_errors(call, kind, parts):
    with pytest.raises(kind) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_memory_in_other_words():
    for words, size in {
        "16G": 16e9,
        "16 GB": 16e9,
        "1.5Gi": 1.5 * 2**30,
        "512MiB": 2.0**29,
        "2e9": None,
        2e9: 2e9,
    }.items():
        if size is None:
            with pytest.raises(WrongTypeError, match="memory at f: got '2e9'"):
                _memory.limit_of(words, TINY, "f")
        else:
            assert _memory.limit_of(words, TINY, "f") == (int(size), "as given")


def test_micro_batches_of_a_vast_batch_are_found_at_once():
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    state = ts.setup(ts.rules.sgd(0.1), {"w": np.ones((4, 2), np.float32)})
    with pytest.raises(DoesNotFitError):
        find_accumulation(step, state, np.ones((1, 4), np.float32), 10**12, memory=MIB)


def test_a_report_is_a_table():
    _, report = by_analysis(lambda n: 60 * MIB + MIB * n, 1 << 30, mode="binsearch")
    lines = repr(report).splitlines()
    assert lines[0] == "batch size 964, within 1.0 GiB (as given)"
    assert lines[1].split() == ["size", "state", "batch", "temporary", "results", "runtime", "need", "fits", "s"]
    assert lines[-1].split()[0] == "964" and "1.0 GiB" in lines[-1] and " yes " in lines[-1]


# -------------------------------------------------------------------------------------------------------- learning rate


def regression(rule=None, dropout=False, features=8):
    x = np.random.default_rng(0).normal(size=(96, features)).astype(np.float32)

    def loss_fn(params, x, key=None):
        seen = x * jax.random.bernoulli(key, 0.5, x.shape) if dropout else x
        return jnp.mean((seen @ params["w"] - x.sum(1)) ** 2)

    state = ts.setup(rule or ts.rules.sgd(0.1), {"w": jnp.zeros(features)}, key=0)
    return ts.train_step(loss_fn), state, ts.batches(x, 32, shuffle=True, seed=1), x


def test_rates_and_losses_are_those_of_a_loop_by_hand():
    step, state, data, _ = regression()
    _, report = find_learning_rate(step, state, data, low=1e-4, high=10.0, points=40, smooth=0.9)
    w, losses, batches = np.zeros(8), [], [np.asarray(x, np.float64) for _ in range(14) for x in data]
    rates = 1e-4 * (10.0 / 1e-4) ** (np.arange(40) / 39)
    for rate, x in zip(rates, batches, strict=False):  # NumPy, in float64
        losses.append(np.mean((x @ w - x.sum(1)) ** 2))
        w = w - rate * 2 * x.T @ (x @ w - x.sum(1)) / len(x)
    np.testing.assert_allclose(report.rates, rates, rtol=1e-5)
    np.testing.assert_allclose(report.losses[: report.used], losses[: report.used], rtol=1e-3)
    weights = 0.9 ** np.arange(report.used)[::-1]
    last = np.average(losses[: report.used], weights=weights)  # the bias-corrected average, in closed form
    np.testing.assert_allclose(report.smoothed[report.used - 1], last, rtol=1e-3)
    assert 20 < report.used < 40  # 2 / the largest eigenvalue of the Hessian is about 0.6
    assert 0.2 < report.rates[report.used] < 10


@pytest.mark.medium
def test_the_suggestions():
    step, state, data, _ = regression()
    rate, report = find_learning_rate(step, state, data, low=0.001, high=0.2, points=50, smooth=0.0)
    lines = [np.polyfit(np.arange(11), report.losses[i - 5 : i + 6], 1)[0] for i in range(5, 45)]
    assert report.used == 50 and rate == report.steepest == pytest.approx(report.rates[5 + int(np.argmin(lines))])
    assert report.tenth == pytest.approx(report.rates[np.argmin(report.losses)] / 10)


def test_the_range_test_changes_nothing():
    schedule = ts.schedules.linear_schedule(0.1, 0.0, 100)
    step, state, data, _ = regression(ts.rules.adam(schedule), dropout=True)
    next(iter(data))
    before, place = jax.tree.map(jnp.copy, state), data.get_state()
    find_learning_rate(step, state, data, low=1e-4, points=20)
    assert_trees_equal(state, before)
    assert data.get_state() == place
    assert ts.hyperparams(state)["learning_rate"] == pytest.approx(0.1)  # the schedule's still


@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"loss_scale": "dynamic"}])
def test_rejected_steps_end_the_test(options):
    """Under a loss scale, too: a gradient that is not finite at the smallest scale is none of its doing."""

    def loss_fn(params, x):  # finite everywhere; beyond 0.2 its gradient is 0 / 0
        return jnp.mean((x @ params["w"] - 1) ** 2) + jnp.sqrt(jnp.maximum(0.2 - params["w"][0], 0.0))

    state, data = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2)}, **options), [np.ones((4, 2), np.float32)]
    _, report = find_learning_rate(ts.train_step(loss_fn), state, data, low=1e-4, high=10, points=50)
    assert 10 < report.used < 50 and np.isnan(report.losses[report.used])
    assert np.isfinite(report.losses[: report.used]).all()


def test_a_loss_scale_that_comes_down_does_not_end_the_test():
    """At the start because it is too large, and later because it has grown: the rates and losses are those without."""
    _, state, _, x = regression()
    step = ts.train_step(lambda params, x: 1e4 * jnp.mean((x @ params["w"] - x.sum(1)) ** 2))
    data, options = [x], dict(low=1e-8, high=1e-5, points=40)
    _, plain = find_learning_rate(step, state, data, **options)
    scale = ts.precision.LossScale(2.0**126, interval=7, ceiling=2.0**126)  # times 1e4 is beyond float32
    scaled = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(8)}, key=0, loss_scale=scale)
    _, report = find_learning_rate(step, scaled, data, **options)
    np.testing.assert_array_equal(report.rates, plain.rates)
    np.testing.assert_allclose(report.losses, plain.losses, rtol=1e-5)
    assert report.used == 40 and int(scaled.rejected) == 0


def test_a_number_among_the_extra_arguments_of_a_range_test():
    step = ts.train_step(lambda params, x, temperature: temperature * jnp.mean((x @ params["w"]) ** 2))
    state = ts.setup(ts.rules.sgd(0.1), {"w": np.ones(2, np.float32)})
    _, report = find_learning_rate(step, state, [np.ones((4, 2), np.float32)] * 8, points=20, temperature=2.0)
    assert report.losses[0] == 8.0


@pytest.mark.slow
def test_a_learning_rate_of_a_part():
    rule = ts.rules.partition({"a": ts.rules.sgd(0.5), "b": ts.rules.sgd(0.0)})
    step = ts.train_step(lambda params, x: jnp.mean((x * params["a"] * params["b"] - 2) ** 2))
    state = ts.setup(rule, {"a": jnp.ones(()), "b": jnp.ones(())})
    rate, _ = find_learning_rate(step, state, [np.ones(4, np.float32)], low=1e-3, points=30, name="learning_rate@a")
    assert rate > 1e-3
    with pytest.raises(HyperparameterError, match="lerning_rate"):
        find_learning_rate(step, state, [np.ones(4, np.float32)], name="lerning_rate")


@pytest.mark.slow
def test_the_plot_shows_the_curve_and_both_rates():
    pytest.importorskip("matplotlib")
    step, state, data, _ = regression(dropout=True)
    _, report = find_learning_rate(step, state, data, low=1e-4, points=30)
    (axes,) = report.plot().axes
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "learning rate"
    curve, steepest, tenth = axes.get_lines()
    np.testing.assert_array_equal(curve.get_ydata(), report.smoothed[: report.used])
    assert (steepest.get_xdata()[0], tenth.get_xdata()[0]) == (report.steepest, report.tenth)
    assert report.plot()._repr_png_()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "kind", "parts"),
    [
        (dict(low=1.0, high=0.1), HyperparameterError, ["low and high", "1.0 and 0.1", "0 < low < high"]),
        (dict(low=0.0), HyperparameterError, ["low and high"]),
        (dict(points=5), HyperparameterError, ["points", "≥ 10"]),
        (dict(points=10.5), WrongTypeError, ["points"]),
        (dict(smooth=1.0), HyperparameterError, ["smooth"]),
        (dict(stop=0.5), HyperparameterError, ["stop"]),
        (dict(data=iter([1])), WrongTypeError, ["data", "read again"]),
        (dict(step=3), WrongTypeError, ["step", "3 (int)"]),
        (dict(state=3), WrongTypeError, ["state", "3 (int)"]),
        (dict(low=1e3, high=1e9, points=10), HyperparameterError, ["learning_rate", "a loss that does not fall"]),
    ],
)  # fmt: skip
def test_errors_of_the_range_test(options, kind, parts):
    step, state, data, _ = regression()
    given = {"step": step, "state": state, "data": data, **options}
    with pytest.raises(kind) as caught:
        find_learning_rate(given.pop("step"), given.pop("state"), given.pop("data"), **given)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.slow
def test_devices_share_members_and_not_rows():
    """Each device of a sharded population has all rows: its need is that of its members alone."""
    make = lambda key: ts.setup(ts.rules.sgd(0.1), {"w": jax.random.normal(key, (64, 64))})
    step, row = ts.train_step(lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2)), np.ones((1, 64), np.float32)
    mesh = ts.mesh(devices=jax.devices()[:2])
    options = dict(memory=96 << 20, max_size=4096, multiple_of=4096)
    whole = ts.find_batch_size(step, ts.shard(ts.population(make, 4), mesh), row, **options)[1].trials[0].need
    half = ts.find_batch_size(step, ts.population(make, 2), row, **options)[1].trials[0].need
    assert whole.batch == half.batch == 4096 * 64 * 4 and whole.state == half.state
    assert whole.temporary == pytest.approx(half.temporary, rel=0.1)


def test_a_learning_rate_is_found_for_a_loss_without_data():
    rate, _ = ts.find_learning_rate(ts.train_step(toys.drawn), toys.state(key=0), points=50, low=1e-3, high=1e3)
    assert 0 < rate < 10
