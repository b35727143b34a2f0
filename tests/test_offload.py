"""Moments, averages and master copies in host memory: the bits of a state that is wholly on its devices."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from jax.sharding import NamedSharding
from tests import gpu_facts
from tests.helpers import assert_trees_equal, count_compiles
from tsunax._core import trees
from tsunax.checkpoints import _writing
from tsunax.devices import meshes
from tsunax.errors import DeviceError, DoesNotFitError, StateError
from tsunax.precision import Policy

ROWS, WIDTH, HIDDEN = 32, 32, 64
PARTS = ["moments", "average", "masters"]
LARGE = 2 * WIDTH * HIDDEN * 4  # bytes of the two kernels in float32; the biases stay on the devices


def init():
    rng = np.random.default_rng(0)
    kernel = lambda *shape: (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)
    return {
        "up": {"kernel": kernel(WIDTH, HIDDEN), "bias": np.zeros(HIDDEN, np.float32)},
        "down": {"kernel": kernel(HIDDEN, WIDTH), "bias": np.zeros(WIDTH, np.float32)},
    }


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"][None])
    return jnp.mean((hidden @ params["down"]["kernel"] + params["down"]["bias"][None] - batch["y"]) ** 2)


def batches_of(n, bad=()):
    rng = np.random.default_rng(1)
    made = [{k: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for k in "xy"} for _ in range(n)]
    for i in bad:
        made[i]["x"][3] = np.nan
    return made


def setup(rule=None, **options):
    rule = rule or ts.rules.chain(ts.rules.clip_by_global_norm(0.5), ts.rules.adamw(1e-2, weight_decay=0.1))
    options = {"ema": 0.9, "precision": Policy(param="bfloat16"), "freezable": True} | options
    return ts.setup(rule, init(), key=0, **options)


def mesh_of(n):
    return ts.mesh(data=1, fsdp=n, devices=jax.devices()[:n])


def both(n, make=setup, host=tuple(PARTS)):
    """A state on its devices, and the same one with these parts in host memory."""
    return ts.shard(make(), mesh_of(n)), ts.shard(make(), mesh_of(n), host=host)


def offloaded(tree) -> list[str]:
    return [at for at, x in trees.leaves_at("", tree) if x.sharding.memory_kind == "pinned_host"]


def bytes_of(tree) -> int:
    """Bytes in host memory for each device."""
    sizes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(tree) if trees.is_offloaded(x)]
    return sum(int(np.prod(shape)) * 4 for shape in sizes)


N = pytest.mark.parametrize("n", [1, pytest.param(8, marks=pytest.mark.several_devices)])


@pytest.fixture(scope="module", autouse=True)
def _memory():
    """A CPU in jax 0.7.2 has host memory, but its programs can only read it: `shard` says so."""
    try:
        ts.shard(setup(), mesh_of(1), host="moments")
    except DeviceError as error:
        assert "annotate_device_placement" in str(error)
        pytest.skip(str(error))


@N
def test_what_lies_where(n):
    plain, state = both(n)
    assert offloaded(plain) == []
    found = offloaded(state)
    assert len(found) == 8 and all("kernel" in at for at in found)  # mu, nu, the average, the masters
    assert not any("params" in at and "average" not in at for at in found)
    assert_trees_equal(state, plain)
    assert bytes_of(state) == 4 * LARGE // n
    (average,) = {at.split("[")[0] for at in offloaded(both(n, host="average")[1])}
    assert average == ".average.params"


@N
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.medium)])
def test_steps_have_equal_bits(n, accumulate):
    step = ts.train_step(loss_fn, accumulate=accumulate)
    plain, state = both(n)
    where = offloaded(state)
    for i, batch in enumerate(batches_of(6, bad=[2])):
        if i == 4:
            plain, state = ts.freeze(plain, "down/**"), ts.freeze(state, "down/**")
        plain, expected = step(plain, batch)
        with count_compiles() as c:
            state, info = step(state, batch)
        assert c.compiles == 0 or i == 0
        gpu_facts.assert_equal_bits((state, info), (plain, expected), on_gpu="bfloat16 in host memory")
        assert offloaded(state) == where
    assert int(state.rejected) == 1 and int(state.step) == 5


@pytest.mark.medium
@N
@pytest.mark.filterwarnings("ignore:step 5 of epoch:RuntimeWarning")
def test_a_fused_loop_has_equal_bits(n):
    step = ts.train_step(loss_fn)
    data = batches_of(8, bad=[5])
    runs = [ts.fit(step, state, data, epochs=2, steps_per_call=4, progress=False)[0] for state in both(n)]
    assert_trees_equal(*runs)
    assert int(runs[0].rejected) == 2 and len(offloaded(runs[1])) == 8


@N
def test_born_in_host_memory(n):
    state = ts.shard(setup, mesh_of(n), host=PARTS)
    expected = both(n)[1]
    assert offloaded(state) == offloaded(expected)
    assert_trees_equal(state, ts.shard(setup, mesh_of(n)))
    shapes = ts.shard(jax.eval_shape(setup), mesh_of(n), host=PARTS)
    assert [x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(shapes)] == [
        trees.is_offloaded(x) for x in jax.tree.leaves(state)
    ]


@N
def test_the_donated_memory_is_used_again(n):
    step = ts.train_step(loss_fn)
    state = both(n)[1]
    old = state.opt_state
    about = ts.describe(step, state, batches_of(1)[0])
    assert not about.not_aliased
    step(state, batches_of(1)[0])
    assert all(x.is_deleted() for x in jax.tree.leaves(old) if x.size >= 1024)


@pytest.mark.medium
@N
def test_saved_and_restored_to_either_place(n, tmp_path):
    step = ts.train_step(loss_fn)
    _, state = both(n)
    state, _ = step(state, batches_of(1)[0])
    with ts.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        there, here = both(n)
        restored, on_devices = checkpoints.restore(here).state, checkpoints.restore(there).state
        weights = checkpoints.restore(both(n)[1], params_only=True).state
    assert offloaded(restored) == offloaded(state) == offloaded(weights) and offloaded(on_devices) == []
    batch = batches_of(2)[1]
    on = [step(x, batch)[0] for x in (state, restored, on_devices)]
    assert_trees_equal(on[1], on[0])
    assert_trees_equal(on[2], on[0])


@pytest.mark.medium
@N
def test_what_is_shown(n):
    step = ts.train_step(loss_fn)
    plain, state = both(n)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches_of(1)[0])
    there, here = (ts.describe(step, x, shapes) for x in (plain, state))
    assert there.memory.host == 0 and here.memory.host == bytes_of(state)
    assert here.memory.state + here.memory.host == there.memory.state
    assert "in host memory" in repr(here) and "host" not in repr(there).splitlines()[2]
    placement = ts.devices.describe_sharding(state)
    plain_placement = ts.devices.describe_sharding(plain)
    assert placement.host == bytes_of(state) * n and placement.total == plain_placement.total
    each = plain_placement.bytes
    assert all(placement.bytes[at] == each[at] - bytes_of(state) for at in each)
    assert "in host memory" in repr(placement)
    other = ts.train_step(loss_fn)
    other.lower(plain, shapes)
    other.lower(state, shapes)
    (reason,) = ts.describe(other, state, shapes).recompiles[:1]
    assert "in host memory" in reason


@gpu_facts.moments_come_at_once
def test_a_batch_that_fits_because_of_it():
    make = lambda: ts.setup(ts.rules.adam(1e-2), {"w": np.zeros((1024, 1024), np.float32)})
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    plain, state = both(1, make, "moments")
    example = jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    _, report = ts.find_batch_size(step, state, example, max_size=8, memory=1 << 30)
    need = report.trials[0].need
    assert need.host == 8 << 20 and "host" in repr(report)
    between = {"max_size": 8, "memory": need.total + need.host // 2, "margin": 0.0}
    assert ts.find_batch_size(step, state, example, **between)[0] == 8
    with pytest.raises(DoesNotFitError):
        ts.find_batch_size(step, plain, example, **between)
    _, without = ts.find_batch_size(step, plain, example, max_size=8, memory=1 << 30)
    assert without.trials[0].need.total == need.total + need.host and "host" not in repr(without)


@pytest.mark.medium
@N
def test_both_halves_by_hand_and_the_rest_of_a_window(n):
    half = ts.value_and_grad(loss_fn)

    @jax.jit
    def step(state, batch):
        loss, grads = half(state, batch)
        return ts.update(state, grads, loss=loss)

    plain, state = both(n, lambda: setup(ts.rules.accumulate(ts.rules.adam(1e-2), 3)))
    assert len(offloaded(state)) >= 8
    for batch in batches_of(4):
        (plain, _), (state, _) = step(plain, batch), step(state, batch)
    plain, state = ts.flush(plain), ts.flush(state)
    assert_trees_equal(state, plain)
    assert len(offloaded(state)) >= 8


@pytest.mark.medium
@N
def test_averages_and_edits(n):
    step = ts.train_step(loss_fn)
    plain, state = both(n)
    for batch in batches_of(2):
        (plain, _), (state, _) = step(plain, batch), step(state, batch)
    evaluate = ts.eval_step(lambda params, batch, ema: loss_fn(ema, batch))
    is_equal = functools.partial(gpu_facts.assert_equal_bits, on_gpu="bfloat16 in host memory")
    is_equal(evaluate(state, batch), evaluate(plain, batch))
    mine, theirs = ts.averaged(state), ts.averaged(plain)
    is_equal(mine, theirs)
    assert not offloaded(mine.params) and offloaded(mine) == offloaded(state)
    more = jax.tree.map(lambda x: x + 1, plain.params)
    plain, state = plain.replace(params=more), state.replace(params=more)
    assert len(offloaded(state)) == 8
    plain, state = (ts.adjust(x, "up/**", learning_rate=0.1) for x in (plain, state))
    (plain, _), (state, _) = step(plain, batch), step(state, batch)
    is_equal(state, plain)


@pytest.mark.medium
@pytest.mark.several_devices
@pytest.mark.filterwarnings("ignore:.*step 1 of epoch:RuntimeWarning")
def test_several_states_and_populations():
    def step(run, batch):
        a, info = one(run.a, batch)
        b, _ = one(run.b, batch)
        return run.advance(a=a, b=b, all_or_none=True), info

    one = ts.train_step(loss_fn)
    make = lambda: ts.States(a=setup(), b=setup(ts.rules.adam(0.1)))
    runs = [ts.fit(step, run, batches_of(3, bad=[1]), epochs=1, progress=False)[0] for run in both(8, make)]
    assert_trees_equal(*runs)
    assert len(offloaded(runs[1])) == 16
    member = lambda key, rate: ts.setup(ts.rules.adam(rate), init())
    population = lambda: ts.population(member, 8, rate=np.linspace(0.01, 0.1, 8))
    plain, state = both(8, population, "moments")
    for batch in batches_of(2):
        (plain, _), (state, _) = one(plain, batch), one(state, batch)
    assert_trees_equal(state, plain)
    assert len(offloaded(state)) == 4


@pytest.mark.parametrize(
    "host, options, text",
    [
        (["moment"], {}, r"part at shard\(host=\.\.\.\): got 'moment', expected one of .*'moments'\?"),
        ("params", {}, r"got 'params', expected one of average, masters, moments"),
        (["average"], {"ema": None}, r"got 'average', expected one of masters, moments"),
    ],
)
def test_parts_that_a_state_does_not_have(host, options, text):
    with pytest.raises(StateError, match=text):
        ts.shard(setup(**options), mesh_of(1), host=host)


def test_devices_without_such_memory(monkeypatch):
    def sharding(mesh, spec, memory_kind=None):
        if memory_kind is not None:
            raise ValueError("Could not find memory addressable by device")
        return NamedSharding(mesh, spec)

    monkeypatch.setattr(meshes, "NamedSharding", sharding)
    with pytest.raises(DeviceError, match=r"host memory at shard\(host=\.\.\.\): got .+, expected .*'pinned_host'"):
        ts.shard(setup(), mesh_of(1), host="moments")
    assert dataclasses.is_dataclass(ts.shard(setup(), mesh_of(1)))


def test_a_saved_block_of_host_memory_is_a_copy():
    """NumPy reads the host memory of a GPU in place, and no buffer that it reads can be donated."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    array = jax.device_put(np.arange(4096, dtype=np.float32), place)
    gpu = SimpleNamespace(platform="gpu")
    shard = SimpleNamespace(device=gpu, data=array, replica_id=0)
    block = _writing._on_host(array, [shard])
    assert block.ctypes.data != array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(block, np.arange(4096))
    assert _writing._is_host_memory(shard)
