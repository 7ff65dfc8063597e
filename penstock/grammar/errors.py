"""The errors of grammars: both become the result of their request."""

from penstock.errors import RequestError


class UnsupportedSchema(RequestError):
    """A JSON schema has a keyword that cannot be enforced exactly. `keyword` and `path` say which and where.

    `path` is a JSON pointer from the root of the schema, which is `#`.
    """

    code = "unsupported_schema"

    def __init__(self, keyword: str, path: str, reason: str) -> None:
        super().__init__(f"'{keyword}' at {path}: {reason}")
        self.keyword = keyword
        self.path = path
        self.reason = reason


class GrammarFailed(RequestError):
    """A grammar cannot go on: a token of the log is not allowed by it, or computing a mask exceeds its limits."""

    code = "grammar_failed"
