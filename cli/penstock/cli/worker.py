"""`penstock worker auto | prefill | decode | endpoint`: one worker process."""

import typer

app = typer.Typer(help="Run one worker until SIGTERM.", no_args_is_help=True)


@app.command("auto")
def run_auto() -> None:
    """Turn requests into token streams and results, and job references too."""
    from penstock.prefill_worker.main import run_auto_worker

    run_auto_worker()


@app.command("prefill")
def run_prefill() -> None:
    """Turn requests into KV blocks, first tokens and job references."""
    from penstock.prefill_worker.main import run_prefill_worker

    run_prefill_worker()


@app.command("decode")
def run_decode() -> None:
    """Turn job references into token streams and results."""
    from penstock.decode_worker.main import run_decode_worker

    run_decode_worker()


@app.command("endpoint")
def run_endpoint() -> None:
    """Turn requests into token streams and results, by asking servers with OpenAI's API (PENSTOCK_ENDPOINT_URLS)."""
    from penstock.endpoint_worker.main import run_endpoint_worker

    run_endpoint_worker()
