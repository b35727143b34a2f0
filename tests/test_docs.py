"""The site: every page is reached, what the table of features names is there, the reference has every public name."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import tsunax as ts

from test_coming_from import problem_with

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
FEATURES = TEXTS[DOCS / "features.md"]


def rows(page: str) -> list[list[str]]:
    """The cells of each line of each table, without heads."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    heads = {i - 1 for i, line in enumerate(lines) if line.startswith("| ---")}
    kept = [line for i, line in enumerate(lines) if i not in heads and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in kept]


def below(page: Path) -> set[Path]:
    """The pages in a page's toctrees, and in theirs."""
    found = set()
    for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", TEXTS[page], re.MULTILINE | re.DOTALL):
        for name in re.findall(r"^(?!:)(\S+)$", tree, re.MULTILINE):
            found |= {child := page.parent / f"{name}.md", *(below(child) if child in TEXTS else ())}
    return found


def documented() -> set[str]:
    """The full names of what the reference shows: single ones, and the public ones of whole modules."""
    found = set()
    for page in (DOCS / "api").glob("*.md"):
        found |= set(re.findall(r"^\.\. auto(?:function|class):: (\S+)", TEXTS[page], re.MULTILINE))
        for module in re.findall(r"^\.\. automodule:: (\S+)", TEXTS[page], re.MULTILINE):
            found |= {module, *(f"{module}.{name}" for name in importlib.import_module(module).__all__)}
    return found


def test_every_page_is_in_a_toctree():
    assert below(DOCS / "index.md") == set(PAGES) - {DOCS / "index.md"}


def test_no_page_has_the_name_of_one_that_sphinx_writes():
    assert {path.stem for path in PAGES if path.parent == DOCS} & {"search", "genindex", "modindex"} == set()


def anchors(page: Path) -> set[str]:
    """The sections of a page, as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *PAGES], ids=lambda path: path.stem)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    files = [(page.parent / file if file else page, anchor) for file, anchor in links]
    assert [str(file) for file, _ in files if not file.is_file()] == []
    assert [(file.name, anchor) for file, anchor in files if anchor and anchor not in anchors(file)] == []


@pytest.mark.parametrize("row", rows(FEATURES), ids=lambda row: row[0].replace("`", ""))
def test_every_feature_has_its_page_and_its_tests(row):
    assert len(row) == 4 and all(row), row
    assert re.fullmatch(r"\[[\w ]+\]\([\w-]+\.md\)", row[2]), row
    named = re.findall(r"`([^`]+)`", row[3])
    assert named and problem_with(" ".join(named)) is None, problem_with(" ".join(named))
    assert len(named) == len(re.findall(r"\btest_\w+::", row[3])), f"{row[3]}: a name without its file"


def test_features_that_are_not_there_are_found():
    assert problem_with("test_state::test_a_new_state_has_stepped")
    assert rows("| a | b |\n| --- | --- |\n| `x` | y |\n") == [["`x`", "y"]]


def test_the_reference_has_every_public_name():
    shown = documented()
    modules = {name for name in ts.__all__ if inspect.ismodule(getattr(ts, name))}
    missing = {f"tsunax.{name}" for name in set(ts.__all__) - modules} - shown
    for module in (getattr(ts, name) for name in modules):
        missing |= {f"{module.__name__}.{name}" for name in module.__all__} - shown
    assert sorted(missing - {f"tsunax.{m}.{n}" for m in modules for n in ts.__all__}) == []


def test_the_tests_that_pages_name_are_there():
    named = {name for text in TEXTS.values() for name in re.findall(r"`(test_\w+::test_\w+)`", text)}
    assert len(named) > 200
    assert sorted(name for name in named - {"test_state::test_x", "test_hyper::test_x"} if problem_with(name)) == []


def test_what_pages_import_is_there():
    """Also in blocks that are not run, as they need a cluster."""
    text = "\n".join(TEXTS.values())
    modules = set(re.findall(r"^import (tsunax(?:\.\w+)*)", text, re.M))
    from_modules = set(re.findall(r"^from (tsunax(?:\.\w+)*) import ([\w, ]+)", text, re.M))
    assert modules and len(from_modules) > 5
    for name in modules:
        importlib.import_module(name)
    for module, names in from_modules:
        assert all(hasattr(importlib.import_module(module), name) for name in names.split(", ")), (module, names)


COLUMNS = 84  # what a block of the site shows at 1,280 pixels


def wide_lines(page: str) -> list[str]:
    """The lines of code that the site would break. Messages of one long line, in ```text, it may break."""
    blocks = re.findall(r"^```(?!text|\{toctree|\{eval-rst)[^\n]+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if len(line) > COLUMNS]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_no_line_of_code_is_wider_than_a_desktop_shows(page):
    assert wide_lines(TEXTS[page]) == []


def test_no_line_of_the_readmes_program_is_either():
    """Its commands are lines to copy, and its diff is shown beside nothing."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n.*?^```", readme, re.MULTILINE | re.DOTALL)
    assert wide_lines(program) == []


def test_wide_lines_are_found_and_messages_wrap():
    wide = "x" * (COLUMNS + 1)
    assert wide_lines(f"```python\n{wide}\n```\n{wide}\n```text\n{wide}\n```\n```bash\nls\n```\n") == [wide]
    style = (DOCS / "_static" / "site.css").read_text(encoding="utf-8")
    assert re.search(r"div\.highlight pre[^{]*\{[^}]*white-space: pre-wrap", style)


# What a reader of the guides of Flux, Lightning and Ray would type into a search field: it is in the text of a page.
AS_TYPED = (
    "fmap hparams max_trials steps_per_trial Cos( |> gpu AccumGrad(5) ClipGrad(0.1) accumulate_grad_batches "
    "gradient_clip_val auto_scale_batch_size OptimiserChain( Flux.setup( Flux.update!( withgradient "
    "train!( adjust!(opt_state freeze!(opt_state thaw! testmode! @layer trainable=(weight,) WeightDecay( SignDecay "
    "CUDA.functional() DataLoader((X, Y) CuIterator FluxDistributedModel mpiexecjl enable_reproducibility( "
    "accelerate(amp=True) to_tune_trainable step_sizes max_iter degree startval endval percent_start ceil_fn"
)


def test_a_reader_finds_the_words_as_they_are_typed():
    text = "\n".join(TEXTS.values()).replace("\\|", "|")
    phrases = re.split(r" (?!gpu|Y\))", AS_TYPED)
    assert "|> gpu" in phrases and "DataLoader((X, Y)" in phrases
    assert [phrase for phrase in phrases if phrase not in text] == []


# Words of other systems for what tsunax does: readers search for them. Those of the guides alone, which need a row of
# coming-from.md, are in test_coming_from.py.
OF_OTHER_SYSTEMS = """
Optimisers.update trainstep! trainstep_withgradient! Chain MixedPrecision f16 bf16 f32 f64 KeyPath loadmodel!
Constant Step Exp Poly Inv Triangle TriangleDecay2 TriangleExp Sin SinDecay2 SinExp CosAnneal percent_start restart
Sequence Loop Interpolator Shifted Shortened ComposedSchedule OneCycle reverse symmetric reset! Scheduler
GradientAccumulationScheduler accumulate_grad_batches gradient_clip_algorithm BackboneFinetuning
Nesterov RMSProp Rprop AdaMax NAdam RAdam OAdam AdaGrad AdaDelta AMSGrad AdaBelief Lion
gpu_device eltype force local_rank total_workers bcast! reduce! allreduce! patience plateau throttle
seed_everything EarlyStopping ModelCheckpoint LightningDataModule train_dataloader save_hyperparameters lr_find
mae msle huber_loss logitcrossentropy binarycrossentropy logitbinarycrossentropy kldivergence poisson_loss hinge_loss
squared_hinge_loss dice_coeff_loss tversky_loss binary_focal_loss focal_loss siamese_contrastive_loss
label_smoothing ctc_loss
Trainer fit! ckpt_path train_step val_step test_step log fast_dev_run validate accuracy seed! foreach_trainable Foil
microbatching inject_hyperparams MultiSteps apply_if_finite multi_transform DynamicScale OneCycleLR GradScaler
""".split()


def test_a_reader_finds_the_words_of_other_systems():
    """In a first cell of a table of a page, as code."""
    cells = [
        re.split(r"(?<!\\)\|", line, maxsplit=2)[1]
        for text in TEXTS.values()
        for line in re.findall(r"^\|.*", text, re.M)
    ]
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    finds = lambda word: re.compile(rf"(?<!\w){re.escape(word)}(?![\w!])").search
    assert [word for word in OF_OTHER_SYSTEMS if not any(map(finds(word), codes))] == []
    assert not any(map(finds("OptimiserChains"), codes))
