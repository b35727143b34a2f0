"""The pattern language: one matcher for selection, freezing, groups, decay, masks and sharding.

Globs over the components of a path, lists with `!`, predicates, and trees of bools all become
*flags*, one bool per leaf in flatten order. Nothing else in tsunax looks at a pattern.
"""

import contextlib
import contextvars
import fnmatch
import functools
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tsunax._core import trees
from tsunax.errors import PatternError, WrongTypeError, nearest

_Test = Callable[[str], Any]


class _Glob(NamedTuple):
    """A parsed pattern: one test per component, None for "**"."""

    text: str
    excludes: bool
    tests: tuple[_Test | None, ...]


def _fits(tests: Sequence[_Test | None], name: Sequence[str]) -> bool:
    for i, test in enumerate(tests):
        if test is None:
            return any(_fits(tests[i + 1 :], name[k:]) for k in range(i, len(name) + 1))
        if i == len(name) or not test(name[i]):
            return False
    return len(tests) == len(name)


def _component_test(text: str, part: str) -> _Test | None:
    if part == "**":
        return None
    closed = re.sub(r"\[!?+\]?+[^\]]*+\]", ".", part)
    if not part or "**" in part or "[" in closed:
        expected = "names, '*', '?', '[..]' or a whole '**' between single '/'"
        raise PatternError(f"pattern {text!r}", "", f"the component {part!r}", expected)
    is_plain = closed == part and not re.search(r"[*?]", part)
    return part.__eq__ if is_plain else re.compile(fnmatch.translate(part)).match


@functools.lru_cache(maxsize=1024)
def _glob(text: str) -> _Glob:
    excludes = text.startswith("!")
    # Two "**" in a row match the same as one.
    parts = re.sub(r"\*\*(/\*\*)+", "**", text[excludes:]).split("/")
    return _Glob(text, excludes, tuple(_component_test(text, part) for part in parts))


def _by_globs(globs: Sequence[_Glob], place: str, tree: Any) -> tuple[bool, ...]:
    names = [name for name, _, _ in trees.leaves_with_names(tree)]
    printed_paths = list(map(trees.shown_path, names))
    # A key may contain a "/", as in haiku. Components are taken from the printed path.
    leaf_names = [trees.path_str(name).split("/") if name else () for name in names]
    flags = [False] * len(leaf_names)
    for glob in globs:
        literal = glob.text.removeprefix("!")
        hits = [
            _fits(glob.tests, name) or path == literal
            for name, path in zip(leaf_names, printed_paths, strict=True)
        ]
        if not any(hits):
            nearest_paths = ", ".join(map(repr, nearest(glob.text, printed_paths)))
            raise PatternError(
                f"pattern {glob.text!r}",
                place,
                got=f"no match among {len(hits)} leaves",
                expected="at least one",
                fix=f"Nearest: {nearest_paths}.",
            )
        flags = [not glob.excludes if hit else flag for hit, flag in zip(hits, flags, strict=True)]
    return tuple(flags)


def _as_flag(title: str, path: Sequence[Any], value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        where = trees.access_str("params", path)
        raise PatternError(title, where, trees.describe(value), "True or False")
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


_LISTS = (list, tuple)  # exactly: a NamedTuple is a tree


def compile_where(where: Any, place: str = "") -> Callable[[Any], tuple[bool, ...]]:
    """Check `where`, one of the four forms of `select`; the result maps a tree to its flags."""
    where = [where] if isinstance(where, str) else where
    texts = [entry for entry in where if isinstance(entry, str)] if type(where) in _LISTS else []
    if type(where) in _LISTS and len(texts) == len(where):
        globs = [_glob(text) for text in texts]
        if globs and all(glob.excludes for glob in globs):
            got = f"only exclusions {texts}"
            raise PatternError("where", place, got, "one that selects", "Start with '**'.")
        return functools.partial(_by_globs, globs, place)
    is_node = where is not None and not jax.tree_util.all_leaves([where])
    if callable(where) and (isinstance(where, jax.tree_util.Partial) or not is_node):
        return functools.partial(_by_predicate, where)  # a callable module is a tree of bools
    if isinstance(where, (bool, np.bool_)) or (is_node and not texts):
        return functools.partial(_by_mask, where)
    forms = "a pattern ('encoder/**'), a list of patterns, a predicate f(path, leaf) or a bool tree"
    raise WrongTypeError("where", place, f"{where_text(where)} ({type(where).__name__})", forms)


def where_text(where: Any) -> str:
    """A selection in words, for messages."""
    if callable(where) or trees.is_array(where) or isinstance(where, Mapping):
        return trees.describe(where)
    return re.sub(r" at 0x\w+", "", " ".join(repr(where).split()))[:80]


def select(where: Any, tree: Any, place: str = "") -> tuple[bool, ...]:
    """One flag per leaf of `tree`, in flatten order: whether `where` selects it.

    `where` is one of

    - a pattern over path components: "*", "?" and "[ab]" match within one component, as in
      `fnmatch`; "**" matches any number of components, also none: "encoder/**" is all below
      "encoder" and a leaf "encoder" itself. The printed path is split into components: a dict key
      "mlp/linear" counts as two. The printed path of a leaf matches the leaf, also with a "[" or
      "*" in it;
    - a list of patterns: a "!" in front excludes, and the last match wins;
    - a predicate `f(path, leaf) -> bool` with a path like "encoder/0/kernel";
    - a tree of bools with the structure of `tree`.

    Raises `PatternError` if a pattern (also in a list) matches no leaf, if nothing is selected,
    and if a bool tree or the result of a predicate does not fit; `ParamsError` if there are no
    leaves. `place` is the call that the errors of patterns without a match name.

    >>> select(["**", "!**/bias"], {"dense": {"bias": 0.0, "kernel": 1.0}})
    (False, True)
    """
    flags_of = compile_where(where, place)
    if jax.tree.structure(tree).num_leaves == 0:
        raise trees.no_parameters("params", tree)
    flags = flags_of(tree)
    if not any(flags):
        got = f"{where_text(where)}, which selects nothing"
        raise PatternError("where", place, got, "at least one leaf")
    return flags


# (params, flags): a tree, and which of its leaves the running rule of `partition` handles
_enclosing: contextvars.ContextVar[Any] = contextvars.ContextVar("_enclosing", default=None)


@contextlib.contextmanager
def group_of(tree: Any, flags: Sequence[bool]) -> Generator[None, None, None]:
    """A context in which `select_in_group` is given the leaves of `tree` with these flags."""
    if (outer := _enclosing.get()) is not None:
        of_group = iter(flags)
        tree, flags = outer[0], [is_in_outer and next(of_group) for is_in_outer in outer[1]]
    token = _enclosing.set((tree, flags))
    try:
        yield
    finally:
        _enclosing.reset(token)


def select_in_group(where: Any, tree: Any, place: str = "") -> tuple[bool, ...]:
    """`select`, in which a pattern may match leaves of other groups alone.

    So the groups of a partition can share one mask.
    """
    whole, flags = _enclosing.get() or (None, ())
    if jax.tree.structure(tree).num_leaves != sum(flags):
        return select(where, tree, place)
    pairs = zip(select(where, whole, place), flags, strict=True)
    return tuple(selected for selected, in_group in pairs if in_group)
