"""The equivalences in one table: each row is a run (setup, step, data), each column another way to the same numbers.

The fast tests have a row for each pair of a setup, a step, data and an equivalence, but for one setup; the slow tests
have every row.
`python -m tests.test_equivalences` prints how many rows each equivalence has.
"""

import collections
import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests import toys
from tests.helpers import assert_trees_close, assert_trees_equal, covering_array
from tsunax.reproduce import fingerprint
from tsunax.timelines import timeline

pytestmark = pytest.mark.filterwarnings("ignore:step .* was rejected:RuntimeWarning")
GOAL = 10  # past the end of an epoch
RULE = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adam(optax.linear_schedule(0.05, 0.0, 40)))
PLAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.05, 0.0, 40)))

SETUPS = {  # (what setup gets, what is done to the state)
    "plain": ({}, None),
    "average": ({"ema": 0.9, "spikes": True}, None),
    "bfloat16": ({"precision": "bfloat16"}, None),
    "bfloat16 params": ({"precision": ts.precision.Policy("bfloat16", "bfloat16")}, None),
    "float16": ({"precision": "float16"}, None),
    "part": ({"trainable": "out/**"}, None),
    "window": ({"every": 2}, None),
    "freeze": ({"freezable": True}, lambda state: ts.freeze(state, "out/**")),
}
NAMED = {"loss_fn": toys.named_sequence_loss, "model_state": {"rows": jnp.zeros(())}}
STEPS = {
    "plain": {"loss_fn": toys.sequence_loss},
    "remat": {"loss_fn": toys.sequence_loss, "remat": True, "on_nonfinite": "raise"},
    "named": NAMED,
    "micro-batches": {**NAMED, "accumulate": 2},
    "rejected": {"loss_fn": toys.sequence_loss, "is_bad": True},
    "dropped": {**NAMED, "accumulate": 2, "on_nonfinite": "drop", "is_bad": True},
    "images": {"loss_fn": toys.image_loss, "model_state": toys.STATISTICS},
}
DATA = {
    "batches": lambda x: ts.batches(x, 8, shuffle=True, seed=1, drop_remainder=True),
    "short": lambda x: ts.batches(x, 8, shuffle=True, seed=1),
    "list": lambda x: [*ts.batches(x, 8, drop_remainder=True)],
    "resident": lambda x: ts.batches(x, 8, shuffle=True, seed=1, drop_remainder=True, device=True),
    "prefetch": lambda x: ts.prefetch(ts.batches(x, 8, shuffle=True, seed=1, drop_remainder=True)),
}


@functools.cache
def step_of(name, **changes):
    options = {name: x for name, x in STEPS[name].items() if name not in ("model_state", "is_bad")} | changes
    return ts.train_step(options.pop("loss_fn"), donate=False, **options)


@dataclasses.dataclass(frozen=True)
class Row:
    """A run, made anew by each call of its methods."""

    setup: str
    step: str
    data: str

    def make(self, key=3, rule=RULE, **changes):
        options, edit = SETUPS[self.setup]
        options = {**options, **changes}
        if every := options.pop("every", 0):
            rule = ts.rules.accumulate(rule, every)
        if options.pop("spikes", False):
            rule = ts.rules.chain(ts.rules.reject_spikes(warmup=3), rule)
        params = toys.image_params() if self.step == "images" else toys.sequence_params()
        state = ts.setup(rule, params, key=key, model_state=STEPS[self.step].get("model_state"), **options)
        return state if edit is None else edit(state)

    def batches(self):
        x = toys.IMAGES if self.step == "images" else toys.SEQUENCES
        if "is_bad" in STEPS[self.step]:
            x = {**x, "x": toys.with_a_bad_row(x["x"])}
        return DATA[self.data](x)

    def fit(self, state=None, data=None, goal=GOAL, **options):
        state, data = self.make() if state is None else state, self.batches() if data is None else data
        options = {"log_every": 1, "max_bad": 100, "progress": False, **options}
        return ts.fit(step_of(self.step), state, data, steps=goal, **options)

    @functools.cache  # noqa: B019, few rows
    def whole(self):
        """The run that others are compared with: one step a call."""
        return self.fit(steps_per_call=1)

    def assert_close(self, state, expected, is_coarse=False):
        rtol = 2e-2 if "16" in self.setup else 2e-4 if is_coarse else 1e-5
        for part in (lambda state: state, lambda state: ts.averaged(state) if state.average else state):
            assert_trees_close(part(state).params, part(expected).params, rtol=rtol, atol=rtol)
        assert int(state.step) == int(expected.step)


def calls(row, folder):
    """Other calls, with an event after every second step."""
    every = ts.callbacks.every(2, lambda run: None)
    state, history = row.fit(steps_per_call=5, callbacks=every)
    assert_trees_equal(state, row.whole()[0])
    np.testing.assert_array_equal(history["loss"], row.whole()[1]["loss"])


def resumed(row, folder):
    """Runs that are cut in the middle of an epoch: the next one has what the last one saved, or its state and data."""
    state, data, losses = row.make(), row.batches(), row.whole()[1]["loss"]
    for goal in (3, 5, GOAL):
        saved, history = row.fit(goal=goal, checkpoint=folder / "run", steps_per_call=4)
        if row.data != "list":  # which begins at its beginning
            state, _ = row.fit(state, data, goal)
    assert_trees_equal(saved, row.whole()[0])
    assert row.data == "list" or fingerprint(state) == fingerprint(saved)
    np.testing.assert_array_equal(history["loss"], losses)


def loop(row, folder):
    """The loop that everyone writes."""
    expected, history = row.whole()
    state, infos = by_hand(row, row.make(), int(expected.calls))
    row.assert_close(state, expected)
    applied = [info for info in infos if info.applied]
    rtol = 4e-3 if "16" in row.setup else 1e-5
    np.testing.assert_allclose(history["loss"], [info.loss for info in applied], rtol=rtol)
    rates = [info.hyperparams["learning_rate"] for info in applied]
    np.testing.assert_allclose(history["learning_rate"], rates, rtol=1e-6)


def by_hand(row, state, calls, step=None):
    data, step, infos = row.batches(), step or step_of(row.step), []
    no_mask = {"mask": None} if "mask" in inspect.signature(step.loss_fn).parameters else {}
    for batch in itertools.islice(itertools.chain.from_iterable(iter(data) for _ in range(calls)), calls):
        state, info = step(state, batch, **no_mask)  # which is as if none was given
        infos.append(jax.device_get(info))
    return state, infos


def line(row, folder):
    """at(k) is the state after step k, and a branch with nothing changed is its parent."""
    prints = {}
    note = ts.callbacks.every(1, lambda run: prints.update({run.step: fingerprint(run.state)}))
    with ts.Checkpoints(folder / "run", every=4, keep_last=None) as checkpoints:
        state, _ = row.fit(checkpoint=checkpoints, callbacks=note)
    found = timeline(folder / "run", step_of(row.step), row.make, row.batches())
    assert {k: fingerprint(found.at(k)) for k in prints} == prints and len(prints) == GOAL
    found.branch(5, folder / "branch")
    assert_trees_equal(row.fit(checkpoint=folder / "branch", resume="must")[0], state)


def devices(row, folder):
    mesh = ts.mesh(fsdp=2, devices=jax.devices()[:2])
    row.assert_close(row.fit(ts.shard(row.make(), mesh))[0], row.whole()[0], is_coarse=True)


def member(row, folder):
    runs = ts.population(lambda key: row.make(key), 2, key=0)
    one, runs = (by_hand(row, state, GOAL)[0] for state in (ts.populations.member(runs, 1), runs))
    row.assert_close(ts.populations.member(runs, 1), one, is_coarse=True)


def micro_batches(row, folder):
    """The whole batch, under a loss function that names nothing; without noise, because each micro-batch has a key."""
    loss_fn = {"loss_fn": toys.quiet_sequence_loss} if "model_state" in STEPS[row.step] else {}
    scale = {"loss_scale": 128.0} if row.setup == "float16" else {}  # a search for it would reject other calls
    state, _ = by_hand(row, row.make(**scale), GOAL, step_of(row.step, accumulate=4, **loss_fn))
    row.assert_close(state, by_hand(row, row.make(**scale), GOAL, step_of("plain"))[0])
    if loss_fn:
        assert float(state.model_state["rows"]) == (76 if row.data == "short" else 80)


def closed_over(row, folder):
    """A frozen leaf is as one that the loss function closes over."""
    state, _ = row.fit(ts.freeze(row.make(), "hidden/**"))
    row.assert_close(state, row.fit(row.make(trainable="out/**"))[0])


def live(row, folder):
    """A live rule is that of optax."""
    row.assert_close(row.fit(row.make(rule=PLAIN))[0], row.whole()[0])


EQUIVALENCES = {f.__name__: f for f in (calls, resumed, loop, line, devices, member, micro_batches, closed_over, live)}


def is_possible(setup, step, data, equivalence):
    if equivalence == "devices":
        return step != "remat"  # a mesh needs another policy than "raise"
    if equivalence == "micro_batches":
        return step not in ("dropped", "images")  # the former drops other rows, the latter sees them together
    return equivalence != "closed_over" or setup not in ("part", "freeze")


FACTORS = [*SETUPS], [*STEPS], [*DATA], [*EQUIVALENCES]
ALL = [row for row in itertools.product(*FACTORS) if is_possible(*row)]
PAIRS = covering_array(*FACTORS, is_possible=lambda *row: "bfloat16" not in row and is_possible(*row))


@pytest.mark.parametrize(
    ("setup", "step", "data", "equivalence"),
    [*PAIRS, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALL if row not in PAIRS)],
)
def test_an_equivalence(tmp_path, setup, step, data, equivalence):
    EQUIVALENCES[equivalence](Row(setup, step, data), tmp_path)


if __name__ == "__main__":
    print(len(ALL), "equivalences,", len(PAIRS), "of them fast:")
    print(*(f"{name} {n}" for name, n in collections.Counter(row[-1] for row in ALL).items()), sep=", ")
