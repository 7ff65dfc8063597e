"""Preparing JSON schemas for the grammar engine: a keyword that it cannot enforce exactly is refused, with its path.

`prepare_schema` builds a new schema out of the keywords that are known to be enforced; no other reaches the engine:

- `$ref`s are resolved here, inside of the schema only, and each target is prepared once, as an entry of `$defs`.
- `oneOf` becomes `anyOf` where the alternatives exclude each other: by their types, by constants, or by a property
  that all of them require and give different constants, also behind a `$ref`.
- Older drafts' `items` and `additionalItems` for tuples become `prefixItems` and `items`.
- `format` becomes a pattern where the engine does not know it, or is not exact about leap years and lengths. One that
  restricts nothing, and one that no specification knows beside a `pattern`, is an annotation.
- Patterns are translated (`pattern.py`).
- `propertyNames` becomes `properties` or `patternProperties`, and `uniqueItems` the orders in which the items can come.
- Annotations, and keywords that no draft knows, are left out, as the specification says.
"""

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

from penstock.errors import UnsupportedSchema
from penstock.grammar.formats import (
    ENCODINGS,
    ENGINE_FORMATS,
    FORMAT_PATTERNS,
    FREE_FORMATS,
    MAX_HOSTNAME_CHARS,
    UNENFORCED_FORMATS,
)
from penstock.grammar.pattern import PatternRefused, check_text, translate_pattern, translate_patterns

T = TypeVar("T")
MAX_DEPTH = 96
"""The most schemas inside of each other, `$ref`s followed. The engine's compiler recurses; at 600 its stack ends."""
MAX_SCHEMAS = 5000
MAX_PROPERTIES = 1000
MAX_OPTIONAL_PROPERTIES = 256
"""The most optional properties of one object. The engine's parser needs four items for each in one row, of 2,000."""
MAX_ENUM_VALUES = 5000
MAX_PATTERN_PROPERTIES = 16
"""The most pattern properties of one object. Each pair of them is checked for names that match both."""
MAX_ITEM_ORDERS = 120
"""The most orders of different items in one array: enough for any order of 5 values, or of 2 among 11."""
MAX_COMPARED_ALTERNATIVES = 64
"""The most alternatives of one `oneOf`: each is compared with each other one."""
_MAX_MEETINGS = 50
"""The most schemas in which several apply to one value; with more, all of them are assumed to apply to it."""
MAX_PATTERNS_AT_ONCE = 4
"""The most patterns for one text. Their intersection takes time exponential in their number."""
MAX_EXACT_INT = 2**53
"""The engine keeps bounds and constants as float64."""
MAX_LENGTH = 2**31 - 1
MAX_INT_DIVISOR = 1000
"""The largest integer of `multipleOf`: the engine's automaton has a state for each remainder."""

Node = dict[str, Any] | bool
"""A prepared schema."""

_APPLICATORS = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")
"""Keywords whose schemas apply to the same value. The engine intersects them in the order in which they are written."""
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("not", "if", "then", "else"), "it cannot be enforced: write what is allowed as 'anyOf'"),
    **dict.fromkeys(
        ("contains", "minContains", "maxContains"),
        "items cannot be counted by what they are: use 'prefixItems' for those that must be there",
    ),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"),
        "dependencies cannot be enforced: write the allowed combinations as 'anyOf'",
    ),
    "unevaluatedItems": "it cannot be enforced: use 'items' beside 'prefixItems'",
    "unevaluatedProperties": "it cannot be enforced: use 'additionalProperties' beside all 'properties'",
    **dict.fromkeys(
        ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"), "it is not followed: use '$ref'"
    ),
    **dict.fromkeys(
        ("extends", "disallow", "divisibleBy"), "keywords of draft 3 are not supported: use those of draft 2020-12"
    ),
    "x-guidance": "options of the engine cannot be given: leave it out",
}


@dataclass(frozen=True)
class PreparedSchema:
    """A schema with the same meaning as another one, which the engine enforces exactly if it takes it."""

    schema: dict[str, Any]
    paths: Mapping[int, str]
    """The source of each schema inside of it, by the schema's `id()`: a JSON pointer into the given schema."""


def prepare_schema(schema: Any) -> PreparedSchema:
    """Prepare a schema for the engine. Raises `UnsupportedSchema`."""
    return _Preparation(schema).prepare_schema()


class _Preparation:
    """One schema while it is prepared."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_schemas = 0
        self._num_enum_values = 0
        self._names: dict[str, str] = {}
        """The entry of `$defs` for each target of a `$ref`, by the target's JSON pointer."""
        self._defs: dict[str, Node] = {}
        self._paths: dict[int, str] = {}

    def prepare_schema(self) -> PreparedSchema:
        if not isinstance(self._root, dict):
            raise UnsupportedSchema.at_keyword("schema", "#", "it must be an object")
        self._prepare_target("#", 0)
        self._check_ends()
        if sum_patterns(self._defs) > MAX_PATTERNS_AT_ONCE:
            reason = f"a text would have to match more than {MAX_PATTERNS_AT_ONCE} patterns at once"
            raise UnsupportedSchema.at_keyword("pattern", "#", reason)
        self._check_exclusive_bounds()
        for node in iterate_nodes(self._defs):
            self._replace_one_of(node)
        return PreparedSchema({"$ref": "#/$defs/0", "$defs": self._defs}, self._paths)

    def _prepare_target(self, pointer: str, depth: int, path: str = "#") -> str:
        """Prepare what a JSON pointer at `path` names, if it is not yet; return the reference to its `$defs` entry."""
        if pointer not in self._names:
            self._names[pointer] = name = str(len(self._names))
            self._defs[name] = True
            self._defs[name] = self._prepare(self._resolve(pointer, path), pointer, depth)
        return f"#/$defs/{self._names[pointer]}"

    def _resolve(self, pointer: str, path: str) -> Any:
        node = self._root
        for part in pointer.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")  # noqa: PLW2901
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                raise UnsupportedSchema.at_keyword("$ref", path, f"there is no schema at {pointer}")
        return node

    def _prepare(self, node: Any, path: str, depth: int) -> Node:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise UnsupportedSchema.at_keyword("schema", path, "it must be an object or a boolean")
        if depth > 0 and (node.get("not") is True or node.get("not") == {}):
            return False
        self._count_schemas(1, path)
        if depth > MAX_DEPTH:
            raise UnsupportedSchema.at_keyword("schema", path, f"it is more than {MAX_DEPTH} schemas deep")
        for keyword, value in node.items():
            self._check_keyword(keyword, value, f"{path}/{escape_pointer(keyword)}")
        plain: dict[str, Any] = {}
        applied: dict[str, Any] = {}
        more: list[Node] = []
        for keyword, value in node.items():
            made = self._prepare_keyword(node, keyword, value, f"{path}/{escape_pointer(keyword)}", depth) or {}
            if keyword in _APPLICATORS:
                applied |= made
            else:
                more += made.pop("allOf", ())  # of a format or a pattern
                plain |= made
        self._replace_property_names(plain, path)
        more += self._replace_unique_items(plain, path)
        if more:
            applied["allOf"] = [*applied.get("allOf", ()), *more]
        self._check_object(plain, path)
        # The engine takes `additionalProperties` for what the keywords before it, up to an applicator, leave over.
        first = next((keyword for keyword in node if keyword in (*_APPLICATORS, "properties", "propertyNames")), "")
        found = {**applied, **plain} if first in _APPLICATORS else {**plain, **applied}
        self._paths[id(found)] = path
        return found

    def _count_schemas(self, count: int, path: str) -> None:
        self._num_schemas += count
        if self._num_schemas > MAX_SCHEMAS:
            raise UnsupportedSchema.at_keyword(
                "schema", path, f"there are more than {MAX_SCHEMAS:,} schemas: use fewer"
            )

    def _check_keyword(self, keyword: str, value: Any, path: str) -> None:
        if keyword in _REFUSED:
            raise UnsupportedSchema.at_keyword(keyword, path, _REFUSED[keyword])
        if keyword == "$id" and path != "#/$id":
            raise UnsupportedSchema.at_keyword(
                keyword, path, "only the root may have one: use '$ref' with a JSON pointer"
            )

    def _prepare_keyword(
        self, node: dict[str, Any], keyword: str, value: Any, path: str, depth: int
    ) -> dict[str, Any] | None:
        """Return what a keyword becomes; None for an annotation."""
        if keyword in _VALUE_CHECKS:
            return {keyword: _VALUE_CHECKS[keyword](value, keyword, path)}
        if keyword in {"format", "pattern"}:
            return _prepare_format(node, value, path) if keyword == "format" else _prepare_pattern(value, path)
        if keyword in {"items", "additionalItems"}:
            return self._prepare_items(node, keyword, value, path, depth)
        made: Any = None
        match keyword:
            case "const":
                made = self._check_constant(value, keyword, path)
            case "enum":
                made = self._prepare_enum(value, path)
            case "$ref":
                made = self._prepare_ref(value, path, depth)
            case "allOf" | "anyOf" | "oneOf" | "prefixItems":
                made = self._prepare_list(value, keyword, path, depth)
            case "properties" | "patternProperties":
                made = self._prepare_map(value, keyword, path, depth)
            case "additionalProperties" | "propertyNames":
                made = self._prepare(value, path, depth + 1)
            case _:
                return None
        return {keyword: made}

    def _prepare_items(
        self, node: dict[str, Any], keyword: str, value: Any, path: str, depth: int
    ) -> dict[str, Any] | None:
        """Return `items` of the latest draft, or what a tuple of older drafts becomes in it."""
        is_tuple = isinstance(node.get("items"), list)
        if keyword == "items" and is_tuple:
            return {"prefixItems": self._prepare_list(value, keyword, path, depth)}
        if keyword == "additionalItems" and not is_tuple:
            return None
        return {"items": self._prepare(value, path, depth + 1)}

    def _replace_property_names(self, plain: dict[str, Any], path: str) -> None:
        """Write `propertyNames` as the properties that it allows."""
        allowed = plain.pop("propertyNames", True)
        if allowed is True or (allowed is not False and allowed.keys() <= {"type"} and "string" in _types_of(allowed)):
            return
        names, known = self._list_values(allowed), plain.get("properties", {})
        pattern = None if known else _find_pattern_of_names(allowed)
        if "patternProperties" in plain or (names is None and pattern is None):
            reason = (
                "names cannot be held to it here: use 'properties' or 'patternProperties' "
                "with 'additionalProperties': false"
            )
            raise UnsupportedSchema.at_keyword("propertyNames", f"{path}/propertyNames", reason)
        others = plain.get("additionalProperties", True)
        if names is None:
            plain["patternProperties"] = {pattern: others}
        else:
            texts = [one for one in names if isinstance(one, str)]
            plain["properties"] = {name: one for name, one in known.items() if name in texts}
            plain["properties"] |= {name: others for name in texts if name not in known}
        plain["additionalProperties"] = False

    def _replace_unique_items(self, plain: dict[str, Any], path: str) -> list[Node]:
        """Return what demands that the items of an array differ, if `uniqueItems` is there, and leave it out."""
        prefix, items = plain.get("prefixItems", []), plain.get("items", True)
        most = min(plain.get("maxItems", MAX_LENGTH), MAX_LENGTH if items is not False else len(prefix))
        if not plain.pop("uniqueItems", False) or most <= 1 or "array" not in _types_of(plain):
            return []
        values = None if prefix else self._list_values(items)
        distinct = list(
            {_write_constant(one): one for one in reversed(values or [])}.values()
        )  # of equal ones the first
        most = min(most, len(distinct))
        if values is None or math.perm(len(distinct), most) > MAX_ITEM_ORDERS:
            reason = (
                "items cannot be compared: leave it out, or list up to 5 values as an 'enum' in 'items', "
                f"or more with a 'maxItems' for which there are at most {MAX_ITEM_ORDERS} orders"
            )
            raise UnsupportedSchema.at_keyword("uniqueItems", f"{path}/uniqueItems", reason)
        constants = [{"const": one} for one in distinct]
        orders = list(itertools.permutations(constants, most))
        self._count_schemas(len(orders) * most, path)
        plain.pop("items", None)
        plain.pop("maxItems", None)
        others = [one for one in _types_of(plain) if one != "array"]
        found: list[Node] = [{"type": "array", "prefixItems": list(order), "items": False} for order in orders]
        return [{"anyOf": [*found, *([{"type": others}] if others else [])]}]

    def _list_values(self, node: Node) -> list[Any] | None:
        """Return the values that a prepared schema allows, if it lists them; None for another one."""
        for _ in range(16):
            if isinstance(node, bool) or set(node) != {"$ref"}:
                break
            node = self._follow(node)
        if isinstance(node, bool):
            return None if node else []
        match sorted(node.keys() - {"type"}):
            case ["enum"] | ["const"]:
                values = node["enum"] if "enum" in node else [node["const"]]
                return [one for one in values if _is_of_type(one, _types_of(node))]
            case ["anyOf"] if "type" not in node:
                found = [self._list_values(one) for one in node["anyOf"]]
                return None if None in found else [value for one in found for value in one or ()]
            case [] if set(_types_of(node)) <= {"null", "boolean"}:
                return [one for one in (None, False, True) if _type_of_value(one) in _types_of(node)]
        return None

    def _prepare_ref(self, value: Any, path: str, depth: int) -> str:
        if not isinstance(value, str):
            raise UnsupportedSchema.at_keyword("$ref", path, "it must be a text")
        if value != "#" and not value.startswith("#/"):
            raise UnsupportedSchema.at_keyword("$ref", path, "no other document is read: use '#/$defs/...'")
        return self._prepare_target(value, depth + 1, path)

    def _prepare_list(self, value: Any, keyword: str, path: str, depth: int) -> list[Node]:
        if not isinstance(value, list) or (not value and keyword != "prefixItems"):
            raise UnsupportedSchema.at_keyword(keyword, path, "it must be a list of schemas")
        return [self._prepare(one, f"{path}/{index}", depth + 1) for index, one in enumerate(value)]

    def _prepare_map(self, value: Any, keyword: str, path: str, depth: int) -> dict[str, Node]:
        if not isinstance(value, dict):
            raise UnsupportedSchema.at_keyword(keyword, path, "it must be an object")
        if len(value) > (MAX_PROPERTIES if keyword == "properties" else MAX_PATTERN_PROPERTIES):
            raise UnsupportedSchema.at_keyword(keyword, path, "it has too many entries")
        found = {}
        for name, one in value.items():
            where = f"{path}/{escape_pointer(name)}"
            if keyword == "patternProperties":
                found[_translate(name, keyword, where, translate_pattern)] = self._prepare(one, where, depth + 1)
            else:
                _check_writable(name, keyword, where)
                found[name] = self._prepare(one, where, depth + 1)
        return found

    def _prepare_enum(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise UnsupportedSchema.at_keyword("enum", path, "it must be a list of values")
        self._num_enum_values += len(value)
        if self._num_enum_values > MAX_ENUM_VALUES:
            raise UnsupportedSchema.at_keyword("enum", path, f"there are more than {MAX_ENUM_VALUES:,} values")
        for one in value:
            self._check_constant(one, "enum", path)
        return value

    def _check_constant(self, value: Any, keyword: str, path: str) -> Any:
        """Return a value as it is. Raises `UnsupportedSchema` if answers cannot have it."""
        if isinstance(value, str):
            _check_writable(value, keyword, path)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(value, keyword, path)
        elif isinstance(value, list):
            for one in value:
                self._check_constant(one, keyword, path)
        elif isinstance(value, dict):
            for name, one in value.items():
                self._check_constant(name, keyword, path)
                self._check_constant(one, keyword, path)
        return value

    def _check_object(self, plain: dict[str, Any], path: str) -> None:
        names = plain.get("properties", {})
        required = plain.get("required", [])
        if len(set(names) - set(required)) > MAX_OPTIONAL_PROPERTIES:
            reason = f"an object may have {MAX_OPTIONAL_PROPERTIES} that are not required"
            raise UnsupportedSchema.at_keyword("properties", f"{path}/properties", reason)
        free = plain.get("additionalProperties", True) is not False or plain.get("patternProperties")
        if free and plain.get("minProperties", 0) > len(set(required)) + 1:
            raise UnsupportedSchema.at_keyword(
                "minProperties",
                f"{path}/minProperties",
                "names that are not listed might come twice: list them as 'required'",
            )

    def _check_ends(self) -> None:
        """Refuse a recursion that no value can end."""
        ending: set[str] = set()
        num_known = -1
        while len(ending) > num_known:
            num_known = len(ending)
            for name in reversed(self._defs):  # those that others refer to first
                if name not in ending and _can_end(self._defs[name], ending):
                    ending.add(name)
        for pointer, name in reversed(self._names.items()):
            if name not in ending:
                raise UnsupportedSchema.at_keyword("$ref", pointer, "no value ends this recursion")

    def _check_exclusive_bounds(self) -> None:
        """Refuse whole exclusive bounds less than 1 from the opposite bound: the engine allows the bound itself.

        Bounds meet where they stand in one schema, and in schemas that apply to the same value.
        """
        nodes = list(iterate_nodes(self._defs))
        if _find_near_bound(nodes) is None:
            return
        meetings = [node for node in nodes if _has_several_parts(node)]
        groups = [[node] for node in nodes]
        groups += [nodes] if len(meetings) > _MAX_MEETINGS else [self._reach(node) for node in meetings]
        for group in groups:
            if (found := _find_near_bound(group)) is not None:
                keyword, node = found
                path = f"{self._paths.get(id(node), '#')}/{keyword}"
                raise UnsupportedSchema.at_keyword(
                    keyword, path, "it is less than 1 from an opposite bound: use a bound that is allowed itself"
                )

    def _reach(self, start: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a schema with all those inside of it, `$ref`s followed."""
        found = {id(start): start}
        waiting = [start]
        while waiting:
            node = waiting.pop()
            inner = [*iterate_children(node), *([self._follow(node)] if "$ref" in node else [])]
            for one in inner:
                if isinstance(one, dict) and id(one) not in found:
                    found[id(one)] = one
                    waiting.append(one)
        return list(found.values())

    def _follow(self, node: dict[str, Any]) -> Node:
        return self._defs[node["$ref"].rpartition("/")[2]]

    def _replace_one_of(self, node: dict[str, Any]) -> None:
        options = node.get("oneOf")
        if options is None or "anyOf" in node or len(options) > MAX_COMPARED_ALTERNATIVES:
            return
        if all(_is_disjoint(one, two, self._defs, 4) for i, one in enumerate(options) for two in options[:i]):
            order = {"anyOf" if keyword == "oneOf" else keyword: value for keyword, value in node.items()}
            node.clear()
            node.update(order)


def _find_near_bound(nodes: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """Return a whole exclusive bound that is less than 1 from the opposite bound of one of these schemas."""
    for keyword, sign, opposite in (
        ("exclusiveMinimum", 1, ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", -1, ("minimum", "exclusiveMinimum")),
    ):
        others = sorted({sign * node[name] for node in nodes for name in opposite if name in node})
        for node in nodes:
            bound = sign * node.get(keyword, 0.5)
            if bound == int(bound) and "number" in _types_of(node):
                nearest = bisect_right(others, bound)
                if nearest < len(others) and others[nearest] < bound + 1:
                    return keyword, node
    return None


def _has_several_parts(node: dict[str, Any]) -> bool:
    """Return whether several schemas inside of this one, or it and one inside of it, apply to the same value."""
    inner = len(node.get("allOf", ())) + sum(keyword in node for keyword in ("anyOf", "oneOf", "$ref"))
    return inner + bool(node.keys() - {*_APPLICATORS, "type"}) > 1


def iterate_nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas in `$defs`, or inside of a schema, the inner ones after the outer ones."""
    for node in value.values() if isinstance(value, dict) else value:
        if isinstance(node, dict):
            yield node
            yield from iterate_nodes(list(iterate_children(node)))


def iterate_children(node: dict[str, Any]) -> Iterator[Node]:
    """Yield the schemas directly inside of a schema."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from node.get(keyword, ())
    yield from _iterate_inner(node)


def sum_patterns(defs: Mapping[str, Node]) -> int:
    """Return a bound of how many patterns one text may have to match at once."""
    known: dict[str, int] = {}

    def sum_in_schema(node: Node) -> int:
        if isinstance(node, bool):
            return 0
        target = node.get("$ref", "")
        inner = [sum_in_schema(one) for one in _iterate_inner(node)]
        options = [sum_in_schema(one) for keyword in ("anyOf", "oneOf") for one in node.get(keyword, ())]
        own = ("pattern" in node) + ("format" in node) + sum(sum_in_schema(one) for one in node.get("allOf", ()))
        return own + max(inner, default=0) + max(options, default=0) + (sum_in_entry(target) if target else 0)

    def sum_in_entry(target: str) -> int:
        name = target.rpartition("/")[2]
        if name not in known:
            known[name] = 0  # a recursion meets itself one level below
            known[name] = sum_in_schema(defs[name])
        return known[name]

    return max(sum_in_entry(name) for name in defs)


def _iterate_inner(node: dict[str, Any]) -> Iterator[Node]:
    """Yield the schemas of what a value contains."""
    for keyword in ("items", "additionalProperties"):
        if keyword in node:
            yield node[keyword]
    yield from node.get("prefixItems", ())
    for keyword in ("properties", "patternProperties"):
        yield from node.get(keyword, {}).values()


def _can_end(node: Node, ending: set[str]) -> bool:
    """Return whether there is a value for a schema, if there are values for these entries of `$defs`."""
    if isinstance(node, bool):
        return True
    if "$ref" in node and node["$ref"].rpartition("/")[2] not in ending:
        return False
    if not all(_can_end(one, ending) for one in node.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(_can_end(one, ending) for one in node[keyword]):
            return False
    types = set(_types_of(node))
    if not types <= {"object", "array"}:
        return True
    return ("object" in types and _object_can_end(node, ending)) or ("array" in types and _array_can_end(node, ending))


def _object_can_end(node: dict[str, Any], ending: set[str]) -> bool:
    names = node.get("properties", {})
    return all(_can_end(names.get(name, True), ending) for name in node.get("required", ()))


def _array_can_end(node: dict[str, Any], ending: set[str]) -> bool:
    prefix = node.get("prefixItems", [])[: node.get("minItems", 0)]
    rest = node.get("items", True) if node.get("minItems", 0) > len(prefix) else True
    return all(_can_end(one, ending) for one in (*prefix, rest))


def _is_disjoint(one: Node, two: Node, defs: Mapping[str, Node], depth: int) -> bool:
    """Return whether it is certain that no value matches both schemas."""
    one, two = _follow_refs(one, defs), _follow_refs(two, defs)
    if isinstance(one, bool) or isinstance(two, bool) or depth == 0:
        return False
    if not _simple_types(one) & _simple_types(two):
        return True
    first, second = _constants_of(one), _constants_of(two)
    if first is not None and second is not None and not first & second:
        return True
    if _simple_types(one) & _simple_types(two) != {"object"}:
        return False
    shared = set(one.get("required", ())) & set(two.get("required", ()))
    names, other = one.get("properties", {}), two.get("properties", {})
    return any(
        name in names and name in other and _is_disjoint(names[name], other[name], defs, depth - 1) for name in shared
    )


def _follow_refs(node: Node, defs: Mapping[str, Node]) -> Node:
    """Return the target of a schema that is nothing but a `$ref`."""
    for _ in range(16):
        if isinstance(node, bool) or set(node) != {"$ref"}:
            return node
        node = defs[node["$ref"].rpartition("/")[2]]
    return True


def _simple_types(node: dict[str, Any]) -> set[str]:
    return {"number" if one == "integer" else one for one in _types_of(node)}


def _types_of(node: dict[str, Any]) -> Sequence[str]:
    if "type" in node:
        return [node["type"]] if isinstance(node["type"], str) else list(node["type"])
    values = [node["const"]] if "const" in node else node.get("enum")
    return _TYPES if values is None else [_type_of_value(one) for one in values]


def _type_of_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return kinds[type(value)]


def _constants_of(node: dict[str, Any]) -> set[str] | None:
    """Return the values of a schema that allows only some; None for another one."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if values is None:
        return None
    return {_write_constant(one) for one in values}


def _write_constant(value: Any) -> str:
    """Return a text that equal values have in common: 1 and 1.0 are the same value."""
    match value:
        case bool() | str() | None:
            return json.dumps(value)
        case list():
            return f"[{','.join(map(_write_constant, value))}]"
        case dict():
            return f"{{{','.join(f'{json.dumps(name)}:{_write_constant(value[name])}' for name in sorted(value))}}}"
    return str(float(value) + 0.0)  # -0.0 is 0.0


def _is_of_type(value: Any, types: Sequence[str]) -> bool:
    kind = _type_of_value(value)
    return kind in types or (kind == "number" and "integer" in types and value == int(value))


def _find_pattern_of_names(node: Node) -> str | None:
    """Return the pattern that says all that a prepared schema demands of a text; None if there is no such pattern."""
    if isinstance(node, bool) or "string" not in _types_of(node):
        return None
    demands = {keyword: value for keyword, value in node.items() if keyword != "type"}
    match demands:
        case {"pattern": str(pattern)} if len(demands) == 1:
            return pattern
        case {"allOf": [only]} if len(demands) == 1:
            return _find_pattern_of_names(only)
    if demands and demands.keys() <= {"minLength", "maxLength"}:
        return f"^[^\\x{{0}}]{{{demands.get('minLength', 0)},{demands.get('maxLength', '')}}}$"
    return None


def _check_type(value: Any, keyword: str, path: str) -> str | list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        raise UnsupportedSchema.at_keyword(keyword, path, "it must be a name, or a list of names")
    if unknown := [one for one in names if one not in _TYPES]:
        raise UnsupportedSchema.at_keyword(keyword, path, f"there is no type {unknown[0]!r}: use {', '.join(_TYPES)}")
    return value if isinstance(value, str) else list(names)


def _check_names(value: Any, keyword: str, path: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UnsupportedSchema.at_keyword(keyword, path, "it must be a list of names")
    if len(value) > MAX_PROPERTIES:
        raise UnsupportedSchema.at_keyword(keyword, path, "it has too many entries")
    for one in value:
        _check_writable(one, keyword, path)
    return value


def _check_writable(text: str, keyword: str, path: str) -> None:
    try:
        check_text(text)
    except PatternRefused as error:
        raise UnsupportedSchema.at_keyword(keyword, path, str(error)) from None


def _translate(value: Any, keyword: str, path: str, translate: Callable[[str], T]) -> T:
    if not isinstance(value, str):
        raise UnsupportedSchema.at_keyword(keyword, path, "it must be a text")
    try:
        return translate(value)
    except PatternRefused as error:
        raise UnsupportedSchema.at_keyword(keyword, path, str(error)) from None


def _prepare_pattern(value: Any, path: str) -> dict[str, Any]:
    parts = _translate(value, "pattern", path, translate_patterns)
    return {"pattern": parts[-1], "allOf": [{"pattern": one} for one in parts[:-1]]}


def _prepare_format(node: dict[str, Any], value: Any, path: str) -> dict[str, Any] | None:
    if "string" not in _types_of(node):
        return None
    if not isinstance(value, str):
        raise UnsupportedSchema.at_keyword("format", path, "it must be a text")
    if value in ENGINE_FORMATS:
        return {"format": value}
    is_known = (value in FORMAT_PATTERNS and value not in ENCODINGS) or value in UNENFORCED_FORMATS
    if value in FREE_FORMATS or (_has_pattern(node) and not is_known):
        return None
    if value not in FORMAT_PATTERNS:
        reason = f"the format {value!r} cannot be enforced: say it as a 'pattern' instead, or leave it out"
        raise UnsupportedSchema.at_keyword("format", path, reason)
    more: list[Node] = [{"pattern": pattern} for pattern in FORMAT_PATTERNS[value]]
    if value == "hostname":
        more.append({"maxLength": MAX_HOSTNAME_CHARS})
    return {"allOf": more}


def _has_pattern(node: dict[str, Any]) -> bool:
    parts = node.get("allOf")
    return "pattern" in node or any(isinstance(one, dict) and "pattern" in one for one in parts or ())


def _check_flag(value: Any, keyword: str, path: str) -> bool:
    if not isinstance(value, bool):
        raise UnsupportedSchema.at_keyword(keyword, path, "it must be true or false")
    return value


def _check_length(value: Any, keyword: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 0:
        raise UnsupportedSchema.at_keyword(keyword, path, "it must be a whole number from 0 on")
    if value > MAX_LENGTH:
        raise UnsupportedSchema.at_keyword(keyword, path, f"it may be {MAX_LENGTH:,}")
    return int(value)


def _check_number(value: Any, keyword: str, path: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UnsupportedSchema.at_keyword(keyword, path, "it must be another value: use a number")
    if abs(value) > MAX_EXACT_INT:
        raise UnsupportedSchema.at_keyword(keyword, path, "numbers beyond 2^53 are not exact: use texts")
    return value


def _check_divisor(value: Any, keyword: str, path: str) -> int | float:
    number = _check_number(value, keyword, path)
    if number <= 0:
        raise UnsupportedSchema.at_keyword(keyword, path, "it must be above 0")
    digits = f"{number:.9f}".rstrip("0").replace(".", "").lstrip("0")
    if float(f"{number:.9f}") != number or int(digits or 0) > MAX_INT_DIVISOR:
        raise UnsupportedSchema.at_keyword(
            keyword, path, f"it has too many digits: use at most those of {MAX_INT_DIVISOR:,}"
        )
    return number


def escape_pointer(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


_VALUE_CHECKS: Mapping[str, Callable[[Any, str, str], Any]] = {
    "type": _check_type,
    "required": _check_names,
    "multipleOf": _check_divisor,
    "uniqueItems": _check_flag,
    **dict.fromkeys(_LENGTHS, _check_length),
    **dict.fromkeys(_BOUNDS, _check_number),
}
"""Functions by keyword: each makes the prepared value from the keyword's value, the keyword and its path."""
