"""Eight micro-batches of convolutional models on CPU: a scan as it is, a scan with `fast`, and a Python loop.

Each adds up the value and the gradient. The Python loop is one jitted, donated call per micro-batch; XLA gives its
convolutions the fast layout, so it is the floor that a scan should reach.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from tsunax._cpu.convolutions import fast

from benchmarks._common import interleave, ratio, save, table

MICRO = 8
LAST = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
FIRST = {2: ("NCHW", "OIHW", "NCHW")}
CASES = {  # layout, rows of a micro-batch, spatial axes, features, groups
    "2d, 3-16-32-32": (LAST[2], 8, (16, 16), (3, 16, 32, 32), 1),
    "2d, features first": (FIRST[2], 8, (16, 16), (3, 16, 32, 32), 1),
    "2d, 4 groups": (LAST[2], 4, (16, 16), (16, 32, 32), 4),
    "2d, depthwise": (LAST[2], 8, (16, 16), (16, 16, 16), 16),
    "1d, 8-32-32": (LAST[1], 8, (128,), (8, 32, 32), 1),
    "3d, 1-8-16": (LAST[3], 4, (8, 8, 8), (1, 8, 16), 1),
}


def model(layout, rows, space, features, groups):
    """Params, micro-batches and a loss: 3-wide convolutions with ReLU between them."""

    def shape(letters, sizes, space):
        space = iter(space)
        return tuple(sizes[a] if a in sizes else next(space) for a in letters)

    keys = iter(jax.random.split(jax.random.key(0), len(features)))
    params = [
        jax.random.normal(next(keys), shape(layout[1], {"O": o, "I": i // groups}, (3,) * len(space))) / (9 * i) ** 0.5
        for i, o in itertools.pairwise(features)
    ]
    xs = jax.random.normal(next(keys), (MICRO, *shape(layout[0], {"N": rows, "C": features[0]}, space)))

    def loss_fn(params, x):
        for w in params:
            ones = (1,) * len(space)
            x = lax.conv_general_dilated(x, w, ones, "SAME", dimension_numbers=layout, feature_group_count=groups)
            x = jax.nn.relu(x)
        return jnp.mean(x**2)

    return params, xs, loss_fn


def by_scan(f, params, xs):
    @jax.jit
    def scanned(params, xs):
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(f, params, xs[0]))
        return lax.scan(lambda sums, x: (jax.tree.map(jnp.add, sums, f(params, x)), None), zeros, xs)[0]

    def burst(n):
        for _ in range(n):
            jax.block_until_ready(scanned(params, xs))

    return burst


def by_python(f, params, xs):
    @functools.partial(jax.jit, donate_argnums=0)
    def add(sums, params, x):
        return jax.tree.map(jnp.add, sums, f(params, x))

    shapes = jax.eval_shape(f, params, xs[0])
    xs = list(xs)

    def burst(n):
        for _ in range(n):
            sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            for x in xs:
                sums = add(sums, params, x)
            jax.block_until_ready(sums)

    return burst


def main() -> None:
    for name, case in CASES.items():
        params, xs, loss_fn = model(*case)
        f = jax.value_and_grad(loss_fn)
        contenders = {
            "Python loop": by_python(f, params, xs),
            "scan": by_scan(f, params, xs),
            "scan, fast": by_scan(fast(f), params, xs),
        }
        times = interleave(contenders, rounds=20, steps=2)
        found = {k: (sorted(v)[len(v) // 2], *ratio(times, k, "Python loop")) for k, v in times.items()}
        head = ("contender", "us/8 micro-batches", "x low", "x median", "x high")
        table(name, [(k, *v) for k, v in found.items()], head)
    save("convolutions")


if __name__ == "__main__":
    main()
