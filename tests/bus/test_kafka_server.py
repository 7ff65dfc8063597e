"""The broker that is started for development and tests."""

from pathlib import Path
from typing import Self

import pytest

from penstock.errors import DependencyMissing
from penstock.local import kafka


class Broker:
    """Ends as Java does that was told to keep the classes it has loaded."""

    def __init__(self, directory: Path, jvm_options: list[str]) -> None:
        self.made = Path(jvm_options[0].removeprefix("-XX:ArchiveClassesAtExit="))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.made.write_bytes(b"classes")


class Missing(Broker):
    def __enter__(self) -> Self:
        raise DependencyMissing("it does not start")


@pytest.mark.parametrize(("broker", "is_archived"), [(Broker, True), (Missing, False)])
def test_java_maps_classes_that_were_archived(
    broker: type[Broker], is_archived: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "KafkaServer", broker)
    jars, scratch = tmp_path / "jars", tmp_path / "scratch"
    scratch.mkdir()
    kafka.archive_classes(jars, scratch)
    command = kafka._build_java_command("java", jars, "Main", "given", log_level="off")
    assert (f"-XX:SharedArchiveFile={tmp_path / 'jars.jsa'}" in command) is is_archived
    assert command[-4:] == ["-cp", f"{jars}/*", "Main", "given"]
