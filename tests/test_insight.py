"""`describe` and `replay`: counts against hand counts, reasons against what was done, faults where they were put."""

import contextlib
import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsunax as ts
from tsunax import _cost
from tsunax.errors import HyperparameterError, StateError, WrongTypeError
from tsunax.insight import describe, replay

ROWS = 512
SIZES = (64, 256, 256, 256, 16)
PARAMS = [np.full((a, b), 0.01, np.float32) for a, b in itertools.pairwise(SIZES)]
BATCH = np.ones((ROWS, SIZES[0]), np.float32)


def mlp(params, x):
    for w in params[:-1]:
        x = jnp.maximum(x @ w, 0)
    return jnp.mean((x @ params[-1]) ** 2)


def layer(i, rows=ROWS):
    """Multiply-adds, as two, of one product of layer i with all rows."""
    return 2 * rows * SIZES[i] * SIZES[i + 1]


FORWARD = sum(map(layer, range(4)))
INPUTS = sum(map(layer, range(1, 4)))  # gradients of what goes into a layer: none of the batch


def state_of(params=PARAMS, rule=None, **options):
    return ts.setup(ts.rules.adam(1e-3) if rule is None else rule, params, **options)


# ------------------------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize(
    ("options", "setup", "expected"),
    [
        ({}, {}, 2 * FORWARD + INPUTS),
        ({"accumulate": 4}, {}, 2 * FORWARD + INPUTS),
        ({"remat": True}, {}, 3 * FORWARD + INPUTS),
        ({"remat": True, "accumulate": 2}, {}, 3 * FORWARD + INPUTS),
        ({}, {"trainable": ["2", "3"]}, FORWARD + layer(2) + 2 * layer(3)),
        ({}, {"precision": "bfloat16"}, 2 * FORWARD + INPUTS),
    ],
    ids=["plain", "accumulate", "remat", "both", "selection", "bfloat16"],
)
def test_flops_of_an_mlp(options, setup, expected):
    step = ts.train_step(mlp, **options)
    traced = step.trace(state_of(**setup), BATCH)
    found = _cost.flops_of(traced.jaxpr)
    assert found.matmul == expected
    assert found.matmul < found.total < 1.02 * expected
    assert found.loops == 0 and found.opaque == ()


def test_flops_of_fused_steps():
    step, state = ts.train_step(mlp, accumulate=2), state_of()
    program = jax.make_jaxpr(lambda state, batches: ts.train_steps(step, state, batches))(state, np.stack([BATCH] * 5))
    assert _cost.flops_of(program, trips=5).matmul == 5 * (2 * FORWARD + INPUTS)
    assert _cost.flops_of(program).loops == 1


def test_flops_of_a_cnn():
    def taps(n, stride, k=3):
        """(output, tap) pairs of one axis under SAME padding that meet the input, counted one by one."""
        m = -(-n // stride)
        pad = max((m - 1) * stride + k - n, 0) // 2
        return sum(0 <= o * stride + j - pad < n for o in range(m) for j in range(k))

    def conv(x, w, stride, groups=1):
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", feature_group_count=groups, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss_fn(params, x):
        x = jnp.maximum(conv(x, params["a"], 1), 0)
        x = jnp.maximum(conv(x, params["b"], 2), 0)
        x = conv(x, params["c"], 1, groups=8)
        return jnp.mean((x.mean((1, 2)) @ params["out"]) ** 2)

    shapes = {"a": (3, 3, 3, 16), "b": (3, 3, 16, 32), "c": (3, 3, 4, 32), "out": (32, 10)}
    params = {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
    rows = 8
    a, b, c = (
        2 * rows * taps(20, stride) ** 2 * shapes[name][2] * shapes[name][3]
        for name, stride in (("a", 1), ("b", 2), ("c", 1))
    )
    c = 2 * rows * taps(10, 1) ** 2 * 4 * 32
    out = 2 * rows * 32 * 10
    for accumulate in (1, 2):
        traced = ts.train_step(loss_fn, accumulate=accumulate).trace(
            state_of(params), np.ones((rows, 20, 20, 3), np.float32)
        )
        assert _cost.flops_of(traced.jaxpr).matmul == 2 * a + 3 * (b + c + out)


def test_flops_of_a_gpt():
    from flax import nnx

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from examples.gpt import GPT

    width, depth, t, rows = 128, 2, 64, 4
    graphdef, params = nnx.split(GPT(width, depth, nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, x):
        logits = nnx.merge(graphdef, params)(x[:, :-1].astype(jnp.int32))
        return ts.losses.softmax_cross_entropy_with_integer_labels(logits, x[:, 1:]).mean()

    tokens = rows * t
    block = 2 * tokens * width * (3 + 1 + 4 + 4) * width + 2 * 2 * tokens * t * width
    forward = depth * block + 2 * tokens * width * 256
    for options, times in (({}, 3), ({"accumulate": 2}, 3), ({"remat": True}, 4)):
        traced = ts.train_step(loss_fn, **options).trace(state_of(params), np.ones((rows, t + 1), np.uint8))
        assert _cost.flops_of(traced.jaxpr).matmul == times * forward


def test_elements_are_counted_as_xla_does_where_nothing_is_merged():
    def f(x, y):
        return jnp.sum(jnp.exp(x) * y + x / y - jnp.sqrt(y)) + jnp.max(x**3)

    x = np.ones((64, 32), np.float32)
    found, of_xla = _cost.flops_of(jax.make_jaxpr(f)(x, x)), jax.jit(f).lower(x, x).cost_analysis()
    assert found.transcendental == of_xla["transcendentals"] == 2 * 64 * 32
    assert found.other == pytest.approx(of_xla["flops"], rel=0.01)


def test_programs_within_programs():
    """Branches count as the dearest, loops of unknown length as one trip, dead equations and integers not at all."""
    x = jnp.ones((8, 8))

    def f(x, n):
        x = jax.lax.cond(n > 0, lambda x: x @ x @ x, lambda x: x @ x, x)
        x = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1]
        _ = x @ x
        unused = jax.jit(lambda x: (x @ x, x))(x)[1]
        return jax.jit(jax.checkpoint(lambda x: x @ x))(unused) + (n * n).astype(float) * 0

    found = _cost.flops_of(jax.make_jaxpr(f)(x, jnp.int32(3)), trips=7)
    assert found.matmul == 2 * 8**3 * (2 + 7 + 1) and found.loops == 1
    assert _cost.flops_of(jax.make_jaxpr(jnp.linalg.cholesky)(x)).opaque == ("cholesky",)


def test_what_is_read_off_the_compiled_program():
    step, state = ts.train_step(mlp), state_of()
    about = describe(step, state, BATCH, peak=1e12)
    moving = 3 * sum(w.nbytes for w in PARAMS) + 4 * 4  # params, two moments, the clock
    assert about.donated == about.aliased == moving and about.not_aliased == ()
    assert about.memory.state >= moving and about.memory.batch == BATCH.nbytes
    assert about.bytes_accessed > moving and about.communication == ()
    assert about.devices == 1 and set(about.seconds) == {"trace", "lower", "compile"}
    assert about.utilisation(1e-3) == pytest.approx((2 * FORWARD + INPUTS) / 1e-3 / 1e12)
    assert about.utilisation(1e-3, peak=2e12) == pytest.approx(about.utilisation(1e-3) / 2)
    assert not state.params[0].is_deleted() and int(state.calls) == 0
    text = repr(about)
    assert "donated" in text and "WARNING" not in text and text in about._repr_html_().replace("&#x27;", "'")
    shapes = jax.eval_shape(lambda: state_of())
    same = describe(step, shapes, jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype))
    assert same.flops == about.flops and same.memory == about.memory
    kept = describe(dataclasses.replace(step, donate=False), state, BATCH)
    assert (kept.donated, kept.aliased) == (0, 0) and "donate=False" in repr(kept)


def test_a_donation_that_fails_is_named():
    def init(params):
        return {"low": jax.tree.map(jnp.zeros_like, params), "kept": jax.tree.map(jnp.zeros_like, params)}

    def update(grads, state, params=None):
        return grads, {"low": jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads), "kept": grads}

    state = state_of(rule=optax.GradientTransformation(init, update), params={"w": np.ones((32, 16), np.float32)})
    about = describe(ts.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2)), state, np.ones((4, 32), np.float32))
    assert about.not_aliased == ("state.opt_state['low']['w']",)
    assert about.donated - about.aliased == 32 * 16 * 4
    assert "WARNING" in repr(about) and "state.opt_state['low']['w']" in repr(about)


def test_communication_by_kind():
    state = ts.shard(state_of(), ts.mesh(data=8))
    about = describe(ts.train_step(mlp), state, BATCH)
    found = {c.kind: c for c in about.communication}
    # data parallel: every gradient is added up once, and a few scalars
    assert set(found) == {"all-reduce"} and about.devices == 8
    assert sum(w.nbytes for w in PARAMS) <= found["all-reduce"].bytes <= sum(w.nbytes for w in PARAMS) + 64
    fsdp = describe(ts.train_step(mlp), ts.shard(state_of(), ts.mesh(data=1, fsdp=8)), BATCH)
    assert "all-gather" in {c.kind for c in fsdp.communication} and "talks" in repr(fsdp)
    assert {leaf.sharding for leaf in fsdp.leaves} != {""}


def test_collectives_in_loops_count_as_often_as_they_run():
    text = """HloModule m, input_output_alias={ {0}: (1, {}, may-alias) }, entry_computation_layout={()->()}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = (f32[8]{0}, bf16[2,4]{1,0}) all-reduce(%x, %y), to_apply=%add
}

%condition (p: (s32[], f32[8])) -> pred[] {
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="batch[\\'x\\']"}
  %b = f32[8]{0} parameter(1), metadata={op_name="moving[0]"}
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %g = (f32[1]{0}, f32[8]{0}) all-gather-start(%s), dimensions={0}
}
"""
    found = {c.kind: (c.count, c.bytes) for c in _cost.collectives_in(text)}
    assert found == {"all-reduce": (5, 5 * (32 + 16)), "all-gather": (1, 32)}
    assert _cost.donated_in(text) == ({"batch['x']", "moving[0]"}, {"moving[0]"})


# ---------------------------------------------------------------------------------------------------------- the table


def test_the_table_of_leaves():
    params = {
        "body": {"w": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)},
        "head": np.ones((8, 2), np.float32),
    }
    rule = ts.rules.chain(
        ts.rules.clip_global_norm(2.0),
        ts.rules.groups(
            {"body/**": ts.rules.adamw(1e-3, weight_decay=0.1, mask=["**", "!**/bias"]), "**": ts.rules.sgd(0.5)}
        ),
    )
    state = ts.freeze(state_of({**params, "old": np.ones(3, np.float32)}, rule, trainable=["**", "!old"]), "head")
    step = ts.train_step(lambda p, x: jnp.mean((x @ p["body"]["w"] + p["body"]["bias"][None]) @ p["head"]))
    about = describe(step, state, np.ones((4, 8), np.float32))
    found = {leaf.path: leaf for leaf in about.leaves}
    assert {path: leaf.status for path, leaf in found.items()} == {
        "body/w": "trained",
        "body/bias": "trained",
        "head": "frozen",
        "old": "not trained",
    }
    assert found["body/w"].values["weight_decay"] == 0.1 and found["body/bias"].values["weight_decay"] == 0
    assert found["body/w"].values["learning_rate"] == 1e-3 and found["head"].values == {"learning_rate": 0.5}
    assert found["body/w"].rule == "adamw@body/**" and found["head"].rule == "sgd@**"
    assert found["head"].clip == "clip_global_norm 2" and found["old"].clip == ""
    assert found["body/w"].shape == (8, 8) and found["body/w"].dtype == "float32"
    state = ts.adjust(state, "body/w", learning_rate=0.25)
    rates = {
        leaf.path: leaf.values.get("learning_rate")
        for leaf in describe(step, state, np.ones((4, 8), np.float32)).leaves
    }
    assert rates == {"body/w": 0.25, "body/bias": 1e-3, "head": 0.5, "old": None}


def test_many_leaves_are_shown_by_kind():
    params = {f"layer{i}": {"w": np.ones((4, 4), np.float32)} for i in range(40)}
    state = ts.freeze(state_of(params, ts.rules.sgd(0.1)), "layer7/**")
    about = describe(
        ts.train_step(lambda p, x: sum(jnp.sum(x @ q["w"]) for q in p.values())), state, np.ones((2, 4), np.float32)
    )
    lines = repr(about).partition("\n\n")[2].splitlines()
    assert len(about.leaves) == 40 and len(lines) == 3
    assert lines[1].startswith(".../w (39 leaves)") and "624" in lines[1] and "frozen" in lines[2]


# ---------------------------------------------------------------------------------------------------- why it recompiled


def square(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def test_why_it_recompiled():
    x, params = np.ones((8, 4), np.float32), {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}
    step = ts.train_step(
        lambda params, batch: jnp.mean((batch["x"] @ params["w"] + params["b"][None]) ** 2) + 0 * batch.get("y", 0)
    )
    fresh = lambda rule=None, **options: state_of(params, ts.rules.sgd(0.1) if rule is None else rule, **options)
    reasons = lambda: list(ts.insight._traces.why(step.traces))
    step(fresh(), {"x": x})
    step(fresh(), {"x": x})
    assert reasons() == []
    step(fresh(), {"x": x[:4]})
    step(fresh(), {"x": jnp.asarray(x, jnp.bfloat16)})
    step(fresh(), {"x": x, "y": 1.0})
    step(fresh(), {"x": x, "y": jnp.float32(1)})
    step(fresh(ts.rules.adam(0.1)), {"x": x})
    step(fresh(trainable="w"), {"x": x})
    step(fresh(precision="bfloat16"), {"x": x})
    step(ts.freeze(fresh(), "b"), {"x": x})
    step(ts.adjust(fresh(), "b", learning_rate=0.2), {"x": x})
    step(ts.shard(fresh(), ts.mesh()), {"x": x})
    ts.train_steps(step, fresh(), {"x": np.stack([x] * 3)})
    ts.train_steps(step, fresh(), {"x": np.stack([x] * 4)})
    expected = [
        "step: batch['x'] has shape (4, 4), had (8, 4)",
        "step: batch['x'] has dtype bfloat16, had float32",
        "step: tree at batch['y']: got float32[], expected nothing",
        "step: batch['y'] has a strong type, had a weak type (it was a Python number)",
        "step: the rule is another one, in more than its numbers",
        "step: trainable= selects other leaves: params['b'] is not trained",
        "step: precision is bfloat16, was none",
        "step: the state has frozen flags, which it had not",
        "step: the hyperparameters are cut into other groups (adjust)",
        "step: the state lies on a mesh, not as before",
        "loop: batches.batches['x'] has shape (4, 8, 4), had (3, 8, 4)",
    ]
    assert reasons() == expected


def test_fit_and_new_arguments_are_in_the_count():
    step = ts.train_step(lambda params, x, scale=1.0: square(params, x) * scale)
    params, x = {"w": np.ones((4, 2), np.float32)}, np.ones((8, 4), np.float32)
    state, _ = step(state_of(params), x)
    state, _ = step(state, x, scale=np.float32(2))
    state, _ = ts.fit(step, state, ts.batches(x, 4), epochs=1, progress=False)
    twin = dataclasses.replace(step)  # equal: the two share the compiled loop
    assert [trace.kind for trace in step.traces] == ["step", "step", "loop"]
    about = describe(step, state, x)
    assert about.recompiles == ("step: argument 'scale' is new",) and "argument 'scale' is new" in repr(about)
    assert describe(twin, state, x).traces == len(step.traces) + 1


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda: describe(square, state_of(), BATCH), WrongTypeError, "a train_step"),
        (lambda: describe(ts.train_step(mlp), PARAMS, BATCH), WrongTypeError, "state at describe()"),
        (lambda: describe(ts.train_step(mlp), state_of(), BATCH, peak=-1), HyperparameterError, "a number above 0"),
        (lambda: describe(ts.train_step(mlp), state_of(), BATCH, peak="fast"), WrongTypeError, "or 'measure'"),
        (lambda: describe(ts.train_step(mlp), state_of(), ["a"]), ts.errors.TsunaxError, "batch"),
    ],
)
def test_wrong_arguments(wrong, kind, text):
    with pytest.raises(kind, match=text.replace("(", r"\(").replace(")", r"\)")):
        wrong()


def test_a_peak_must_be_had():
    about = describe(ts.train_step(square), state_of({"w": np.ones((4, 2), np.float32)}), np.ones((8, 4), np.float32))
    with pytest.raises(HyperparameterError, match="peak at utilisation"):
        about.utilisation(1.0)
    with pytest.raises(HyperparameterError, match="seconds_per_step"):
        about.utilisation(0.0, peak=1e12)
    peak = ts.insight.measured_peak(size=128, seconds=0.05)
    assert 1e6 < peak < 1e14


_MEMORY = """
import os
os.environ["XLA_FLAGS"] = ""
import resource, sys
import jax, jax.numpy as jnp, numpy as np
import tsunax as ts
from tsunax.insight import describe

width, depth, rows = {width}, {depth}, {rows}
params = [np.full((width, width), 1 / width, np.float32) for _ in range(depth)]

def loss_fn(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

def resident():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024

step = ts.train_step(loss_fn, accumulate={accumulate})
shapes = jax.eval_shape(lambda: ts.setup(ts.rules.adam(1e-3), params))
batch = np.ones((rows, width), np.float32)
need = describe(step, shapes, jax.ShapeDtypeStruct(batch.shape, batch.dtype)).memory
# warm up XLA's own pools on a small one, then look at what grows
small = ts.setup(ts.rules.adam(1e-3), [w[:8, :8] for w in params])
jax.block_until_ready(ts.train_step(loss_fn)(small, batch[:8, :8])[0].params)
program = step.lower(shapes, jax.ShapeDtypeStruct(batch.shape, batch.dtype)).compile()
before, _ = resident()
state = ts.setup(ts.rules.adam(1e-3), params)
state, info = step(state, batch)
jax.block_until_ready(state.params)
_, after = resident()
print(need.total, after - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {"width": 2048, "depth": 6, "rows": 4096, "accumulate": 1},
        {"width": 1024, "depth": 12, "rows": 16384, "accumulate": 2},
        {"width": 2048, "depth": 8, "rows": 2048, "accumulate": 4},
    ],
    ids=["wide", "long", "cut"],
)
def test_peak_memory_is_what_the_process_grows_by(model):
    out = subprocess.run([sys.executable, "-c", _MEMORY.format(**model)], capture_output=True, text=True, check=True)
    said, grown = map(int, out.stdout.split())
    assert said == pytest.approx(grown, rel=0.1)


# -------------------------------------------------------------------------------------------------------------- replay

# name: what is computed of t (1 in all rows but one), where it is not finite, the primitive, whether in the gradient.
# `p` is a parameter, `h` the hidden layer; every function stands on a line of its own, which the report must name.
FAULTS = {
    "log of 0": (lambda t, p, h: jnp.log(t) * p, 0.0, "log", False),
    "0 / 0": (lambda t, p, h: p * t / t, 0.0, "div", False),
    "x / 0": (lambda t, p, h: p / t, 0.0, "div", False),
    "sqrt at 0": (lambda t, p, h: jnp.sqrt(t * p), 0.0, "div", True),
    "where and sqrt": (lambda t, p, h: jnp.where(t > 0, jnp.sqrt(t * p), p), 0.0, "div", True),
    "sqrt below 0": (lambda t, p, h: p * jnp.sqrt(t), -1.0, "sqrt", False),
    "exp": (lambda t, p, h: p * jnp.exp(t), 1000.0, "exp", False),
    "exp in a softmax": (lambda t, p, h: p * jnp.exp(t) / (1 + jnp.exp(t)), 1000.0, "exp", False),
    "inf - inf": (lambda t, p, h: p * (jnp.where(t > 5, jnp.inf, t) - jnp.where(t > 5, jnp.inf, 0)), 9.0, "sub", False),
    "0 * inf": (lambda t, p, h: p * (jnp.where(t > 5, jnp.inf, t) * jnp.where(t > 5, 0, t)), 9.0, "mul", False),
    "norm at 0": (lambda t, p, h: jnp.linalg.norm(t[:, None] * p * h, axis=-1), 0.0, "div", True),
    "power of 0": (lambda t, p, h: p * t**-1.5, 0.0, "pow", False),
    "power below 0": (lambda t, p, h: p * t**0.5001, -2.0, "pow", False),
    "label": (
        lambda t, p, h: p * jnp.take_along_axis(h, t.astype(int)[:, None], 1, mode="fill")[:, 0],
        7.0,
        "gather",
        False,
    ),
    "mask": (lambda t, p, h: p * jax.nn.softmax(jnp.where(t[:, None] < 5, h, -jnp.inf), -1)[:, 0], 9.0, "sub", False),
    "log1p": (lambda t, p, h: p * jnp.log1p(-(t - 1)), 2.0, "log1p", False),
    "overflow": (lambda t, p, h: p * (t * 3e38), 10.0, "mul", False),
}
VARIANTS = {
    "plain": ({}, {}, False),
    "cut": ({"accumulate": 4}, {}, False),
    "scan": ({}, {}, True),
    "scan, cut, remat": ({"accumulate": 4, "remat": True}, {}, True),
    "bfloat16": ({}, {"precision": "bfloat16"}, False),
    "dropping, cut": ({"accumulate": 4, "on_nonfinite": "drop"}, {}, False),
}


def planted(fault, row, options, setup, in_scan):
    """A step, a state and a batch with a fault in one row."""
    f, value, _, _ = FAULTS[fault]

    def loss_fn(params, batch):
        h, t, p = jnp.tanh(batch["x"] @ params["w"]), batch["t"], params["p"]
        if not in_scan:
            return jnp.mean(h[:, 0] + f(t, p, h))

        def layer(carry, i):
            return carry + f(jnp.where(i == 1, t, jnp.ones_like(t)), p, h), None

        return jnp.mean(jax.lax.scan(layer, h[:, 0], jnp.arange(3))[0])

    x = np.random.default_rng(row).normal(size=(8, 4)).astype(np.float32)
    batch = {"x": x, "t": np.where(np.arange(8) == row, np.float32(value), np.float32(1))}
    state = state_of({"w": np.eye(4, dtype=np.float32), "p": np.float32(0.5)}, key=0, **setup)
    return ts.train_step(loss_fn, **options), state, batch


def check(fault, row, variant):
    options, setup, in_scan = VARIANTS[variant]
    step, state, batch = planted(fault, row, options, setup, in_scan)
    f, _, primitive, in_gradient = FAULTS[fault]
    report = replay(step, state, batch)
    said = fault, variant, row, repr(report)
    assert report.primitive == primitive and report.argument == "", said
    assert report.in_gradient == in_gradient, said
    # the first leaf in order that the fault reaches: p, but where the gradient of h is wrong too and w comes first
    assert report.result == ("gradient of params['p']" if in_gradient else "loss"), said
    assert report.micro_batch == (row % 4 if "accumulate" in options else None), said
    assert report.trips == ((1,) if in_scan else ()), said
    line = f.__code__.co_firstlineno
    assert report.line.startswith(f"{__file__}:{line} "), said
    assert "lambda t, p, h:" in report.code, said
    assert not state.params["w"].is_deleted() and int(state.calls) == 0


@pytest.mark.parametrize("fault", ["log of 0", "sqrt at 0", "mask"])
def test_planted_faults(fault):
    check(fault, 5, "scan, cut, remat")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_planted_faults_everywhere(variant):
    for row, fault in enumerate(FAULTS):
        check(fault, row % 8, variant)


def test_faults_of_what_was_given():
    step, state, batch = planted("exp", 3, {"accumulate": 4}, {}, False)
    batch = {"x": batch["x"], "t": np.ones(8, np.float32)}
    report = replay(step, state, batch)
    assert report.result == "" and "finite" in repr(report)
    x = batch["x"].copy()
    x[6, 1] = np.nan
    report = replay(step, state, {**batch, "x": x})
    assert (report.argument, report.micro_batch, report.primitive) == ("batch['x']", 2, "")
    assert "nan at [6, 1], 1 of 32" in repr(report)
    sick = state.replace(params={**state.params, "w": state.params["w"].at[0, 1].set(jnp.nan)})
    report = replay(step, sick, batch)
    assert (report.argument, report.micro_batch) == ("state.params['w']", None)
    named = ts.train_step(lambda params, x, model_state, teacher: ts.Loss.mean(x @ params + model_state * teacher))
    state = ts.setup(ts.rules.sgd(0.1), np.ones((4, 1), np.float32), model_state=np.float32(np.inf))
    assert replay(named, state, x[:5], teacher=np.float32(1)).argument == "state.model_state"
    state = state.replace(model_state=np.float32(1))
    assert replay(named, state, x[:5], teacher=np.float32(np.nan)).argument == "extra['teacher']"


def test_float16_that_overflows_under_a_loss_scale():
    def loss_fn(params, x):
        return jnp.mean(x @ params["w"])  # the line

    state = ts.setup(ts.rules.sgd(0.1), {"w": np.ones((4, 2), np.float32)}, precision="float16", loss_scale="dynamic")
    state = state.replace(loss_scale=dataclasses.replace(state.loss_scale, scale=jnp.float32(1024)))
    step, x = ts.train_step(loss_fn), np.full((8, 4), 200, np.float32)  # 8 rows of 200 times 1024 / 16: 102400
    after, info = step(jax.tree.map(jnp.copy, state), x)
    assert not bool(info.applied)
    report = replay(step, state, x)
    assert report.in_gradient and report.result == "gradient of params['w']" and "# the line" in report.code
    assert report.primitive == "dot_general"
    gone = replay(step, after.replace(loss_scale=dataclasses.replace(after.loss_scale, scale=jnp.float32(1))), x)
    assert gone.result == ""


def test_it_draws_as_that_call_did():
    def loss_fn(params, x, key, mask):
        draw = jax.random.uniform(key, x.shape[:1])
        return ts.Loss.mean(jnp.log(jnp.where(draw > 0.9, 0.0, 1.0)) + x @ params, where=mask)

    step = ts.train_step(loss_fn)
    state = ts.setup(ts.rules.sgd(0.1), np.ones(3, np.float32), key=1)
    x, found = np.ones((4, 3), np.float32), []
    for _ in range(12):
        before = jax.tree.map(jnp.copy, state)
        state, info = step(state, x)
        again = replay(step, before, x)
        assert (again.result == "loss") == (not bool(info.applied)), (int(before.calls), repr(again))
        assert again.primitive in ("", "log")
        found.append(bool(info.applied))
    assert 0 < sum(found) < 12


def test_what_is_harmless_is_not_blamed():
    """Infinities that a mask puts in, that cancel, or that are in a branch that is not taken."""

    def loss_fn(params, batch):
        scores = jnp.where(batch["seen"], batch["x"] @ params["w"], -jnp.inf)
        weights = jax.nn.softmax(scores, -1)
        harmless = jnp.where(batch["t"] > 0, 1.0, jnp.exp(1000 * jnp.abs(params["p"]) * jnp.ones(4)))
        return jnp.mean(jnp.log(batch["t"]) * params["p"] + weights[:, 0] + harmless)  # blamed

    seen = np.ones((4, 4), bool)
    seen[:, 2] = False
    batch = {"x": np.ones((4, 4), np.float32), "seen": seen, "t": np.array([1, 2, 3, 4], np.float32)}
    step, state = ts.train_step(loss_fn), state_of({"w": np.eye(4, dtype=np.float32), "p": np.float32(1)})
    assert replay(step, state_of({"w": np.eye(4, dtype=np.float32), "p": np.float32(0)}), batch).result == ""
    batch["t"] = np.array([1, 2, 3, 0], np.float32)
    report = replay(step, state, batch)
    assert report.primitive in ("log", "exp") and report.result == "loss"


def test_loops_and_branches():
    def loss_fn(params, x):
        x = jax.lax.fori_loop(0, 6, lambda i, x: x + jnp.log(5.0 - i - (i == 3) * 2), x)  # while or scan
        return jnp.mean(x @ params)

    state = ts.setup(ts.rules.sgd(0.1), np.ones(3, np.float32))
    report = replay(ts.train_step(loss_fn), state, np.ones((2, 3), np.float32))
    assert (report.primitive, report.trips) == ("log", (3,)) and "while or scan" in report.code

    def branching(params, x):
        y = jax.lax.cond(x[0, 0] > 0, lambda x: x / (x - 1), lambda x: x, x)
        return (
            jnp.mean(jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, y))[1]) * params.sum()
        )

    report = replay(ts.train_step(branching), state, np.ones((2, 3), np.float32))
    assert (report.primitive, report.trips) == ("div", ()) and "lax.cond" in report.code


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda: replay(square, state_of(), BATCH), WrongTypeError, "step at replay"),
        (lambda: replay(ts.train_step(mlp), BATCH, state_of()), WrongTypeError, "The state comes first"),
        (
            lambda: replay(ts.train_step(mlp), ts.population(lambda key: state_of(key=key), 2, key=0), BATCH),
            StateError,
            "one member",
        ),
    ],
)
def test_wrong_arguments_of_replay(wrong, kind, text):
    with pytest.raises(kind, match=text):
        wrong()


# ------------------------------------------------------------------------------------------------- what fit rejected


def risky(params, batch, key):
    return jnp.mean(jnp.log(batch["t"]) * params["w"] + 0 * jax.random.normal(key, batch["t"].shape))


def run_of(bad_calls, n=24, max_bad=2, rows=4, **options):
    """A run of n batches of which some have a 0: its error, or None, and what callbacks saw."""
    t = np.ones((n, rows), np.float32)
    for call in bad_calls:
        t[call, call % rows] = 0
    seen = []
    state = ts.setup(ts.rules.sgd(0.1), {"w": np.float32(1)}, key=0)
    step = ts.train_step(risky)
    data = [{"t": x, "call": np.full(rows, i)} for i, x in enumerate(t)]
    keep = lambda run: seen.append(list(run.rejected))
    try:
        with pytest.warns(RuntimeWarning, match="rejected") if bad_calls else contextlib.nullcontext():
            options = {"callbacks": keep, "progress": False, "max_bad": max_bad, **options}
            state, _ = ts.fit(step, state, data, epochs=1, **options)
    except ts.errors.NonFiniteError as error:
        return step, error, seen
    return step, state, seen


@pytest.mark.parametrize("per_call", ["auto", 5, None])
def test_fit_keeps_the_last_rejected_calls(per_call):
    step, error, _ = run_of([3, 9, 10, 11], max_bad=3, steps_per_call=per_call)
    assert isinstance(error, ts.errors.NonFiniteError)
    assert [(kept.step, kept.calls, kept.epoch) for kept in error.rejected] == [(8, 9, 0), (8, 10, 0), (8, 11, 0)]
    for kept in error.rejected:
        assert (kept.batch["call"] == kept.calls).all() and isinstance(kept.batch["t"], np.ndarray)
        state, batch = kept.of(error.state)
        assert int(state.calls) == kept.calls
        report = replay(step, state, batch)
        assert (report.primitive, report.result) == ("log", "loss")
        assert f"at [{kept.calls % 4}]" in repr(report)


def test_rejected_calls_of_a_run_that_went_on():
    _, state, seen = run_of([2, 20], max_bad=5)
    assert int(state.step) == 22 and [kept.calls for kept in seen[-1]] == [2, 20]
    with pytest.raises(StateError, match=r"state at Rejected\.of"):
        seen[-1][0].of(state)
    later, _ = seen[-1][0].of(state, exact=False)
    assert int(later.calls) == 2
    assert run_of([])[2][-1] == []


_ELSEWHERE = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[2])
import test_insight as test
import tsunax as ts
from tsunax.insight import replay
state = ts.setup(ts.rules.sgd(0.1), {"w": np.float32(5)}, key=7)
like = {"state": state, "batch": {"t": np.ones(4, np.float32), "call": np.ones(4, np.int32)}}
found = ts.exchange.restore(sys.argv[1], like)
print(int(found["state"].calls), float(found["state"].params["w"]), replay(ts.train_step(test.risky), **found))
"""


@pytest.mark.slow
def test_a_rejected_call_is_saved_and_replayed_elsewhere(tmp_path):
    _, error, _ = run_of([5, 6], max_bad=2)
    state, batch = error.rejected[-1].of(error.state)
    ts.exchange.save(tmp_path / "bad.safetensors", {"state": state, "batch": batch})
    command = [sys.executable, "-c", _ELSEWHERE, str(tmp_path / "bad.safetensors"), str(Path(__file__).parent)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"6 {float(state.params['w'])} The loss is ")
    assert "log gave -inf at [2]" in said and "jnp.log(batch" in said


def test_a_loss_scale_is_put_back():
    def loss_fn(params, x):
        return jnp.mean(x @ params["w"])

    state = ts.setup(ts.rules.sgd(0.1), {"w": np.ones((4, 2), np.float32)}, precision="float16", loss_scale=1024.0)
    step, data = ts.train_step(loss_fn), [np.full((8, 4), 200, np.float32)] * 3
    with pytest.raises(ts.errors.NonFiniteError) as caught:
        ts.fit(step, state, data, epochs=1, progress=False, max_bad=1)
    before, batch = caught.value.rejected[-1].of(caught.value.state)
    assert float(before.loss_scale.scale) == 1024 and replay(step, before, batch).primitive == "dot_general"
