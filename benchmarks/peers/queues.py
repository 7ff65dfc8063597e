"""Task queues of others, each with a worker process of its own: tasks are sent one by one, then all results are read.

python benchmarks/peers/queues.py NAME REDIS_URL FOLDER     (in the environment `queues` of `benchmarks.peers.setup`)

It starts the queue's worker, and prints its process id. For each number of tasks on a line of its input it sends so
many, reads their results, and prints `done`; the end of the input ends both. A task gets 32 token ids and returns four
pieces of text: what a short answer is. Results are kept, and a task is acknowledged once its result is there.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, PIECES = list(range(100, 132)), [" word", " and", " another", " word"]
TIMEOUT_S = 120
POLL_S = 0.02
"""How often queues without a way to wait look for a result; their own defaults are up to half a second."""

CELERY = """
from celery import Celery
app = Celery("task_module", broker={url!r}, backend={url!r})
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=8, worker_send_task_events=False)
app.conf.update(broker_connection_retry_on_startup=True)

@app.task
def answer(prompt):
    return {pieces!r}
"""
DRAMATIQ = """
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
broker = RedisBroker(url={url!r})
broker.add_middleware(Results(backend=RedisBackend(url={url!r})))
dramatiq.set_broker(broker)

@dramatiq.actor(store_results=True)
def answer(prompt):
    return {pieces!r}
"""
ARQ = """
from arq.connections import RedisSettings

async def answer(ctx, prompt):
    return {pieces!r}

class Worker:
    functions, redis_settings, max_jobs, poll_delay = [answer], RedisSettings.from_dsn({url!r}), 32, {poll_s!r}
"""
TASKIQ = """
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker
broker = RedisStreamBroker(url={url!r}).with_result_backend(RedisAsyncResultBackend(redis_url={url!r}))

@broker.task
async def answer(prompt):
    return {pieces!r}
"""
MODULES = {"celery": CELERY, "dramatiq": DRAMATIQ, "arq": ARQ, "taskiq": TASKIQ}
WORKERS = {
    "celery": "celery -A task_module worker --pool solo -l ERROR --without-gossip --without-mingle --without-heartbeat",
    "dramatiq": "dramatiq task_module --processes 1 --threads 8",
    "arq": "arq task_module.Worker",
    "taskiq": "taskiq worker task_module:broker --workers 1 --log-level ERROR --ack-type when_saved",
}


def run_celery(module: Any, num_tasks: int) -> None:
    """Send tasks and read their results."""
    for sent in [module.answer.delay(PROMPT) for _ in range(num_tasks)]:
        assert sent.get(timeout=TIMEOUT_S) == PIECES


def run_dramatiq(module: Any, num_tasks: int) -> None:
    """Send tasks and read their results."""
    for sent in [module.answer.send(PROMPT) for _ in range(num_tasks)]:
        assert sent.get_result(block=True, timeout=1000 * TIMEOUT_S) == PIECES


async def run_arq(module: Any, num_tasks: int) -> None:
    """Send tasks and read their results."""
    from arq import create_pool  # type: ignore[import-not-found, unused-ignore]

    pool = await create_pool(module.Worker.redis_settings)
    for job in [await pool.enqueue_job("answer", PROMPT) for _ in range(num_tasks)]:
        # `Job.result` raises for a job that ends between its two looks, so the result is looked for here.
        while (found := await job.result_info()) is None:
            await asyncio.sleep(POLL_S)
        assert found.result == PIECES
    await pool.aclose()


async def run_taskiq(module: Any, num_tasks: int) -> None:
    """Send tasks and read their results."""
    await module.broker.startup()
    for task in [await module.answer.kiq(PROMPT) for _ in range(num_tasks)]:
        found = await task.wait_result(timeout=TIMEOUT_S, check_interval=POLL_S)
        assert found.return_value == PIECES
    await module.broker.shutdown()


RUNS: dict[str, Callable[[Any, int], Any]] = {
    "celery": run_celery, "dramatiq": run_dramatiq, "arq": run_arq, "taskiq": run_taskiq,
}  # fmt: skip


def main() -> None:
    name, url, folder = sys.argv[1:]
    (Path(folder) / "task_module.py").write_text(MODULES[name].format(url=url, pieces=PIECES, poll_s=POLL_S))
    os.chdir(folder)
    sys.path.insert(0, folder)
    import task_module  # type: ignore[import-not-found, unused-ignore]

    program, *arguments = WORKERS[name].split()
    with Path(f"{name}.log").open("w") as log:
        worker = subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *arguments], stdout=log, stderr=log,
            env=os.environ | {"PYTHONPATH": folder},
        )  # fmt: skip
    print(worker.pid, flush=True)
    try:
        for line in sys.stdin:
            if asyncio.iscoroutinefunction(RUNS[name]):
                asyncio.run(RUNS[name](task_module, int(line)))
            else:
                RUNS[name](task_module, int(line))
            print("done", flush=True)
    finally:
        worker.terminate()
        time.sleep(0.5)
        worker.kill()


if __name__ == "__main__":
    main()
