"""The pattern language: one matcher for selection, freezing, groups, decay, masks and sharding.

Globs over the components of a path, lists with `!`, predicates, and trees of bools all become
*flags*, one bool per leaf in flatten order. Nothing else in tsunax looks at a pattern.
"""

import dataclasses
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from tsunax._core import trees
from tsunax.errors import PatternError, WrongTypeError, nearest


@dataclasses.dataclass(frozen=True)
class _Glob:
    """A parsed pattern: one test per component, in runs between the "**"."""

    text: str
    excludes: bool
    runs: tuple[tuple[Callable[[str], Any], ...], ...]

    def matches(self, name: trees.Names) -> bool:
        first, last = self.runs[0], self.runs[-1]
        if len(self.runs) == 1:
            return len(name) == len(first) and _run_fits(first, name)
        at, end = len(first), len(name) - len(last)
        if at > end or not _run_fits(first, name) or not _run_fits(last, name[end:]):
            return False
        for run in self.runs[1:-1]:  # the leftmost fit leaves the most names for later runs
            while at + len(run) <= end and not _run_fits(run, name[at:]):
                at += 1
            at += len(run)
        return at <= end


def _run_fits(run: tuple[Callable[[str], Any], ...], name: trees.Names) -> bool:
    for i, test in enumerate(run):  # noqa: SIM110, a generator is 3 times slower
        if not test(name[i]):
            return False
    return True


def _bad_pattern(text: str, column: int, got: str) -> PatternError:
    expected = "names, '*', '?', '[..]' or a whole '**' between single '/'"
    return PatternError(f"pattern {text!r}", f"column {column}", got, expected)


def _component_test(text: str, part: str, column: int) -> Callable[[str], Any]:
    if not part:
        raise _bad_pattern(text, column, "an empty component")
    if "**" in part:
        raise _bad_pattern(text, column + part.index("**"), f"'**' inside of {part!r}")
    closed = re.sub(r"\[!?+\]?+[^\]]*+\]", lambda found: "." * len(found[0]), part)
    if "[" in closed:
        raise _bad_pattern(text, column + closed.index("["), "a '[' that is not closed")
    is_plain = closed == part and not re.search(r"[*?]", part)
    return part.__eq__ if is_plain else re.compile(fnmatch.translate(part)).match


@functools.lru_cache(maxsize=1024)
def _glob(text: str) -> _Glob:
    excludes = text.startswith("!")
    column = int(excludes)
    runs: list[list[Callable[[str], Any]]] = [[]]
    for part in text[column:].split("/"):
        if part == "**":
            runs.append([])
        else:
            runs[-1].append(_component_test(text, part, column))
        column += len(part) + 1
    return _Glob(text, excludes, tuple(map(tuple, runs)))


def _by_globs(globs: Sequence[_Glob], tree: Any) -> tuple[bool, ...]:
    leaf_names = [name for name, _, _ in trees.leaves_with_names(tree)]
    flags = [False] * len(leaf_names)
    for glob in globs:
        hits = [glob.matches(name) for name in leaf_names]
        if not any(hits):
            near = ", ".join(map(repr, nearest(glob.text, map(trees.shown_path, leaf_names))))
            got = f"no match among {len(hits)} leaves"
            below = glob.text + "/**"
            is_subtree = not glob.text.endswith("**") and any(map(_glob(below).matches, leaf_names))
            fix = f"For all below it: {below!r}." if is_subtree else f"Nearest: {near or 'none'}."
            raise PatternError(f"pattern {glob.text!r}", "", got, "at least one", fix)
        flags = [not glob.excludes if hit else flag for hit, flag in zip(hits, flags, strict=True)]
    return tuple(flags)


def _as_flag(what: str, path: Sequence[Any], value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        where = trees.access_str("params", path)
        raise PatternError(what, where, trees.describe(value), "True or False")
    return bool(value)


def _by_predicate(predicate: Callable[..., Any], tree: Any) -> tuple[bool, ...]:
    return tuple(
        _as_flag("result of the predicate", path, predicate(trees.path_str(name), leaf))
        for name, path, leaf in trees.leaves_with_names(tree)
    )


def _by_mask(mask: Any, tree: Any) -> tuple[bool, ...]:
    if difference := trees.first_difference(mask, tree, "params", "True or False"):
        fix = "Make it with jax.tree.map over the tree that it selects from."
        raise PatternError(f"bool tree {difference}. {fix}")
    named = trees.leaves_with_names(mask)
    return tuple(_as_flag("leaf of the bool tree", path, leaf) for _, path, leaf in named)


def _check_predicate(predicate: Callable[..., Any]) -> None:
    try:
        inspect.signature(predicate).bind("path", None)
    except ValueError:  # a builtin without a signature
        return
    except TypeError:
        got = trees.describe_call(predicate)
        raise WrongTypeError("predicate", "", got, "f(path, leaf)") from None


_LISTS = (list, tuple)  # exactly: a NamedTuple is a tree


def compile_where(where: Any) -> Callable[[Any], tuple[bool, ...]]:
    """Check `where` before there is a tree; the result maps a tree to its flags. See `select`.

    Raises `PatternError` for a malformed pattern or nothing but exclusions, and `WrongTypeError`
    for none of the four forms.
    """
    where = [where] if isinstance(where, str) else where
    texts = [entry for entry in where if isinstance(entry, str)] if type(where) in _LISTS else []
    if type(where) in _LISTS and len(texts) == len(where):
        globs = [_glob(text) for text in texts]
        if globs and all(glob.excludes for glob in globs):
            got = f"only exclusions {texts}"
            raise PatternError("where", "", got, "one that selects", "Start with '**'.")
        return functools.partial(_by_globs, globs)
    is_node = where is not None and not jtu.all_leaves([where])
    if callable(where) and (isinstance(where, jtu.Partial) or not is_node):
        _check_predicate(where)
        return functools.partial(_by_predicate, where)  # a callable module is a tree of bools
    if isinstance(where, (bool, np.bool_)) or (is_node and not texts):
        return functools.partial(_by_mask, where)
    forms = "a pattern ('encoder/**'), a list of patterns, a predicate f(path, leaf) or a bool tree"
    raise WrongTypeError("where", "", f"{where_text(where)} ({type(where).__name__})", forms)


def where_text(where: Any) -> str:
    """A selection in words, for messages."""
    if callable(where) or trees.is_array(where) or isinstance(where, Mapping):
        return trees.describe(where)
    return re.sub(r" at 0x\w+", "", " ".join(repr(where).split()))[:80]


def select(where: Any, tree: Any, *, allow_empty: bool = False) -> tuple[bool, ...]:
    """One flag per leaf of `tree`, in flatten order: whether `where` selects it.

    `where` is one of

    - a pattern over path components: "*", "?" and "[ab]" match within one component, as in
      `fnmatch`; "**" matches any number of components, also none: "encoder/**" is all below
      "encoder" and a leaf "encoder" itself. A dict key with a "/" is one component: "a?b" matches
      "a/b";
    - a list of patterns: a "!" in front excludes, and the last match wins;
    - a predicate `f(path, leaf) -> bool` with a path like "encoder/0/kernel";
    - a tree of bools with the structure of `tree`.

    Raises `PatternError` if a pattern (each one of a list) matches no leaf, if nothing is selected
    (unless `allow_empty`), and if a bool tree or the result of a predicate does not fit;
    `ParamsError` if there are no leaves (unless `allow_empty`).

    >>> select(["**", "!**/bias"], {"dense": {"bias": 0.0, "kernel": 1.0}})
    (False, True)
    """
    flags_of = compile_where(where)
    if jax.tree.structure(tree).num_leaves == 0:
        if not allow_empty:
            raise trees.no_parameters("params", tree)
        return ()
    flags = flags_of(tree)
    if not any(flags) and not allow_empty:
        got = f"{where_text(where)}, which selects nothing"
        raise PatternError("where", "", got, "at least one leaf")
    return flags
