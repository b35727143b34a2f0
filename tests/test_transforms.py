"""Arrays in a file as leaves and back: axes, dtypes, stacks, parts; all of it planned before anything is read."""

import itertools
import json
import random
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tests.helpers import assert_trees_equal, error_of
from tsunax.checkpoints import _safetensors, exchange
from tsunax.checkpoints.exchange import cast, rearrange, torch_kernel, torch_name
from tsunax.errors import HyperparameterError, PatternError, WrongTypeError


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.safetensors"


# ------------------------------------------------------------------------------------------------------- one array

CASES = {  # a transform, the shape in the file, the leaf by NumPy's own operations
    "transpose": (rearrange("o i -> i o"), (6, 5), lambda x: x.T),
    "same": (rearrange("... -> ..."), (2, 3), lambda x: x),
    "split heads": (
        rearrange("(heads d) i -> i heads d", heads=2),
        (6, 5),
        lambda x: x.reshape(2, 3, 5).transpose(2, 0, 1),
    ),
    "join heads": (rearrange("h d o -> (h d) o", h=2), (2, 3, 5), lambda x: x.reshape(6, 5)),
    "one projection of three": (
        rearrange("i (three h d) -> three i h d", three=3, h=2),
        (5, 24),
        lambda x: x.reshape(5, 3, 2, 4).transpose(1, 0, 2, 3),
    ),
    "a bias in heads": (rearrange("(h d)->h d", h=2), (6,), lambda x: x.reshape(2, 3)),
    "halves to pairs": (
        rearrange("(h two d) i -> i (h d two)", h=2, two=2),
        (12, 5),
        lambda x: x.reshape(2, 2, 3, 5).transpose(3, 0, 2, 1).reshape(5, 12),
    ),
    "linear": (torch_kernel, (6, 5), lambda x: x.T),
    "conv1d": (torch_kernel, (6, 5, 3), lambda x: x.transpose(2, 1, 0)),
    "conv2d": (torch_kernel, (6, 5, 3, 2), lambda x: x.transpose(2, 3, 1, 0)),
    "conv3d": (torch_kernel, (6, 5, 3, 2, 4), lambda x: x.transpose(2, 3, 4, 1, 0)),
    "axes in the middle": (rearrange("a ... b -> b ... a"), (2, 3, 4, 5), lambda x: x.transpose(3, 1, 2, 0)),
    "a scalar": (rearrange("... -> ..."), (), lambda x: x),
    "nothing": (rearrange("(h d) i -> i h d", h=2), (0, 5), lambda x: x.reshape(2, 0, 5).transpose(2, 0, 1)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_forward_is_numpys_and_inverse_the_way_back(name, dtype):
    transform, shape, expected = CASES[name]
    bits = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    x = bits.view(dtype).reshape(shape)  # NaN of every kind among them
    leaf = transform.forward(x)
    assert_trees_equal(leaf, expected(x))
    assert_trees_equal(transform.inverse(leaf), x)
    if dtype != "int8":
        assert_trees_equal(jax.jit(transform.forward)(jnp.asarray(x)), jnp.asarray(expected(x)))


@pytest.mark.parametrize("name", CASES)
def test_a_part_of_a_leaf_is_read_from_a_part_of_the_file(name):
    transform, shape, expected = CASES[name]
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    leaf, rng = expected(x), random.Random(0)
    for _ in range(50):
        bounds = tuple(tuple(sorted(rng.choices(range(n + 1), k=2))) for n in leaf.shape)
        read = lambda cut: x[tuple(slice(*axis) for axis in cut)]
        found = transform.part(leaf.shape, bounds, read)
        assert_trees_equal(found, leaf[tuple(slice(*axis) for axis in bounds)])


@pytest.mark.parametrize(
    ("name", "axis", "n", "share"),
    [
        ("transpose", 0, 5, 5),
        ("transpose", 1, 3, 3),
        ("split heads", 0, 5, 5),
        ("split heads", 1, 2, 2),
        ("split heads", 2, 3, 1),  # inner axes of a joined one are read whole
        ("join heads", 0, 2, 2),
        ("halves to pairs", 1, 2, 2),
        ("conv2d", 3, 6, 6),
        ("conv2d", 2, 5, 5),
        ("one projection of three", 0, 3, 3),
        ("one projection of three", 2, 2, 1),
    ],
)
def test_a_shard_reads_its_share(name, axis, n, share):
    transform, shape, expected = CASES[name]
    x = normal(*shape)
    leaf, sizes = expected(x), []

    def read(cut):
        sizes.append(x[tuple(slice(*axis) for axis in cut)])
        return sizes[-1]

    step = leaf.shape[axis] // n
    for i in range(n):
        bounds = [(0, n) for n in leaf.shape]
        bounds[axis] = (i * step, i * step + step)
        transform.part(leaf.shape, tuple(bounds), read)
    assert [y.size * share for y in sizes] == [x.size] * n


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("o i", {}),
        ("o i -> i o -> o i", {}),
        ("o i -> i", {}),
        ("o i -> i k", {}),
        ("o o -> o o", {}),
        ("(h d) i -> i h d", {}),
        ("i h d -> i (h d)", {}),  # the way back could not be known
        ("(h d) i -> i h d", {"heads": 2}),
        ("((h d) e) i -> i h d e", {"h": 2, "d": 2}),
        ("(h d i -> i h d", {"h": 2}),
        ("(... h) -> ... h", {"h": 2}),
        ("o i -> () i o", {}),
        ("o, i -> i, o", {}),
        ("... ... -> ... ...", {}),
        ("", {}),
    ],
)
def test_malformed_patterns(pattern, sizes):
    text = error_of(lambda: rearrange(pattern, **sizes), HyperparameterError)
    assert text == (
        f"pattern at rearrange(): got {pattern!r} with {sizes}, expected each name once on both sides of '->', "
        "and the length of all names but one in parentheses."
    )


def test_arguments_of_other_kinds():
    for size, kind in ((0, HyperparameterError), ("2", WrongTypeError), (2.0, WrongTypeError), (True, WrongTypeError)):
        text = error_of(lambda size=size: rearrange("(h d) i -> i h d", h=size), kind)
        assert text.startswith("h at rearrange(): got ") and text.endswith("expected an int ≥ 1.")
    for dtype in ("int8", bool, "complex64", None):  # floats in int8 would lose their fractions
        text = error_of(lambda dtype=dtype: cast(dtype), WrongTypeError)
        assert text.startswith("dtype at cast(): got ") and "expected a float dtype" in text


def test_arrays_that_do_not_fit():
    split = rearrange("(heads d) i -> i heads d", heads=4)
    text = error_of(lambda: split.forward(np.ones((6, 5))), ValueError)
    assert text == "shape (6, 5), expected '(heads d) i' with {'heads': 4}"
    assert "expected 'i heads d'" in error_of(lambda: split.inverse(np.ones((5, 2, 3))), ValueError)
    assert "expected 'o i ...'" in error_of(lambda: torch_kernel.forward(np.ones(3)), ValueError)


def test_cast():
    x = normal(3)
    assert_trees_equal(cast("bfloat16").inverse(x), x.astype(jnp.bfloat16))
    assert_trees_equal(cast(jnp.bfloat16).inverse(np.arange(3)), np.arange(3))
    assert np.shares_memory(cast("float32").inverse(x), x)
    with pytest.raises(TypeError):
        cast("half a float")


# ------------------------------------------------------------------------------------------------------------ files


def files():
    """A file of several layers as torch would have it, and the tree that it becomes."""
    file = {
        "model.embed.weight": normal(7, 6, seed=1),
        "model.norm.weight": normal(6, seed=2),
        "model.steps": np.array(3, np.int32),
    }
    for i in range(3):
        file[f"model.layers.{i}.q.weight"] = normal(8, 6, seed=10 + i)
        file[f"model.layers.{i}.q.bias"] = normal(8, seed=20 + i)
        for j in range(2):
            file[f"model.layers.{i}.experts.{j}.weight"] = normal(5, 6, seed=30 + 2 * i + j)
    stack = lambda name: np.stack([file[f"model.layers.{i}.{name}"] for i in range(3)])
    experts = np.stack([stack(f"experts.{j}.weight") for j in range(2)], 1)
    tree = {
        "embed": {"embedding": file["model.embed.weight"]},
        "norm": {"scale": file["model.norm.weight"]},
        "layers": {
            "q": {
                "kernel": stack("q.weight").reshape(3, 2, 4, 6).transpose(0, 3, 1, 2),
                "bias": stack("q.bias").reshape(3, 2, 4),
            },
            "experts": {"kernel": experts.transpose(0, 1, 3, 2)},
        },
        "steps": file["model.steps"],
    }
    return file, tree


def rename(name):
    return "model." + torch_name(name).replace("layers.", "layers.{}.").replace("experts.", "experts.{}.")


HOW = {
    "rename": rename,
    "transform": {
        "layers/q/kernel": rearrange("(heads d) i -> i heads d", heads=2),
        "layers/q/bias": rearrange("(heads d) -> heads d", heads=2),
        "**/kernel": torch_kernel,
    },
}


def test_there_and_back(path, tmp_path):
    file, tree = files()
    exchange.save(path, file)
    found = exchange.restore(path, like(tree), **HOW)
    assert_trees_equal(found, jax.tree.map(jnp.asarray, tree))
    assert_trees_equal(exchange.restore(path, tree, **HOW), tree)  # NumPy's stay NumPy's
    exchange.save(tmp_path / "b.safetensors", found, **HOW)
    assert_trees_equal(exchange.restore(tmp_path / "b.safetensors"), file)
    exchange.save(tmp_path / "b.safetensors", tree, **HOW)
    assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


def test_into_a_state_and_with_a_part(path):
    file, tree = files()
    params = {name: tree[name] for name in ("embed", "norm", "layers")}
    del file["model.steps"]
    exchange.save(path, file)
    state = ts.setup(ts.rules.adam(1e-3), jax.tree.map(np.zeros_like, params))
    assert_trees_equal(exchange.restore(path, state, **HOW).params, jax.tree.map(jnp.asarray, params))
    part = exchange.restore(path, jax.tree.map(np.zeros_like, params), where="layers/q/**", **HOW)
    assert_trees_equal(part["layers"]["q"], params["layers"]["q"])
    assert not part["embed"]["embedding"].any() and not part["layers"]["experts"]["kernel"].any()


def test_a_whole_state_is_transformed_by_its_own_names(path):
    state = ts.setup(ts.rules.adam(1e-3), {"kernel": normal(3, 2), "bias": normal(2)})
    transform = {"**/kernel": torch_kernel}
    exchange.save(path, state, transform=transform)
    shapes = {name: x.shape for name, x in exchange.contents(path).items()}
    assert shapes["params/kernel"] == shapes["opt_state/0/mu/kernel"] == (2, 3)
    assert_trees_equal(exchange.restore(path, state, transform=transform), state)
    params = exchange.restore(path, state.params, transform=transform)
    assert_trees_equal(params, state.params)


def test_leaves_that_are_not_wanted_may_be_anything(path):
    exchange.save(path, {"w": normal(2, 3)})
    tree = {"w": np.zeros((3, 2), np.float32), "f": jax.nn.relu, "v": np.ones(3, np.float32)}
    found = exchange.restore(path, tree, where="w", transform={"w": torch_kernel, "v": torch_kernel})
    assert_trees_equal(found["w"], normal(2, 3).T)


def test_casts(path):
    tree = {"w": normal(4, 3), "n": np.arange(3), "key": jax.random.key(0)}
    exchange.save(path, tree, transform={"**": cast("bfloat16")})
    kinds = {name: x.dtype.name for name, x in exchange.contents(path).items()}
    assert kinds == {"w": "bfloat16", "n": "int64", "key": "uint32"}
    half = {**tree, "w": tree["w"].astype(jnp.bfloat16).astype(np.float32)}
    assert_trees_equal(exchange.restore(path, tree, transform={"**": cast("bfloat16")}), half)
    assert_trees_equal(exchange.restore(path, tree, cast=True), half)
    text = error_of(lambda: exchange.restore(path, tree, transform={"**": cast("float16")}))
    assert "tree['w']: 'w' is bfloat16[4,3], expected float16[4,3] for float32[4,3]" in text
    exchange.save(path, {"w": half["w"]}, transform={"w": cast("bfloat16")})  # nothing is lost the second time
    assert_trees_equal(exchange.restore(path)["w"].astype(np.float32), half["w"])


def test_the_first_pattern_that_matches_decides(path):
    exchange.save(path, {"a": normal(2, 3), "b": normal(2, 3)})
    tree = {"a": normal(2, 3), "b": normal(3, 2)}
    found = exchange.restore(path, tree, transform={"a": rearrange("... -> ..."), "**": torch_kernel})
    assert_trees_equal(found, {"a": normal(2, 3), "b": normal(2, 3).T})


def test_flax_and_orbax_files_are_transformed_too(tmp_path):
    import flax.serialization
    import orbax.checkpoint as ocp

    tree, how = {"layers": {"0": {"kernel": normal(2, 3)}, "1": {"kernel": normal(2, 3, seed=1)}}}, {}
    how["rename"] = lambda name: "layers/{}/kernel"
    how["transform"] = {"kernel": rearrange("a (h d) -> h a d", h=3)}
    expected = np.stack([x["kernel"].reshape(2, 3, 1).transpose(1, 0, 2) for x in tree["layers"].values()])
    (tmp_path / "a.msgpack").write_bytes(flax.serialization.to_bytes(tree))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
    for found in (
        exchange.restore(tmp_path / "a.msgpack", {"kernel": expected * 0}, format="flax", **how),
        exchange.restore(tmp_path / "orbax", {"kernel": expected * 0}, format="orbax", **how),
    ):
        assert_trees_equal(found, {"kernel": expected})


def test_a_name_with_braces_is_itself_without_rename(path):
    tree = {"a{}": normal(2), "{}{}": normal(3)}
    exchange.save(path, tree)
    assert_trees_equal(exchange.restore(path, tree), tree)


# ------------------------------------------------------------------------------------- sharded, little at a time


def spread(tree):
    """`like` of a tree over eight devices: each leaf along its longest axis that can be cut."""
    mesh = ts.mesh(data=2, fsdp=4)

    def one(x):
        axes = [i for i, n in enumerate(x.shape) if n % 4 == 0]
        spec = [None] * len(x.shape)
        if axes:
            spec[max(axes, key=lambda i: x.shape[i])] = "fsdp"
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(one, tree)


def test_eight_devices_have_the_same_bits(path):
    file, tree = files()
    exchange.save(path, file)
    wanted = spread(tree)
    found = exchange.restore(path, wanted, **HOW)
    assert_trees_equal(found, tree)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.sharding == y.sharding
    kernel = found["layers"]["q"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (3, 6, 2, 1)


def test_leaves_are_read_one_by_one(path, monkeypatch):
    """When an array is read, none but those of its own leaf are there any more."""
    stored = {f"{i}": normal(16, 24, seed=i) for i in range(8)}
    exchange.save(path, stored)
    tree = jax.tree.map(np.transpose, stored)
    read, found, most = _safetensors.read, [], []

    class Watched(np.ndarray):
        pass

    def watched(*args):
        most.append(sum(ref() is not None for ref in found))
        new = read(*args).view(Watched)
        found.append(weakref.ref(new))
        return new

    monkeypatch.setattr(_safetensors, "read", watched)
    assert_trees_equal(exchange.restore(path, spread(tree), transform={"**": torch_kernel}), tree)
    assert len(most) == 8 and max(most) <= 1


def test_everything_is_compared_before_an_array_is_read(path, monkeypatch):
    file, tree = files()
    del file["model.layers.1.q.bias"]
    file["model.layers.2.q.weight"] = normal(7, 6)
    file["model.layers.3.q.weight"] = normal(8, 6)
    exchange.save(path, file)
    monkeypatch.setattr(_safetensors, "read", lambda *_: pytest.fail("an array was read"))
    tree["norm"]["scale"] = tree["norm"]["scale"][:5]
    assert error_of(lambda: exchange.restore(path, like(tree), **HOW)) == (
        f"other arrays in {path}:\n"
        "  tree['layers']['q']['bias']: nothing named 'model.layers.1.q.bias', expected float32[8] for float32[3,2,4]\n"
        "  tree['layers']['q']['kernel']: 'model.layers.2.q.weight' is float32[7,6], expected float32[8,6] for "
        "float32[3,6,2,4]\n"
        "  tree['norm']['scale']: 'model.norm.weight' is float32[6], expected float32[5]\n"
        "  'model.layers.3.q.weight' is float32[8,6], expected nothing of that name\n"
        "  Nearest to 'model.layers.1.q.bias': 'model.layers.2.q.bias', 'model.layers.0.q.bias', "
        "'model.layers.1.q.weight'. where= takes a part, rename= finds other names, cast=True takes other dtypes."
    )


def test_leaves_that_do_not_fit_their_transform(path):
    file, tree = files()
    exchange.save(path, file)
    before = path.read_bytes()
    tree["layers"]["q"]["kernel"] = tree["layers"]["q"]["kernel"][:, :, 0]
    tree["layers"]["experts"]["kernel"] = normal(3)
    expected = (
        "  tree['layers']['experts']['kernel']: float32[3] for 'model.layers.{}.experts.{}.weight', "
        "expected an axis for each {}\n"
        "  tree['layers']['q']['kernel']: shape (6, 4), expected 'i heads d' with {'heads': 2}\n"
    )
    for name, call in {
        "restore()": lambda: exchange.restore(path, tree, **HOW),
        "save()": lambda: exchange.save(path, tree, **HOW),
    }.items():
        assert error_of(call).startswith(f"leaves that do not fit in {name}:\n{expected}")
    assert path.read_bytes() == before
    text = error_of(lambda: exchange.save(path, {"w": normal(2, 12)}, rename=lambda name: "w{}{}"))
    assert "tree['w']: float32[2,12] for 'w{}{}', expected an axis for each {}" in text  # w1 1.. and w11 .. are one


def test_other_mistakes(path):
    exchange.save(path, {"w": normal(2, 3)})
    tree, restore = {"w": normal(3, 2)}, exchange.restore
    assert "pattern 'v' at restore(transform=): got no match" in error_of(
        lambda: restore(path, tree, transform={"v": torch_kernel}), PatternError
    )
    assert "pattern 'v' at save(transform=): got no match" in error_of(
        lambda: exchange.save(path, tree, transform={"v": torch_kernel}), PatternError
    )
    assert "like at restore(): got none" in error_of(
        lambda: restore(path, transform={"w": torch_kernel}), WrongTypeError
    )
    twice = lambda: exchange.save(path, {"a": normal(2, 3), "b": normal(3)}, rename=lambda name: "{}")
    assert "name '0' at save(): got two arrays, tree['a'] and tree['b']" in error_of(twice)
    assert_trees_equal(restore(path), {"w": normal(2, 3)})


# -------------------------------------------------------------------------------------------- torch's modules, in flax


def convolved(x, weight, bias):
    """torch's Conv2d by its definition: x (rows, in, height, width), weight (out, in, kh, kw)."""
    (_, _, height, width), (out, _, kh, kw) = x.shape, weight.shape
    y = np.zeros((len(x), out, height - kh + 1, width - kw + 1))
    for i, j in itertools.product(range(y.shape[2]), range(y.shape[3])):
        y[:, :, i, j] = np.einsum("nchw,ochw->no", x[:, :, i : i + kh, j : j + kw].astype(np.float64), weight) + bias
    return y


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (2, 3), padding="VALID", rngs=rngs)
        self.bn = nnx.BatchNorm(4, use_running_average=True, epsilon=1e-5, rngs=rngs)
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, epsilon=1e-5, rngs=rngs)
        head = [nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 2, rngs=rngs)]
        self.head = nnx.List(head) if hasattr(nnx, "List") else head


@pytest.mark.medium
def test_torchs_modules_compute_the_same_in_flax(path):
    """Against the definitions in torch's documentation, in float64."""
    file = {
        "conv.weight": normal(4, 3, 2, 3, seed=1), "conv.bias": normal(4, seed=2),
        "bn.weight": normal(4, seed=3), "bn.bias": normal(4, seed=4),
        "bn.running_mean": normal(4, seed=5), "bn.running_var": normal(4, seed=6) ** 2,
        "embed.weight": normal(5, 4, seed=7), "norm.weight": normal(4, seed=8), "norm.bias": normal(4, seed=9),
        "head.0.weight": normal(6, 4, seed=10), "head.0.bias": normal(6, seed=11),
        "head.1.weight": normal(2, 6, seed=12), "head.1.bias": normal(2, seed=13),
    }  # fmt: skip
    exchange.save(path, file)
    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), (nnx.Param, nnx.BatchStat), ...)
    how = {"rename": torch_name, "transform": {"**/kernel": torch_kernel}}
    net = nnx.merge(graph, exchange.restore(path, params, **how), rest)
    w = {name: x.astype(np.float64) for name, x in file.items()}
    x, close = normal(2, 3, 5, 6, seed=20), lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    with jax.numpy_rank_promotion("allow"):
        conv = convolved(x, w["conv.weight"], w["conv.bias"])
        last = lambda x: np.moveaxis(x, 1, -1)
        close(net.conv(last(x)), last(conv))
        scaled = (last(conv) - w["bn.running_mean"]) / np.sqrt(w["bn.running_var"] + 1e-5)
        close(net.bn(jnp.asarray(last(conv), jnp.float32)), scaled * w["bn.weight"] + w["bn.bias"])
        rows = w["embed.weight"][[0, 4, 2]]
        close(net.embed(jnp.array([0, 4, 2])), rows)
        z = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
        z = z * w["norm.weight"] + w["norm.bias"]
        close(net.norm(net.embed(jnp.array([0, 4, 2]))), z)
        hidden = z @ w["head.0.weight"].T + w["head.0.bias"]
        close(net.head[1](net.head[0](jnp.asarray(z, jnp.float32))), hidden @ w["head.1.weight"].T + w["head.1.bias"])
    exchange.save(path, nnx.state(net, (nnx.Param, nnx.BatchStat)), **how)
    assert_trees_equal(exchange.restore(path), file)


def test_an_index_of_several_files(tmp_path):
    file, tree = files()
    weight_map = {}
    for i, (name, x) in enumerate(file.items()):
        weight_map[name] = f"part-{i}.safetensors"
        exchange.save(tmp_path / weight_map[name], {name: x})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_trees_equal(exchange.restore(tmp_path, tree, **HOW), tree)
