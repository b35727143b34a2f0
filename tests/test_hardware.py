"""Devices: which one is meant and why, the preference and its file, and what moves between them."""

import dataclasses
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal, run_python
from tsunax._core import device_kinds
from tsunax.devices import (
    device,
    device_info,
    device_of,
    devices,
    is_available,
    prefer,
    preferred,
    selection,
    simulate,
    supported_devices,
    to_device,
    to_host,
)
from tsunax.errors import ConfigError, DeviceError, WrongTypeError

ROOT = Path(__file__).resolve().parents[1]
CPU = jax.devices("cpu")


@dataclasses.dataclass(frozen=True)
class Fake:
    """What is asked of a device before anything is put there."""

    platform: str
    id: int = 0
    device_kind: str = "Fake"


@pytest.fixture(autouse=True)
def _nobody_prefers(monkeypatch, tmp_path):
    monkeypatch.delenv("TSUNAX_DEVICE", raising=False)
    monkeypatch.chdir(tmp_path)


def absent(platform):
    raise RuntimeError(f"Unknown backend {platform}. Available backends are []")


@pytest.fixture
def present(monkeypatch):
    """Makes JAX have these devices, {its platform: [device, ...]}, and no others; an error is raised."""

    def make(**platforms):
        def find(platform):
            found = platforms[platform] if platform in platforms else absent(platform)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(device_kinds, "find", find)

    return make


@pytest.fixture
def everywhere():
    """As if JAX_PLATFORMS was not set."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


# ----------------------------------------------------------------------------------------------------- which one


def test_the_cpu_is_always_there():
    assert device() == device("cpu") == CPU[0]
    assert device("cpu", 3) == CPU[3] and devices() == devices("cpu") == CPU
    assert is_available("cpu") and not is_available("gpu")
    assert is_available("cpu:7") and is_available(("cpu", 0)) and not is_available("gpu:0")
    assert not any(map(is_available, ["cpu:8", ("cpu", 8), ("cpu", -1), ("cpu", "0")]))
    assert supported_devices() == device_kinds.KINDS[1:]


@pytest.mark.parametrize(
    ("platforms", "first"),
    [
        ({"cpu": 2, "cuda": 2, "tpu": 4}, "tpu"),
        ({"cpu": 2, "rocm": 1}, "rocm"),
        ({"cpu": 2, "mps": 1}, "mps"),
        ({"cpu": 2, "cuda": 2, "rocm": 2}, "cuda"),
        ({"cpu": 2}, "cpu"),
    ],
)
def test_automatic_order(present, platforms, first):
    there = {name: [Fake(name, i) for i in range(n)] for name, n in platforms.items()}
    present(**there)
    assert devices() == there[first] and device() == there[first][0]


def test_kinds_are_jax_platforms(present):
    cuda, metal = [Fake("gpu", 0), Fake("gpu", 1)], [Fake("mps")]
    present(cpu=CPU, cuda=cuda, mps=metal)
    assert devices("gpu") == devices("cuda") == cuda and devices("metal") == metal
    assert [kind for kind in supported_devices() if is_available(kind)] == ["gpu", "cpu", "cuda", "metal"]
    with pytest.raises(
        DeviceError, match=r"device\('rocm', 0\): got no rocm, expected one that is here: gpu \(2\), cpu"
    ):
        device("rocm")


def test_what_is_absent_says_why(present, everywhere, monkeypatch):
    with pytest.raises(DeviceError) as error:
        device("gpu")
    fix = "JAX finds none; its plugin may not be installed."
    assert str(error.value) == f"device at device('gpu', 0): got no gpu, expected one that is here: cpu (8). {fix}"
    with pytest.raises(DeviceError, match="plugin"):
        devices("rocm")
    present(cpu=CPU, cuda=RuntimeError("Backend 'cuda' failed to initialize: no driver"))
    with pytest.raises(DeviceError, match="failed to initialize: no driver"):
        devices("cuda")
    jax.config.update("jax_platforms", "cpu")
    with pytest.raises(DeviceError, match="JAX_PLATFORMS=cpu leaves it out"):
        devices("tpu")


def test_another_platform_is_taken_and_none_is_an_error(present, monkeypatch):
    monkeypatch.setattr(device_kinds, "find", lambda platform: [Fake("npu")] if platform is None else absent(platform))
    assert device() == Fake("npu")
    present(cuda=AssertionError())
    with pytest.raises(DeviceError, match=r"devices: got .*, expected a backend"):
        device()
    with pytest.raises(DeviceError, match="expected one that is here: none is"):
        device("gpu")


def test_reasons(present, everywhere, monkeypatch, capsys):
    device("cpu", 2, verbose=True)
    assert capsys.readouterr().out == "device cpu:2 (cpu): cpu was asked for\n"
    present(cpu=CPU)
    device(verbose=True)
    said = "cpu is the first of tpu, gpu, cpu that is here"
    assert capsys.readouterr().out == f"device cpu:0 (cpu): {said}\n"
    present(cpu=CPU, cuda=[Fake("gpu")])
    monkeypatch.setenv("TSUNAX_DEVICE", "cpu")
    assert device(verbose=True) == CPU[0]
    assert capsys.readouterr().out == "device cpu:0 (cpu): cpu is preferred by TSUNAX_DEVICE\n"
    assert device("gpu") == Fake("gpu")


def test_an_unavailable_preference_warns_and_goes_on(present, everywhere, monkeypatch, capsys):
    present(cpu=CPU, tpu=[Fake("tpu")])
    monkeypatch.setenv("TSUNAX_DEVICE", "rocm")
    with pytest.warns(
        UserWarning, match=r"rocm, preferred by TSUNAX_DEVICE, is not here: JAX finds none.*Another"
    ) as w:
        assert device(verbose=True) == Fake("tpu")
    assert w[0].filename == __file__
    with pytest.warns(UserWarning, match="rocm"):
        assert devices() == [Fake("tpu")]


@pytest.mark.parametrize(
    ("ask", "kind", "text"),
    [
        (lambda: device("cuba"), DeviceError, "kind at device('cuba', 0): got 'cuba', expected one of auto, tpu, "),
        (lambda: device("cuba"), DeviceError, "Did you mean 'cuda'?"),
        *((lambda k=k: device(k), DeviceError, f"Did you mean '{k.lower()}'?") for k in ("CUDA", "CPU", "TPU", "Metal")),
        (lambda: device("AMDGPU"), DeviceError, "Did you mean 'gpu'?"),
        (lambda: is_available("gpus"), DeviceError, "Did you mean 'gpu'?"),
        (lambda: is_available("gpus:1"), DeviceError, "got 'gpus', expected one of tpu"),
        (lambda: device(" cpu "), DeviceError, "Did you mean 'cpu'?"),
        (lambda: device("cpu", 8), DeviceError, "index at device('cpu', 8): got 8, expected 0 to 7."),
        (lambda: device("cpu", -1), DeviceError, "got -1, expected 0 to 7"),
        (lambda: device("cuba:1"), DeviceError, "kind at device('cuba:1'): got 'cuba', expected one of auto, tpu"),
        (lambda: device("cpu:8"), DeviceError, "index at device('cpu:8'): got 8, expected 0 to 7"),
        (lambda: device("cpu:one"), DeviceError, "kind at device('cpu:one'): got 'cpu:one', expected one of auto"),
        (lambda: device("cpu:1", 2), DeviceError, "kind at device('cpu:1', 2): got 'cpu:1', expected one of auto"),
        (lambda: devices([]), DeviceError, "devices at devices([]): got 0 devices, expected at least one"),
        (lambda: devices([1, 2, 1]), DeviceError, "devices at devices([1, 2, 1]): got 3 devices"),
        (lambda: devices([CPU[3], 3]), DeviceError, "got 2 devices, expected at least one, each once"),
        (lambda: devices([0, -1]), DeviceError, "index at devices([0, -1]): got -1, expected 0 to 7"),
        (lambda: to_device(1.0, "tpu"), DeviceError, "device at to_device('tpu'): got no tpu, expected one"),
        (lambda: to_device(1.0, 3), WrongTypeError, "device at to_device(): got 3 (int), expected a kind or a jax.D"),
        (lambda: to_device(1.0, jax.make_mesh((8,), ("data",))), WrongTypeError, "for a mesh use shard or prefetch"),
        (lambda: simulate(0), DeviceError, "n at simulate(): got 0, expected 1 or more"),
        (lambda: simulate(4), DeviceError, "simulate: got a backend that has started, expected to be called"),
    ],
)  # fmt: skip
def test_wrong_devices(ask, kind, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jax.make_mesh's default axis types
        with pytest.raises(kind) as error:
            ask()
    assert text in str(error.value)


WORDS = {  # what takes a device, and a part of what comes back
    "setup": lambda d: ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(3)}, key=0, device=d),
    "to_device": lambda d: to_device({"w": np.ones(3)}, d),
    "batches": lambda d: ts.batches(np.ones((4, 2)), 2, device=d).resident,
    "prefetch": lambda d: [*ts.prefetch([np.ones((4, 2))], d)],
    "shard": lambda d: ts.shard({"w": np.ones(3)}, d),
}


@pytest.mark.parametrize("name", WORDS)
def test_devices_are_given_by_the_same_words_everywhere(name):
    take = WORDS[name]
    many = set(CPU) if name == "shard" else {CPU[0]}
    words = [("cpu", many), (("cpu", 3), {CPU[3]}), (CPU[2], {CPU[2]}), ("auto", many)]
    words += [("cpu:3", {CPU[3]}), (jax.sharding.SingleDeviceSharding(CPU[2]), {CPU[2]})]
    for word, there in words:
        assert all(x.devices() == there for x in jax.tree.leaves(take(word))), word
    absent = r"^device at \w+\(\[?('gpu'|\('gpu', 1\)|'gpu:1')\]?\): got no gpu, expected one that is here: cpu \(8\)"
    for word in ("gpu", ("gpu", 1), "gpu:1"):
        with pytest.raises(DeviceError, match=absent):
            take(word)
    with pytest.raises(DeviceError, match=r"got 'CUDA', expected one of auto, tpu, gpu, .*Did you mean 'cuda'"):
        take("CUDA")
    with pytest.raises(DeviceError, match=r"got 8, expected 0 to 7"):
        take(("cpu", 8))
    for wrong in (3, ("cpu", 1, 2), CPU):
        with pytest.raises(WrongTypeError, match=rf"at {name}\(\): got "):
            take(wrong)


def test_one_device_is_given_by_the_same_words_to_device_and_devices(capsys):
    for word in ("cpu:3", ("cpu", 3), CPU[3], jax.sharding.SingleDeviceSharding(CPU[3])):
        assert device(word) == CPU[3]
        assert devices(word) == [CPU[3]]
        assert device_info(word).platform == "cpu"
        assert ts.mesh(devices=word).devices.item() == CPU[3]
    assert devices(["cpu:3", 1]) == [CPU[3], CPU[1]]
    device("cpu:3", verbose=True)
    assert capsys.readouterr().out == "device cpu:3 (cpu): it was asked for\n"


def test_shard_without_a_mesh_and_with_a_sharding():
    with pytest.raises(WrongTypeError, match=r"arguments at shard\(\): got .*'mesh', expected state, mesh, rules"):
        ts.shard({"w": np.ones(3)})
    sharding = jax.sharding.NamedSharding(ts.mesh(), jax.sharding.PartitionSpec())
    with pytest.raises(WrongTypeError, match=r"mesh at shard\(\): got NamedSharding, .*specs of leaves are rules"):
        ts.shard({"w": np.ones(3)}, sharding)


def test_lists_of_devices():
    chosen = [CPU[0], CPU[2]]
    assert devices([0, 2]) == devices(chosen) == devices([("cpu", 0), ("cpu", 2)]) == chosen
    assert devices(("cpu", 2)) == list(ts.mesh(devices=("cpu", 2)).devices.flat) == [CPU[2]]


def test_info():
    info = device_info(CPU[3])
    assert (info.platform, info.kind, info.memory_total, info.memory_in_use) == ("cpu", "cpu", None, None)
    assert info == device_info() and isinstance(info.version, str)


def test_info_reads_what_the_device_says(present):
    class Client:
        platform_version = "cuda 13000"

    class Card:
        platform, device_kind, client = "gpu", "H100", Client()

        def memory_stats(self):
            return {"bytes_in_use": 3, "bytes_limit": 64, "peak_bytes_in_use": 5}

    class Silent(Card):
        def memory_stats(self):
            raise RuntimeError("not implemented")

    present(cuda=[Card()])
    assert device_info("gpu") == selection.DeviceInfo("gpu", "H100", 64, 3, "cuda 13000")
    present(cuda=[Silent()])
    assert device_info("gpu") == selection.DeviceInfo("gpu", "H100", None, None, "cuda 13000")
    with pytest.raises(WrongTypeError, match=r"device at device_info\(\): got 0 \(int\), expected a kind"):
        device_info(0)


@pytest.mark.medium
def test_simulated_devices_do_not_deadlock(tmp_path):
    source = """
import os
from tsunax.devices.selection import devices, simulate
simulate(3)
simulate(8)
assert int(os.environ["NPROC"]) >= 16
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
assert len(devices()) == 8 and {one.platform for one in jax.devices()} == {"cpu"}
mesh = jax.sharding.Mesh(np.array(devices()), ("data",))
rows = jax.device_put(jnp.ones((64, 16)), NamedSharding(mesh, PartitionSpec("data")))
whole = jax.device_put(jnp.zeros((16, 16)), NamedSharding(mesh, PartitionSpec()))
step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w))
for _ in range(200):
    whole = step(whole, rows)
print(float(whole.sum()))
"""
    others = {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = run_python("-c", source, folder=tmp_path, **others)
    assert done.returncode == 0, done.stderr
    # w stays c everywhere, and the error 16 c - 1 shrinks by 1 - 0.1 * 2/16 * 16 a step
    np.testing.assert_allclose(float(done.stdout), 16, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ the preference


def said(text: str = "", folder=".") -> Path:
    path = Path(folder) / ".tsunax-device"
    path.write_bytes(text.encode())
    return path.absolute()


def quiet_prefer(kind):
    with pytest.warns(UserWarning, match=r"\.tsunax-device was changed. It takes effect in new processes"):
        prefer(kind)


def test_the_file_is_written_whole(monkeypatch):
    """Over the nearest one from wherever below it; None deletes it."""
    path, inside = said("gpu"), Path("a/b")
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert preferred() == "gpu"
    quiet_prefer("cpu")
    assert path.read_text() == "cpu\n" and preferred() == "cpu" and not list(Path(".").iterdir())
    quiet_prefer(None)
    assert not path.exists() and preferred() is None


def test_a_missing_file_is_made():
    quiet_prefer("tpu")
    assert Path(".tsunax-device").read_text() == "tpu\n" and preferred() == "tpu"


def test_the_variable_goes_first(monkeypatch):
    said("tpu")
    monkeypatch.setenv("TSUNAX_DEVICE", "cpu")
    assert preferred() == "cpu"
    with pytest.warns(UserWarning) as caught:
        prefer("gpu")
    assert str(caught[0].message).startswith("TSUNAX_DEVICE=cpu goes before ") and len(caught) == 2
    monkeypatch.setenv("TSUNAX_DEVICE", "auto")
    assert preferred() is None and device() == CPU[0]
    monkeypatch.setenv("TSUNAX_DEVICE", "")
    assert preferred() == "gpu"
    monkeypatch.setenv("TSUNAX_DEVICE", "gpuu")
    with pytest.raises(
        ConfigError, match=r"device at TSUNAX_DEVICE: got 'gpuu', expected one of .* Did you mean 'gpu'"
    ):
        device()


def test_the_nearest_file_counts(monkeypatch):
    said("gpu\n")
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    assert preferred() == "gpu"
    said("auto")
    assert preferred() is None


def test_an_unknown_preference_is_not_written():
    with pytest.raises(DeviceError, match="kind at prefer\\(\\): got 'amd', expected one of auto, tpu"):
        prefer("amd")
    with pytest.raises(DeviceError, match=r"got 'cpu:1', .* Did you mean 'cpu'\?"):
        prefer("cpu:1")
    assert not Path(".tsunax-device").exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpus", "device at {}: got 'gpus', expected one of auto, tpu, gpu, "),
        ("gpus", "Did you mean 'gpu'?"),
        ("", "device at {}: got '', expected one of auto"),
        ('device = "gpu"', "got 'device = \"gpu\"', expected one of"),
        ("cpu\ngpu", "got 'cpu\\ngpu', expected one of"),
    ],
)
def test_wrong_files(text, found):
    path = said(text)
    for ask in (preferred, device):
        with pytest.raises(ConfigError) as error:
            ask()
        assert found.format(path) in str(error.value)
    assert path.stat().st_size == len(text.encode())
    assert device("cpu") == CPU[0]  # asked for by name: no file is read


@pytest.mark.medium
def test_the_preference_reaches_the_next_process(tmp_path):
    first = "import tsunax.devices.selection as h; h.prefer('gpu'); print(h._started())"
    done = run_python("-c", first, folder=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)
    second = """
import os, tsunax.devices.selection as h
h.device(verbose=True)
os.environ["TSUNAX_DEVICE"] = "cpu"
h.device(verbose=True)
"""
    done = run_python("-c", second, folder=tmp_path)
    why = f"gpu, preferred by {tmp_path.resolve() / '.tsunax-device'}, is not here: JAX_PLATFORMS=cpu leaves it out"
    assert done.returncode == 0 and f"UserWarning: {why}. Another device is used." in done.stderr
    said, then = done.stdout.splitlines()
    assert said == "device cpu:0 (cpu): cpu is the first of tpu, gpu, cpu that is here"
    assert then == "device cpu:0 (cpu): cpu is preferred by TSUNAX_DEVICE"


# -------------------------------------------------------------------------------------------------------- moving


def test_trees_move_and_come_back():
    params = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16), "n": np.int8(3)}
    opt_state = optax.adamw(1e-3).init(params)
    tree = {"params": params, "opt": opt_state, "key": jax.random.key(3), "act": jnp.tanh, "name": "relu", "none": None}
    tree |= {"rate": 0.5, "text": np.array(["a"]), "mask": np.array([True])}
    moved = to_device(tree, CPU[2])
    arrays = [x for x in jax.tree.leaves(moved) if isinstance(x, jax.Array)]
    assert {(x.device, x.committed) for x in arrays} == {(CPU[2], True)} and len(arrays) == 12
    assert moved["act"] is jnp.tanh and moved["text"] is tree["text"] and moved["rate"] == 0.5
    assert type(moved["opt"][0]) is type(opt_state[0])
    assert device_of(moved) == CPU[2]
    rest = ("act", "name", "text")
    assert_trees_equal(
        {k: v for k, v in moved.items() if k not in rest}, {k: v for k, v in tree.items() if k not in rest}
    )
    host = to_host(moved)
    assert jax.dtypes.issubdtype(host["key"].dtype, jax.dtypes.prng_key) and host["key"].device == CPU[0]
    del host["key"], moved["key"]
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(host)) and host["act"] is jnp.tanh
    assert host["params"]["b"].dtype == jnp.bfloat16 and host["params"]["w"].flags.writeable
    assert_trees_equal(
        {k: v for k, v in host.items() if k not in rest}, {k: v for k, v in moved.items() if k not in rest}
    )


def test_what_is_there_stays_the_same_object():
    x, key = to_device((jnp.ones(3), jax.random.key(0)), CPU[1])
    again = to_device({"x": x, "key": key, "new": jnp.zeros(2)}, CPU[1])
    assert again["x"] is x and again["key"] is key and again["new"].device == CPU[1]
    elsewhere = to_device(x, CPU[4])
    assert elsewhere.device == CPU[4] and x.device == CPU[1] and not x.is_deleted()
    free = jnp.ones(3)  # would follow the first committed array that it meets
    kept = to_device(free, CPU[0])
    assert kept.committed and kept.unsafe_buffer_pointer() == free.unsafe_buffer_pointer()


def test_tied_arrays_stay_tied():
    w, v = jnp.ones(3), np.ones(3)
    moved = to_device({"in": w, "out": w, "a": v, "b": [v]}, CPU[1])
    assert moved["in"] is moved["out"] and moved["a"] is moved["b"][0] and moved["in"] is not moved["a"]
    host = to_host(moved)
    assert host["in"] is host["out"] and host["a"] is host["b"][0]


def test_numpy_memory_is_not_shared():
    source = np.ones(4096, np.float32)
    moved = to_device(source, CPU[0])
    source[:] = 7
    assert float(moved.max()) == 1
    host = to_host(moved)
    host[:] = 7
    assert float(moved.max()) == 1


MESH = jax.sharding.Mesh(np.array(CPU), ("data",))
REPLICATED = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())
SCALED = ts.train_step(lambda params, x, scale: jnp.mean(x @ params["w"]) * scale[0])


def made(w, **options):
    return ts.setup(ts.rules.sgd(0.1), {"w": np.ones(64, np.float32), "v": w}, **options)


# what keeps an array of the user's, for longer than the call
TAKERS = {
    "to_device": lambda w: to_device({"w": w}, CPU[1]),
    "to_device, mesh": lambda w: to_device({"w": w}, REPLICATED),
    "shard": lambda w: ts.shard({"w": w}, ts.mesh()),
    "setup": lambda w: made(w),
    "setup, frozen": lambda w: made(w, trainable="w"),
    "setup, device": lambda w: made(w, device=CPU[1]),
    "setup, handed over": lambda w: made(w, device=CPU[1], copy=False),
    "setup, model_state": lambda w: made(np.ones(1, np.float32), model_state={"m": w}),
    "replace": lambda w: made(np.ones(64, np.float32)).replace(params={"w": w, "v": w}),
    "batches": lambda w: ts.batches({"w": w}, 2, device=True).resident,
    "batches, device": lambda w: ts.batches({"w": w}, 8, device=ts.mesh()).resident,
    "batch on a mesh": lambda w: SCALED(ts.shard(made(np.ones(64, np.float32)), ts.mesh()), np.stack([w] * 8), scale=w),
    "fit": lambda w: ts.fit(
        SCALED, made(np.ones(1, np.float32)), [np.stack([w])], steps=1, extra={"scale": w}, progress=False
    ),
    "evaluate": lambda w: ts.evaluate(ts.eval_step(SCALED.loss_fn), made(w), [np.stack([w])], scale=w),
}


@pytest.mark.parametrize("name", TAKERS)
def test_jax_is_given_copies_of_a_users_memory(name, monkeypatch):
    """A transfer to a GPU may read the memory of a NumPy array after the call has returned; a CPU does not show it.

    So JAX is given a copy, or the call waits for what JAX makes of the memory.
    """
    w, seen, finished = np.ones(64, np.float32), [], []

    def spy(call):
        def spied(x, *args, **options):
            result = call(x, *args, **options)
            seen.extend((leaf, result) for leaf in jax.tree.leaves(x) if isinstance(leaf, np.ndarray))
            return result

        return spied

    for module, function in ((jax, "device_put"), (jnp, "array"), (jnp, "asarray")):
        monkeypatch.setattr(module, function, spy(getattr(module, function)))
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: finished.append(x) or wait(x))
    TAKERS[name](w)
    shared = [result for x, result in seen if np.shares_memory(x, w)]
    assert seen and all(any(result is x for x in finished) for result in shared)


def test_only_an_accelerator_is_asked_to_copy_to_the_host_ahead(monkeypatch):
    asked = []
    kind = type(jnp.ones(1))
    monkeypatch.setattr(kind, "copy_to_host_async", lambda x: asked.append(x))
    x = jnp.ones(3)
    np.testing.assert_array_equal(to_host(x), np.ones(3))
    assert not asked
    monkeypatch.setattr(kind, "sharding", property(lambda x: Elsewhere()))
    np.testing.assert_array_equal(to_host(x), np.ones(3))
    assert len(asked) == 1


class Elsewhere:
    """The sharding of an array on a GPU."""

    device_set, memory_kind = {Fake("gpu")}, "device"


def test_what_was_brought_to_the_host_can_be_donated():
    x = to_device(jnp.ones(4096), CPU[1])
    host = to_host(x)
    jax.jit(lambda x: 2 * x, donate_argnums=0)(x)
    assert x.is_deleted() and host.max() == 1


def test_under_jit_and_with_a_sharding():
    assert float(jax.jit(lambda x: to_device({"x": x}, CPU[0])["x"] + 1)(jnp.ones(()))) == 2
    mesh = jax.sharding.Mesh(np.array(CPU), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    spread = to_device(np.arange(8.0), rows)
    assert spread.sharding == rows and to_device(spread, rows) is spread
    np.testing.assert_array_equal(to_host(spread), np.arange(8))
    with pytest.raises(
        DeviceError, match=r"tree at device_of\(\): got tree\['x'\] on .* and 6 more, expected one device"
    ):
        device_of({"x": spread})


def test_device_of():
    assert device_of({"a": np.ones(2), "b": "x"}) is None
    assert device_of({"a": np.ones(2), "b": to_device(jnp.ones(2), CPU[5])}) == CPU[5]
    mixed = {"a": to_device(jnp.ones(2), CPU[5]), "b": [to_device(jnp.ones(2), CPU[6])]}
    with pytest.raises(DeviceError) as error:
        device_of(mixed)
    places = f"tree['a'] on {CPU[5]}, tree['b'][0] on {CPU[6]}"
    fix = "to_device(tree, device) brings them together."
    assert str(error.value) == f"tree at device_of(): got {places}, expected one device. {fix}"
    assert device_of(to_device(mixed, CPU[6])) == CPU[6]


def test_a_state_on_another_device_is_printed_and_stepped():
    state = ts.setup(ts.rules.adam(1e-2), {"w": jnp.ones(3)}, key=jax.random.key(0), ema=0.9)
    batch = {"x": np.ones((4, 3), np.float32)}
    step = ts.train_step(lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2))
    away = to_device(state, CPU[3])
    assert device_of(away) == CPU[3] and str(CPU[3]) in repr(away)
    here, _ = step(state, batch)
    there, info = step(away, batch)
    assert device_of(there) == CPU[3] and device_of(info.loss) == CPU[3]
    assert_trees_equal(to_host(there.params), to_host(here.params))
    back = to_device(there, CPU[0])
    assert device_of(back) == CPU[0]
    step(back, batch)


def on(place):
    return ts.setup(ts.rules.sgd(0.0), {"w": np.ones(2, np.float32)}, device=place)


AT_TWO_DEVICES = {  # with a state on a device and a batch on another one
    "step": lambda state, batch: STEP(state, batch),
    "evaluate": lambda state, batch: ts.evaluate(SCORE, state, [batch]),
    "fit, one batch": lambda state, batch: ts.fit(STEP, state, [batch], steps=1, progress=False),
    "fit": lambda state, batch: ts.fit(STEP, state, iter([batch]), steps=1, progress=False),
    "fit, no loop": lambda state, batch: ts.fit(STEP, state, [batch], steps=1, steps_per_call=None, progress=False),
    "fit, a function": lambda state, batch: ts.fit(
        lambda state, batch: STEP(state, batch), state, [batch], steps=1, progress=False
    ),
    "prefetch": lambda state, batch: ts.fit(
        STEP, state, ts.prefetch([to_host(batch)], batch["x"].sharding), steps=1, progress=False
    ),
    "data on a device": lambda state, batch: ts.fit(
        STEP, state, ts.batches(to_host(batch), 2, device=batch["x"].sharding), steps=1, progress=False
    ),
    "iterate": lambda state, batch: next(ts.loop.iterate(STEP, state, [batch], steps=1)),
    "run_epoch": lambda state, batch: ts.loop.run_epoch(STEP, state, [batch]),
}
STEP = ts.train_step(lambda params, batch, scale=1.0: jnp.mean((batch["x"] @ params["w"]) ** 2) * scale)
SCORE = ts.eval_step(STEP.loss_fn)
ROWS = {"x": np.ones((4, 2), np.float32)}


@pytest.mark.parametrize("name", AT_TWO_DEVICES)
def test_a_state_and_a_batch_on_two_devices_are_one_error(name):
    call = AT_TWO_DEVICES[name]
    with pytest.raises(DeviceError) as raised:
        call(on(CPU[1]), to_device(ROWS, CPU[3]))
    fix = "Move it: ts.to_device(batch, device), or ts.prefetch(data, device)."
    expected = f"leaf at batch['x']: got an array on {CPU[3]}, expected {CPU[1]}, as the state. {fix}"
    assert str(raised.value) == expected
    call(on(CPU[3]), to_device(ROWS, CPU[3]))


def test_a_state_on_a_mesh_takes_batches_from_anywhere():
    """Also of arrays that were put on one of its devices, whole."""
    mesh = ts.mesh(devices=CPU[:2])
    for data in ([to_device(ROWS, CPU[3])], ts.batches(ROWS, 2, device=CPU[3]), ts.batches(ROWS, 2, device=True)):
        state, history = ts.fit(STEP, ts.shard(on(None), mesh), data, steps=2, progress=False)
        assert len(state.params["w"].devices()) == 2 and history["loss"][-1] == 4


# ------------------------------------------------------------------------------------------------------- loaders
