"""A worker that dies of a poisoned prompt as it would of a fault in native code, and is started again each time.

It writes a line for each death.
"""

import ctypes
import logging
import os
import signal
from typing import Any

from penstock.decode_worker.main import run_decode_worker
from penstock.engine import loading
from penstock.engine.runner import ModelRunner
from penstock.engine.step import Step
from penstock.names import Stage
from penstock.prefill_worker.main import run_prefill_worker

POISON = 499
"""A token that no other prompt of the tests has."""
PR_SET_PDEATHSIG = 1


def main(stage: Stage) -> None:
    """Run workers whose engine dies in a step with a poisoned request of its stage.

    In prefill that is one named so, in decode any with three output tokens.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    right: Any = ModelRunner.compute_sampled_logits

    def deadly(self: ModelRunner, step: Step) -> Any:
        for seq, _ in step.batch.plan:
            kills = seq.num_output_tokens == 3 if stage == "decode" else seq.id == "kills-prefill"
            if POISON in seq.token_ids and kills:
                os.kill(os.getpid(), signal.SIGSEGV)
        return right(self, step)

    ModelRunner.compute_sampled_logits = deadly  # type: ignore[method-assign]
    # The proof is the matter of other tests, and would be done at each of nine starts.
    loading.prove_once = lambda model, *_: model  # type: ignore[attr-defined, unused-ignore]
    while True:
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            (run_prefill_worker if stage == "prefill" else run_decode_worker)()
            return
        _, status = os.waitpid(pid, 0)
        logging.info("died of signal %d", os.waitstatus_to_exitcode(status))
