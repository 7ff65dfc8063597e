"""`penstock batch run`: killed and gone on with, against real workers."""

import os
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from penstock.ingest.batch.journal import Journal, JournalError
from penstock.ingest.batch.lines import FinishedRow
from penstock.local.processes import Child
from penstock.local.stack import Stack
from sim.forked import fork_process, run_penstock
from sim.waiting import PATIENCE_S, wait_for
from tests.ingest.batch_files import each_once, finished, lines, read_file, row, run_of, wait_for_results

NUM_SOME = 21


def start(line: Stack, folder: Path, run: Callable[..., None] = run_penstock) -> Child:
    own = {"PENSTOCK_PIPELINE": line.addresses.pipeline, "PENSTOCK_STREAM_URL": line.addresses.stream_url}
    command = ("batch", "run", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    return fork_process("batch run", folder / "log", run, *command, environment=os.environ | own)


def stand_still_after_some(*command: str) -> None:
    """Run the command, which writes some rows, and then waits to be killed."""
    write_rows = Journal.write_rows

    def write_some(journal: Journal, rows: Sequence[FinishedRow]) -> None:
        write_rows(journal, rows[:NUM_SOME])
        threading.Event().wait()

    with mock.patch.object(Journal, "write_rows", write_some):
        run_penstock(*command)


@pytest.mark.proof
def test_killed_at_any_time_it_goes_on(line: Stack, tmp_path: Path) -> None:
    """Every row once, and asked once; one bad row fails alone; a changed input is refused."""
    count, output, max_tokens = 200, tmp_path / "out.jsonl", 40
    rows = [row(number, max_tokens) for number in range(count)]
    rows[5] = row(5, temperature=-1)
    (tmp_path / "in.jsonl").write_bytes(lines(rows))

    child, journal = start(line, tmp_path, stand_still_after_some), tmp_path / "out.jsonl.journal"
    wait_for(lambda: journal.exists() and finished(output) > 0, "some rows")
    child.kill()
    killed_at = finished(output)
    assert 0 < killed_at <= NUM_SOME
    with output.open("ab") as file:  # rows that no journal has, the last of them half written
        file.write(b'{"custom_id": "row-199"}\n{"custom_id": "row-2')
    with journal.open("ab") as file:
        file.write(b'{"ok": [1, 2')

    child = start(line, tmp_path)
    wait_for(lambda: finished(output) > killed_at or not child.is_alive(), "more rows")
    child.send_signal(signal.SIGINT)
    assert child.wait(PATIENCE_S) in (130, 1, -signal.SIGINT)  # the last where it came before or after the run itself

    assert start(line, tmp_path).wait(PATIENCE_S) == 1  # a row failed
    assert f"of {count} rows are finished already" in (tmp_path / "log").read_text()
    answers, failed = read_file(output), read_file(tmp_path / "out.errors.jsonl")
    assert each_once([*answers, *failed], count)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in failed] == [("row-5", 400)]
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == max_tokens for one in answers)
    ids = wait_for_results(line, f"chatcmpl-{run_of(output)}-", count - 1)
    assert len(ids) == len(set(ids)) == count - 1

    (tmp_path / "in.jsonl").write_bytes(lines(rows[1:]))
    assert start(line, tmp_path).wait(PATIENCE_S) == 1
    assert "the input is another one" in (tmp_path / "log").read_text()


def test_a_journal_takes_no_file_of_others(tmp_path: Path) -> None:
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    output.write_bytes(b"precious\n")
    with pytest.raises(JournalError, match="was not made by this"):
        Journal(output, errors, "input")
    assert output.read_bytes() == b"precious\n"
    output.unlink()
    with Journal(output, errors, "input") as journal:
        journal.write_rows([FinishedRow(1, b"one", is_ok=True), FinishedRow(2, b"two", is_ok=False)])
        with pytest.raises(JournalError, match="another run has it"):
            Journal(output, errors, "input")
    output.write_bytes(b"")
    with pytest.raises(JournalError, match="was changed"):
        Journal(output, errors, "input")


@pytest.mark.parametrize("kept", range(0, 400, 7))
def test_a_journal_cut_anywhere_gives_what_it_still_says(tmp_path: Path, kept: int) -> None:
    """Rows and journal agree after any crash: what the journal does not name is not in the files either."""
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    with Journal(output, errors, "input") as journal:
        for number in range(1, 7):
            journal.write_rows([FinishedRow(number, b"row %d" % number, is_ok=number != 3)])
        path, whole = journal.path, journal.path.read_bytes()
    path.write_bytes(whole[: min(kept, len(whole))])
    with Journal(output, errors, "input") as journal:
        rows = output.read_bytes().splitlines() + errors.read_bytes().splitlines()
        assert sorted(rows) == [b"row %d" % number for number in sorted(journal.finished_rows)]
        left = {1, 2, 3, 4, 5, 6} - journal.finished_rows
        journal.write_rows([FinishedRow(number, b"row %d" % number, is_ok=True) for number in left])
    with Journal(output, errors, "input") as journal:
        assert journal.finished_rows == {1, 2, 3, 4, 5, 6}
    assert len(output.read_bytes().splitlines() + errors.read_bytes().splitlines()) == 6


def test_a_full_disk_ends_a_run_that_can_be_gone_on_with(tmp_path: Path) -> None:
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(output, errors, "input") as journal:
        journal.write_rows([FinishedRow(1, b"1" * 500, is_ok=True)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(JournalError, match="File too large"):
                journal.write_rows([FinishedRow(2, b"2" * 1000, is_ok=True)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with pytest.raises(JournalError, match="File too large"):  # there is room, but half a row is in its place
            journal.write_rows([FinishedRow(3, b"3", is_ok=True)])
    with Journal(output, errors, "input") as journal:
        assert journal.finished_rows == {1}
        journal.write_rows([FinishedRow(2, b"2", is_ok=True)])
    assert output.read_bytes().splitlines() == [b"1" * 500, b"2"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"none/out\.jsonl\.journal: No such file or directory"):
        Journal(tmp_path / "none" / "out.jsonl", tmp_path / "errors.jsonl", "input")
