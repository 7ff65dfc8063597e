"""For how long bodies ask to keep the KV of their prompt, and that their requests say it."""

from typing import Any

import pytest

from penstock.ingest.ignored import IGNORED_HEADER
from penstock.ingest.retention import find_retention
from tests.ingest.test_sessions import ASKED, MESSAGES, OPENAI, Site, site

__all__ = ["site"]
FIVE_MINUTES, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
TEXT = {"type": "text", "text": "?"}


@pytest.mark.parametrize(
    ("fields", "seconds", "heeded"),
    [
        ({}, None, set()),
        ({"prompt_cache_retention": "24h"}, 3600, {"prompt_cache_retention"}),
        ({"prompt_cache_retention": "in_memory"}, 300, {"prompt_cache_retention"}),
        ({"prompt_cache_retention": "for ever"}, None, set()),
        ({"prompt_cache_retention": ["24h"]}, None, set()),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, 1800, {"prompt_cache_options"}),
        ({"prompt_cache_options": {"ttl": "48h"}}, 3600, {"prompt_cache_options"}),
        ({"prompt_cache_options": {"mode": "explicit"}}, None, set()),
        ({"cache_control": FIVE_MINUTES}, 300, {"cache_control"}),
        ({"cache_control": HOUR | {"ttl": "5m"}}, 300, {"cache_control"}),
        ({"cache_control": HOUR | {"ttl": "0m"}}, None, set()),
        ({"cache_control": HOUR | {"ttl": 5}}, None, set()),
        ({"cache_control": "1h"}, None, set()),
        (
            {"system": [TEXT | {"cache_control": FIVE_MINUTES}], "tools": [{"name": "f", "cache_control": HOUR}]},
            3600, {"system.*.cache_control", "tools.*.cache_control"},
        ),
        (
            {"messages": [3, {"content": "?"}, {"content": [{"content": [TEXT | {"cache_control": HOUR}]}]}]},
            3600, {"messages.*.content.*.content.*.cache_control"},
        ),
    ],
)  # fmt: skip
def test_a_body_asks_by_the_fields_of_its_api(fields: dict[str, Any], seconds: int | None, heeded: set[str]) -> None:
    assert find_retention(fields) == (seconds, heeded)


@pytest.mark.parametrize(
    ("path", "body", "retain_s", "ignored"),
    [
        *[(path, {"prompt_cache_retention": "24h", "user": "u"}, 3600.0, "user") for path in OPENAI],
        (OPENAI[1], {"prompt_cache_retention": "never"}, None, "prompt_cache_retention"),
        (
            MESSAGES, {"messages": [{"role": "user", "content": [TEXT | {"cache_control": FIVE_MINUTES}]}]},
            300.0, None,
        ),
        (MESSAGES, {}, None, None),
    ],
)  # fmt: skip
def test_a_request_says_how_long_its_kv_is_kept_and_fields_that_are_heeded_are_not_named(
    site: Site, path: str, body: dict[str, Any], retain_s: float | None, ignored: str | None
) -> None:
    answer = site.post(path, ASKED[path] | body)
    assert answer.status_code == 200, answer.text
    (request,) = [one for one in site.read_requests() if one.id == answer.headers["x-request-id"]]
    assert (request.retain_s, answer.headers.get(IGNORED_HEADER)) == (retain_s, ignored)
