"""Several states as one run, and runs whose data come from the state."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal, count_compiles
from tsunax.errors import LossError, NonFiniteError, StateError, WrongTypeError

X = (np.random.default_rng(0).normal(size=(64, 3)) + 2).astype(np.float32)
RATE = ts.schedules.cosine_decay_schedule(0.02, 100)


def fake_of(params, x, key):
    noise = jax.random.normal(key, (x.shape[0], 2))
    return jnp.tanh(noise @ params["w"]) @ params["v"]


def critic_loss(params, x, key, generator):
    score = lambda x: jnp.tanh(x @ params["w"]) @ params["v"]
    real, fake = score(x), score(fake_of(generator, x, key))
    return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))


def generator_loss(params, x, key, critic):
    score = jnp.tanh(fake_of(params, x, key) @ critic["w"]) @ critic["v"]
    return jnp.mean(jax.nn.softplus(-score))


critic_step, generator_step = ts.train_step(critic_loss), ts.train_step(generator_loss)


def step_of(all_or_none=False):
    def step(run, x):
        c, c_info = critic_step(run.critic, x, generator=run.generator.params)
        g, g_info = generator_step(run.generator, x, critic=c.params)
        run = run.advance(generator=g, critic=c, all_or_none=all_or_none)
        return run, {"generator": g_info, "critic": c_info}

    return step


step, whole_step = step_of(), step_of(all_or_none=True)


def params(key, n_in, n_out):
    w, v = jax.random.split(jax.random.key(key))
    return {"w": jax.random.normal(w, (n_in, 8)), "v": jax.random.normal(v, (8, n_out))}


def gan(**options):
    g = ts.setup(ts.rules.adam(RATE), params(1, 2, 3), key=3)
    c = ts.setup(ts.rules.sgd(0.1, momentum=0.9), params(2, 3, 1), key=4)
    return ts.States(generator=g, critic=c, **options)


def data(x=X):
    return ts.batches(x, 16, shuffle=True, seed=1)


def fits(run, steps=12, x=X, step=step, **options):
    return ts.fit(step, run, data(x), steps=steps, progress=False, **options)


def poisoned(*rows):
    """In the order of the rows: NaN in the batch of four that a row lies in."""
    x = X.copy()
    x[list(rows)] = np.nan
    return ts.batches(x, 16)


# --- the value


def test_it_is_a_pytree_with_readable_paths_that_prints_copies_and_pickles():
    run = gan(carry={"env": jnp.ones(3)})
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(run)]
    assert {".clock", ".carry['env']", ".generator.params['w']", ".critic.params['v']"} <= {*names}
    assert str(run).startswith(
        "States(step=0, calls=0)\n  generator: TrainState(step=0, calls=0)\n    v  float32[8, 3]"
    )
    assert "carry: float32[3]" in str(run) and "critic" in dir(run) and "advance" in dir(run)
    for same in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run), jax.tree.map(lambda x: x, run)):
        assert jax.tree.structure(same) == jax.tree.structure(run)
        assert_trees_equal(same.critic.params, run.critic.params)
    assert jax.jit(lambda run: run)(run).members.keys() == run.members.keys() == {"generator": 0, "critic": 0}.keys()


def test_a_key_that_two_members_share_is_copied_so_that_both_can_be_donated():
    key = jax.random.key(0)
    state = lambda: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, key=key)
    run = jax.jit(lambda run: run, donate_argnums=0)(ts.States(a=state(), b=state()))
    assert int(run.step) == 0


# --- the bits


def test_a_gan_has_the_bits_of_plain_optax_with_two_optimizers():
    txs = {"generator": optax.adam(optax.cosine_decay_schedule(0.02, 100)), "critic": optax.sgd(0.1, momentum=0.9)}
    start = {"generator": params(1, 2, 3), "critic": params(2, 3, 1)}
    keys = {"generator": jax.random.key(3), "critic": jax.random.key(4)}

    def move(name, params, states, grads):
        updates, state = txs[name].update(grads, states[name], params[name])
        return {**params, name: optax.apply_updates(params[name], updates)}, {**states, name: state}

    @jax.jit
    def plain(params, states, i, x):
        key = {name: jax.random.fold_in(key, i) for name, key in keys.items()}
        grads = jax.grad(critic_loss)(params["critic"], x, key["critic"], params["generator"])
        params, states = move("critic", params, states, grads)
        grads = jax.grad(generator_loss)(params["generator"], x, key["generator"], params["critic"])
        return move("generator", params, states, grads)

    states = {name: tx.init(start[name]) for name, tx in txs.items()}
    run, compiled = gan(), jax.jit(step, donate_argnums=0)
    for i, x in enumerate(X.reshape(4, 16, 3)):
        start, states = plain(start, states, i, x)
        run, info = compiled(run, x)
    assert_trees_equal(run.generator.params, start["generator"])
    assert_trees_equal(run.critic.params, start["critic"])
    assert int(run.step) == int(run.calls) == 4 and info["critic"].applied


def test_fit_is_the_loop_whatever_the_steps_of_a_call():
    given = [*X.reshape(4, 16, 3)]
    run, infos = ts.loop.run_steps(step, gan(), np.stack(given * 3))
    fit = lambda k: ts.fit(step, gan(), given, steps=12, progress=False, steps_per_call=k)[0]
    for fitted in (fit(1), fit(5), [*ts.loop.iterate(step, gan(), given, steps=12, steps_per_call=5)][-1][0]):
        assert_trees_equal(fitted, run)
    close = lambda a, b: np.testing.assert_allclose(a, b, 2e-5)
    jax.tree.map(close, fit(None).critic.params, run.critic.params)  # the step as it is
    assert infos["critic"].loss.shape == (12,) and infos["generator"].hyperparams["learning_rate"].shape == (12,)


def test_a_loop_of_ones_own_works_outside_of_jit_where_members_donate():
    run = gan()
    for x in X.reshape(4, 16, 3):
        run, _ = step(run, x)
    assert int(run.step) == 4 == int(run.critic.step)


def test_a_run_that_was_stopped_and_resumed_has_the_bits_of_one_that_was_not(tmp_path):
    run, history = fits(gan(carry=jnp.arange(3.0)), 12)
    with ts.Checkpoints(tmp_path / "a", every=3) as checkpoints:
        fits(gan(carry=jnp.arange(3.0)), 7, checkpoint=checkpoints)
        assert checkpoints.latest() == 7
    again, known = fits(gan(carry=jnp.zeros(3)), 12, checkpoint=tmp_path / "a")
    assert_trees_equal(again, run)
    np.testing.assert_array_equal(known.last("critic/loss"), history.last("critic/loss"))
    with ts.Checkpoints(tmp_path / "a", read_only=True) as checkpoints:
        names = {leaf.name for leaf in checkpoints.home.manifest(12).leaves}
        assert {"generator/params/w", "critic/opt_state/0/trace/w", "carry", "clock"} <= names
        assert checkpoints.restore(gan(carry=jnp.zeros(3)), partial="w").step == 12


@pytest.mark.medium
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    fits(gan(), 8, checkpoint=ts.Checkpoints(tmp_path, every=4))
    file = next((tmp_path / "8" / "arrays").iterdir())
    file.write_bytes(file.read_bytes()[:-9] + b"\0\1\2\3\4\5\6\7\x08")
    with ts.Checkpoints(tmp_path, read_only=True) as checkpoints, pytest.warns(UserWarning, match="skipped"):
        assert checkpoints.restore(gan()).step == 4


def test_a_run_in_hand_that_is_further_than_its_checkpoint_goes_on(tmp_path):
    run, _ = fits(gan(), 4, checkpoint=tmp_path)
    run, _ = fits(run, 6)
    with pytest.warns(UserWarning, match="the state given goes on"):
        run, _ = fits(run, 8, checkpoint=tmp_path)
    assert int(run.step) == 8


def test_sharded_over_devices_it_is_as_on_one():
    wide = lambda: ts.States(
        generator=ts.setup(ts.rules.adam(0.02), params(1, 2, 3), key=3),
        critic=ts.setup(ts.rules.adam(0.01), {"w": jnp.ones((3, 512)) / 9, "v": jnp.ones((512, 4)) / 9}, key=4),
        carry={"buffer": jnp.zeros((64, 32))},
    )
    one, _ = fits(wide(), 8)
    mesh = ts.mesh(fsdp=2)
    rules = {"carry/**": jax.sharding.PartitionSpec("data"), "generator/**": None}
    many = ts.shard(wide(), mesh, rules)
    assert many.carry["buffer"].sharding.spec[0] == "data"
    assert many.critic.opt_state[0].mu["v"].sharding.spec == many.critic.params["v"].sharding.spec
    assert "fsdp" in str(many.critic.params["v"].sharding.spec)
    many, _ = fits(many, 8)
    close = lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6)
    jax.tree.map(close, many.critic.params, one.critic.params)
    jax.tree.map(close, many.generator.params, one.generator.params)
    assert int(many.step) == 8


def test_a_member_of_a_population_of_runs_is_its_single_run():
    def make(key, rate):
        g = ts.setup(ts.rules.adam(rate), params(1, 2, 3), key=key)
        return ts.States(generator=g, critic=ts.setup(ts.rules.sgd(0.1), params(2, 3, 1), key=4), carry=key)

    runs = ts.population(make, 3, key=0, rate=np.array([0.01, 0.02, 0.03]))
    many, history = fits(runs, 8)
    one, single = fits(ts.populations.member(runs, 1), 8)
    close = lambda a, b: np.testing.assert_allclose(a[1], b, 2e-5, 2e-6)
    jax.tree.map(close, many.generator.params, one.generator.params)
    np.testing.assert_allclose(history.last("critic/loss/1"), single.last("critic/loss"), 1e-5)
    assert many.step.tolist() == [8, 8, 8] and "rejected/2" in history.names
    assert ts.hyperparams(many)["generator/learning_rate"][2] == pytest.approx(0.03)
    assert ts.States(a=runs.generator, b=runs.critic).clock.shape == (3, 4)  # of populations: one of runs


# --- from outside


def test_adjust_freeze_and_thaw_begin_with_the_member_and_compile_nothing():
    run = ts.thaw(ts.freeze(gan(), "critic/w"))
    run, _ = ts.loop.run_steps(step, run, X.reshape(4, 16, 3))
    jax.block_until_ready(run)
    ts.adjust(run, "critic", learning_rate=0.3)
    with count_compiles() as counts:
        run = ts.freeze(ts.adjust(run, "critic", learning_rate=0.2), "critic/w")
        before = run.critic.params["w"] + 0
        run, _ = ts.loop.run_steps(step, run, X.reshape(4, 16, 3))
    assert "train_steps" not in counts.traced
    assert ts.hyperparams(run)["critic/learning_rate"] == 0.2
    assert_trees_equal(run.critic.params["w"], before)
    run = ts.adjust(gan(), "critic/v", learning_rate=0.5)
    assert ts.hyperparams(run)["critic/learning_rate@v"] == 0.5
    assert ts.hyperparams(ts.adjust(run, **ts.hyperparams(run))) == ts.hyperparams(run)


@pytest.mark.medium
def test_a_callback_may_adjust_a_member_or_replace_it():
    def change(run):
        state = ts.adjust(run.state, "critic", learning_rate=0.05)
        return state.replace(generator=ts.freeze(state.generator, "w"))

    _, history = fits(gan(), 6, callbacks=ts.callbacks.every(3, change), log_every=1)
    assert history["critic/learning_rate"].tolist() == [0.1] * 3 + [0.05] * 3
    assert history.names.count("generator/learning_rate") == 1
    np.testing.assert_allclose(history["generator/learning_rate"], [RATE(i) for i in range(6)], 1e-6)
    wrong = ts.callbacks.every(3, lambda run: run.state.replace(carry=jnp.ones(2)))
    with pytest.raises(StateError, match="carry"):
        fits(gan(), 6, callbacks=wrong)


def test_describe_find_batch_size_migrate_and_replay_take_a_run():
    state = lambda: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)})
    pair = lambda: ts.States(a=state(), b=state())
    log, square = (ts.train_step(lambda p, x, f=f: jnp.mean(f(x @ p["w"]))) for f in (jnp.log, jnp.square))

    def step(run, x):
        (a, a_info), (b, b_info) = log(run.a, x), square(run.b, x)
        return run.advance(a=a, b=b), {"a": a_info, "b": b_info}

    about = ts.describe(step, pair(), X[:16])
    assert about.donated == about.aliased > 0 and about.flops > 0
    assert [leaf.path for leaf in about.leaves] == ["a/w", "b/w"]
    size, _ = ts.find_batch_size(step, pair(), X[:1], memory=60 << 20, max_size=64)
    assert size == 64
    b, report = ts.migrate(pair().b, ts.rules.adam(0.1), ema=0.9)
    run = pair().replace(b=b)
    assert "average of w" in report.new and run.a.average is None and int(run.step) == 0
    assert_trees_equal(run.b.average.params, run.b.params)
    report = ts.replay(step, pair(), -X[:16])
    assert (report.result, report.primitive) == ("info['a'].loss", "log") and "jnp.log" in report.code
    assert ts.replay(step, pair(), X[:16]).result == ""


# --- verdicts


def test_the_verdict_of_a_member_is_its_own():
    bad = X[:16] * np.float32(np.nan)
    start = gan()
    run, info = jax.jit(step)(start, bad)
    assert not info["critic"].applied and info["generator"].applied
    assert_trees_equal(run.critic.params, start.critic.params)
    assert (run.generator.params["w"] != start.generator.params["w"]).any()
    counts = [int(x) for x in (run.step, run.calls, run.rejected, run.rejected_in_a_row)]
    assert counts == [0, 1, 1, 1] and [int(run.generator.step), int(run.critic.step)] == [1, 0]
    run, _ = jax.jit(step)(run, X[:16])
    assert [int(x) for x in (run.step, run.calls, run.rejected, run.rejected_in_a_row)] == [1, 2, 1, 0]


def test_all_or_none_rejects_every_update_of_a_call():
    bad = X[:16] * np.float32(np.nan)
    start = gan(carry=jnp.zeros(()))

    def counted(run, x):
        run, info = whole_step(run, x)
        return run.replace(carry=run.carry + 1), info

    run, _ = jax.jit(counted)(start, bad)
    for name in ("params", "opt_state"):
        assert_trees_equal(getattr(run.generator, name), getattr(start.generator, name))
    for member in (run.generator, run.critic):
        assert [int(x) for x in (member.step, member.calls, member.rejected, member.rejected_in_a_row)] == [0, 1, 1, 1]
    assert run.carry == 1
    run, _ = jax.jit(counted)(run, X[:16])
    assert [int(run.step), int(run.generator.step), int(run.critic.step), int(run.rejected)] == [1, 1, 1, 1]
    assert int(run.generator.rejected_in_a_row) == 0


@pytest.mark.parametrize("steps_per_call", ["auto", None])
def test_fit_counts_warns_of_and_gives_up_rejected_calls(steps_per_call):
    def fit(max_bad, *rows):
        return ts.fit(
            step, gan(), poisoned(*rows), steps=7, progress=False, log_every=1, max_bad=max_bad,
            steps_per_call=steps_per_call,
        )  # fmt: skip

    with pytest.warns(RuntimeWarning, match="step 1 of epoch 0 was rejected .loss nan.: critic: loss: got nan"):
        run, history = fit(10, 20)
    assert [int(run.step), int(run.calls), int(run.generator.step), int(run.critic.step)] == [7, 9, 9, 7]
    assert history["step"].tolist() == [1, 2, 3, 4, 5, 6, 7] and history["rejected"].tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert history["critic/rejected"].tolist() == [0, 1, 1, 1, 2, 2, 2] and history.last("generator/rejected") == 0
    with (
        pytest.raises(NonFiniteError, match="critic: loss: got nan; the last of 2 in a row") as caught,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        fit(2, 20, 40)
    state = caught.value.state
    if steps_per_call is not None:  # there the host learns of it late
        assert [int(state.calls), int(state.rejected_in_a_row), int(state.critic.step)] == [3, 2, 1]


@pytest.mark.medium
def test_a_cadence_is_a_scan_of_ones_own():
    def cadenced(run, x):
        def critic(c, x):
            c, info = critic_step(c, x, generator=run.generator.params)
            return c, info

        c, infos = jax.lax.scan(critic, run.critic, x.reshape(4, 4, 3))
        g, g_info = generator_step(run.generator, x, critic=c.params)
        last = jax.tree.map(lambda x: x[-1], infos)
        return run.advance(generator=g, critic=c), {"generator": g_info, "critic": last}

    run, history = fits(gan(), 6, step=cadenced)
    assert [int(run.step), int(run.generator.step), int(run.critic.step)] == [6, 6, 24]
    assert history.last("critic/loss") > 0
    x = X[:16].copy()
    x[0] = np.nan  # in the first of four: the last one was applied, and the call was rejected
    run, info = jax.jit(cadenced)(gan(), x)
    assert [int(run.critic.step), int(run.rejected)] == [3, 1] and info["critic"].applied


def test_a_loss_scale_on_its_way_down_is_no_failure():
    critic = ts.setup(ts.rules.sgd(0.01), params(2, 3, 1), key=4, precision="float16")
    run = ts.States(generator=gan().generator, critic=critic)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run, _ = fits(run, 6, max_bad=3)
    assert int(run.step) == 6


# --- bad inputs

STATE = lambda: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
RUNS = lambda: ts.population(lambda key: STATE(), 2)
twice = lambda run, x: (run.advance().advance(), {})
REFUSED = {
    "no state": (lambda: ts.States(a=jnp.ones(2)), WrongTypeError, "'a' at States: got float32[2]"),
    "a pair": (lambda: ts.States(a=(STATE(), 1)), WrongTypeError, "got tuple of 2, expected a TrainState"),
    "two sizes": (lambda: ts.States(a=STATE(), b=RUNS()), StateError, "got a population of 2 and one state, expected"),
    "another size": (lambda: ts.States(a=STATE()).replace(a=RUNS()), StateError, "got a population of 2 and one state"),
    "a slash": (lambda: ts.States(**{"a/b": STATE()}), StateError, "got 'a/b', expected a name that can be"),
    "a taken name": (lambda: ts.States(step=STATE()), StateError, "got 'step'"),
    "unknown": (lambda: gan().critc, AttributeError, "Did you mean 'critic'?"),
    "assigned": (lambda: setattr(gan(), "critic", 1), AttributeError, "run.replace(critic=...)"),
    "replaced": (lambda: gan().replace(critc=STATE()), StateError, "expected one of generator, critic, carry"),
    "advanced": (lambda: gan().advance(critic=3), WrongTypeError, "member 'critic' at States: got 3 (int)"),
    "frozen in a step": (
        lambda: gan().advance(critic=ts.freeze(gan().critic, "**"), all_or_none=True),
        StateError,
        "freeze, adjust or migrate before the step",
    ),
    "cut in a step": (
        lambda: gan().advance(critic=ts.adjust(gan().critic, "w"), all_or_none=True),
        StateError,
        "member at critic",
    ),
    "adjusted": (lambda: ts.adjust(gan(), learning_rate=0.1), StateError, "expected one of generator, critic"),
    "of nobody": (lambda: ts.adjust(gan(), "head", learning_rate=0.1), StateError, "expected one of generator, critic"),
    "frozen": (lambda: ts.freeze(gan(), ["w"]), StateError, "Give a member, or 'member/pattern'."),
    "averaged": (lambda: ts.averaged(gan()), WrongTypeError, "expected a TrainState of tsunax"),
    "called": (lambda: critic_step(gan(), X), WrongTypeError, "expected a TrainState of tsunax"),
    "described": (lambda: ts.describe(critic_step, gan(), X), WrongTypeError, "expected a TrainState of tsunax"),
    "not counted": (lambda: fits(gan(), step=lambda run, x: (run, {})), StateError, "return run.advance(...), info"),
    "counted twice": (lambda: fits(gan(), step=twice), StateError, "one run.advance() a call"),
    "a member": (lambda: fits(gan(), step=lambda run, x: (run.critic, {})), StateError, "expected States"),
    "epochs of nothing": (lambda: ts.fit(own_draw, STATE(), epochs=3), WrongTypeError, "and steps= without data"),
    "no goal": (lambda: ts.fit(own_draw, STATE()), WrongTypeError, "expected one of them, and steps= without data"),
    "a batch for none": (lambda: own_draw(drawing(), X), LossError, "got a batch, expected none"),
}  # fmt: skip


def test_one_state_under_two_names_is_two():
    state = STATE()
    run = ts.States(a=state, b=state)
    assert run.a.params["w"] is not run.b.params["w"]
    assert_trees_equal(run.a, run.b)


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(name):
    call, kind, text = REFUSED[name]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value), str(caught.value)


# --- data from the state


def draws(params, key):
    return jnp.mean((params["w"] - jax.random.normal(key, (2,))) ** 2)


own_draw = ts.train_step(draws)


def drawing(**options):
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, key=0, **options)


@pytest.mark.medium
def test_a_loss_that_takes_a_key_and_no_batch_needs_no_data():
    state = drawing()
    for _ in range(20):
        state, info = own_draw(state)
    plain = {"w": jnp.ones(2)}
    grad = jax.jit(jax.grad(draws))
    for i in range(20):
        plain = {"w": plain["w"] - 0.1 * grad(plain, jax.random.fold_in(jax.random.key(0), i))["w"]}
    np.testing.assert_allclose(state.params["w"], plain["w"], 1e-6)
    keyword = ts.train_step(lambda params, *, key: draws(params, key))
    fitted, history = ts.fit(keyword, drawing(), steps=20, progress=False)
    assert_trees_equal(fitted.params, ts.fit(own_draw, drawing(), steps=20, progress=False, steps_per_call=3)[0].params)
    np.testing.assert_allclose(fitted.params["w"], plain["w"], 1e-6)
    assert history["step"].tolist() == [1, 10, 20]
    # n draws of a call
    _, info = ts.train_step(draws, accumulate=4)(drawing())
    keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), i) for i in range(4)]
    np.testing.assert_allclose(info.loss, np.mean([draws({"w": jnp.ones(2)}, key) for key in keys]), 1e-6)


def walked(run):
    """A bandit that walks: the state of the world moves with the step."""
    noise = jax.random.normal(jax.random.fold_in(run.agent.key, run.agent.calls), run.carry["place"].shape)
    place = 0.9 * run.carry["place"] + noise
    agent, info = follow(run.agent, place)
    seen = {"place": place, "buffer": jnp.roll(run.carry["buffer"], 1, 0).at[0].set(place)}
    return run.advance(agent=agent, carry=seen), info


follow = ts.train_step(lambda params, place: jnp.mean((place - params["w"][None]) ** 2))


def walking():
    return ts.States(agent=drawing(), carry={"place": jnp.ones((4, 2)), "buffer": jnp.zeros((5, 4, 2))})


@pytest.mark.medium
def test_what_lives_beside_the_state_is_carried_saved_and_resumed(tmp_path):
    run, history = ts.fit(walked, walking(), steps=30, progress=False)
    one = walking()
    for _ in range(30):
        one, _ = jax.jit(walked)(one)
    np.testing.assert_allclose(run.carry["buffer"], one.carry["buffer"], 1e-5)
    assert int(run.step) == 30 and history["loss"][-1] > 0 and (run.carry["buffer"] != 0).all()
    for k in (1, 7, 30):
        assert_trees_equal(ts.fit(walked, walking(), steps=30, progress=False, steps_per_call=k)[0], run)
    both = lambda run, nothing: walked(run)
    assert_trees_equal(ts.fit(both, walking(), steps=30, progress=False)[0], run)
    seen = []
    checkpoints = ts.Checkpoints(tmp_path, every=5)
    ts.fit(walked, walking(), steps=17, progress=False, checkpoint=checkpoints)
    again, _ = ts.fit(
        walked, walking(), steps=30, progress=False, checkpoint=checkpoints,
        evaluate=lambda run: seen.append(int(run.step)) or {"far": jnp.max(run.carry["place"])}, evaluate_every=10,
    )  # fmt: skip
    assert_trees_equal(again, run)
    assert seen == [20, 30] and checkpoints.steps() == [25, 30]
    states = [state for state, _ in ts.loop.iterate(walked, walking(), steps=30, steps_per_call=10)]
    assert_trees_equal(states[-1], run)


@pytest.mark.medium
def test_without_data_it_is_sharded_mapped_logged_and_stopped():
    run = ts.shard(walking(), ts.mesh(devices=jax.devices()[:2]), {"carry/place": ("data",)})
    single, _ = ts.fit(walked, walking(), steps=6, progress=False)
    run, _ = ts.fit(walked, run, steps=6, progress=False)
    np.testing.assert_allclose(run.agent.params["w"], single.agent.params["w"], 1e-5)
    runs = ts.population(lambda key: ts.States(agent=drawing(), carry=walking().carry), 3, key=0)
    runs, history = ts.fit(walked, runs, steps=6, progress=False)
    np.testing.assert_allclose(runs.agent.params["w"][2], single.agent.params["w"], 1e-5)
    assert "loss/2" in history.names
    rows = []
    stop = ts.callbacks.every(4, lambda run: run.stop("enough"))
    run, history = ts.fit(
        walked,
        walking(),
        steps=100,
        progress=False,
        callbacks=stop,
        log_every=2,
        logger=lambda row, step: rows.append(step),
    )
    assert int(run.step) == 4 and rows == [1, 2, 4]
    assert ts.fit(walked, walking(), steps=100, dry_run=True)[0].calls == 2


@pytest.mark.medium
def test_replicas_that_meet_after_each_step_are_data_parallelism():
    """The page's DiLoCo with H = 1 and SGD; with more steps apart, against a loop of plain optax."""
    rows, start = X[:48].reshape(2, 6, 2, 2, 3), {"w": jnp.array([1.0, -1.0, 0.5])}
    loss_fn = lambda params, x: jnp.mean((x @ params["w"] - x[:, 0] * x[:, 1]) ** 2)
    inner = ts.train_step(loss_fn)

    def meet(run, batch):
        everywhere = lambda p: jnp.broadcast_to(p, (2, *p.shape))
        workers = run.carry.replace(params=jax.tree.map(everywhere, run.model.params))
        train = lambda workers, rows: inner(workers, ts.populations.each(rows))
        workers, infos = jax.lax.scan(train, workers, batch)
        moved = jax.tree.map(lambda old, new: old - new.mean(0), run.model.params, workers.params)
        model, info = ts.update(run.model, moved, loss=jnp.mean(infos.loss))
        return run.advance(model=model, carry=workers), info

    def trained(rule, outer, rows):
        workers = ts.population(lambda key: ts.setup(rule, start), 2)
        run = ts.States(model=ts.setup(outer, start), carry=workers)
        return ts.fit(meet, run, list(rows), epochs=1, progress=False)[0].model.params["w"]

    state = ts.setup(ts.rules.sgd(0.02), start)
    for x in rows.reshape(12, 4, 3):  # the rows of both workers
        state, _ = inner(state, x)
    met = trained(ts.rules.sgd(0.02), ts.rules.sgd(1.0), rows.reshape(12, 1, 2, 2, 3))
    np.testing.assert_allclose(met, state.params["w"], rtol=1e-5)

    rule, outer = optax.adam(0.01), optax.sgd(0.7, momentum=0.9, nesterov=True)
    params, outer_state, states = start, outer.init(start), [rule.init(start) for _ in range(2)]
    for call in rows:
        ends = []
        for i in range(2):
            own = params
            for x in call[:, i]:
                updates, states[i] = rule.update(jax.grad(loss_fn)(own, x), states[i])
                own = optax.apply_updates(own, updates)
            ends.append(own)
        moved = jax.tree.map(lambda old, *new: old - sum(new) / 2, params, *ends)
        updates, outer_state = outer.update(moved, outer_state)
        params = optax.apply_updates(params, updates)
    met = trained(ts.rules.adam(0.01), ts.rules.sgd(0.7, momentum=0.9, nesterov=True), rows)
    np.testing.assert_allclose(met, params["w"], rtol=1e-4)


@pytest.mark.parametrize("name", ["clock", "tally", "carry", "members"])
def test_members_have_names_of_their_own(name):
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(4)})
    with pytest.raises((StateError, WrongTypeError, TypeError)):
        ts.States(**{"a": state, name: state}) if name != "carry" else ts.States(carry=state)
