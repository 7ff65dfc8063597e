import signal
import sys
from pathlib import Path

import pytest

from penstock.local.processes import start_child
from sim.waiting import PATIENCE_S, wait_for

PARENT = """
import sys, threading
from pathlib import Path
from penstock.local.processes import start_child
made = []
def start():
    made.append(start_child([sys.executable, "-c", "import time; time.sleep(600)"], name="child"))
thread = threading.Thread(target=start)
thread.start(); thread.join()  # the thread that asked for the child is gone; the child must live on
Path(sys.argv[1]).write_text(str(made[0].pid))
made[0].wait(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children with their parent on Linux only")
def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = start_child([sys.executable, "-c", PARENT, str(pid_file)], name="parent", log=tmp_path / "log")
    wait_for(lambda: pid_file.exists() and pid_file.read_text(), "the child runs")
    pid = int(pid_file.read_text())
    assert is_running(pid)
    assert parent.is_alive()
    parent.kill()
    wait_for(lambda: not is_running(pid), "the child ended too")


def test_stop_asks_first_and_then_kills(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    polite = start_child([sys.executable, "-c", "import time; time.sleep(600)"], name="polite")
    assert polite.stop(PATIENCE_S) == -signal.SIGTERM
    child = start_child([sys.executable, "-c", stubborn], name="stubborn", log=tmp_path / "log")
    wait_for(lambda: child.read_log_tail() == "up", "it ignores the signal")
    with pytest.raises(TimeoutError, match="stubborn"):
        child.wait(0.01)
    assert child.stop(0.1) == -signal.SIGKILL
    assert not child.is_alive()
