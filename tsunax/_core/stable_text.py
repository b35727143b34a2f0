"""Values as text and arrays as bits that are equal in every process and every run.

Texts have no addresses and no order of sets: an object is its type and fields, a function its name,
its code and the values that it closes over.
"""

import collections
import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import jax
import numpy as np

from tsunax._core import trees

_DEEP = 14  # depth of objects within objects beyond which values count as equal
_VALUES = 50_000  # values that are read at most: reading 50,000 takes 0.2 s
_LISTED = 100  # longer lists and dicts count only by their length in a text for files
_SHORT = 40  # characters of a value that a warning names
_CHANGING = (int, float, list, dict, set, collections.deque)
_PLAIN = (str, bytes, int, float, complex, type(None), enum.Enum)
_HASHED = 10_000  # up to this many elements an array is compared by all values, beyond by a sample
# Library objects store functions of users in these attributes: methods, decorators, partials, jit,
# properties, custom derivatives.
_INNER = "__wrapped__ __func__ __self__ func args keywords fget fwd bwd jvp".split()
# Their code is not read as a script's, even if the walk begins with it.
_LIBRARIES = ("tsunax", "jax", "optax", "flax")
# Operations of byte code that name a global or a module, and operations that read an attribute.
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "IMPORT_FROM")
# Code with these names may read attributes that it does not name.
_READING_ANY = {"getattr", "vars", "__dict__", "asdict", "astuple"}
# Methods that fill a container while code runs: a cache, or a list of calls, is no setting.
_FILLING = {*"append appendleft add update setdefault pop popleft extend insert clear".split()}
_UNCALLED = "__eq__ __repr__ __hash__ __str__ __lt__ __le__ __gt__ __ge__ __getstate__".split()


def bits_of(array: Any) -> np.ndarray | None:
    """An array on the host (a key as its words); None if other processes hold a part of it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if not array.is_fully_replicated:
            return None
        array = array.addressable_data(0)
    return trees.on_host(array)


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def words_of(
    x: Any,
    depth: int = 0,
    outer_ids: frozenset = frozenset(),
    code: bool = True,
    numbers: bool = True,
) -> str:
    """A value as text.

    Without `code` it is an outline, for files that other versions read: functions by their names
    and closures, arrays and (without `numbers`) numbers as "#", and an object with a method
    `in_words(inner)` as that returns.

    >>> words_of({"rate": 0.1, "sizes": {3, 1}, "f": max}), words_of(np.ones(3, np.float32))
    ("{'rate': 0.1, 'sizes': {1, 3}, 'f': max}", 'float32[3] 8a31a40ecac0')
    """
    if x is None or isinstance(x, (bool, str, bytes)):
        return repr(x)
    if isinstance(x, (int, float, complex)) and not trees.is_array(x):
        return repr(x) if numbers else "#"
    if trees.is_array(x):
        return _of_array(x) if code else "#"
    if depth > _DEEP or id(x) in outer_ids:
        return "…"
    inner = lambda y: words_of(y, depth + 1, outer_ids | {id(x)}, code, numbers)
    kind = type(x).__name__
    if not code and (in_words := getattr(type(x), "in_words", None)):
        return in_words(x, inner)
    if isinstance(x, type):
        return f"{x.__module__}.{x.__qualname__}" if code else x.__name__
    if isinstance(x, Mapping):
        items_text = ", ".join(f"{inner(k)}: {inner(v)}" for k, v in x.items())
        return f"{kind * (kind != 'dict')}{{{items_text}}}"
    if isinstance(x, Set):
        return f"{kind * (kind != 'set')}{{{', '.join(sorted(map(inner, x)))}}}"
    if isinstance(x, (list, tuple)):
        items_text = ", ".join(map(inner, x))
        opening, closing = {"list": "[]", "tuple": "()"}.get(kind) or (f"{kind}(", ")")
        return f"{opening}{items_text}{closing}"
    if isinstance(x, functools.partial):
        return f"partial({inner(x.func)}, {inner(x.args)}, {inner(x.keywords)})"
    if isinstance(x, types.MethodType):
        return f"{inner(x.__self__)}.{x.__name__}"
    if isinstance(x, types.FunctionType):
        return _of_function(x, inner, code)
    if callable(x) and hasattr(x, "__qualname__"):
        return x.__qualname__
    fields = dataclasses.fields(x) if dataclasses.is_dataclass(x) else ()
    fields = [f.name for f in fields if f.repr]
    if not fields and type(x).__repr__ is object.__repr__:
        fields = list(getattr(x, "__dict__", {}))
    if fields or dataclasses.is_dataclass(x):
        return f"{kind}({', '.join(f'{name}={inner(getattr(x, name, None))}' for name in fields)})"
    return without_address(repr(x))


def without_address(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _of_function(f: types.FunctionType, inner: Callable[[Any], str], code: bool) -> str:
    if not code:
        parts = [text for text in map(inner, cells_of(f).values()) if text not in ("#", "None")]
        return f.__qualname__.split(".<locals>")[0] + (f"({', '.join(parts)})" if parts else "")
    parts = [f.__defaults__, f.__kwdefaults__, *cells_of(f).values()]
    text = inner([x for x in parts if x is not None])
    return f"{f.__qualname__} {hash_of_code(f.__code__)}" + (f" of {text}" if text != "[]" else "")


def cells_of(f: Any) -> dict[str, Any]:
    """The values that a function closes over, by name."""
    values = {}
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            values[name] = cell.cell_contents
    return values


def _of_array(x: Any) -> str:
    is_array = np.ndim(x) or isinstance(x, np.ndarray | jax.Array)
    words = trees.describe(x) if is_array else f"{x.dtype}[]"
    words += " weak" * bool(getattr(x, "weak_type", False))
    if (bits := bits_of(x)) is None:
        return words
    if bits.dtype == object:
        return f"{words} {words_of(bits.tolist())}"
    value = hash_of(np.ascontiguousarray(bits).tobytes()) if bits.ndim else bits[()]
    return f"{words} {value}"


def value_text(x: Any) -> str:
    """The values of a small array with six digits; the shape and dtype of a large one."""
    has_values = not (trees.is_key(x) or trees.is_traced(x) or trees.is_gone(x))
    if not has_values or not getattr(x, "is_fully_addressable", True) or np.size(x) > _LISTED:
        return trees.describe(x)
    with np.printoptions(precision=6, linewidth=10**6, threshold=_LISTED):
        return " ".join(str(np.asarray(x)).split())


def _short_text(x: Any) -> str:
    """A number, a string, a tuple or list of both, or a small array as text; else ""."""
    items = x if isinstance(x, tuple | list) and len(x) <= _LISTED else [x]
    if all(isinstance(y, bool | int | float | str) for y in items):
        return repr(x)
    return value_text(x) if trees.is_array(x) else ""


def hash_of_code(code: types.CodeType, doc: str | None = None) -> str:
    """The hash of code and the functions inside it, without its file, lines and docstring."""
    text_of = lambda x: hash_of_code(x) if isinstance(x, types.CodeType) else words_of(x)
    constants = [text_of(x) for x in code.co_consts if x != doc]
    return hash_of(code.co_code + repr((code.co_names, constants)).encode())


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], tuple[str, ...], frozenset[str]]:
    """Attributes that code may read, globals and modules that it names, names that it changes."""
    instructions = list(dis.get_instructions(code))
    operations = [(x.opname, x.argval) for x in instructions]
    # `cache[key] = x` and `cache.append(x)` begin at the same column as `cache`.
    position_of = lambda x: x.positions and (x.positions.lineno, x.positions.col_offset)
    is_filling = lambda x: x.opname.endswith("E_SUBSCR") or x.argval in _FILLING
    places = {position_of(x) for x in instructions if is_filling(x)} - {None, (None, None)}
    loads = (x for x in instructions if position_of(x) in places and "LOAD_" in x.opname)
    changed = {str(x.argval) for x in loads if "FAST" not in x.opname} - _FILLING
    stored = {"STORE_GLOBAL": code.co_names, "STORE_DEREF": code.co_freevars}
    changed |= {x for operation, x in operations if x in stored.get(operation, ())}
    inner = [_names_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    attributes = {x for operation, x in operations if operation.startswith(_ATTRIBUTES)}
    attributes |= {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    names = [x for operation, x in operations if operation in _GLOBALS]
    names += [x for _, inner_names, _ in inner for x in inner_names]
    union = lambda names, i: frozenset(names.union(*(inner_result[i] for inner_result in inner)))
    return union(attributes, 0), tuple(names), union(changed, 2)


class _Walk:
    """A walk over the values that code refers to, breadth first.

    Functions refer to their defaults, to the variables of their closure, and to the globals and
    modules that they name. Of modules, classes and objects, an attribute counts if any of the code
    reads it. The code of Python, of tsunax and of installed packages is not read, except the
    package of the function. If the walk is exact, all attributes of pytrees and dataclasses count,
    and arrays count by value or identity instead of by shape.
    """

    def __init__(self, f: Any, is_exact: bool) -> None:
        self.is_exact, self.package = is_exact, ""
        self.names, names_before = {"__wrapped__", "setup"}, 0  # flax calls `setup` of a module
        self.changed: set[str] = set()  # names that the code itself changes
        self.values: dict[str, str] = {}  # numbers and short strings by name, for messages
        # Code that comes later in the walk may read an attribute of an earlier object.
        while names_before < len(self.names) + len(self.changed):
            names_before = len(self.names) + len(self.changed)
            parts = itertools.islice(self._parts(f), _VALUES)
            self.digest = hash_of("\n".join(parts).encode())

    def _is_read(self, module: object) -> bool:
        """Whether the code of a module is read."""
        top = str(module).partition(".")[0]
        file = str(getattr(sys.modules.get(top), "__file__", ""))
        is_foreign = top != self.package and "-packages" in file  # site-packages, dist-packages
        return not (is_foreign or top in _LIBRARIES or top in sys.stdlib_module_names)

    def _parts(self, f: Any) -> Iterator[str]:
        queue, number_of_id = collections.deque([f]), dict[int, Any]()
        while queue:
            x = queue.popleft()
            if id(x) in number_of_id:
                yield f"#{number_of_id[id(x)][0]}"
                continue
            if not isinstance(x, (tuple, *_PLAIN)):  # two equal numbers may be one object
                number_of_id[id(x)] = len(number_of_id), x
            text, inner_values = self._text_and_inside(x)
            yield text
            queue.extend(inner_values)

    def _text_and_inside(self, x: Any) -> tuple[str, Iterable[Any]]:
        """The text of a value itself, and the values inside of it."""
        kind, title = type(x), f"{type(x).__module__}.{type(x).__qualname__}"
        if isinstance(x, _PLAIN):
            return f"{title} {x!r}", ()
        if trees.is_array(x):
            return self._text_of_array(x), ()
        if isinstance(x, types.FunctionType):
            inner_values = [*self._named_values("", cells_of(x)), getattr(x, "__wrapped__", None)]
            top = str(x.__module__).partition(".")[0]
            self.package = self.package or (top if top not in _LIBRARIES else "")
            if not self._is_read(top):
                return x.__qualname__, inner_values
            attributes, names, changed = _names_in(x.__code__)
            self.names |= attributes | (_READING_ANY & {*names})
            self.changed |= changed
            read_values = {name: x.__globals__.get(name, sys.modules.get(name)) for name in names}
            inner_values += self._named_values("", read_values)
            text = f"{x.__qualname__} {hash_of_code(x.__code__, x.__doc__)}"
            named = x.__code__.co_varnames[: x.__code__.co_argcount]
            defaults = dict(zip(reversed(named), reversed(x.__defaults__ or ()), strict=False))
            return text, [
                *inner_values,
                *self._named_values("", defaults | (x.__kwdefaults__ or {})),
            ]
        if isinstance(x, Mapping | list | tuple | Set):
            flat = itertools.chain(*x.items()) if isinstance(x, Mapping) else x
            flat = sorted(map(words_of, x)) if isinstance(x, Set) else flat
            return f"{title} {len(x)}", flat if self.is_exact or len(x) <= _LISTED else ()
        if isinstance(x, types.ModuleType):
            is_read = self._is_read(x.__name__)
            read_values = {
                name: vars(x)[name] for name in sorted(self.names & {*vars(x)}) if is_read
            }
            return x.__name__, self._named_values(f"{x.__name__}.", read_values)
        if isinstance(x, type):
            read_classes = [c for c in x.__mro__ if self._is_read(c.__module__)]
            members = {name: y for c in reversed(read_classes) for name, y in vars(c).items()}
            dunders = {name for name, y in members.items() if isinstance(y, types.FunctionType)
                      and name[:2] == "__" and name not in _UNCALLED}  # fmt: skip
            counted = {name: members[name] for name in sorted((self.names | dunders) & {*members})}
            return f"{x.__module__}.{x.__qualname__}", self._named_values(f"{x.__name__}.", counted)
        slots = (getattr(c, "__slots__", ()) for c in kind.__mro__)
        names = [n for s in slots for n in ([s] if isinstance(s, str) else s) if n[:2] != "__"]
        members = {n: getattr(x, n, None) for n in names} | getattr(x, "__dict__", {})
        fields = getattr(kind, "__dataclass_fields__", members)
        is_read = self._is_read(kind.__module__)
        # Library code is not read here, but it may read any attribute, also of pytrees.
        is_struct = dataclasses.is_dataclass(kind) or not jax.tree_util.all_leaves([x])
        may_be_read = not is_read or not _READING_ANY.isdisjoint(self.names)
        is_of_python = title.partition(".")[0] in sys.stdlib_module_names
        is_whole = (may_be_read or (self.is_exact and is_struct)) and not is_of_python
        names = (self.names | {*(fields if is_whole else ())}) & {*members}
        flat = self._named_values(
            f"{kind.__name__}.", {name: members[name] for name in sorted(names)}
        )
        inner = [n for n in _INNER if not is_read and (n in members or hasattr(kind, n))]
        inner_values = [*[kind] * is_read, *(getattr(x, name, None) for name in inner), *flat]
        label = getattr(x, "__qualname__", "") if members or inner_values else repr(x)
        return f"{title} {label if self.is_exact else without_address(str(label))}", inner_values

    def _named_values(self, owner: str, values: Mapping[str, Any]) -> list[Any]:
        """Names and values, without numbers and contents that the code changes while it runs."""
        names_and_values: list[Any] = []
        for name, x in values.items():
            if name in self.changed and not self.is_exact:
                x = type(x) if isinstance(x, _CHANGING) else x
                x = trees.describe(x) if trees.is_array(x) else x
            elif (text := _short_text(x)) and len(text) <= _SHORT:
                self.values[owner + name] = text
            names_and_values += name, x
        return names_and_values

    def _text_of_array(self, x: Any) -> str:
        if not self.is_exact:
            return value_text(x)
        is_small = np.size(x) <= _HASHED and getattr(x, "is_fully_addressable", True)
        if is_small and not trees.is_gone(x):
            return _of_array(x)
        # A program that reads a large array keeps it: no other array gets its id. The owner of a
        # NumPy array may refill it, which some of its elements show: to hash all takes seconds.
        sample = _of_array(x.flat[:: x.size // _HASHED]) if isinstance(x, np.ndarray) else ""
        return f"{trees.describe(x)} {id(x)} {sample}"


def code_of(f: Any, *, is_exact: bool = False) -> str:
    """A hash of the code of a function, or a step, and of all values that it refers to.

    It is the same in every process. If it `is_exact`, equal hashes in this process mean that a
    trace of the function gives the same program, unless it reads attributes of functions or of
    subclasses of dict and list, all elements of large arrays, or the environment.
    """
    try:
        return _Walk(f, is_exact).digest
    except Exception:  # objects of any library, and their properties
        return f"unknown {id(f)}" if is_exact else "unknown"  # equal to no other hash


def values_of(f: Any) -> dict[str, str]:
    """The numbers and short strings that the code of a function refers to, by name."""
    with contextlib.suppress(Exception):
        return _Walk(f, is_exact=False).values
    return {}


def parts_of(root: str, node: Any, path: tuple = ()) -> dict[str, str]:
    """The leaves of a tree by path, and its containers and static fields."""
    place = trees.access_str(root, path)
    if node is None or jax.tree_util.all_leaves([node]):
        return {place: words_of(node)}
    parts, children = {}, trees.children_of(node)
    kind, static = jax.tree_util.tree_structure(node, is_leaf=lambda x: x is not node).node_data()
    if kind is not dict or not children:  # the paths of its leaves show a dict's keys
        words = "" if static is None else f" {words_of(static)}"
        parts[f"{place} itself"] = f"{kind.__name__}{words}"
    for key, child in children:
        parts |= parts_of(root, child, path + key)
    return parts
