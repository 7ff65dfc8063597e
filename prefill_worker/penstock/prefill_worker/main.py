"""How a worker that reads requests is composed and started: `penstock worker prefill`, `penstock worker auto`."""

from penstock.ops.lag import LagWatch
from penstock.worker.process import WorkerProcess, require_libraries


def run_auto_worker(*, next_name: bool = False) -> None:
    """Turn requests and job references into token streams and results, until told to stop."""
    with WorkerProcess("auto", next_name=next_name) as process:
        engine = process.open_engine()
        with require_libraries():
            from penstock.decode_worker.role import DecodeRole
            from penstock.prefill_worker.stay import StayPolicy
            from penstock.prefill_worker.staying_role import StayingRole
        name = process.settings.engine.find_served_name()
        stays = StayPolicy(process.settings.stay, process.find_kinds_to_hand_to)
        role = StayingRole(process.pipeline, engine, stays, name, process.name)
        role.set_default_prompt(process.settings.embed.prompt)
        job_role = DecodeRole(process.pipeline, engine, name)
        job_role.grammars, job_role.adapters = role.grammars, role.adapters
        role.adapters.read_beats = process.read_beats
        role.pictures = job_role.pictures = process.open_pictures(engine)
        process.exits.callback(role.grammars.close)
        process.serve(role, process.make_metrics(role.model_name), job_role, **role.describe_model())


def run_prefill_worker(*, next_name: bool = False) -> None:
    """Turn requests into KV blocks, first tokens and job references, until told to stop."""
    with WorkerProcess("prefill", next_name=next_name) as process:
        engine = process.open_engine(only_prompts=True)
        with require_libraries():
            from penstock.prefill_worker.backpressure import DecodeBackpressure
            from penstock.prefill_worker.role import PrefillRole
        watch = LagWatch(process.addresses, process.settings.bus)
        backpressure = process.exits.enter_context(DecodeBackpressure(watch.read_latest))
        role = PrefillRole(process.pipeline, engine, backpressure, process.settings.engine.find_served_name())
        role.pictures = process.open_pictures(engine)
        role.adapters.read_beats = process.read_beats
        role.set_default_prompt(process.settings.embed.prompt)
        process.exits.callback(role.grammars.close)
        process.serve(role, process.make_metrics(role.model_name), **role.describe_model())
