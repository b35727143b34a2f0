"""Every transformation of optax and optax.contrib as a rule: it trains as in optax, or setup says why it cannot.

`python -m tests.test_optax` writes what the tests find into the table of docs/optax.md.
"""

import functools
import inspect
import re
import types
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close
from tsunax import rules
from tsunax.errors import RuleError
from tsunax.rules.optimizers import CONTRIB, OPTAX

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "optax.md"
PARAMS = {"b": np.array([0.5, -0.3], np.float32), "w": np.array([[2.0, -1.0], [0.5, 1.5], [1.0, -2.0]], np.float32)}
MASK = {"b": False, "w": True}
sgd = optax.sgd(0.1)
down = lambda tx: optax.chain(optax.sgd(1.0), tx)  # a line search wants a direction downhill


dimensions = lambda tree: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)

# What each one is given: the arguments that it cannot do without, or a function that makes it
MAKE: dict[str, Any] = {
    "add_decayed_weights": (0.1,),
    "adaptive_grad_clip": (0.1,),
    "add_noise": (0.1, 0.5, 0),
    "apply_if_finite": (sgd, 3),
    "chain": (sgd,),
    "clip": (0.1,),
    "clip_by_block_rms": (0.1,),
    "clip_by_global_norm": (0.1,),
    "conditionally_mask": (sgd, lambda step: step % 2 == 0),
    "conditionally_transform": (sgd, lambda step: step % 2 == 0),
    "differentially_private_aggregate": (1.0, 0.1, 0),
    "dpsgd": (0.1, 1.0, 0.1, 0),
    "ema": (0.9,),
    "flatten": (sgd,),
    "freeze": (MASK,),
    "galore": lambda f: f(0.1, rank=1),
    "hutchinson_estimator_diag_hessian": lambda f: f(jax.random.key(0)),
    "inject_hyperparams": lambda f: f(optax.adam)(0.1),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(0.1),
    "lookahead": (sgd, 2, 0.5),
    "masked": (sgd, MASK),
    "measure_with_ema": (optax.tree.norm, 0.9),
    "mechanize": (sgd,),
    "monitor": lambda f: f({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    "multi_transform": ({"x": sgd, "y": optax.adam(0.1)}, {"b": "x", "w": "y"}),
    "named_chain": (("x", sgd),),
    "noisy_sgd": lambda f: f(0.1, key=0),
    "partition": ({"x": sgd, "y": optax.adam(0.1)}, {"b": "x", "w": "y"}),
    "reduce_on_plateau": lambda f: down(f()),
    "sam": (sgd, sgd),
    "scale": (-0.1,),
    "scale_by_backtracking_linesearch": lambda f: down(f(5)),
    "scale_by_galore": lambda f: f(rank=1),
    "scale_by_madgrad": (0.1,),
    "scale_by_muon": lambda f: optax.masked(f(weight_dimension_numbers=dimensions), MASK),
    "scale_by_rprop": (0.1,),
    "scale_by_schedule": (lambda step: -0.1,),
    "scale_by_zoom_linesearch": lambda f: down(f(5)),
    "schedule_free": (sgd, 0.1),
    "selective_transform": lambda f: f(sgd, freeze_mask=MASK),
    "snapshot": ("norm", optax.tree.norm),
    "split_real_and_imaginary": (sgd,),
    "stateless": (lambda updates, params: updates,),
    "stateless_with_tree_map": (lambda u, p: -u,),
    "trace": (0.9,),
    "with_extra_args_support": (sgd,),
}

_LOSS = "`train_step` passes the loss function; by hand, call `ts.update(..., loss=, value_fn=)`"
_HESSIAN = "`train_step` passes the loss function; by hand, call `ts.update(..., obj_fn=)`"
_INSIDE = "passes all extra arguments to all rules inside; `ts.rules.{}` passes only those in each signature"
_STEPS = "`state.step` counts every call"
_IGNORE = 'works under `on_nonfinite="ignore"`: other policies reject a gradient that is not finite before the rule'
_OF_ROWS = "needs a gradient for each row: `train_step(loss_fn, per_example=True)`"
NOTES = {
    "add_decayed_weights": "`ts.rules.add_decayed_weights(..., where=)` takes patterns",
    "apply_every": f"{_STEPS}; `ts.rules.accumulate` counts windows and weights them",
    "apply_if_finite": f"{_IGNORE}. `train_step(on_nonfinite=\"skip\")`, the default, does the same for all rules",
    "chain": _INSIDE.format("chain"),
    "clip_by_global_norm": "over the leaves that it gets; `ts.rules.clip_by_global_norm` is over all groups",
    "conditionally_mask": _STEPS,
    "differentially_private_aggregate": _OF_ROWS,
    "dpsgd": _OF_ROWS,
    "ema": "averages the updates; for an average of the params, use `setup(..., ema=)`",
    "freeze": "`setup(trainable=)` and `ts.freeze` stop the decay, too",
    "hutchinson_estimator_diag_hessian": f"an estimate, not a direction: use it in `sophia`. {_HESSIAN}",
    "inject_hyperparams": "its numbers are in `state.opt_state.hyperparams`; those of `ts.rules.live(factory)` "
    "are in `ts.hyperparams`",
    "inject_stateful_hyperparams": "like `inject_hyperparams`",
    "lbfgs": _LOSS,
    "masked": _INSIDE.format("partition"),
    "multi_transform": "`partition`'s old name",
    "partition": _INSIDE.format("partition"),
    "reduce_on_plateau": "put it at the end of a chain",
    "sam": f"{_STEPS}, also the adversarial ones; with `opaque_mode=True`, `train_step` passes `grad_fn`",
    "scale_by_backtracking_linesearch": f"{_LOSS}. Put it after a rule whose updates point downhill",
    "scale_by_zoom_linesearch": f"{_LOSS}. Put it after a rule whose updates point downhill",
    "schedule_free": "evaluate at `optax.contrib.schedule_free_eval_params`",
    "selective_transform": "`setup(trainable=)` saves the gradient, too",
    "snapshot": "its measurements are in `state.opt_state`",
    "sophia": _HESSIAN,
    "zero_nans": _IGNORE,
    "split_real_and_imaginary": "wrap rules for real numbers in it if params are complex",
}  # fmt: skip
CANNOT = {
    "measure_with_ema": "it does not return updates: use it in `monitor`",
    "monitor": "its state has no measurements before the first update, but a step must keep its structure; "
    "use `snapshot`",
    "lookahead": "its params are `optax.LookaheadParams`: write your own loop, around any of `ts.rules`",
}
NO_ANNOTATION = {"dog", "dowg", "hutchinson_estimator_diag_hessian", "monitor", "scale_by_factored_rms"}


@pytest.mark.parametrize("policy", ["skip", "ignore"])
@pytest.mark.parametrize("repair", [optax.zero_nans, None])
def test_what_repairs_a_gradient_works_under_ignore_alone(policy, repair):
    rule = optax.apply_if_finite(optax.sgd(1.0), 3) if repair is None else optax.chain(repair(), optax.sgd(1.0))
    state = ts.setup(rule, {"w": jnp.ones(2)})
    grads = {"w": jnp.array([jnp.nan, 0.5])}
    state, info = ts.update(state, grads, on_nonfinite=policy)
    applied = policy == "ignore"
    assert bool(info.applied) == applied
    moved = 0.5 if applied and repair is not None else 1.0
    np.testing.assert_array_equal(state.params["w"], [1.0, moved])


def transformations() -> dict:
    """{name: factory} of all public functions that return a transformation."""
    found = {}
    for module in (optax, optax.contrib):
        for name, f in vars(module).items():
            if isinstance(f, types.FunctionType | functools.partial) and not name.startswith("_"):
                returns = str(inspect.signature(f).return_annotation)
                if "GradientTransformation" in returns or name in NO_ANNOTATION:
                    found[name] = f
    return found


ALL = transformations()


def make(name: str, module=None) -> Any:
    factory, given = ALL[name] if module is None else getattr(module, name), MAKE.get(name, ())
    if callable(given):
        return given(factory)
    return factory(0.1) if "learning_rate" in inspect.signature(factory).parameters and not given else factory(*given)


def loss_fn(params, _=None):
    return jnp.sum((params["w"] * np.float32(1.5) - 1) ** 2) + jnp.sum(params["b"] ** 4)


GRADIENT = jax.jit(jax.value_and_grad(loss_fn))


def trained_by_optax(name: str, steps=2):
    tx, params = make(name), jax.tree.map(jnp.asarray, PARAMS)
    names = inspect.signature(tx.update).parameters
    takes_all = any(p.kind == p.VAR_KEYWORD for p in names.values())
    state = tx.init(params)
    for _ in range(steps):
        value, grads = GRADIENT(params)
        search = "obj_fn" if name in ("hutchinson_estimator_diag_hessian", "sophia") else "value_fn"
        extra = {"value": value, "grad": grads, search: loss_fn}
        extra = {k: v for k, v in extra.items() if takes_all or k in names}
        grads = of_rows(grads) if NOTES.get(name) == _OF_ROWS else grads
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params


def of_rows(grads):
    return jax.tree.map(lambda g: jnp.stack([g, 3 * g]), grads)


def trained_by_tsunax(rule, steps=2, each=lambda grads: grads):
    state = ts.setup(rule, PARAMS)
    for _ in range(steps):
        value, grads = GRADIENT(state.params)
        state, info = ts.update(state, each(grads), loss=value, value_fn=loss_fn, obj_fn=loss_fn)
        assert info.applied
    return state.params


# test_rules trains them, too
LONG = {"acprop", "lbfgs", "muon", "scale_by_zoom_linesearch", "sophia"}
# One of each kind: what wraps, groups, masks, measures, is given the loss or its function, and is refused
QUICK = {"adamw", "apply_if_finite", "chain", "conditionally_mask", "inject_hyperparams", "lookahead", "masked"}
QUICK |= {
    "differentially_private_aggregate",
    "multi_transform",
    "polyak_sgd",
    "sam",
    "scale_by_backtracking_linesearch",
    "schedule_free",
    "snapshot",
}
SPEED = {name: [] if name in QUICK else [pytest.mark.slow if name in LONG else pytest.mark.medium] for name in ALL}
CASES = [pytest.param(name, marks=SPEED[name]) for name in sorted(ALL)]


@pytest.mark.parametrize("name", CASES)
def test_every_transformation_is_a_rule_or_says_why_not(name):
    if name in CANNOT:
        with pytest.raises(RuleError, match=r"rule \w+ at setup\(\): got"):
            ts.setup(make(name), PARAMS)
        return
    with jax.numpy_rank_promotion("allow"):  # scale_by_distance_over_gradients
        expected = trained_by_optax(name)
        each = of_rows if NOTES.get(name) == _OF_ROWS else lambda grads: grads
        assert_trees_close(trained_by_tsunax(make(name), each=each), expected, rtol=1e-5, atol=1e-6)
        if name in rules.__all__ and name != "partition":  # which has patterns for labels
            assert_trees_close(trained_by_tsunax(make(name, rules)), expected, rtol=2e-5, atol=2e-6)


def test_the_table_says_so():
    assert sorted(rows_of_the_page()) == sorted(map(row_of, ALL)), "python -m tests.test_optax writes it"


# ------------------------------------------------------------------------------------------------------- the page


def row_of(name: str) -> str:
    module = "optax.contrib" if hasattr(optax.contrib, name) else "optax"
    answer = "no" if name in CANNOT else "with a note" if name in NOTES else "yes"
    live = f"`ts.rules.{name}`" if name in rules.__all__ and name in (*OPTAX, *CONTRIB) else ""
    return f"| `{module}.{name}` | {answer} | {live} | {CANNOT.get(name, NOTES.get(name, ''))} |"


def rows_of_the_page() -> list[str]:
    return re.findall(r"^\| `optax.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head = text[: text.index("| transformation |")]
    of = lambda module: sorted(name for name in ALL if (module == "optax") != hasattr(optax.contrib, name))
    rows = [row_of(name) for module in ("optax", "optax.contrib") for name in of(module)]
    table = "\n".join(["| transformation | a rule | live | notes |", "| --- | --- | --- | --- |", *rows])
    PAGE.write_text(f"{head}{table}\n", encoding="utf-8")


if __name__ == "__main__":
    write()


@pytest.mark.parametrize(
    ("factory", "shape"),
    [
        (functools.partial(optax.sm3, 0.1), ()),
        (optax.scale_by_distance_over_gradients, ()),
        (optax.contrib.scale_by_muon, (2, 3)),
    ],
)
def test_a_leaf_that_a_rule_cannot_take_is_refused_by_setup(factory, shape):
    """The same for the live form as for optax's own."""
    for rule in (factory(), rules.live(factory)()):
        with pytest.raises(RuleError, match=r"at setup\(\): got .*, expected updates like the params"):
            ts.setup(rule, {"w": jnp.ones(shape), "m": jnp.ones((2, 3))})


def test_an_update_is_traced_once_for_rules_that_differ_in_numbers():
    traced = []

    def factory(learning_rate):
        update = lambda updates, state, params=None: (traced.append(1) or updates, state)
        return optax.chain(optax.GradientTransformation(optax.init_empty_state, update), optax.sgd(learning_rate))

    counts = []
    for rate in (1e-3, 2e-3, 3e-3):
        ts.setup(rules.chain(rules.clip_by_global_norm(rate), rules.live(factory)(rate)), {"w": jnp.ones(2)})
        counts.append(len(traced))
    assert counts[0] and counts == counts[:1] * 3
    for _ in range(2):  # what is refused once is refused again
        with pytest.raises(RuleError, match="rule sm3 at setup"):
            ts.setup(rules.sm3(1e-3), {"w": jnp.float32(1)})


def test_flax_writes_and_reads_the_optimizer_state_of_a_training_state():
    state = ts.setup(rules.adam(1e-3), {"w": jnp.ones(2)})
    state, _ = ts.update(state, {"w": jnp.ones(2)})
    text = flax.serialization.to_bytes(state.opt_state)
    blank = jax.tree.map(jnp.zeros_like, state.opt_state)
    assert_trees_close(flax.serialization.from_bytes(blank, text), state.opt_state, rtol=0, atol=0)
