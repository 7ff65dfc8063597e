"""How a decode worker is composed and started: `penstock worker decode`."""

from penstock.worker.process import WorkerProcess, require_libraries


def run_decode_worker(*, next_name: bool = False) -> None:
    """Turn job references into token streams and results, until told to stop."""
    with WorkerProcess("decode", next_name=next_name) as process:
        engine = process.open_engine()
        with require_libraries():
            from penstock.decode_worker.role import DecodeRole
        role = DecodeRole(process.pipeline, engine, process.settings.engine.find_served_name())
        role.adapters.read_beats = process.read_beats
        role.set_default_prompt(process.settings.embed.prompt)
        process.exits.callback(role.grammars.close)
        process.serve(role, process.make_metrics(role.model_name), **role.describe_model())
