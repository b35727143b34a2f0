"""States over many devices: the numbers of one device, no more memory than promised, and a word where it cannot be."""

import copy
import dataclasses
import functools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.helpers import assert_trees_close, assert_trees_equal
from tsunax import testing
from tsunax._core import placement
from tsunax.errors import DataError, DeviceError, HyperparameterError, LossError, PatternError, WrongTypeError

ROWS, WIDTH, HIDDEN = 40, 32, 64


def init(seed=0):
    rng = np.random.default_rng(seed)
    kernel = lambda *shape: (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)
    return {
        "up": {"kernel": kernel(WIDTH, HIDDEN), "bias": np.zeros(HIDDEN, np.float32)},
        "down": {"kernel": kernel(HIDDEN, WIDTH), "bias": np.zeros(WIDTH, np.float32)},
    }


def loss_fn(params, batch, mask):
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"][None])
    out = hidden @ params["down"]["kernel"] + params["down"]["bias"][None]
    return ts.Loss.mean(jnp.mean((out - batch["y"]) ** 2, -1), where=mask)


def batches_of(n, rows=ROWS, seed=1):
    rng = np.random.default_rng(seed)
    return [{k: rng.normal(size=(rows, WIDTH)).astype(np.float32) for k in "xy"} for _ in range(n)]


def setup(params=None, rule=None, **options):
    rule = ts.rules.adam(1e-2) if rule is None else rule
    return ts.setup(rule, init() if params is None else params, key=0, **options)


RULES = {"up/kernel": P(None, "tensor"), "down/kernel": P("tensor")}
LAYOUTS = {
    "replicated": lambda n: ({}, None),
    "fsdp": lambda n: ({"data": 1, "fsdp": n}, None),
    "fsdp+tensor": lambda n: ({"data": 1, "fsdp": max(n // 2, 1), "tensor": min(n, 2)}, RULES),
}
FEATURES = {
    "plain": ({}, {}),
    "accumulate": ({}, {"accumulate": 4}),
    "bf16": ({"precision": "bfloat16"}, {}),
    "guard": ({}, {}),
    "ema": ({"ema": 0.9}, {}),
    "freeze": ({}, {}),
    "all": ({"ema": 0.9}, {"accumulate": 2}),
}


def mesh_of(layout, n, **more):
    sizes, rules = LAYOUTS[layout](n)
    return ts.mesh(**sizes, devices=jax.devices()[:n], **more), rules


def spec(x) -> P:
    """How an array is spread, without the Nones at the end."""
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def specs(tree):
    return jax.tree.map(spec, tree)


def run(state, step, feature, n=50):
    """The losses of n steps, with what belongs to a feature on the way."""
    data, losses = batches_of(5), []
    for i in range(n):
        batch = data[i % 5]
        if feature in ("guard", "all") and i % 7 == 3:
            batch = {**batch, "x": np.where(np.arange(ROWS)[:, None] == 9, np.nan, batch["x"]).astype(np.float32)}
        if feature in ("freeze", "all") and i in (2, 20):
            state = ts.freeze(state, "down/**") if i == 2 else ts.thaw(state)
        state, info = step(state, batch)
        losses.append(info.loss)
    return state, np.array(jax.device_get(losses))


@functools.cache
def on_one_device(feature, steps):
    options, asked = FEATURES[feature]
    return run(setup(**options), ts.train_step(loss_fn, **asked), feature, steps)


def check_equal_to_one_device(n, layout, feature, steps=50):
    options, asked = FEATURES[feature]
    expected, losses = on_one_device(feature, steps)
    step = ts.train_step(loss_fn, **asked)
    mesh, rules = mesh_of(layout, n)
    state, found = run(ts.shard(setup(**options), mesh, rules), step, feature, steps)
    is_coarse = feature == "bf16"  # a sum that is cut is rounded where it was not, by 2**-9 each time
    np.testing.assert_allclose(found, losses, rtol=4e-3 if is_coarse else 1e-5)
    coarse, fine = {"rtol": 0.1, "atol": 2e-2}, {"rtol": 1e-4, "atol": 1e-5}
    assert_trees_close(state.params, expected.params, **(coarse if is_coarse else fine))
    assert int(state.step) == int(expected.step) and int(state.rejected) == int(expected.rejected)
    if n > 1:
        (program,) = step.programs.values()
        assert program._cache_size() == (2 if feature in ("freeze", "all") else 1)  # the first freeze is another state
        assert specs(state.params) == specs(ts.shard(setup(**options), mesh, rules).params)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_of_one_device(layout):
    check_equal_to_one_device(4, layout, "all", steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_numbers_of_one_device_in_full(n, layout, feature):
    check_equal_to_one_device(n, layout, feature)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.medium), 8])
def test_a_share_of_the_bytes_on_each_device(n):
    """Parameters, moments and averages: 1/n of the whole, and what is too small to cut."""
    mesh, _ = mesh_of("fsdp", n)
    state = ts.shard(setup(ema=0.9), mesh)
    small = sum(x.nbytes for x in jax.tree.leaves(init()) if x.size < 1024)
    for part, copies in ((state.params, 1), (state.opt_state, 2), (state.average, 1)):
        whole = sum(x.nbytes for x in jax.tree.leaves(part))
        for device in mesh.devices.flat:
            held = sum(s.data.nbytes for x in jax.tree.leaves(part) for s in x.addressable_shards if s.device == device)
            assert held <= whole / n + copies * small + 16
    shown = ts.devices.describe_sharding(state)
    assert set(shown.bytes.values()) == {max(shown.bytes.values())} and len(shown.bytes) == n
    assert f"axis 1 over fsdp={n}" in repr(shown) and f"on each of {n}" in repr(shown)


def test_zero_1_spreads_what_only_the_update_needs():
    mesh, policy = ts.mesh(), ts.precision.Policy("bfloat16", "bfloat16")
    state = ts.shard(setup(ema=0.9, precision=policy), mesh, zero1=True)
    assert set(jax.tree.leaves(specs(state.params))) == {P()}
    adam = state.opt_state[0]
    for part in (adam.mu, adam.nu, state.masters, state.average.params):
        assert specs(part["up"]) == {"kernel": P(None, "data"), "bias": P()}
    step = ts.train_step(loss_fn)
    _, losses = run(setup(ema=0.9), step, "plain", 6)
    state, found = run(ts.shard(setup(ema=0.9), mesh, zero1=True), step, "plain", 6)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert spec(state.opt_state[0].mu["up"]["kernel"]) == P(None, "data")


def test_made_where_it_lives():
    """No leaf is ever whole on a device, and the bits are those of the state that was made in one place."""
    mesh, _ = mesh_of("fsdp", 8)
    make = lambda: setup(jax.tree.map(lambda x: jax.random.uniform(jax.random.key(1), x.shape), init()))
    born, moved = ts.shard(make, mesh), ts.shard(make(), mesh)
    assert_trees_equal(born.params, moved.params)
    assert specs(born.params) == specs(moved.params) and specs(born.opt_state) == specs(moved.opt_state)
    assert np.isfinite(ts.train_step(loss_fn)(born, batches_of(1)[0])[1].loss)


@pytest.mark.medium
def test_axes_that_are_types():
    """With explicit axes too, parameters collected where the loss needs them."""
    step = ts.train_step(loss_fn)
    _, losses = run(setup(), step, "plain", 6)
    for layout, make in (("replicated", False), ("fsdp", False), ("fsdp", True)):
        mesh, _ = mesh_of(layout, 8, explicit=True)
        _, found = run(ts.shard(setup if make else setup(), mesh), step, "plain", 6)
        np.testing.assert_allclose(found, losses, rtol=1e-5)
    _, history = ts.fit(step, ts.shard(setup(), mesh), batches_of(5), steps=6, log_every=1, progress=False)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)


@pytest.mark.slow
def test_micro_batches_and_windows_on_axes_that_are_types():
    """Each device cuts its own rows; where they do not divide they are padded, or refused."""
    mesh = ts.mesh(data=2, fsdp=4, explicit=True)
    rule = ts.rules.sgd(0.1)  # Adam makes 1e-4 of the rounding of an element whose gradient is near its eps
    for rows, accumulate in ((48, 3), (27, 2)):
        step, data = ts.train_step(loss_fn, accumulate=accumulate), batches_of(1, rows)[0]
        testing.check_sharding(step, setup(rule=rule), data, mesh, steps=1)
    blind = ts.train_step(lambda params, batch: loss_fn(params, batch, None), accumulate=2)
    with pytest.raises(DataError, match=r"got 40 rows over 8 devices, expected a multiple of 16.*into 2.*mask"):
        blind(ts.shard(setup(), mesh), batches_of(1)[0])


@pytest.mark.slow
def test_batches_that_a_program_gathers_are_spread_on_axes_that_are_types():
    seen = []

    def loss(params, batch, mask):
        seen.append(jax.typeof(batch["x"]).sharding.spec)
        return loss_fn(params, batch, mask)

    mesh = ts.mesh(explicit=True)
    data = ts.batches(batches_of(1)[0], 8, device=mesh)
    ts.fit(ts.train_step(loss), ts.shard(setup(), mesh), data, steps=2, progress=False)
    assert seen and all(x == P(("data", "fsdp"), None) for x in seen)


def test_rules_may_be_pairs():
    mesh, spread = ts.mesh(data=2, fsdp=4), {"up/kernel": P("fsdp")}
    for rules in (spread, list(spread.items())):
        assert spec(ts.shard(setup(), mesh, rules).params["up"]["kernel"]) == P("fsdp")


# What follows what


def test_rules_come_first_then_names_then_the_largest_axis():
    mesh = ts.mesh(data=2, fsdp=2, tensor=2)
    state = ts.shard(setup(), mesh, {"up/kernel": P(None, "tensor"), "up/**": P("tensor"), "down/kernel": None})
    expected = {"up": {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}, "down": {"kernel": P(), "bias": P()}}
    assert specs(state.params) == specs(state.opt_state[0].mu) == specs(state.opt_state[0].nu) == expected
    assert spec(ts.shard(setup(), mesh).params["up"]["kernel"]) == P(None, "fsdp")  # 64 of (32, 64)
    odd = ts.shard({"a": np.zeros((77, 50)), "b": np.zeros((33, 77)), "c": np.zeros((3, 3))}, mesh)
    assert specs(odd) == {"a": P(None, "fsdp"), "b": P(), "c": P()}


@pytest.mark.medium
def test_names_that_flax_gives_to_axes():
    mesh = ts.mesh(data=2, fsdp=2, tensor=2)
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    params = nn.Dense(HIDDEN, kernel_init=kernel).init(jax.random.key(0), jnp.ones((1, WIDTH)))
    state = ts.shard(ts.setup(ts.rules.adam(1e-3), params), mesh, logical={"embed": "fsdp", "mlp": "tensor"})
    for tree in (state.params, state.opt_state[0].mu):
        assert spec(tree["params"]["kernel"].value) == P("fsdp", "tensor")
    is_new = hasattr(nnx, "use_eager_sharding")
    kind = {"out_sharding": (None, "tensor"), "eager_sharding": False} if is_new else {"sharding": (None, "tensor")}
    params = nnx.State({"w": nnx.Param(jnp.zeros((WIDTH, HIDDEN)), **kind)})
    assert spec(jax.tree.leaves(ts.shard(params, mesh))[0]) == P("fsdp", "tensor")
    with pytest.raises(PatternError, match=r"logical axis at shard.*'heads'.*one of embed, mlp"):
        ts.shard(ts.setup(ts.rules.sgd(0.1), state.params), mesh, logical={"heads": "tensor"})


def test_moments_of_another_shape():
    """Factored moments have the sums over rows and columns of what they belong to."""
    params = {"w": np.zeros((256, 2048), np.float32), "b": np.zeros(2048, np.float32)}
    state = ts.shard(ts.setup(ts.rules.adafactor(1e-3), params), ts.mesh(data=1, fsdp=8))
    for x in jax.tree.leaves(state.opt_state):
        held = max(s.data.nbytes for s in x.addressable_shards)
        assert held == x.nbytes // 8 if x.size >= 1024 else held == x.nbytes
    assert spec(state.params["w"]) == P(None, "fsdp")


def test_plain_optax_unselected_and_model_state():
    params, mesh = init(), ts.mesh(data=1, fsdp=8)
    state = ts.setup(optax.adam(1e-2), params, trainable="up/**", model_state={"big": np.zeros((64, 64), np.float32)})
    state = ts.shard(state, mesh)
    assert spec(state.params["down"]["kernel"]) == P("fsdp")
    assert spec(state.opt_state[0].mu["up"]["kernel"]) == P(None, "fsdp")
    assert spec(state.model_state["big"]) == P("fsdp")
    assert state.clock.sharding == NamedSharding(mesh, P())


# Batches


def test_rows_are_spread_and_never_computed_whole():
    for place in (
        lambda: ts.shard(setup(), ts.mesh()),
        lambda: setup(jax.device_put(init(), NamedSharding(ts.mesh(), P()))),
    ):
        step, state, batch = ts.train_step(loss_fn), place(), batches_of(1)[0]
        text = step.lower(state, batch).compile().as_text()
        assert f"f32[{ROWS // 8},{HIDDEN}]" in text and f"f32[{ROWS},{HIDDEN}]" not in text
        on_device = jax.tree.map(jnp.asarray, batch)
        losses = {float(step(place(), x)[1].loss) for x in (batch, on_device)}
        assert len(losses) == 1


def test_rows_are_spread_wherever_a_part_of_the_state_is():
    mesh, params = ts.mesh(), init()
    state = setup({**params, "up": jax.device_put(params["up"], NamedSharding(mesh, P()))}, trainable="down/**")
    text = ts.train_step(loss_fn).lower(state, batches_of(1)[0]).compile().as_text()
    assert f"f32[{ROWS // 8},{HIDDEN}]" in text and f"f32[{ROWS},{HIDDEN}]" not in text


@pytest.mark.medium
def test_a_program_for_shapes():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches_of(1, rows=27)[0])
    state = ts.shard(setup(), ts.mesh())
    for given in (state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)):
        assert f"f32[4,{HIDDEN}]" in ts.train_step(loss_fn).lower(given, shapes).compile().as_text()


@pytest.mark.medium
def test_rows_that_do_not_divide():
    """Padded where the loss masks them; refused where it does not."""
    batch = batches_of(1, rows=27)[0]
    step = ts.train_step(loss_fn)
    for given, rows in (({}, 27), ({"mask": (np.arange(27) % 3 > 0).astype(np.float32)}, 18)):
        testing.check_sharding(step, setup(), batch, tolerance=1e-6, steps=1, **given)
        assert float(step(ts.shard(setup(), ts.mesh()), batch, **given)[1].weight) == rows

    blind = ts.train_step(lambda params, batch: loss_fn(params, batch, None))
    with pytest.raises(DataError, match=r"got 27 rows, expected a multiple of 8.*mask"):
        blind(ts.shard(setup(), ts.mesh()), batch)


@pytest.mark.medium
def test_a_buffer_that_is_filled_again():
    """A CPU reads NumPy arrays where they are, and a step returns before it has."""
    step, data, losses = ts.train_step(loss_fn), batches_of(6, rows=64), []
    buffer = {k: np.empty((64, WIDTH), np.float32) for k in "xy"}
    for is_same in (False, True):
        state, infos = ts.shard(setup(), ts.mesh()), []
        for batch in data:
            if is_same:
                for k in "xy":
                    buffer[k][:] = batch[k]
            state, info = step(state, buffer if is_same else batch)
            infos.append(info.loss)
        losses.append(jax.device_get(infos))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_a_large_batch_is_copied_once(dtype):
    """Not never: its memory is the caller's to fill again. Not twice: the device takes the copy as its own."""
    room = np.zeros((1 << 20) + 64, np.uint8)
    aligned = room[-room.ctypes.data % 64 :][: 1 << 20]
    x = aligned.view(jnp.dtype(dtype)).reshape(64, -1)
    x[:] = np.arange(64)[:, None]
    expected, mesh = x.copy(), ts.mesh()
    for home in (None, NamedSharding(mesh, P())):
        copies = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                placement, "aligned_copy", lambda x, f=placement.aligned_copy, own=copies: own.append(f(x)) or own[-1]
            )
            placed = jax.block_until_ready(placement.put_rows(x, home))
        (own,) = copies
        where = range(own.ctypes.data, own.ctypes.data + own.nbytes)
        assert all(shard.data.unsafe_buffer_pointer() in where for shard in placed.addressable_shards)
        x[:] = 0
        np.testing.assert_array_equal(np.asarray(placed), expected)
        x[:] = expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_mask_of_tokens_is_padded_along_its_rows_and_a_mask_of_other_rows_is_refused(accumulate):
    x = np.random.default_rng(0).normal(size=(13, 5, 4)).astype(np.float32)
    mask = (np.arange(65).reshape(13, 5) % 3 > 0).astype(np.float32)
    loss = lambda params, x, mask: ts.Loss.mean((x @ params["w"]) ** 2, mask)
    step = ts.train_step(loss, accumulate=accumulate, donate=False)
    for place in (lambda state: state, lambda state: ts.shard(state, ts.mesh())):
        state = place(ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(4)}))
        np.testing.assert_allclose(step(state, x, mask=mask)[1].loss, np.mean(x.sum(-1)[mask > 0] ** 2), rtol=1e-5)
        with pytest.raises(LossError, match=r"first axis of 13 rows|where"):
            step(state, x, mask=mask[:12])


def test_a_rule_with_more_axes_than_its_array_is_refused():
    with pytest.raises(DeviceError, match=r"at w: .*divide the shape \(8,\)"):
        ts.shard({"w": jnp.ones(8)}, ts.mesh(), {"w": P(None, "fsdp")})


@pytest.mark.medium
def test_a_mask_that_is_given_counts_beside_padding():
    rows = 27
    data = jax.tree.map(lambda *x: np.stack(x), *batches_of(2, rows))
    for mask in (None, (np.arange(rows) % 3 > 0).astype(np.float32)):
        extra = {} if mask is None else {"mask": mask}
        one, many = (
            ts.loop.run_steps(ts.train_step(loss_fn), state, data, **extra)[1]
            for state in (setup(), ts.shard(setup(), ts.mesh()))
        )
        np.testing.assert_allclose(many.loss, one.loss, rtol=1e-5)
        np.testing.assert_array_equal(many.weight, one.weight)
    batch = jax.tree.map(lambda x: x[0], data)
    found = ts.train_step(loss_fn)(ts.shard(setup(), ts.mesh()), batch, mask=None)[1]
    assert float(found.weight) == rows
    with pytest.raises(LossError, match=r"rows at batch.*the same number in every leaf"):
        ts.train_step(loss_fn)(ts.shard(setup(), ts.mesh()), {**batch, "table": np.zeros((5, 2), np.float32)})


def test_an_evaluation_spreads_the_rows_that_it_can_pad():
    seen = []

    def loss(params, batch, mask):
        jax.debug.inspect_array_sharding(batch["x"], callback=lambda s: seen.append(s.is_fully_replicated))
        return loss_fn(params, batch, mask)

    arrays = batches_of(1, rows=36)[0]
    found = ts.evaluate(ts.eval_step(loss), ts.shard(setup(), ts.mesh()), ts.batches(arrays, 20))
    assert found["loss"] == pytest.approx(float(ts.eval_step(loss_fn)(setup(), arrays).compute()), rel=1e-6)
    assert seen == [False]  # one program, rows apart


@pytest.mark.slow
def test_an_epoch_whose_tail_does_not_divide():
    arrays = batches_of(1, rows=83)[0]
    step, data = ts.train_step(loss_fn), lambda: ts.batches(arrays, 16, shuffle=True)
    _, expected = ts.fit(step, setup(), data(), epochs=2, log_every=1, progress=False)
    for per_call in ("auto", 1, None):
        state = ts.shard(setup(), ts.mesh())
        state, found = ts.fit(step, state, data(), epochs=2, log_every=1, progress=False, steps_per_call=per_call)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    exact = ts.evaluate(ts.eval_step(loss_fn), jax.device_put(state, jax.devices()[0]), data())
    assert ts.evaluate(ts.eval_step(loss_fn), state, data())["loss"] == pytest.approx(exact["loss"], rel=1e-6)


def test_batch_statistics_and_dropout_are_those_of_the_whole_batch():
    def loss(params, batch, key, model_state):
        x = batch["x"] * jax.random.bernoulli(key, 0.5, batch["x"].shape)
        mean, var = x.mean(0), x.var(0)
        out = (x - mean[None]) * jax.lax.rsqrt(var + 1e-5)[None] @ params["up"]["kernel"]
        state = {k: 0.9 * model_state[k] + 0.1 * new for k, new in {"mean": mean, "var": var}.items()}
        return ts.Loss.mean(out**2, model_state=state)

    step, start = ts.train_step(loss), {k: np.zeros(WIDTH, np.float32) for k in ("mean", "var")}
    states = [setup(model_state=start), ts.shard(setup(model_state=start), ts.mesh())]
    for batch in batches_of(3):
        states, infos = zip(*[step(state, batch) for state in states], strict=True)
        np.testing.assert_allclose(infos[1].loss, infos[0].loss, rtol=1e-5)
    assert_trees_close(states[1].model_state, states[0].model_state, rtol=1e-5, atol=1e-7)


def test_a_refresh_spreads_its_rows_too():
    def loss(params, batch, model_state):
        return ts.Loss.mean(batch["x"], model_state={"mean": jnp.mean(batch["x"], 0)})

    state = ts.shard(setup(model_state={"mean": np.zeros(WIDTH, np.float32)}), ts.mesh())
    batch = batches_of(1)[0]
    found = ts.update_batch_stats(loss)(state, batch).model_state["mean"]
    np.testing.assert_allclose(found, batch["x"].mean(0), rtol=1e-5, atol=1e-6)


def test_hyperparameters_and_freezing_where_it_lives():
    mesh, _ = mesh_of("fsdp", 8)
    step, state, batch = ts.train_step(loss_fn), ts.shard(setup(freezable=True), mesh), batches_of(1)[0]
    for change in (lambda s: ts.adjust(s, learning_rate=0.5), lambda s: ts.freeze(s, "up/**"), ts.thaw):
        state, _ = step(change(state), batch)
    (program,) = step.programs.values()
    assert program._cache_size() == 1


@pytest.mark.medium
@pytest.mark.parametrize("axes", [{"data": 1, "fsdp": -1}, pytest.param({"explicit": True}, marks=pytest.mark.medium)])
def test_states_that_were_edited_compile_nothing(axes):
    """They go back to where they were, under the same names of places."""
    make = lambda: setup(rule=ts.rules.accumulate(ts.rules.adam(1e-2), every=4))
    step, state, batch = ts.train_step(loss_fn), ts.shard(make(), ts.mesh(**axes)), batches_of(1)[0]
    state, _ = step(state, batch)
    assert pickle.dumps(state)
    before = state.params["down"]["kernel"].sharding
    for edit in (
        ts.flush,
        copy.deepcopy,
        lambda s: s.replace(params=init(1)),
        lambda s: s.replace(params=jax.tree.map(lambda x: x * 1.0, s.params), key=3),
    ):
        state, _ = step(edit(state), batch)
        assert state.params["down"]["kernel"].sharding.is_equivalent_to(before, 2)
    (program,) = step.programs.values()
    assert program._cache_size() == 1


@pytest.mark.medium
def test_a_refresh_leaves_everything_in_its_place():
    def loss(params, batch, model_state):
        return ts.Loss.mean(batch["x"] @ params["up"]["kernel"], model_state={"mean": jnp.mean(batch["x"], 0)})

    state = ts.shard(setup(model_state={"mean": np.zeros(WIDTH, np.float32)}), ts.mesh(data=1, fsdp=-1))
    step, batch = ts.train_step(loss), batches_of(1)[0]
    state, _ = step(state, batch)
    state, _ = step(ts.update_batch_stats(loss)(state, batch), batch)
    (program,) = step.programs.values()
    assert program._cache_size() == 1


# Errors


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            {"data": 3},
            r"mesh: got data=3 x fsdp=1 x tensor=1, expected sizes that multiply to 8 devices.*devices=jax.devices\(\)\[:n\]",
        ),
        ({"data": -1, "fsdp": 3}, r"got data=-1 x fsdp=3 x tensor=1, expected sizes that multiply to 8"),
        ({"data": -1, "fsdp": -1}, "got data=-1 x fsdp=-1 x tensor=1, expected .*, -1 for one at most"),
        ({"data": 16}, "expected sizes that multiply to 8 devices"),
        ({"tensor": 0}, "tensor=0, expected sizes"),
        ({"devices": [0, 0]}, "got 2 devices, expected at least one, each once"),
        ({"devices": []}, "got 0 devices"),
        ({"devices": [99]}, "99"),
    ],
)
def test_meshes_that_cannot_be(sizes, text):
    with pytest.raises((DeviceError, HyperparameterError, WrongTypeError), match=text):
        ts.mesh(**sizes)


@pytest.mark.parametrize(
    ("rules", "kind", "text"),
    [
        ({"up/kernel": P("data", "data")}, DeviceError, r"sharding .* at up/kernel: got DuplicateSpecError"),
        ({"up/kernel": P("model")}, DeviceError, r"sharding .* at up/kernel: .*model.* is not found in mesh"),
        (
            {"down/bias": P(None, "tensor")},
            DeviceError,
            r"sharding P.*None, 'tensor'.* at down/bias: got .*, expected .* divide the shape \(32,\)",
        ),
        ({"odd": P("tensor")}, DeviceError, r"odd: got .*, expected .* divide the shape \(3,\)"),
        ({"uo/kernel": P()}, PatternError, "no match among 5 leaves.*up/kernel"),
    ],
)
def test_rules_that_cannot_be_followed(rules, kind, text):
    state = setup({**init(), "odd": np.zeros(3, np.float32)})
    with pytest.raises(kind, match=text):
        ts.shard(state, ts.mesh(tensor=2), rules)


def test_a_leaf_outside_of_the_mesh_is_named():
    state = ts.shard(setup(), ts.mesh(devices=jax.devices()[:4]))
    for place in (jax.devices()[7], NamedSharding(ts.mesh(devices=jax.devices()[4:]), P())):
        params = {**state.params, "down": jax.device_put(state.params["down"], place)}
        with pytest.raises(ValueError, match=r"incompatible devices.*\['down'\]\['bias'\]"):
            ts.train_step(loss_fn)(dataclasses.replace(state, params=params), batches_of(1)[0])


def test_things_that_are_no_mesh_or_state():
    with pytest.raises(WrongTypeError, match=r"mesh at shard.*ts\.mesh"):
        ts.shard(setup(), "data")
    with pytest.raises(TypeError, match=r"'adam'.* is not a valid JAX type"):
        ts.shard({"name": "adam"}, ts.mesh())


def test_what_is_shown():
    text = repr(ts.devices.describe_sharding({"w": jnp.zeros((64, 64)), "host": np.zeros(3), "key": jax.random.key(0)}))
    assert re.search(r"\['w'\]\s+float32\[64, 64\]\s+\S*cpu\S*\s+16.0 KiB", text, re.IGNORECASE), text
    assert "host" in text and text.endswith("in all, 16.0 KiB at most on each of 1")
    gone = jnp.zeros(3)
    gone.delete()
    text = repr(ts.devices.describe_sharding({"gone": gone, "host": np.zeros(3)}))
    assert re.search(r"'gone'.*donated\n.*'host'.*host\n0 B in all", text), text


def test_the_sharding_of_shapes_is_described():
    make = lambda: ts.setup(ts.rules.adam(1e-2), {"up": jnp.zeros((512, 64))})
    mesh = ts.mesh(data=1, fsdp=-1)
    shapes, there = ts.shard(jax.eval_shape(make), mesh), ts.shard(make, mesh)
    found, expected = ts.devices.describe_sharding(shapes), ts.devices.describe_sharding(there)
    assert (found.total, dict(found.bytes)) == (expected.total, dict(expected.bytes))
    assert found.rows == expected.rows
    assert "axis 0 over fsdp=8" in repr(found)
