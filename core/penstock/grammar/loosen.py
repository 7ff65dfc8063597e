"""Loosening the schemas of tools that are not strict: what the grammar engine cannot enforce is left out, and named.

The engine names one keyword at a time. It is left out of its schema, so that any value may stand there, and the rest
is tried again. A keyword that says what another one is about takes that one along.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.errors import InvalidRequest, RequestError, UnsupportedSchema
from penstock.grammar.tools import TOOLS_PATH, ConstrainedCalls
from penstock.messages import GrammarSpec

MAX_LOOSENINGS = 24
"""After so many keywords, the next schema with a fault is left out as a whole: each try costs a compilation."""
WHOLE = ""
"""Stands for all of a schema among the names of keywords."""
_DEPENDENTS = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
    "items": ("additionalItems",),
}
"""By keyword: those that would forbid more without it."""


class LoosenedGrammar(NamedTuple):
    """A grammar that can be used, and the keywords that were left out of its tools' schemas."""

    spec: GrammarSpec
    keywords: tuple[str, ...] = ()


def loosen_grammar(
    spec: GrammarSpec, names: Collection[str], check: Callable[[GrammarSpec], object]
) -> LoosenedGrammar:
    """Return a grammar that `check` takes: the schemas of the tools with these names lack what it refuses.

    Raises the `UnsupportedSchema` or `InvalidRequest` of a check if other parts of the grammar are at fault.
    """
    if not names:
        check(spec)
        return LoosenedGrammar(spec)
    calls = ConstrainedCalls.decode(spec.source)
    is_freed = any(tool.name in names and tool.parameters is None for tool in calls.tools)  # it was too large
    left_out = {WHOLE: None} if is_freed else {}
    while True:
        try:
            check(spec)
            return LoosenedGrammar(spec, tuple(left_out))
        except (UnsupportedSchema, InvalidRequest) as error:
            calls, keyword = _loosen_tool(calls, names, error, is_whole=len(left_out) >= MAX_LOOSENINGS)
        left_out[keyword] = None
        spec = calls.make_spec()


def _loosen_tool(
    calls: ConstrainedCalls, names: Collection[str], error: RequestError, *, is_whole: bool
) -> tuple[ConstrainedCalls, str]:
    """Return the calls without what an error is about, and its keyword. Raises the error if it is not about `names`."""
    if not isinstance(error, UnsupportedSchema):  # all schemas together are too much
        free = calls.free_tools(names)
        if free == calls:
            raise error
        return free, WHOLE
    number, _, path = error.path.removeprefix(TOOLS_PATH).partition("/function/parameters")
    tool = calls.tools[int(number)] if error.path.startswith(TOOLS_PATH) else None
    if tool is None or tool.name not in names or tool.parameters is None:
        raise error
    schema = None if is_whole else _loosen_schema(tool.parameters, error.keyword, path)
    tools = [replace(one, parameters=schema) if one is tool else one for one in calls.tools]
    return replace(calls, tools=tuple(tools)), error.keyword if schema is not None else WHOLE


def _loosen_schema(schema: dict[str, Any], keyword: str, path: str) -> dict[str, Any] | None:
    """Return a schema without the keyword at a path; None if nothing of it would be left."""
    above, _, last = path.rpartition("/")
    parts = [_read_part(part) for part in above.split("/")[1:]]
    if last != keyword and parts[-1:] == [keyword]:  # a name of `properties` is at fault
        *parts, last = parts
    place, fault = (parts, keyword) if last == keyword else ([*parts, _read_part(last)] if path else [], WHOLE)
    try:
        found = _replace_at(schema, place, fault)
    except (KeyError, IndexError, ValueError):  # a `$ref` writes it otherwise
        return None
    return found if isinstance(found, dict) else None


def _replace_at(node: Any, parts: list[str], keyword: str) -> Any:
    """Return a copy of a schema that lacks the keyword in the schema at a place. Without a keyword that is anything."""
    if parts:
        place: Any = int(parts[0]) if isinstance(node, list) else parts[0]
        inner = _replace_at(node[place], parts[1:], keyword)
        return [*node[:place], inner, *node[place + 1 :]] if isinstance(node, list) else node | {place: inner}
    if keyword not in node:
        return True
    return {name: one for name, one in node.items() if name not in (keyword, *_DEPENDENTS.get(keyword, ()))}


def _read_part(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
