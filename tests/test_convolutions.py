"""Convolutions in loops on CPU: bits of the same convolution outside of a loop, whatever it is wrapped in.

What is expected comes from XLA itself, from programs without a loop and without the code under test.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P
from tests.helpers import assert_trees_close, assert_trees_equal, medium_if
from tsunax._cpu import convolutions, rewriting
from tsunax._cpu.convolutions import fast

LAST = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
FIRST = {1: ("NCW", "OIW", "NCW"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCDHW", "OIDHW", "NCDHW")}
MIXED = {2: ("HWNC", "OHWI", "CNHW")}


class Case(NamedTuple):
    """A convolution; `loose` names the results (x, w: gradients) that are within ulps only."""

    name: str
    space: tuple
    kernel: tuple
    features: tuple = (3, 5)
    layout: dict = LAST
    groups: int = 1
    stride: int = 1
    padding: object = "SAME"
    x_step: int = 1  # lhs_dilation: a transposed convolution
    w_step: int = 1
    dtype: str = "float32"
    loose: str = ""

    def conv(self, x, w):
        n = len(self.space)
        padding = self.padding if isinstance(self.padding, str) else (self.padding,) * n
        stride, x_step, w_step = ((k,) * n for k in (self.stride, self.x_step, self.w_step))
        return lax.conv_general_dilated(
            x, w, stride, padding, x_step, w_step, self.layout[n], feature_group_count=self.groups
        )

    def arrays(self, batches=3, rows=4):
        """Batches of rows, and a kernel."""
        n, (c, o) = len(self.space), self.features
        sizes = {"N": rows, "C": c, "O": o, "I": c // self.groups}
        shapes = []
        for letters, space in zip(self.layout[n], (self.space, self.kernel), strict=False):
            space = iter(space)
            shapes.append([sizes[a] if a in sizes else next(space) for a in letters])
        rng = np.random.default_rng(len(self.name))
        make = lambda shape: jnp.asarray(rng.standard_normal(shape), self.dtype)
        return make((batches, *shapes[0])), make(shapes[1])

    def results(self, x, w):
        """The convolution and both gradients of the sum of its squares."""
        y, pull = jax.vjp(self.conv, x, w)
        dx, dw = pull(y)
        return {"y": y, "x": dx, "w": dw}


CASES = [
    Case("1d", (12,), (3,)),
    Case("1d, features first, stride 2", (13,), (4,), layout=FIRST, stride=2),
    Case("1d, groups", (12,), (3,), (10, 10), layout=FIRST, groups=2, loose="w"),
    # Its gradient to x reads 2 features per group, so it is left as it is: its bits depend on the processor.
    Case("1d, groups, narrow gradient", (12,), (3,), (10, 4), layout=FIRST, groups=2, loose="xw"),
    Case("2d", (8, 9), (3, 2)),
    Case("2d, 1x1", (6, 6), (1, 1)),
    Case("2d, features first", (8, 7), (3, 3), layout=FIRST),
    Case("2d, mixed axes", (8, 7), (3, 2), layout=MIXED),
    Case("2d, stride 2, valid", (9, 8), (3, 3), stride=2, padding="VALID"),
    Case("2d, stride 3, uneven padding", (9, 8), (2, 3), stride=3, padding=(2, 0)),
    Case("2d, negative padding", (9, 8), (3, 3), padding=(-1, 2)),
    Case("2d, dilated", (9, 8), (3, 3), w_step=2),
    Case("2d, transposed", (5, 4), (3, 3), x_step=2, padding=(1, 2)),
    Case("2d, transposed, first", (5, 4), (3, 3), layout=FIRST, x_step=2, padding=(2, 2)),
    Case("2d, all at once", (9, 8), (3, 3), layout=FIRST, stride=2, x_step=3, w_step=2, padding=(3, 1)),
    Case("2d, wide groups", (6, 6), (3, 3), (12, 10), groups=2, loose="w"),
    Case("2d, narrow groups", (6, 6), (3, 3), (6, 9), groups=3, loose="xw"),
    Case("2d, groups, first", (6, 6), (3, 3), (12, 10), layout=FIRST, groups=2, stride=2, loose="w"),
    Case("2d, depthwise", (6, 6), (3, 3), (6, 6), groups=6, loose="x"),
    Case("3d", (4, 5, 4), (3, 2, 3)),
    Case("3d, features first, stride 2", (5, 5, 4), (3, 3, 3), layout=FIRST, stride=2),
    Case("3d, groups", (4, 4, 4), (2, 3, 2), (10, 10), groups=2, loose="w"),
    Case("2d, bfloat16", (8, 7), (3, 3), dtype="bfloat16"),
    Case("2d, bfloat16, first", (8, 7), (3, 3), layout=FIRST, stride=2, dtype="bfloat16"),
    Case("2d, float16", (8, 7), (3, 3), dtype="float16"),
    Case("3d, float16", (4, 5, 4), (3, 2, 3), dtype="float16"),
]


@functools.cache
def computed():
    """Every case in one program outside of a loop, and in one with a loop."""
    arrays = [case.arrays() for case in CASES]
    xs, ws = [x for x, _ in arrays], [w for _, w in arrays]

    def all_of(xs, ws):
        return {case.name: case.results(x, w) for case, x, w in zip(CASES, xs, ws, strict=True)}

    outside = jax.jit(all_of)
    plain = [outside([x[i] for x in xs], ws) for i in range(xs[0].shape[0])]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *plain)
    return stacked, jax.jit(lambda xs, ws: lax.map(lambda x: fast(all_of)(x, ws), xs))(xs, ws)


@pytest.mark.medium
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_are_those_outside_of_a_loop(case):
    outside, inside = (results[case.name] for results in computed())
    for name in outside:
        if name in case.loose:
            scale = np.abs(outside[name]).max()
            assert_trees_close(inside[name] / scale, outside[name] / scale, rtol=0, atol=1e-6)
        else:
            assert_trees_equal({name: inside[name]}, {name: outside[name]})


# ----------------------------------------------------------------------------------- what it is wrapped in

WEIGHTS = {
    "a": Case("", (8, 8), (3, 3), (3, 6)).arrays()[1] / 5,
    "b": Case("b", (8, 8), (3, 3), (6, 6)).arrays()[1] / 5,
}
BATCHES = Case("batches", (8, 8), (3, 3), (3, 6)).arrays()[0]
conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=LAST[2])
slow_conv = functools.partial(conv, dimension_numbers=("NHWC", "HWOI", "NHWC"))


def block(w, x):
    return jnp.tanh(slow_conv(x, w.swapaxes(2, 3)))


@jax.custom_jvp
def scaled_block(w, x):
    return block(w, x)


scaled_block.defjvp(lambda primals, tangents: jax.jvp(block, primals, jax.tree.map(lambda t: 2 * t, tangents)))


@jax.custom_vjp
def pulled_block(w, x):
    return block(w, x)


pulled_block.defvjp(lambda w, x: (block(w, x), (w, x)), lambda kept, g: jax.vjp(block, *kept)[1](2 * g))


def conditional_block(w, x):
    return lax.cond(jnp.sum(x) > -1e9, lambda: block(w, x), lambda: jnp.zeros(block(w, x).shape))


def scanned_block(w, x):
    return lax.scan(lambda x, w: (block(w, x), None), x, w[None])[0] if w.shape[-1] == w.shape[-2] else block(w, x)


def while_block(w, x):
    """Without its gradient: a while loop has none backwards."""
    if w.shape[-1] != w.shape[-2]:
        return block(w, x)
    kernel, first = lax.stop_gradient((w.swapaxes(2, 3), (0, x)))
    body = lambda carry: (carry[0] + 1, slow_conv(carry[1], kernel))
    return block(w, x) + lax.while_loop(lambda carry: carry[0] < 1, body, first)[1]


WRAPPED = {
    "bare": block,
    "jit": jax.jit(block),
    "jit in jit": jax.jit(lambda w, x: jax.jit(block)(w, x) * 2),
    "custom_jvp": scaled_block,
    "custom_vjp": pulled_block,
    "checkpoint": jax.checkpoint(block),
    "checkpoint of jit": jax.checkpoint(jax.jit(block), policy=jax.checkpoint_policies.dots_saveable),
    "cond": conditional_block,
    "scan": scanned_block,
    "while": while_block,
    "vmap over rows": lambda w, x: jax.vmap(lambda x: block(w, x[None])[0])(x),
    "vmap over kernels": lambda w, x: jax.vmap(block, (0, None))(jnp.stack([w, 2 * w]), x).sum(0),
}


def loss_of(block):
    return lambda weights, x: jnp.mean(block(weights["b"], block(weights["a"], x)) ** 2)


def in_loop(f):
    return jax.jit(lambda weights, xs: lax.map(lambda x: f(weights, x), xs))


def layouts(f, *args) -> list[str]:
    """The layout of each convolution in the compiled program."""
    text = f.lower(*args).compile().as_text()
    return re.findall(r" convolution\(.*?dim_labels=([\w>-]+)", text)


@pytest.mark.parametrize("name", medium_if(lambda name: name not in ("bare", "vmap over rows", "scan"), WRAPPED))
def test_every_convolution_is_found(name):
    f = jax.value_and_grad(loss_of(WRAPPED[name]))
    looped = in_loop(fast(f))
    found = layouts(looped, WEIGHTS, BATCHES)
    assert len(found) >= 5 and set(found) == {"b01f_01io->b01f"}, found
    alone = jax.jit(f)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *(alone(WEIGHTS, x) for x in BATCHES))
    assert_trees_close(looped(WEIGHTS, BATCHES), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("block", [scaled_block, pulled_block], ids=["custom_jvp", "custom_vjp"])
def test_so_are_those_of_custom_derivatives_without_differentiation(block):
    # differentiation takes the function with the rule away, and leaves the rule
    assert set(layouts(in_loop(fast(loss_of(block))), WEIGHTS, BATCHES)) == {"b01f_01io->b01f"}


def test_a_grouped_kernels_gradient_is_no_convolution_of_batch_groups():
    x, w = jnp.ones((4, 6, 6, 12)), jnp.ones((3, 3, 6, 10))
    f = jax.grad(lambda w, x: jnp.sum(conv(x, w, feature_group_count=2) ** 2))
    groups = lambda f: set(re.findall(r"(batch|feature)_group_count = 2 ", jax.jit(f).lower(w, x).as_text()))
    assert groups(f) == {"batch", "feature"}
    assert groups(fast(f)) == {"feature"}


def test_without_it_they_are_slow():
    # XLA's own layouts in loops. Once it has the fast ones, this fails, and the module can go.
    f = jax.value_and_grad(loss_of(block))
    assert set(layouts(in_loop(f), WEIGHTS, BATCHES)) - {"b01f_01io->b01f"}


def test_the_whole_loop_may_be_given():
    f = jax.value_and_grad(loss_of(block))
    looped = fast(lambda weights, xs: lax.map(lambda x: f(weights, x), xs))
    assert set(layouts(jax.jit(looped), WEIGHTS, BATCHES)) == {"b01f_01io->b01f"}
    twice = jax.make_jaxpr(fast(looped))(WEIGHTS, BATCHES)
    once = jax.make_jaxpr(looped)(WEIGHTS, BATCHES)
    assert str(twice).count("name=convolution_in_loop") == str(once).count("name=convolution_in_loop") > 0


@pytest.mark.medium
def test_it_can_be_differentiated():
    f = jax.grad(loss_of(block))
    penalty = lambda f: jax.jit(lambda w, x: jax.grad(lambda w: sum(jnp.sum(g**2) for g in f(w, x).values()))(w))
    expected = penalty(f)(WEIGHTS, BATCHES[0])
    assert_trees_close(penalty(fast(f))(WEIGHTS, BATCHES[0]), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.medium
def test_it_can_be_vmapped():
    f = jax.grad(loss_of(block))
    both = jax.tree.map(lambda w: jnp.stack([w, 2 * w, 3 * w]), WEIGHTS)
    expected = jax.jit(jax.vmap(f))(both, BATCHES)
    assert_trees_close(jax.jit(jax.vmap(fast(f)))(both, BATCHES), expected, rtol=1e-4, atol=1e-7)


# -------------------------------------------------------------------------------------------- what it leaves alone


def lowered(f, platform):
    return jax.jit(f).trace(WEIGHTS, BATCHES[0]).lower(lowering_platforms=(platform,)).as_text()


def test_only_the_cpu_gets_another_program():
    # The platform that is compiled for decides, on a machine that has none but the CPU.
    f = jax.grad(loss_of(block))
    dims = lambda text: sorted(re.findall(r"dim_numbers = (\[.*?\]->\[.*?\])", text))
    for platform in ("cuda", "tpu"):
        assert dims(lowered(fast(f), platform)) == dims(lowered(f, platform))
        assert lowered(fast(f), platform).count("transpose") == lowered(f, platform).count("transpose")
    assert dims(lowered(fast(f), "cpu")) == ["[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"] * 5


def in_layout(program):
    return rewriting.of_program(program, convolutions.equations, convolutions.NAME, {})


def same_program(f, *args) -> bool:
    program = jax.make_jaxpr(f)(*args)
    return in_layout(program) is program


@pytest.mark.parametrize(
    ("dtype", "ndim", "options", "same"),
    [
        ("float32", 2, {}, False),
        ("int32", 2, {}, True),
        ("complex64", 2, {}, True),
        ("float32", 2, {"preferred_element_type": "float64"}, True),
        ("bfloat16", 2, {"preferred_element_type": "float32"}, False),
        ("float32", 0, {}, True),
        ("float32", 4, {}, True),
    ],
)
def test_unknown_convolutions_are_left_alone(dtype, ndim, options, same):
    # the second name is that of jax 0.7
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        x, w = np.ones((2, 3, *[4] * ndim), dtype), np.ones((5, 3, *[2] * ndim), dtype)
        first = lambda x, w: lax.conv_general_dilated(x, w, (1,) * ndim, "SAME", **options)
        assert same_program(first, x, w) == same


def test_what_is_empty_or_fast_is_left_alone():
    x, w = np.ones((2, 8, 8, 3), np.float32), np.ones((3, 3, 3, 5), np.float32)
    first = lambda x, w: conv(x, w, dimension_numbers=FIRST[2])
    assert same_program(conv, x, w)
    assert not same_program(first, x.swapaxes(1, 3), w.transpose(3, 2, 0, 1))
    assert same_program(first, x[:0].swapaxes(1, 3), w.transpose(3, 2, 0, 1))
    grouped = lambda x, w: conv(x, w, dimension_numbers=FIRST[2], feature_group_count=2)
    for features, same in ((4, True), (5, False)):  # per group
        x, w = np.ones((1, 2 * features, 4, 4), np.float32), np.ones((2, features, 3, 3), np.float32)
        assert same_program(grouped, x, w) == same


def test_an_unknown_parameter_or_a_missing_api_changes_nothing(monkeypatch):
    f = jax.grad(loss_of(block))
    assert not same_program(f, WEIGHTS, BATCHES[0])
    monkeypatch.setattr(convolutions, "_PARAMETERS", convolutions._PARAMETERS - {"padding"})
    assert same_program(f, WEIGHTS, BATCHES[0])
    monkeypatch.delattr(core, "jaxpr_as_fun")
    assert fast(f) is f


def test_sharding():
    f = jax.value_and_grad(loss_of(block))
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    for kind, cut in ((auto, True), (auto, False), (explicit, False), (explicit, True)):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
        x = jax.device_put(BATCHES[0], jax.NamedSharding(mesh, P("data") if cut else P()))
        weights = jax.device_put(WEIGHTS, jax.NamedSharding(mesh, P()))
        assert same_program(f, weights, x) == (kind is explicit and cut), (kind, cut)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    f = jax.value_and_grad(loss_of(block))

    def mapped(f):
        mean = lambda weights, x: lax.pmean(f(weights, x), "data")
        return jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())

    args = WEIGHTS, BATCHES[0]
    assert_trees_equal(jax.jit(mapped(fast(f)))(*args), jax.jit(mapped(f))(*args))
    assert same_program(mapped(f), *args)


# ------------------------------------------------------------------------------------------------ the function


def test_arguments_and_results_are_trees():
    w, x = WEIGHTS["b"], jnp.ones((1, 4, 4, 6))

    @fast
    def f(tree, *, x, unused=None):
        return {"y": slow_conv(x, tree["w"].swapaxes(2, 3))}, None, 3, x

    out, none, three, same = jax.jit(lambda w, x: f({"w": w, "none": None}, x=x))(w, x)
    assert none is None and three.shape == () and int(three) == 3
    assert_trees_equal((out["y"], same), (jax.jit(conv)(x, w), x))


def test_what_is_closed_over_is_read_each_time():
    held = [1.0]
    f = fast(lambda x: x * held[0])
    assert float(f(jnp.ones(()))) == 1
    held[0] = 2.0
    assert float(f(jnp.ones(()))) == 2
    traced = jax.jit(lambda x, y: lax.map(fast(lambda x: x * y), x))
    assert traced(jnp.ones(2), 3.0).tolist() == [3, 3]


def test_a_function_called_twice_stays_one():
    shared = jax.jit(block)

    def f(w, x):
        return shared(w, shared(w, x))

    program = in_layout(jax.make_jaxpr(f)(WEIGHTS["b"], jnp.ones((1, 4, 4, 6))))
    first, second = (eqn.params["jaxpr"] for eqn in program.eqns)
    inner = lambda closed: closed if isinstance(closed, core.Jaxpr) else closed.jaxpr
    assert inner(first) is inner(second)
    assert "convolution_in_loop" in str(first)
