"""The runbook says what there is: every alert, setting, topic and command."""

import re
from pathlib import Path

from typer.core import TyperGroup

from penstock.bus.kafka.bus import RESULTS_RETENTION_MS, WORK_RETENTION_MS
from penstock.cli.main import COMMANDS, load_command
from penstock.config.settings import list_variables
from penstock.ingest.http.site import PAGE_FILES
from penstock.names import CLASSES, Pipeline
from penstock.plan.plan import LOG_REQUEST_BYTES, LOG_TOKEN_BYTES

HERE = Path(__file__).parents[1]
BOOK = (HERE / "docs/operations.md").read_text("utf-8")
RULES = (HERE / "docker/prometheus/rules.yml").read_text("utf-8")


def test_every_alert_has_its_section_and_leads_there() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES)
    assert {f"### {alert}" for alert in alerts} <= set(BOOK.splitlines())
    assert len(alerts) > 10
    links = re.findall(r"runbook_url: http://127\.0\.0\.1:8080/page/(\S+?)#:~:text=(\S+)", RULES)
    assert links == [("operations.md", f"%23%23%23%20{alert}") for alert in alerts]
    assert PAGE_FILES["operations.md"].body.decode() == BOOK, "a gateway serves it"


def test_settings_topics_and_figures_are_those_of_the_code() -> None:
    named = set(re.findall(r"\bPENSTOCK_[A-Z_]+[A-Z]\b", BOOK))
    assert named <= {*list_variables(), *(f"{name}_FILE" for name in list_variables())}
    assert len(named) > 15
    listed = re.findall(r"^\| `(penstock\.<pipeline>\.[^`]+)` \|.*\| (\d+) days \|$", BOOK, re.MULTILINE)
    days = {
        topic.replace("<pipeline>", "p").replace("<class>", priority_class): int(kept)
        for topic, kept in listed
        for priority_class in CLASSES
    }
    assert sorted(days) == sorted(Pipeline("p").all_topics())
    kept_ms = {
        topic: RESULTS_RETENTION_MS if topic == Pipeline("p").results_topic else WORK_RETENTION_MS for topic in days
    }
    assert {topic: kept * 86_400_000 for topic, kept in days.items()} == kept_ms
    assert f"offsets.retention.minutes={WORK_RETENTION_MS // 60_000}" in BOOK
    assert f"{LOG_REQUEST_BYTES:,} bytes for each stream and {LOG_TOKEN_BYTES} for each of its tokens" in BOOK


def test_every_command_exists() -> None:
    for words in set(re.findall(r"(?:^|[`$] )?\bpenstock ([a-z]+(?: [a-z]+)?)", "\n".join(commands()))):
        first, *rest = words.split()
        assert first in COMMANDS, words
        group = load_command(first)
        if isinstance(group, TyperGroup) and rest:
            assert rest[0] in group.commands, words


def commands() -> list[str]:
    """What stands in the book as something to type."""
    return re.findall(r"`(penstock [a-z][^`]*)`", BOOK) + re.findall(r"^\$ (penstock .*)$", BOOK, re.MULTILINE)


def test_the_rights_shown_are_those_that_are_tested() -> None:
    for name in ("redis.acl", "kafka.acl"):
        file = (HERE / "tests/security" / name).read_text("utf-8")
        lines = [line for line in file.splitlines() if line and not line.startswith("#")]
        (block,) = re.findall(rf"^<!-- tests/security/{name} -->\n```\n(.*?)^```$", BOOK, re.MULTILINE | re.DOTALL)
        assert block.splitlines() == lines
