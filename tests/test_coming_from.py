"""The page for those who come from other systems: what it names exists, and what they had is tested or answered there.

`test_pages_do_what_they_print` runs its blocks. Here every feature of Flux, Optimisers.jl, ParameterSchedulers.jl,
Lightning and Ray Train that has to do with rules, clipping, hyperparameters, schedules, modes, stopping and losses is a
row, with the tests that cover it or the row of the page that says what to do instead.
"""

import ast
import dataclasses
import operator
import re
from pathlib import Path

import pytest
import tsunax as ts

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "coming-from.md").read_text(encoding="utf-8")
NAMED = {
    **{name: getattr(ts, name) for name in ("averages", "losses", "metrics", "precision", "rules", "schedules")},
    "ts": ts,
    "state": ts.TrainState,
    "info": ts.StepInfo,
    "step": ts.program.TrainStep,
}

# `test_x::test_y` is a test of tests/test_x.py, anything else the first cell of a row of the page, or a part of it.
RULES_AND_CHAINS = {
    "OptimiserChain": (
        "test_parity::test_optimisers_rule[OptimiserChain: clip, then decay] "
        "test_parity::test_optimisers_rule[OptimiserChain: decay, then clip] "
        "test_parity::test_an_empty_chain_is_the_identity"
    ),
    "WeightDecay": (
        "test_parity::test_optimisers_rule[WeightDecay] "
        "test_parity::test_decay_first_is_a_penalty_in_the_loss "
        "test_parity::test_where_decay_and_penalty_stop_agreeing "
        "test_regularize::test_decay_of_a_leaf_without_gradient"
    ),
    "SignDecay": (
        "test_parity::test_optimisers_rule[SignDecay] test_parity::test_optimisers_rule[SignDecay with WeightDecay]"
    ),
    "AdamW, coupled and not": (
        "test_parity::test_optimisers_rule[AdamW couple=true] "
        "test_parity::test_optimisers_rule[AdamW couple=false] "
        "test_parity::test_adamw_without_couple_does_not_follow_the_rate"
    ),
    "the built-in rules": ("test_parity::test_optimisers_rule test_parity::test_every_rule_of_ours_has_a_row"),
    "writing a new rule": "`init`, `apply!` of your own rule",
    "a penalty in the loss": (
        "test_regularize::test_a_penalty_in_the_loss_is_decay_first_in_the_chain "
        "test_regularize::test_where_they_stop_agreeing "
        "test_regularize::test_an_array_at_two_paths_counts_once"
    ),
}
CLIPPING = {
    "ClipGrad": ("test_parity::test_optimisers_rule[ClipGrad] test_rules::test_clip_value_clamps_and_keeps_nan"),
    "ClipNorm": (
        "test_parity::test_optimisers_rule[ClipNorm] "
        "test_parity::test_clip_per_array_and_globally[p=inf] "
        "test_rules::test_clip_array_norm_scales_each_array_to_its_p_norm "
        "test_rules::test_clip_array_norm_rejects_a_step_whose_norm_overflows_and_says_which"
    ),
    "gradient_clip_val": (
        "test_parity::test_clip_per_array_and_globally[global] "
        "test_rules::test_clipping_inside_of_groups_is_by_the_norm_of_all "
        "test_hyper::test_a_global_clip_is_over_what_is_not_frozen "
        "test_precision::test_clipping_and_norms_see_unscaled_gradients"
    ),
    "gradient_clip_algorithm": '`gradient_clip_algorithm="value"`',
    "what is not finite": "test_parity::test_a_clip_does_not_hide_what_is_not_finite",
}
HYPERPARAMETERS = {
    "adjust!(state, eta)": (
        "test_hyper::test_the_whole_tree_and_subtrees_move_by_their_rates test_hyper::test_moments_are_kept"
    ),
    "adjust!(state; names)": (
        "test_hyper::test_names_that_are_not_there_are_refused_with_those_that_are "
        "test_hyper::test_every_number_has_one_flat_name"
    ),
    "adjust! on a subtree": (
        "test_hyper::test_a_cut_subtree_has_names_of_its_own "
        "test_hyper::test_a_hundred_adjusts_compile_no_step_and_a_cut_compiles_one"
    ),
    "adjust and bias correction": "test_parity::test_adam_and_a_b1_that_changes",
    "momentum and a new rate": "test_parity::test_momentum_and_a_rate_that_changes",
    "the rate as a traced value": (
        "test_hyper::test_whatever_kind_of_number_is_given_it_is_the_same_and_compiles_nothing "
        "test_hyper::test_footgun_17_overriding_a_schedule_is_not_ignored "
        "test_rules::test_footgun_14_bfloat16_params_do_not_turn_b2_into_one"
    ),
    "a negative rate": "a negative η",
}
FROM_JULIA = "test_schedules::test_the_schedules_of_parameter_schedulers"
SCHEDULES = {
    **{name: f"{FROM_JULIA}[{name}]" for name in ("Constant", "Exp", "Poly", "Inv", "Triangle", "Sequence", "Loop")},
    **{name: f"{FROM_JULIA}[{name}]" for name in ("Interpolator", "Shifted", "ComposedSchedule", "OneCycle")},
    "Step": f"{FROM_JULIA}[Step] {FROM_JULIA}[Step, lengths]",
    "TriangleDecay2, TriangleExp": f"{FROM_JULIA}[TriangleDecay2] {FROM_JULIA}[TriangleExp]",
    "Sin, SinDecay2, SinExp": f"{FROM_JULIA}[Sin] {FROM_JULIA}[SinDecay2] {FROM_JULIA}[SinExp]",
    "CosAnneal": f"{FROM_JULIA}[CosAnneal] {FROM_JULIA}[CosAnneal, once]",
    "Shortened": "`Shortened(s, n)`",
    "reverse, symmetric": f"{FROM_JULIA}[reverse] {FROM_JULIA}[symmetric]",
    "zip and adjust!": "`for (η, epoch) in zip(s, 1:100)`, `adjust!`",
    "Stateful, next!, reset!": "`Stateful(s)`, `next!`, `reset!`",
    "Stateful(advance=plateau)": "test_step::test_reduce_on_plateau_sees_the_loss",
    "Scheduler": (
        "test_schedules::test_read_held_and_given_back test_schedules::test_a_live_schedule_trains_as_optax_does"
    ),
    "the unit of the clock": (
        "test_accumulation::test_schedules_and_averages_wait_for_the_window "
        "test_step::test_a_rejected_step_changes_nothing_but_the_tally "
        "test_schedules::test_an_epoch_schedule_driven_by_steps"
    ),
}
RUNS_MODES_AND_STOPPING = {
    "enable_reproducibility": "`enable_reproducibility(seed)`",
    "seed_everything": "`seed_everything(seed)`",
    "the sampler's epoch": "`sampler.set_epoch(epoch)`",
    "conversion to a trainable": "`to_tune_trainable`, `Tuner(...).fit()`",
    "report": "`report(metrics)`",
    "dataset shards": "`get_dataset_shard`, `iter_torch_batches`",
    "Dropout": (
        "test_modes::test_train_mode_drops_and_moves_the_statistics "
        "test_modes::test_nothing_and_everything_dropped "
        "test_modes::test_a_key_given_to_an_evaluation_is_monte_carlo_dropout"
    ),
    "trainmode!, testmode!": (
        "test_modes::test_eval_mode_drops_nothing_and_leaves_the_state_as_it_is "
        "test_modes::test_both_modes_are_compiled_once_and_do_not_disturb_each_other "
        "test_modes::test_a_single_layer_in_eval_mode"
    ),
    "patience": "`patience(predicate, n)`",
    "early_stopping": "`early_stopping(f, n)`, `plateau(f, n)`",
    "plateau": "`early_stopping(f, n)`, `plateau(f, n)`",
    "throttle": "`throttle(f, seconds)`",
    "Lightning's EarlyStopping": "`EarlyStopping(patience=3)`",
}
OF_FLUX = (
    "mse mae msle huber_loss crossentropy logitcrossentropy binarycrossentropy logitbinarycrossentropy kldivergence "
    "poisson_loss hinge_loss squared_hinge_loss dice_coeff_loss tversky_loss binary_focal_loss focal_loss "
    "siamese_contrastive_loss label_smoothing ctc_loss"
).split()
LOSSES = {name: f"test_losses::test_flux_{name}" for name in OF_FLUX}
IN_NUMPY = "test_parity::test_optimisers_rule"
OPTIMISERS = {
    **{name: f"{IN_NUMPY}[{name}]" for name in ("Descent", "Nesterov", "Adam", "AdaMax", "NAdam", "RAdam", "OAdam")},
    **{name: f"{IN_NUMPY}[{name}]" for name in ("AdaGrad", "AdaDelta", "AMSGrad", "AdaBelief", "AdamW")},
    "Momentum": f"{IN_NUMPY}[Momentum] test_parity::test_momentum_and_a_rate_that_changes",
    "RMSProp": f"{IN_NUMPY}[RMSProp] {IN_NUMPY}[RMSProp centred]",
    "Rprop": f"{IN_NUMPY}[Rprop] test_parity::test_rprop_reads_its_rate_at_setup_only",
    "Lion": f"{IN_NUMPY}[Lion] {IN_NUMPY}[Lion as Julia runs it]",
    "all": (
        "test_parity::test_the_namesake_computes_something_else "
        "test_parity::test_the_count_is_shared_and_goes_on "
        "test_parity::test_it_keeps_the_dtype_of_the_params "
        "test_parity::test_float16_wants_an_epsilon_that_it_can_hold"
    ),
}
FEATURES = [
    (title, feature, evidence)
    for title, rows in {
        "rules": RULES_AND_CHAINS,
        "clipping": CLIPPING,
        "hyperparameters": HYPERPARAMETERS,
        "schedules": SCHEDULES,
        "runs": RUNS_MODES_AND_STOPPING,
        "losses": LOSSES,
        "optimisers": OPTIMISERS,
    }.items()
    for feature, evidence in rows.items()
]


def table_rows(page: str) -> list[list[str]]:
    """The cells of every line of every table, without its head."""
    lines = [line for line in page.splitlines() if line.startswith("|") and not line.startswith(("| there", "| ---"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names_in(page: str) -> set[str]:
    """`ts.setup`, `rules.adam`, `state.step`: what the page says that we have. First cells are the others' names."""
    ours = "\n".join(line if not line.startswith("|") else line.split("|", 2)[2] for line in page.splitlines())
    found = re.findall(rf"(?<![\w./])((?:{'|'.join(NAMED)})(?:\.[A-Za-z_]\w*)+)", ours)
    return {name for name in found if not name.endswith(".md")}


def exists(name: str) -> bool:
    root, _, rest = name.partition(".")
    value = NAMED[root]
    if root in ("state", "info", "step"):  # attributes of instances; what these have is not ours to say
        first = rest.split(".")[0]
        return hasattr(value, first) or first in {f.name for f in dataclasses.fields(value)}
    try:
        operator.attrgetter(rest)(value)
    except AttributeError:
        return False
    public = getattr(value, "__all__", None)
    return public is None or rest.split(".")[0] in public


def _tests_and_texts() -> dict[str, tuple[set[str], set[str]]]:
    """Of each test file, the names of its tests, and its strings: among them the ids that it gives."""
    found = {}
    for path in TESTS.glob("test_*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        tests = {n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
        found[path.stem] = tests, {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found


FILES = _tests_and_texts()


def problem_with(evidence: str) -> str | None:
    nodes = re.findall(r"(test_\w+)::(\w+)(?:\[([^\]]*)\])?", evidence)
    if not nodes:
        rows = [row for row in table_rows(PAGE) if evidence in row[0]]
        return None if len(rows) == 1 and rows[0][1] else f"{len(rows)} rows of the page for {evidence}"
    for file, test, param in nodes:
        tests, texts = FILES.get(file, (set(), set()))
        if test not in tests or (param and param not in texts):
            return f"no test {file}::{test}[{param}]"
    return None


@pytest.mark.parametrize("evidence", [e for *_, e in FEATURES], ids=[f"{title}-{name}" for title, name, _ in FEATURES])
def test_every_feature_has_a_test_or_a_row(evidence):
    assert problem_with(evidence) is None


def test_what_is_missing_is_found():
    assert problem_with("test_parity::test_optimisers_rule[Descent] test_parity::test_optimisers_rule[Ascent]")
    assert problem_with("test_parity::test_optimizers_rule")
    assert problem_with("test_nothing::test_optimisers_rule")
    assert problem_with("`Ascent(η)`")


def test_every_loss_of_flux_has_a_row():
    assert [name for name in OF_FLUX if not any(re.search(rf"`{name}[`(]", row[0]) for row in table_rows(PAGE))] == []


def test_every_name_exists():
    names = names_in(PAGE)
    assert len(names) > 70
    assert sorted(name for name in names if not exists(name)) == []


def test_wrong_names_are_found():
    page = "| `ts.gone` | `ts.fitt`, `rules.adam` | `losses.mse`, [rules.md](rules.md) |\n`state.steps`, `ts.Loss.main`"
    assert {n for n in names_in(page) if not exists(n)} == {"ts.fitt", "losses.mse", "state.steps", "ts.Loss.main"}


def test_every_row_has_its_three_cells_and_what_is_not_there_a_way():
    for row in table_rows(PAGE):
        assert len(row) == 3 and row[0] and row[1], row
        assert "not in tsunax" not in row[1] or re.match(r"not in tsunax: .{10}", row[1]), row


def test_links_lead_somewhere():
    pages = set(re.findall(r"\]\(([\w-]+\.md)\)", PAGE))
    assert pages and all((DOCS / page).is_file() for page in pages)
    sections = re.findall(r'"([A-Z][\w ]+)" in\s+\[[\w.-]+\]\(([\w-]+\.md)\)', PAGE)
    assert len(sections) >= 3
    for title, page in sections:
        assert f"\n## {title}" in (DOCS / page).read_text(encoding="utf-8"), f"{page} has no section {title!r}"
