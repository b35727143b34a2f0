"""A physics-informed network solves Burgers' equation: Adam with new points, then L-BFGS.

    python examples/ports/pinn.py           # a minute on two CPU cores; options: --steps, --seed

u_t + u u_x = 0.05 u_xx on [-1, 1], u = -sin(pi x) at first and 0 at both ends. It ends in `relative
error: 0.0008` against the exact solution (Cole and Hopf, by quadrature) and fails above 0.003.

Follows maziarraissi/PINNs at 932f50a, appendix/continuous_time_inference (Burgers)/Burgers.py,
which uses L-BFGS alone, on fixed points and a steeper problem: its training is 43 lines of code at
150 columns, lines 45-71, 104-128 and 131-136.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import tsunax as ts

NU = 0.05
XS, TS = np.linspace(-1, 1, 41), np.linspace(0.1, 1, 10)


def exact(x, t):
    """u(x, t) by Gauss and Hermite's quadrature of the transform of Cole and Hopf."""
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    y = x[..., None] - nodes * np.sqrt(4 * NU * t[..., None])
    f = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * NU))
    return -np.sum(np.sin(np.pi * y) * f, -1) / np.sum(f, -1)


def init(seed, sizes=(2, 32, 32, 32, 1)):
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (n, m)) / n**0.5, "b": jnp.zeros(m)}
        for key, (n, m) in zip(keys, itertools.pairwise(sizes), strict=True)
    ]


def u(params, x, t):
    """The solution at a point, with its values at the first time and at both ends built in."""
    h = jnp.stack([x, t])
    for layer in params[:-1]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    out = (h @ params[-1]["w"] + params[-1]["b"])[0]
    return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * out


def make(seed=0):
    """State and both loss functions, for `main` and for the tests."""

    # training
    def residuals(params, points):
        def at(x, t):
            u_x = jax.grad(u, 1)
            u_xx = jax.grad(u_x, 1)(params, x, t)
            return jax.grad(u, 2)(params, x, t) + u(params, x, t) * u_x(params, x, t) - NU * u_xx

        return ts.Loss.mean(jax.vmap(at)(points[:, 0], points[:, 1]) ** 2)

    def drawn(params, key):
        points = jax.random.uniform(key, (512, 2)) * jnp.array([2.0, 1.0]) - jnp.array([1.0, 0.0])
        return residuals(params, points)

    state = ts.setup(ts.rules.adam(2e-3), init(seed), key=seed)
    # end of training
    return state, drawn, residuals


def main(steps, seed, target=0.003):
    state, drawn, residuals = make(seed)
    points = np.random.default_rng(seed).uniform((-1, 0), (1, 1), (4096, 2)).astype(np.float32)
    # with checkpoint=, give each of the two its own folder
    # training
    state, _ = ts.fit(ts.train_step(drawn), state, steps=steps)
    state, _ = ts.migrate(state, ts.rules.lbfgs())
    state, _ = ts.fit(ts.train_step(residuals), state, [points], steps=steps + steps // 10)
    # end of training
    x, t = (grid.ravel() for grid in np.meshgrid(XS, TS))
    found = jax.vmap(u, (None, 0, 0))(state.params, jnp.float32(x), jnp.float32(t))
    error = float(np.linalg.norm(found - exact(x, t)) / np.linalg.norm(exact(x, t)))
    print(f"relative error: {error:.5f}")
    assert error <= target, f"expected at most {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
