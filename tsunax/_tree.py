"""Everything that tsunax knows about a pytree: paths, patterns, parts, checks, norms, owners.

A leaf is called by the readable components of its key path: `params["encoder"][0].kernel` has the
*names* `("encoder", "0", "kernel")`, shown as "encoder/0/kernel". What a pattern selects is a tuple
of *flags*, one bool per leaf in flatten order; all other functions take flags, so that patterns are
matched in one place only.

Nothing here knows of states, rules or losses. flax's wrappers are recognised by the name of their
class, so flax is not imported; and nothing touches a device at import.
"""

import dataclasses
import difflib
import fnmatch
import functools
import heapq
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from tsunax.errors import ParamsError, PatternError, StateError, WrongTypeError, message

Names = tuple[str, ...]
Flags = Sequence[bool]


def is_array(x: Any) -> bool:
    """Whether `x` is a JAX array (also a traced one), a NumPy array or a NumPy scalar."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_traced(x: Any) -> bool:
    """Whether `x` has no value yet, because jit, vmap, grad or scan is tracing."""
    return isinstance(x, Tracer)


def dtype_of(x: Any) -> Any:
    """The dtype of an array or `ShapeDtypeStruct`, JAX's one for a Python number, else None."""
    if is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
        return x.dtype
    return jnp.result_type(x) if isinstance(x, (bool, int, float, complex)) else None


def is_inexact(x: Any) -> bool:
    """Whether `x` is floating point or complex: what can have a gradient."""
    dtype = dtype_of(x)
    return dtype is not None and bool(jnp.issubdtype(dtype, np.inexact))


# Paths


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The key entry of `Marked`; a mask that asks for `path[-1].key` finds the leaf's own key."""

    owner: int
    last: Any

    def __str__(self) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.last, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Marked:
    """A node around one parameter. What a rule builds from it has the mark in its key path."""

    tree: Any
    mark: _Mark


jtu.register_pytree_with_keys(
    Marked,
    lambda node: (((node.mark, node.tree),), node.mark),
    lambda mark, children: Marked(next(iter(children)), mark),
    lambda node: ((node.tree,), node.mark),
)


def _mark(tree: Any) -> Any:
    keyed, treedef = jtu.tree_flatten_with_path(tree)
    marks = [_Mark(i, path[-1] if path else None) for i, (path, _) in enumerate(keyed)]
    return treedef.unflatten(Marked(leaf, m) for (_, leaf), m in zip(keyed, marks, strict=True))


def _unmark(tree: Any) -> Any:
    is_marked = lambda x: isinstance(x, Marked)
    return jax.tree.map(lambda x: x.tree if is_marked(x) else x, tree, is_leaf=is_marked)


def _without_marks(path: Sequence[Any]) -> tuple:
    return tuple(entry for entry in path if not isinstance(entry, _Mark))


_FIELD_OF_KEY = {
    jtu.DictKey: "key",
    jtu.FlattenedIndexKey: "key",
    jtu.SequenceKey: "idx",
    jtu.GetAttrKey: "name",
}


def key_name(entry: Any) -> str:
    """The readable name of a key entry: dict key, index or field; a name stays what it is."""
    field = _FIELD_OF_KEY.get(type(entry))
    return str(getattr(entry, field) if field else entry)


def names(path: Sequence[Any]) -> Names:
    """The components of a key path; `leaves_with_names` also knows which `.value` is no name."""
    return tuple(map(key_name, _without_marks(path)))


def path_str(path: Sequence[Any]) -> str:
    """Key entries or names, joined: "encoder/0/kernel"; "" for a bare array."""
    return "/".join(names(path))


def show(path: Sequence[Any]) -> str:
    """`path_str` for messages, where a bare array is `<root>`."""
    return path_str(path) or "<root>"


def access_str(root: str, path: Sequence[Any]) -> str:
    """A key path as Python would write it: `params['encoder'][0].kernel`."""
    return root + jtu.keystr(_without_marks(path))


@functools.lru_cache(maxsize=512)
def _is_box_type(kind: type) -> bool:
    boxes = ("Variable", "AxisMetadata")  # of NNX; of Linen: Partitioned and its kin
    flax = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("flax.")]
    return any(name in boxes for name in flax)


def _is_box(x: Any) -> bool:
    return _is_box_type(type(x))


def _named(tree: Any, path: tuple, name: Names) -> Iterator[tuple[Names, tuple, Any]]:
    is_inner_box = lambda x: x is not tree and _is_box(x)
    for tail, node in jtu.tree_flatten_with_path(tree, is_leaf=is_inner_box)[0]:
        wrapped = _is_box(tree) and tail and key_name(tail[0]) == "value"
        inner = name + names(tail[1:] if wrapped else tail)
        if is_inner_box(node):
            yield from _named(node, path + tail, inner)
        else:
            yield inner, path + tail, node


def leaves_with_names(tree: Any) -> list[tuple[Names, tuple, Any]]:
    """`(names, key path, leaf)` of every leaf in flatten order; `None` is no leaf.

    The `.value` that a flax wrapper adds (NNX Variable, Linen Partitioned) is no name; the field
    `value` of any other class is one. Leaves that would share their names by that keep it.
    """
    found = list(_named(tree, (), ()))
    counts = Counter(name for name, _, _ in found)
    if len(counts) == len(found):
        return found
    return [(names(path) if counts[name] > 1 else name, path, leaf) for name, path, leaf in found]


# Patterns


@functools.lru_cache(maxsize=4096)
def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _closeness(name: str, other: str) -> tuple[float, float]:
    """How well `other` has the components of `name`, wildcards left out; then the whole of both."""
    wanted = [part for part in name.split("/") if part.strip("!*")]
    best = [max(_likeness(part, theirs) for theirs in other.split("/")) for part in wanted]
    return sum(best) / max(len(best), 1), _likeness(name, other)


def _listed(items: Sequence[str], most: int) -> str:
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def nearest(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """The `n` of `known` that `name` was most likely meant to be, best first."""
    return heapq.nlargest(n, known, key=lambda other: _closeness(name, other))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: "did you mean 'kernel'? known: bias, kernel"."""
    known = list(known)
    listed = f"known: {_listed(known, 20) or 'none'}"
    close = [other for other in nearest(name, known, 1) if _closeness(name, other)[0] > 0.6]
    return f"did you mean {close[0]!r}? {listed}" if close else listed


@dataclasses.dataclass(frozen=True)
class _Glob:
    """A parsed pattern: one test per component, in the runs that the "**" leave between them."""

    text: str
    excludes: bool
    runs: tuple[tuple[Callable[[str], Any], ...], ...]

    def matches(self, name: Names) -> bool:
        first, last = self.runs[0], self.runs[-1]
        if len(self.runs) == 1:
            return len(name) == len(first) and _fits(first, name)
        at, end = len(first), len(name) - len(last)
        if at > end or not _fits(first, name) or not _fits(last, name[end:]):
            return False
        for run in self.runs[1:-1]:  # its leftmost fit leaves the most room for the runs after it
            while at + len(run) <= end and not _fits(run, name[at:]):
                at += 1
            at += len(run)
        return at <= end


def _fits(run: tuple[Callable[[str], Any], ...], name: Names) -> bool:
    for i, test in enumerate(run):  # noqa: SIM110, a generator is 3 times slower
        if not test(name[i]):
            return False
    return True


def _bad_pattern(text: str, column: int, got: str) -> PatternError:
    expected = "names, '*', '?', '[..]' or a whole '**' between single '/'"
    return PatternError(message(f"pattern {text!r}", f"column {column}", got, expected))


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
    leaf_names = [name for name, _, _ in leaves_with_names(tree)]
    flags = [False] * len(leaf_names)
    for glob in globs:
        hits = [glob.matches(name) for name in leaf_names]
        if not any(hits):
            near = ", ".join(map(repr, nearest(glob.text, map(show, leaf_names))))
            got = f"no match among {len(hits)} leaves"
            fix = f"Nearest: {near or 'none'}."
            raise PatternError(message(f"pattern {glob.text!r}", "", got, "at least one", fix))
        flags = [not glob.excludes if hit else flag for hit, flag in zip(hits, flags, strict=True)]
    return tuple(flags)


def _as_flag(what: str, path: Sequence[Any], value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise PatternError(message(what, show(path), type(value).__name__, "a bool"))
    return bool(value)


def _by_predicate(predicate: Callable[..., Any], tree: Any) -> tuple[bool, ...]:
    return tuple(
        _as_flag("result of the predicate", name, predicate(path_str(name), leaf))
        for name, _, leaf in leaves_with_names(tree)
    )


def _by_mask(mask: Any, tree: Any) -> tuple[bool, ...]:
    if difference := first_difference(mask, tree):
        fix = "Make it with jax.tree.map over the tree that it selects from."
        raise PatternError(f"bool tree {difference}. {fix}")
    named = leaves_with_names(mask)
    return tuple(_as_flag("leaf of the bool tree", name, leaf) for name, _, leaf in named)


_LISTS = (list, tuple)  # exactly: a NamedTuple is a tree


def compile_where(where: Any) -> Callable[[Any], tuple[bool, ...]]:
    """Check `where` before there is a tree; the result maps a tree to its flags. See `select`.

    Raises `PatternError` for a malformed pattern or nothing but exclusions, and `WrongTypeError`
    for what is none of the four forms.
    """
    if isinstance(where, str):
        where = [where]
    texts = [entry for entry in where if isinstance(entry, str)] if type(where) in _LISTS else []
    if type(where) in _LISTS and len(texts) == len(where):
        globs = [_glob(text) for text in texts]
        if globs and all(glob.excludes for glob in globs):
            got = f"only exclusions {texts}"
            raise PatternError(message("where", "", got, "one that selects", "Start with '**'."))
        return functools.partial(_by_globs, globs)
    is_node = where is not None and not jtu.all_leaves([where])
    if callable(where) and (isinstance(where, jtu.Partial) or not is_node):
        return functools.partial(_by_predicate, where)  # a callable module is a tree of bools
    if isinstance(where, (bool, np.bool_)) or (is_node and not texts):
        return functools.partial(_by_mask, where)
    forms = "a pattern ('encoder/**'), a list of patterns, a predicate f(path, leaf) or a bool tree"
    raise WrongTypeError(message("where", "", f"{where!r:.80} ({type(where).__name__})", forms))


def select(where: Any, tree: Any, *, allow_empty: bool = False) -> tuple[bool, ...]:
    """One flag per leaf of `tree`, in flatten order: whether `where` selects it.

    `where` is one of

    - a pattern over path components: "*", "?" and "[ab]" match within one component, as in
      `fnmatch`; "**" any number of them, also none, so that "encoder/**" is all below "encoder" and
      a leaf "encoder" itself. A dict key with a "/" in it is one component: "*" or "a?b" match it;
    - a list of patterns, where a "!" in front takes away, and the last match wins;
    - a predicate `f(path, leaf) -> bool` with a path like "encoder/0/kernel";
    - a tree of bools with the structure of `tree`.

    Raises `PatternError` where a pattern (each one of a list) matches no leaf, where nothing is
    selected (unless `allow_empty`), and where a bool tree or the result of a predicate does not
    fit; `ParamsError` where there are no leaves (unless `allow_empty`).

    >>> select(["**", "!**/bias"], {"dense": {"bias": 0.0, "kernel": 1.0}})
    (False, True)
    """
    flags_of = compile_where(where)
    if jax.tree.structure(tree).num_leaves == 0:
        if not allow_empty:
            raise _no_parameters("params", tree)
        return ()
    flags = flags_of(tree)
    if not any(flags) and not allow_empty:
        got = f"{where!r:.80}, which selects nothing"
        raise PatternError(message("where", "", got, "at least one leaf"))
    return flags


# Parts


def take(tree: Any, flags: Flags) -> list[Any]:
    """The selected leaves of `tree`, in order."""
    return [leaf for leaf, flag in zip(jax.tree.leaves(tree), flags, strict=True) if flag]


def put_back(tree: Any, flags: Flags, leaves: Sequence[Any]) -> Any:
    """`tree` with new selected leaves: `put_back(tree, flags, take(tree, flags))` is `tree`."""
    if sum(flags) != len(leaves):
        expected = f"{sum(flags)}, one for each selected leaf"
        raise StateError(message("leaves to put back", "", len(leaves), expected))
    old, treedef = jax.tree.flatten(tree)
    new = iter(leaves)
    return treedef.unflatten(next(new) if f else leaf for leaf, f in zip(old, flags, strict=True))


def partition(tree: Any, flags: Flags) -> tuple[Any, Any]:
    """`(selected, rest)`: the same containers, each with `None` where the other has the leaf.

    `None` is no leaf for JAX: `selected` can be differentiated, jitted over, given to an optax
    `init`. Classes that check their fields when they are built must let `None` pass.
    """
    leaves, treedef = jax.tree.flatten(tree)
    flagged = list(zip(leaves, flags, strict=True))
    selected = treedef.unflatten(leaf if flag else None for leaf, flag in flagged)
    return selected, treedef.unflatten(None if flag else leaf for leaf, flag in flagged)


def merge(selected: Any, rest: Any) -> Any:
    """The inverse of `partition`; a `None` that was in the tree before is one again."""
    ours, treedef = jax.tree.flatten(selected, is_leaf=lambda x: x is None)
    theirs, other = jax.tree.flatten(rest, is_leaf=lambda x: x is None)
    if treedef != other:
        filled = [treedef.unflatten([0] * len(ours)), other.unflatten([0] * len(theirs))]
        raise StateError(f"parts of two different trees {first_difference(*filled)}.")
    pairs = list(zip(ours, theirs, strict=True))
    if any(a is not None and b is not None for a, b in pairs):
        raise StateError(message("parts of a tree", "", "a leaf that both have", "no overlap"))
    return treedef.unflatten(b if a is None else a for a, b in pairs)


def _children(node: Any) -> list[tuple[tuple, Any]]:
    """Key (a path of one) and value of each direct child, `None`s included; [] for a leaf."""
    keyed, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(key, child) for key, child in keyed if key]


def _describe(x: Any) -> str:
    if x is None:
        return "None"
    if (dtype := dtype_of(x)) is not None:
        return f"{dtype}[{','.join(map(str, np.shape(x)))}]"
    inside = _listed([path_str(key) for key, _ in _children(x)], 6)
    return f"{type(x).__name__} with {inside}" if inside else type(x).__name__


def _difference(got: Any, expected: Any, path: tuple) -> str | None:
    if jax.tree.structure(got) == jax.tree.structure(expected):
        return None
    if type(got) is not type(expected):
        return f"at {show(path)}: got {_describe(got)}, expected {_describe(expected)}"
    ours, theirs = dict(_children(got)), dict(_children(expected))
    for key in theirs | ours:
        if key in ours and key in theirs:
            if difference := _difference(ours[key], theirs[key], path + key):
                return difference
        else:
            found = _describe(ours[key]) if key in ours else "nothing"
            wanted = _describe(theirs[key]) if key in theirs else "nothing"
            return f"at {show(path + key)}: got {found}, expected {wanted}"
    return (
        f"at {show(path)}: got {type(got).__name__} with other static fields, expected equal ones"
    )


def first_difference(got: Any, expected: Any) -> str | None:
    """Where two trees first differ, "at encoder/bias: got nothing, expected float32[3]"; or None.

    Container types, keys, `None`s and static fields count, shapes and dtypes do not: what
    `jax.tree.map` asks for. Marks do not count.
    """
    if jax.tree.structure(got) == jax.tree.structure(expected):
        return None  # without a walk: the usual case
    return _difference(_unmark(got), _unmark(expected), ())


# Checks


def _no_parameters(root: str, tree: Any) -> ParamsError:
    got = f"{type(tree).__name__} without leaves"
    return ParamsError(message("no parameters", root, got, "at least one array"))


def check_keys(params: Any, root: str = "params", path: tuple = ()) -> None:
    """Raise `ParamsError` for a dict whose keys are neither str nor int, or both.

    To be called before anything that flattens: JAX's own error does not say where.
    """
    if isinstance(params, Mapping) and not jtu.all_leaves([params]):
        odd = [key for key in params if not isinstance(key, (str, int))]
        text = [key for key in params if isinstance(key, str)]
        if odd or 0 < len(text) < len(params):
            mixed = [*text[:1], *(key for key in params if key not in text)]
            got = ", ".join(f"{key!r} ({type(key).__name__})" for key in odd[:1] or mixed[:2])
            where = access_str(root, path)
            raise ParamsError(
                message("dict keys", where, got, "all str or all int, so that they sort")
            )
    for key, child in _children(params):
        check_keys(child, root, path + key)


_ASIDE = "Leave it out with trainable=, or keep it in model_state."


def _leaf_fault(leaf: Any) -> tuple[str, str, str, str] | None:
    """What makes a leaf impossible to train, as `what, got, expected, fix`."""
    dtype, floats = dtype_of(leaf), "a float or complex array"
    if dtype is None:
        return "leaf that is no number", type(leaf).__name__, floats, _ASIDE
    if not is_inexact(leaf):
        return "leaf that cannot be trained", f"dtype {dtype}", floats, _ASIDE
    canonical = jax.dtypes.canonicalize_dtype(dtype)
    if canonical != dtype:
        fix = f"It would be cut to {canonical}: cast it yourself, or set jax_enable_x64."
        return "leaf too wide for JAX", f"dtype {dtype}", str(canonical), fix
    if 0 in np.shape(leaf):
        return "leaf without elements", f"shape {np.shape(leaf)}", "no 0 in the shape", _ASIDE
    if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted():
        fix = "A step that it was donated to took it: use what the step returned."
        return "leaf without a buffer", "a deleted array", "a live one", fix
    return None


def _repeat(keys: Iterable[Any], flags: Flags) -> tuple[int, int] | None:
    """The first two places with the same key, at least one of them selected."""
    seen: dict[Any, int] = {}
    for i, key in enumerate(keys):
        j = seen.setdefault(key, i)
        if i != j and (flags[i] or flags[j]):
            return j, i
    return None


@jax.jit
def _count_nonfinite(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(~jnp.isfinite(leaf)) for leaf in leaves]


def _nonfinite(leaves: list[Any]) -> list[int]:
    """For each leaf the number of elements that are NaN or inf; 0 where there are no values yet."""
    counts = [0] * len(leaves)
    elsewhere: dict[frozenset, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        devices = leaf.devices() if isinstance(leaf, jax.Array) else set()
        if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
            elsewhere.setdefault(frozenset(devices), []).append(i)
        else:  # a view that is gone at once: one that stays would keep the leaf from being donated
            counts[i] = np.size(leaf) - int(np.count_nonzero(np.isfinite(np.asarray(leaf))))
    for group in elsewhere.values():  # one program for each set of devices
        with jax.ensure_compile_time_eval():
            found = jax.device_get(_count_nonfinite([leaves[i] for i in group]))
        for i, count in zip(group, found, strict=True):
            counts[i] = int(count)
    return counts


def check_params(params: Any, flags: Flags, root: str = "params") -> None:
    """Raise `ParamsError` for a selected leaf that cannot be trained, or shares its name.

    Unselected leaves may be anything. Values are looked at only where there are some, so not under
    jit or `eval_shape`.
    """
    named = leaves_with_names(params)
    if not named:
        raise _no_parameters(root, params)
    chosen = [(path, leaf) for (_, path, leaf), flag in zip(named, flags, strict=True) if flag]
    for path, leaf in chosen:
        if fault := _leaf_fault(leaf):
            what, *rest = fault
            raise ParamsError(message(what, access_str(root, path), *rest))
    for joint in "/.":
        if pair := _repeat([joint.join(name) for name, _, _ in named], flags):
            where = " and ".join(access_str(root, named[i][1]) for i in pair)
            got = f"{joint.join(named[pair[0]][0])!r} for both"
            raise ParamsError(message("names that collide", where, got, "different names"))
    for (path, leaf), count in zip(chosen, _nonfinite([leaf for _, leaf in chosen]), strict=True):
        if count:
            got = f"{count} of {np.size(leaf)} not finite"
            where = access_str(root, path)
            raise ParamsError(message("leaf with NaN or inf", where, got, "finite numbers"))


def check_aliases(params: Any, flags: Flags, root: str = "params") -> None:
    """Raise `ParamsError` where one array is two leaves, one selected: donation would free both."""
    keyed = jtu.tree_flatten_with_path(params)[0]
    if pair := _repeat([id(x) if is_array(x) else -1 - i for i, (_, x) in enumerate(keyed)], flags):
        where = " and ".join(access_str(root, keyed[i][0]) for i in pair)
        fix = "Copy one of them, or let setup copy (copy=True)."
        raise ParamsError(message("leaves", where, "one array for both", "an array for each", fix))


# Norms


def _square_sum(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128):
        x = x.astype(jnp.float32)
    squares = jnp.square(x.real)
    return jnp.sum(squares + jnp.square(x.imag) if jnp.iscomplexobj(x) else squares)


def square_sums(tree: Any) -> list[jax.Array]:
    """sum(|x|²) of each leaf, in float32 whatever its dtype (float64 for float64)."""
    return [_square_sum(leaf) for leaf in jax.tree.leaves(tree)]


def global_norm(tree: Any) -> jax.Array:
    """sqrt(sum over leaves of sum(|x|²)); for float32 trees with the bits of `optax.tree.norm`."""
    sums = square_sums(tree) or [jnp.zeros((), jnp.float32)]
    dtype = jnp.float64 if any(s.dtype == jnp.float64 for s in sums) else jnp.float32
    return jnp.sqrt(functools.reduce(operator.add, [s.astype(dtype) for s in sums]))


def finite_map(tree: Any) -> list[jax.Array]:
    """For each leaf a bool scalar: whether all of its elements are finite."""
    return [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]


# Owners


def _owners_by_marks(
    init: Callable[[Any], Any], params: Any, keyed: list
) -> list[int | None] | None:
    """None where `init` fails on marked parameters, or makes another state of them."""
    try:
        marked = jtu.tree_flatten_with_path(jax.eval_shape(init, _mark(params)))[0]
    except Exception:  # whatever a user's mask raises when it meets a node that it does not know
        return None
    of = lambda found: [(_without_marks(path), leaf.shape, leaf.dtype) for path, leaf in found]
    if of(marked) != of(keyed):
        return None
    return [next((k.owner for k in path if isinstance(k, _Mark)), None) for path, _ in marked]


def _owners_by_suffix(params: Any, keyed: list) -> list[int | None]:
    """The parameter with the longest equal end of the key path that has the same shape."""
    flat = jtu.tree_flatten_with_path(params)[0]
    index = {(path, np.shape(leaf)): i for i, (path, leaf) in enumerate(flat)}
    ends = ([(path[i:], leaf.shape) for i in range(len(path) + 1)] for path, leaf in keyed)
    return [next((index[end] for end in of_leaf if end in index), None) for of_leaf in ends]


def owners(init: Callable[[Any], Any], params: Any) -> tuple[Any, list[tuple], list[int | None]]:
    """`(shapes, paths, owners)`: from which parameter is each leaf of an optax state made?

    `shapes` is `jax.eval_shape(init, params)`. `paths` and `owners` have, for each leaf of it in
    flatten order, the key path, and the place among the leaves of `params`; None for a count, and
    for what several parameters made together.

    Each parameter is wrapped in a `Marked` node, which optax's tree functions pass through, so that
    masks, labels, factored and stacked moments need no rule of their own. An `init` that does not
    stand this gets the parameter with the longest equal end of the key path and the same shape.
    """
    shapes = jax.eval_shape(init, params)
    keyed = jtu.tree_flatten_with_path(shapes)[0]
    found = _owners_by_marks(init, params, keyed)
    if found is None:
        found = _owners_by_suffix(params, keyed)
    return shapes, [path for path, _ in keyed], found
