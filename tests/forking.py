"""A plugin of pytest that collects once and runs the tests in forked processes: `-p tests.forking --workers 4`.

The first process imports all tests and forks the others, so that none of them imports anything again. They read the
numbers of groups of tests from a pipe that is full before they start, and send their reports through a pipe of their
own. Only the first process logs reports: the summary, `--durations`, `--lf`, `-x` and exit codes are as without this.
"""

import multiprocessing
import os
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, groupby
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, cast
from warnings import WarningMessage

import pytest
from _pytest._io import TerminalWriter

from penstock.garbage import freeze_loaded_objects
from sim import forked

GROUP = struct.Struct("<I")
MAX_GROUP_S, UNKNOWN_S = 30.0, 0.3
SECONDS = "forking/seconds"
"""Where pytest's cache has how long each test took when it last ran."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of processes."""
    parser.addoption("--workers", type=int, default=1, help="run the tests in so many forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forked processes, unless one is enough or there is nothing to run."""
    option = session.config.option
    if option.workers < 2 or option.collectonly or option.usepdb or session.testsfailed or not session.items:
        return None  # pytest's own loop
    if reporter := session.config.pluginmanager.getplugin("terminalreporter"):
        reporter.showfspath = False  # tests of several files run at once
    if "torch" in sys.modules:
        import_module("sim.warm")  # for workers of the pipeline, which tests fork
    _check_threads()
    freeze_loaded_objects()  # no collection of a worker's writes to what it shares with the others
    left = list(range(len(session.items)))
    with _Loop(session) as loop:
        while left:  # a second time only if a worker died and left tests of its group behind
            loop.run(left)
            left = [index for index in left if index not in loop.finished]
    return True


def _check_threads() -> None:
    """Raise if this process has a second thread: a fork would have its locks as they are at that moment."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    if len(names) > 1:
        ours = [f"{thread.name} of {thread.__class__.__module__}" for thread in threading.enumerate()]
        raise pytest.UsageError(f"cannot fork: what the tests import started threads: {names}, of Python's {ours}")


def _read_seconds(config: pytest.Config) -> dict[str, float]:
    cache = getattr(config, "cache", None)
    return cast(dict[str, float], cache.get(SECONDS, {})) if cache else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that took longest, so that no worker is left alone with one of them at the end."""
    if config.option.workers > 1:
        seconds, files = _read_seconds(config), dict[Path, float]()
        for item in items:
            files[item.path] = files.get(item.path, 0.0) + seconds.get(item.nodeid, UNKNOWN_S)
        items.sort(key=lambda item: -files[item.path])


def _split_into_groups(items: list[pytest.Item], indexes: list[int], seconds: dict[str, float]) -> Iterator[list[int]]:
    """Yield groups of tests of one file that take some seconds each."""
    for _, same_file in groupby(indexes, key=lambda index: items[index].path):
        group, length_s = list[int](), 0.0
        for index in same_file:
            group.append(index)
            length_s += seconds.get(items[index].nodeid, UNKNOWN_S)
            if length_s > MAX_GROUP_S:
                yield group
                group, length_s = [], 0.0
        if group:
            yield group


@dataclass
class _Worker:
    """A process that runs tests, as the first process knows it."""

    process: ForkProcess
    reports: Connection
    running: int | None = None
    phases: list[str] = field(default_factory=list)
    """Those of the running test that were reported."""


class _Loop:
    """The first process: it forks workers, and logs what they report."""

    def __init__(self, session: pytest.Session) -> None:
        self.finished = set[int]()
        self._session, self._config = session, session.config
        self._numbers, self._workers = count(), list[_Worker]()
        self._seconds = _read_seconds(session.config)
        cast(Any, session.config)._tmp_path_factory.getbasetemp()  # the workers have folders below it

    def __enter__(self) -> "_Loop":
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs, after a failure with `-x` or an interruption, and keep how long tests took."""
        for worker in self._workers:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGINT)
        for worker in self._workers:
            worker.process.join(20.0)
            worker.process.kill()
        if cache := getattr(self._config, "cache", None):
            cache.set(SECONDS, {nodeid: round(seconds, 2) for nodeid, seconds in self._seconds.items()})

    def run(self, indexes: list[int]) -> None:
        """Run these tests. Some are not finished afterwards if workers died."""
        groups = list(_split_into_groups(self._session.items, indexes, self._seconds))
        queue, filling = os.pipe()
        records = b"".join(map(GROUP.pack, range(len(groups))))
        assert os.write(filling, records) == len(records)
        os.close(filling)
        for _ in range(min(self._config.option.workers, len(groups))):
            self._fork_worker(groups, queue)
        while self._workers:
            ready = wait([worker.reports for worker in self._workers], timeout=0.5)
            for worker in self._workers.copy():
                if worker.reports in ready:
                    if self._receive(worker):
                        continue
                elif worker.process.exitcode is None or worker.reports.poll():
                    continue
                # What it has forked may keep its pipe open: it has ended, though that has not.
                self._workers.remove(worker)
                if worker.process.exitcode:
                    self._log_death(worker)
                    self._fork_worker(groups, queue)
        os.close(queue)

    def _fork_worker(self, groups: list[list[int]], queue: int) -> None:
        reports, sending = Pipe(duplex=False)
        arguments = (self._session, next(self._numbers), groups, queue, sending)
        process = multiprocessing.get_context("fork").Process(target=_run_worker, args=arguments)
        process.start()
        sending.close()
        self._workers.append(_Worker(process, reports))

    def _receive(self, worker: _Worker) -> bool:
        """Log what a worker has sent. Returns whether it was something."""
        hook = self._config.hook
        try:
            kind, content = worker.reports.recv()
        except EOFError:
            worker.process.join()
            return False
        if kind == "began":
            worker.running, worker.phases = content, []
        elif kind == "warned":
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        elif kind == "finished":
            self._finish(content)
            worker.running = None
        else:
            report = hook.pytest_report_from_serializable(config=self._config, data=content)
            worker.phases.append(report.when)
            begun = self._seconds.get(report.nodeid, 0.0) if report.when != "setup" else 0.0
            self._seconds[report.nodeid] = begun + report.duration
            hook.pytest_runtest_logreport(report=report)
        return True

    def _finish(self, index: int) -> None:
        item = self._session.items[index]
        self.finished.add(index)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _log_death(self, worker: _Worker) -> None:
        """Let the test fail in which a worker died."""
        status = worker.process.exitcode or 0
        how = f"status {status}" if status > 0 else signal.Signals(-status).name
        if worker.running is None:
            raise self._session.Failed(f"a process that runs tests ended with {how} outside of a test")
        item = self._session.items[worker.running]
        when = cast(Any, "setup" if not worker.phases else "call" if len(worker.phases) == 1 else "teardown")
        text = f"the process that ran this test ended with {how}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, when)
        item.ihook.pytest_runtest_logreport(report=report)
        self._finish(worker.running)


class _Reporter:
    """Sends a worker's reports. It stands in the place of the reporter to the terminal."""

    def __init__(self, config: pytest.Config, sending: Connection) -> None:
        self._config, self._sending = config, sending
        self.is_open = False
        self._tw = TerminalWriter(os.fdopen(os.dup(2), "w"))  # pytest-timeout writes the stacks of threads to it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._sending.send(("reported", data))

    def pytest_warning_recorded(self, warning_message: WarningMessage, when: str, nodeid: str, location: Any) -> None:
        if self.is_open:  # pytest tells those that were before it was registered
            shown = cast(Any, warning_message)
            shown = WarningMessage(str(shown.message), shown.category, shown.filename, shown.lineno)
            content = {"warning_message": shown, "when": when, "nodeid": nodeid, "location": location}
            self._sending.send(("warned", content))


def _run_worker(session: pytest.Session, number: int, groups: list[list[int]], queue: int, sending: Connection) -> None:
    """Run groups of tests in a forked process until there are no more."""
    forked.end_with_parent()
    os.setpgid(0, 0)  # Ctrl-C reaches the first process alone, which interrupts this one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TEST_WORKER"] = str(number)
    config, manager = session.config, session.config.pluginmanager
    if capture := manager.getplugin("capturemanager"):  # into files of its own
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    forked.fork_server()
    manager.unregister(name="terminalreporter")
    manager.register(reporter := _Reporter(config, sending), "terminalreporter")
    reporter.is_open = True
    factory = cast(Any, config)._tmp_path_factory
    factory._basetemp = factory.mktemp(f"w{number}", numbered=False)
    try:
        while record := os.read(queue, GROUP.size):
            group = groups[GROUP.unpack(record)[0]]
            for index, following in zip(group, [*group[1:], None], strict=True):
                # What fixtures of the session began is left to the next group.
                item, next_item = session.items[index], session if following is None else session.items[following]
                sending.send(("began", index))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
                sending.send(("finished", index))
    except KeyboardInterrupt:
        raise SystemExit(int(pytest.ExitCode.INTERRUPTED)) from None
    finally:
        with suppress(KeyboardInterrupt):
            session._setupstate.teardown_exact(None)
