"""Live rules against plain optax: a table of rules times a list of questions; then what tsunax adds to optax.

What is expected comes from optax itself in a hand-written jitted loop, from NumPy, and from closed forms.
"""

import dataclasses
import functools
import inspect
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles
from tsunax import rules

# ------------------------------------------------------------------------------------------------ the table of rules


@dataclasses.dataclass(frozen=True)
class Row:
    """An optimizer with arguments that are not its defaults."""

    name: str
    numbers: dict  # must be live
    others: dict = dataclasses.field(default_factory=dict)  # must not
    needs: dict = dataclasses.field(default_factory=dict)  # what it cannot do without
    batches: int = 8
    obj_fn: bool = False  # wants the objective, which train_step does not hand on
    wrap: bool = False  # does not train alone

    @property
    def arguments(self):
        return self.numbers | self.others

    def plain(self, **arguments):
        factory = getattr(optax, self.name, None) or getattr(optax.contrib, self.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # optimistic_adam
            tx = factory(**arguments)
        return optax.chain(optax.sgd(0.05), tx) if self.wrap else tx

    def live(self, **arguments):
        tx = getattr(rules, self.name)(**arguments)
        return optax.chain(optax.sgd(0.05), tx) if self.wrap else tx


def row(name, *, others=None, needs=None, batches=8, obj_fn=False, wrap=False, **numbers):
    return Row(name, numbers, others or {}, needs or {}, batches, obj_fn, wrap)


RATE = {"learning_rate": 0.01}
ADAM = dict(learning_rate=3e-3, b1=0.85, b2=0.98, eps=1e-6, eps_root=1e-9)
ROWS = [
    row("adabelief", **ADAM | dict(eps=1e-12, eps_root=1e-12)),
    row("adadelta", learning_rate=0.7, rho=0.85, eps=1e-5, weight_decay=1e-3),
    row(
        "adafactor",
        **dict(learning_rate=3e-3, decay_rate=0.7, clipping_threshold=0.9, momentum=0.8),
        **dict(weight_decay_rate=1e-3, eps=1e-20),
        others=dict(min_dim_size_to_factor=4),
    ),
    row("adagrad", learning_rate=0.03, initial_accumulator_value=0.2, eps=1e-5),
    row("adam", **ADAM),
    row("adamax", learning_rate=3e-3, b1=0.85, b2=0.98, eps=1e-6),
    row("adamaxw", learning_rate=3e-3, b1=0.85, b2=0.98, eps=1e-6, weight_decay=3e-3),
    row("adamw", **ADAM, weight_decay=3e-3),
    row("adan", learning_rate=3e-3, b1=0.95, b2=0.9, b3=0.97, eps=1e-6, eps_root=1e-7, weight_decay=3e-3),
    row("amsgrad", **ADAM),
    row("fromage", learning_rate=3e-3, min_norm=1e-5),
    row("lamb", **ADAM | dict(eps=1e-5), weight_decay=3e-3),
    row("lars", learning_rate=0.3, weight_decay=3e-3, trust_coefficient=3e-3, eps=1e-6, momentum=0.8),
    row("lbfgs", learning_rate=0.7, others=dict(memory_size=4), batches=1),
    row("lion", learning_rate=1e-3, b1=0.85, b2=0.97, weight_decay=3e-3),
    row("nadam", **ADAM),
    row("nadamw", **ADAM, weight_decay=3e-3),
    row("noisy_sgd", learning_rate=0.03, eta=0.02, gamma=0.6, needs=dict(key=0)),
    row("novograd", **ADAM | dict(b2=0.3, eps=1e-5), weight_decay=3e-3),
    row("optimistic_adam", **ADAM, optimism=2e-3),
    row("optimistic_adam_v2", **ADAM, alpha=0.9, beta=0.8),
    row("optimistic_gradient_descent", learning_rate=0.03, alpha=0.9, beta=0.8),
    row("polyak_sgd", max_learning_rate=0.3, scaling=0.7, f_min=0.1, eps=1e-3),
    row("radam", **ADAM, threshold=4.0),
    row(
        "rmsprop",
        **dict(learning_rate=3e-3, decay=0.85, eps=1e-6, initial_scale=0.1, momentum=0.8),
        others=dict(centered=True),
    ),
    row("rprop", learning_rate=3e-3, eta_minus=0.4, eta_plus=1.1, min_step_size=1e-5, max_step_size=1.0),
    row("sgd", learning_rate=0.03, momentum=0.8, others=dict(nesterov=True)),
    row("sign_sgd", learning_rate=3e-3),
    row("signum", learning_rate=3e-3, beta=0.8),
    row("sm3", learning_rate=0.03, momentum=0.8),
    row("yogi", learning_rate=3e-3, b1=0.85, b2=0.98, eps=1e-4),
    row("acprop", **ADAM | dict(eps=1e-12, eps_root=1e-12), weight_decay=3e-3),
    row("ademamix", **ADAM, b3=0.995, alpha=3.0, weight_decay=3e-3),
    row("adopt", learning_rate=3e-3, b1=0.85, b2=0.995, eps=1e-5),
    row("cocob", learning_rate=0.8, alpha=80.0, eps=1e-6, weight_decay=3e-3),
    row(
        "dadapt_adamw",
        **dict(learning_rate=0.7, eps=1e-6, estim_lr0=1e-5, weight_decay=3e-3),
        others=dict(betas=(0.85, 0.98)),
    ),
    row("dog", learning_rate=0.8, eps=1e-6, weight_decay=3e-3, others=dict(init_step=("distance", 1e-3))),
    row("dowg", learning_rate=0.8, init_estim_sq_dist=1e-3, eps=1e-5, weight_decay=3e-3),
    row("galore", learning_rate=3e-3, scale=0.8, weight_decay=3e-3, others=dict(rank=2, update_proj_gap=50)),
    row("madgrad", learning_rate=3e-3, momentum=0.8, weight_decay=3e-3, eps=1e-5),
    row("momo", learning_rate=0.5, beta=0.8, lower_bound=0.1, weight_decay=3e-3),
    row("momo_adam", learning_rate=0.02, b1=0.85, b2=0.98, eps=1e-6, lower_bound=0.1, weight_decay=3e-3),
    row(
        "muon",
        **dict(learning_rate=3e-3, beta=0.9, eps=1e-6, weight_decay=3e-3, consistent_rms=0.2),
        **dict(adam_b1=0.85, adam_b2=0.98, adam_eps_root=1e-9, adam_weight_decay=2e-3, adam_learning_rate=2e-3),
        others=dict(ns_steps=3),
    ),
    row(
        "prodigy",
        **dict(learning_rate=0.7, beta3=0.98, eps=1e-6, estim_lr0=1e-4, estim_lr_coef=0.8, weight_decay=3e-3),
        others=dict(betas=(0.85, 0.98)),
    ),
    row("reduce_on_plateau", min_scale=0.1, others=dict(factor=0.5, rtol=1e-3, atol=1e-4, patience=2), wrap=True),
    row("schedule_free_adamw", learning_rate=3e-3, b1=0.85, b2=0.98, eps=1e-6, weight_decay=3e-3, weight_lr_power=1.5),
    row("schedule_free_sgd", learning_rate=0.3, b1=0.85, weight_decay=3e-3, weight_lr_power=1.5),
    row("simplified_ademamix", **ADAM | dict(learning_rate=1e-3), alpha=2.0, weight_decay=3e-3),
    row(
        "sophia",
        **dict(learning_rate=1e-3, b1=0.9, b2=0.97, eps=1e-6, weight_decay=3e-3, gamma=0.02, clip_threshold=0.9),
        obj_fn=True,
    ),
]
BY_NAME = {r.name: r for r in ROWS}
EVERY_RULE = pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)


def some(*names):
    return pytest.mark.parametrize("row", [BY_NAME[name] for name in names], ids=lambda r: r.name)


# ---------------------------------------------------------------------------------------------- training, both ways

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": RNG.normal(size=(6, 8)).astype(np.float32) / 3,
    "head": RNG.normal(size=(8, 3)).astype(np.float32) / 3,
    "bias": RNG.normal(size=3).astype(np.float32) / 5,
}
BATCHES = [
    (RNG.normal(size=(16, 6)).astype(np.float32), RNG.normal(size=(16, 3)).astype(np.float32)) for _ in range(8)
]
STEPS = 200
NO_CONTRACTION = {"xla_backend_optimization_level": 0}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["kernel"]) @ params["head"] + params["bias"][None] - y) ** 2)


def batches_of(row, dtype=np.float32):
    return [jax.device_put(jax.tree.map(lambda x: x.astype(dtype), b)) for b in BATCHES[: row.batches]]


def train_by_optax(row, tx, *, steps=STEPS, dtype=np.float32, options=None):
    """The loop that everybody writes."""
    tx = optax.with_extra_args_support(tx)

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=options)
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        extra = dict(value=loss, grad=grads, value_fn=lambda p, **_: loss_fn(p, batch))
        if row.obj_fn:
            extra["obj_fn"] = lambda p: loss_fn(p, batch)
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    own = functools.partial(jax.tree.map, lambda x: jnp.array(x, copy=True))
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    opt_state, data = own(tx.init(params)), batches_of(row, dtype)
    for i in range(steps):
        params, opt_state = step(params, opt_state, data[i % len(data)])
    return params


def train_by_tsunax(row, rule, *, steps=STEPS, dtype=np.float32, options=None):
    state = ts.setup(rule, jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS))
    step = ts.train_step(loss_fn, norms=False, on_nonfinite="ignore")
    if options:
        step = functools.partial(jax.jit(step.pure, compiler_options=options), extra={})
    if row.obj_fn:

        @functools.partial(jax.jit, compiler_options=options)
        def step(state, batch):
            loss, grads = ts.value_and_grad(loss_fn)(state, batch)
            obj_fn = lambda p: loss_fn(p, batch)
            return ts.update(state, grads, loss=loss, obj_fn=obj_fn, norms=False, on_nonfinite="ignore")

    data = batches_of(row, dtype)
    for i in range(steps):
        state, _ = step(state, data[i % len(data)])
    return state.params


def distance(a, b) -> float:
    """The largest difference over the largest number."""
    wide = lambda tree: [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    differences = [np.abs(x - y).max() for x, y in zip(wide(a), wide(b), strict=True)]
    return float(max(differences) / max(np.abs(x).max() for x in wide(b)))


def same_bits(a, b) -> bool:
    try:
        assert_trees_equal(a, b)
    except AssertionError:
        return False
    return True


# Rules whose plain program is another one before LLVM sees it, since a constant invites rewriting:
# {name: (largest distance after 200 steps on any stack, what is rewritten)}. docs/live-rules.md has the figures.
REWRITTEN = {}
