"""`describe`: counts against hand counts, reasons against what was done."""

import dataclasses
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from jax.sharding import PartitionSpec as P
from tsunax.errors import WrongTypeError
from tsunax.insight import _cost
from tsunax.insight.description import describe
from tsunax.insight.retraces import retrace_reasons

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
        ({}, {"freezable": True}, 2 * FORWARD + INPUTS),  # gradients of frozen leaves are computed, and not used
    ],
    ids=["plain", "accumulate", "remat", "both", "selection", "bfloat16", "freeze"],
)
def test_flops_of_an_mlp(options, setup, expected):
    step = ts.train_step(mlp, **options)
    traced = step.trace(state_of(**setup), BATCH)
    assert _cost.flops_of(traced.jaxpr) == expected


def test_flops_of_fused_steps():
    step, state = ts.train_step(mlp, accumulate=2), state_of()
    program = jax.make_jaxpr(lambda state, batches: ts.loop.run_steps(step, state, batches))(
        state, np.stack([BATCH] * 5)
    )
    assert _cost.flops_of(program) == 2 * FORWARD + INPUTS  # a loop of unknown length: one trip


@pytest.mark.medium
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
        assert _cost.flops_of(traced.jaxpr) == 2 * a + 3 * (b + c + out)


@pytest.mark.medium
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
        assert _cost.flops_of(traced.jaxpr) == times * forward


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_attention_of_cudnn_counts_as_the_products_that_it_replaces(options, monkeypatch):
    """It is a custom call; here it is traced as if cuDNN were there, and not compiled."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    rows, others, heads, width = 64, 128, 4, 64
    q, kv = jnp.ones((2, rows, heads, width), jnp.bfloat16), jnp.ones((2, others, heads, width), jnp.bfloat16)
    forward = 2 * 2 * 2 * heads * rows * others * width
    for name in ("xla", "cudnn"):
        attend = functools.partial(jax.nn.dot_product_attention, implementation=name, **options)
        loss = lambda *qkv, attend=attend: attend(*qkv).astype(jnp.float32).sum()
        assert _cost.flops_of(jax.make_jaxpr(loss)(q, kv, kv)) == forward, name
        assert _cost.flops_of(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(q, kv, kv)) == 3 * forward, name
        of_members = jnp.stack([q] * 3), jnp.stack([kv] * 3), jnp.stack([kv] * 3)
        assert _cost.flops_of(jax.make_jaxpr(jax.vmap(loss))(*of_members)) == 3 * forward, name


def test_products_of_groups_count_each_row_once():
    """As in mixtures of experts: a row meets the matrix of its group alone."""
    loss = lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes).sum()
    shapes = jnp.ones((32, 8)), jnp.ones((4, 8, 16)), jnp.array([8, 8, 8, 8])
    assert _cost.flops_of(jax.make_jaxpr(loss)(*shapes)) == 2 * 32 * 8 * 16
    assert _cost.flops_of(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes)) == 2 * 2 * 32 * 8 * 16


def test_kernels_of_pallas_count_for_each_place_of_their_grid():
    from jax.experimental import pallas as pl

    def kernel(x, y, out):
        out[...] = x[...] @ y[...]

    blocks = [pl.BlockSpec((16, 32), lambda i, j: (i, 0)), pl.BlockSpec((32, 32), lambda i, j: (0, j))]
    out = dict(
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32), out_specs=pl.BlockSpec((16, 32), lambda i, j: (i, j))
    )
    product = pl.pallas_call(kernel, grid=(4, 2), in_specs=blocks, **out)
    assert _cost.flops_of(jax.make_jaxpr(product)(jnp.ones((64, 32)), jnp.ones((32, 64)))) == 2 * 64 * 32 * 64


def test_programs_within_programs():
    """Branches count as the dearest, loops of unknown length as one trip, dead equations and integers not at all."""
    x = jnp.ones((8, 8))

    def f(x, n):
        x = jax.lax.cond(n > 0, lambda x: x @ x @ x, lambda x: x @ x, x)
        x = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1]
        _ = x @ x
        unused = jax.jit(lambda x: (x @ x, x))(x)[1]
        return jax.jit(jax.checkpoint(lambda x: x @ x))(unused) + (n * n).astype(float) * 0

    assert _cost.flops_of(jax.make_jaxpr(f)(x, jnp.int32(3))) == 2 * 8**3 * (2 + 1 + 1)


@pytest.mark.medium
def test_what_is_read_off_the_compiled_program():
    step, state = ts.train_step(mlp), state_of()
    about = describe(step, state, BATCH)
    moving = 3 * sum(w.nbytes for w in PARAMS) + 5 * 4  # params, two moments, the clock, the count of Adam
    assert about.donated == about.aliased == moving and about.not_aliased == ()
    assert about.memory.state >= moving and about.memory.batch == BATCH.nbytes
    assert about.communication == () and about.devices == 1
    assert about.utilization(1e-3, peak=1e12) == pytest.approx((2 * FORWARD + INPUTS) / 1e-3 / 1e12)
    assert not state.params[0].is_deleted() and int(state.calls) == 0
    text = repr(about)
    assert "donated" in text and "WARNING" not in text and max(map(len, text.splitlines())) <= 80
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


@pytest.mark.medium
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


def test_each_collective_of_a_shard_map_counts():
    """They all have channel 1."""

    def add(x):
        x = jax.lax.psum(x, "data")
        return jax.lax.psum(jnp.tanh(jnp.sin(x) * jax.lax.psum(x + 1, "data")), "data")

    mesh = ts.mesh(data=8)
    spread = jax.shard_map(add, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    text = jax.jit(spread).lower(jnp.ones((8, 16))).compile().as_text()
    assert len(re.findall("channel_id=1\\b", text)) == text.count(" all-reduce(")
    (found,) = _cost.collectives_in(text)
    assert found.bytes == 3 * 16 * 4


def test_collectives_of_a_tpu():
    """One that overlaps with products is in several fusions; a fusion may scatter several arrays."""
    text = """HloModule m

%first (p: bf16[4]) -> bf16[8] {
  %g = bf16[8]{0} all-gather(%p), channel_id=3, dimensions={0}, frontend_attributes={chain_id="0"}
}

%second (p: bf16[4]) -> bf16[8] {
  %h = bf16[8]{0} all-gather(%p), channel_id=3, dimensions={0}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.1 (a: f32[8], b: f32[16]) -> (f32[2], f32[4]) {
  %r = (f32[8]{0}, f32[16]{0}) all-reduce(%a, %b), channel_id=1, to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %x = bf16[8]{0} fusion(%p), kind=kCustom, calls=%first
  %y = bf16[8]{0} fusion(%p), kind=kCustom, calls=%second
  %z = (f32[2]{0}, f32[4]{0}) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    found = {c.kind: (c.count, c.bytes) for c in _cost.collectives_in(text)}
    assert found == {"all-gather": (1, 16), "reduce-scatter": (1, 8 + 16)}


# ---------------------------------------------------------------------------------------------------------- the table


@pytest.mark.medium
def test_the_table_of_leaves():
    params = {
        "body": {"w": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)},
        "head": np.ones((8, 2), np.float32),
    }
    rule = ts.rules.chain(
        ts.rules.clip_by_global_norm(2.0),
        ts.rules.partition(
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
    assert found["body/w"].shape == (8, 8) and found["body/w"].dtype == "float32"


@pytest.mark.medium
def test_of_many_leaves_the_first_are_shown():
    params = {f"layer{i:02}": {"w": np.ones((4, 4), np.float32)} for i in range(50)}
    state = ts.freeze(state_of(params, ts.rules.sgd(0.1)), "layer07/**")
    step = ts.train_step(lambda p, x: sum(jnp.sum(x @ q["w"]) for q in p.values()))
    about = describe(step, state, np.ones((2, 4), np.float32))
    lines = repr(about).partition("\n\n")[2].splitlines()
    assert lines[0].split() == ["leaf", "shape", "status"] and len(lines) == 42
    assert lines[1].split() == ["layer00/w", "float32[4,", "4]", "trained"]
    assert lines[8].endswith("frozen") and lines[-1] == "... 10 more leaves, in .leaves" and len(about.leaves) == 50


@pytest.mark.medium
def test_populations_and_what_of_them_is_frozen():
    params = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}
    step = ts.train_step(lambda p, x: jnp.mean((x @ p["w"] + p["b"][None]) ** 2))
    x, one = np.ones((8, 4), np.float32), state_of(params, ts.rules.sgd(0.1))
    make = lambda key, rate: state_of(params, ts.rules.sgd(rate), key=key)
    runs = ts.population(make, 3, key=0, rate=np.array([0.1, 0.1, 0.1]))
    about = describe(step, ts.freeze(runs, "b"), x)
    assert [leaf.status for leaf in about.leaves] == ["frozen", "trained"]
    each = [jax.tree.map(lambda x, i=i: x[i], ts.freeze(runs, where)) for i, where in enumerate(["b", "b", "w"])]
    mixed = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    assert [leaf.status for leaf in describe(step, mixed, x).leaves] == ["2 of 3 frozen", "1 of 3 frozen"]
    fresh = ts.train_step(lambda p, x: jnp.mean((x @ p["w"] + p["b"][None]) ** 2))
    alone = describe(fresh, one, x).flops
    assert describe(fresh, runs, x).flops == 3 * alone
    assert describe(fresh, one, x).recompiles[-1].startswith("step: state.clock is int32[")


# ---------------------------------------------------------------------------------------------------- why it recompiled


def square(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.medium
def test_why_it_recompiled():
    x, params = np.ones((8, 4), np.float32), {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}
    step = ts.train_step(
        lambda params, batch: jnp.mean((batch["x"] @ params["w"] + params["b"][None]) ** 2) + 0 * batch.get("y", 0)
    )
    fresh = lambda rule=None, **options: state_of(params, ts.rules.sgd(0.1) if rule is None else rule, **options)
    reasons = lambda: list(retrace_reasons(step.traces))
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
    ts.loop.run_steps(step, fresh(), {"x": np.stack([x] * 3)})
    ts.loop.run_steps(step, fresh(), {"x": np.stack([x] * 4)})
    expected = [
        "step: batch['x'] is float32[4,4], was float32[8,4]",
        "step: batch['x'] is bfloat16[8,4], was float32[4,4]",
        "step: batch['y'] is new",
        "step: batch['y'] is float32[], was float32[] (a Python number)",
        "step: the rule, apart from its numbers, is another one",
        "step: the choice of trainable= is another one",
        "step: precision is another one",
        "step: state.frozen is new",
        "step: the cut of the hyperparameters (adjust) is another one",
        "step: the mesh is another one",
        "loop: batches.batches['x'] is float32[4,8,4], was float32[3,8,4]",
    ]
    assert reasons() == expected


def test_an_argument_called_state_is_a_reason_of_its_own():
    x, step = np.ones((8, 4), np.float32), ts.train_step(lambda params, batch: jnp.mean(batch["state"] @ params["w"]))
    fresh = lambda rule: state_of({"w": np.ones((4, 2), np.float32)}, rule)
    step(fresh(ts.rules.sgd(0.1)), {"state": x})
    step(fresh(ts.rules.adam(0.1)), {"state": x[:4]})
    (reason,) = retrace_reasons(step.traces)
    assert "the rule, apart from" in reason and "batch['state'] is float32[4,4], was float32[8,4]" in reason


@pytest.mark.medium
def test_a_precision_says_nothing_of_what_follows_from_it():
    x, params = np.ones((8, 4), np.float32), {"w": np.ones((4, 2), np.float32)}
    step, low = ts.train_step(square), ts.precision.Policy(param="bfloat16", compute="bfloat16")
    step(state_of(params), x)
    about = describe(step, state_of(params, precision=low), x)
    assert about.recompiles == ("step: precision is another one",)


def test_a_call_that_failed_compiled_nothing():
    step, x = ts.train_step(square), np.ones((8, 4), np.float32)
    state = state_of({"w": np.ones((4, 2), np.float32)})
    with pytest.raises(TypeError, match="dot_general"):
        step(state, x[:, :3])
    step(state, x)
    state = state_of({"w": np.ones((4, 2), np.float32)})
    about = describe(step, state, x)
    assert (about.traces, about.recompiles) == (1, ())


@pytest.mark.medium
def test_a_mesh_of_one_device_is_told_from_none():
    step, x = ts.train_step(square, donate=False), np.ones((8, 4), np.float32)
    state = state_of({"w": np.ones((4, 2), np.float32)})
    spread = ts.shard(state, ts.mesh(devices=jax.devices()[:1]))
    step(state, x)
    step(spread, x)
    about = describe(step, spread, x)
    assert about.traces == 2  # describing asks for the program that the step has run
    assert about.recompiles == ("step: the mesh is another one",)
    assert describe(step, state, x).traces == 2
    typed = ts.shard(state, ts.mesh(devices=jax.devices()[:1], explicit=True))
    assert describe(step, typed, x).recompiles[1] == "step: the mesh is another one"


@pytest.mark.medium
def test_models_with_keys_and_noise():
    def loss_fn(params, x, key):
        return jnp.mean((jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ params["w"]) ** 2)

    state = state_of({"w": np.ones((4, 2), np.float32)}, key=0)
    for accumulate in (1, 2):
        about = describe(ts.train_step(loss_fn, accumulate=accumulate), state, np.ones((8, 4), np.float32))
        assert about.flops == 2 * 2 * 8 * 4 * 2


@pytest.mark.medium
def test_fit_and_new_arguments_are_in_the_count():
    step = ts.train_step(lambda params, x, scale=1.0: square(params, x) * scale)
    params, x = {"w": np.ones((4, 2), np.float32)}, np.ones((8, 4), np.float32)
    state, _ = step(state_of(params), x)
    state, _ = step(state, x, scale=np.float32(2))
    state, _ = ts.fit(step, state, ts.batches(x, 4), epochs=1, progress=False)
    twin = dataclasses.replace(step)  # equal: the two share the compiled loop
    assert [trace.kind for trace in step.traces] == ["step", "step", "loop"]
    about = describe(step, state, x)
    assert about.recompiles == ("step: scale is new",) and "scale is new" in repr(about)
    assert describe(twin, state, x).traces == 2  # that loop, and its own program: alone they share none
    assert describe(twin, state, x).recompiles == ()


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda: describe(square, state_of(), BATCH), WrongTypeError, "a ts.train_step"),
        (lambda: describe(ts.train_step(mlp), PARAMS, BATCH), WrongTypeError, "state at describe()"),
    ],
)
def test_wrong_arguments(wrong, kind, text):
    with pytest.raises(kind, match=text.replace("(", r"\(").replace(")", r"\)")):
        wrong()


_MEMORY = """
import os
os.environ["XLA_FLAGS"] = ""
os.environ["NPROC"] = "2"  # the threads whose scratch is counted: sixteen, as the other tests have, take 100 MiB more
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
with open("/proc/self/clear_refs", "w") as file:  # the peak of the program, not that of its compiler in the first call
    file.write("5")
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


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        (optax.adam(1e-3), {}, "by loss and gradient"),
        (ts.rules.adam(1e-3), {}, "by loss and gradient while its live numbers are within bounds, else also by"),
        (ts.rules.lamb(1e-3), {}, "by loss, gradient and update: scale_by_trust_ratio may make an infinite update"),
        (ts.rules.adam(1e-3), {"norms": "update"}, "by loss, gradient and update: norms='update'"),
        (ts.rules.adam(1e-3), {"on_nonfinite": "ignore"}, "by nothing"),
    ],
)
def test_describe_says_by_what_a_step_is_judged(rule, options, said):
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), **options)
    about = ts.describe(step, ts.setup(rule, {"w": jnp.ones(3)}), jnp.ones((2, 3)))
    assert about.judged.startswith(said) and f"judged    {said[:10]}" in str(about)
