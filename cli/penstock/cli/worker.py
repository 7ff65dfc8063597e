"""`penstock worker auto | prefill | decode | endpoint | embed`: one worker process."""

from typing import Annotated

import typer

NextName = Annotated[
    bool, typer.Option("--next-name", help="Take the next free name, `auto-1` for `auto-0`, if it is taken.")
]
app = typer.Typer(help="Run one worker until SIGTERM.", no_args_is_help=True)


@app.command("auto")
def run_auto(next_name: NextName = False) -> None:
    """Turn requests into token streams and results, and job references too."""
    from penstock.prefill_worker.main import run_auto_worker

    run_auto_worker(next_name=next_name)


@app.command("prefill")
def run_prefill(next_name: NextName = False) -> None:
    """Turn requests into KV blocks, first tokens and job references."""
    from penstock.prefill_worker.main import run_prefill_worker

    run_prefill_worker(next_name=next_name)


@app.command("decode")
def run_decode(next_name: NextName = False) -> None:
    """Turn job references into token streams and results."""
    from penstock.decode_worker.main import run_decode_worker

    run_decode_worker(next_name=next_name)


@app.command("endpoint")
def run_endpoint(next_name: NextName = False) -> None:
    """Turn requests into token streams and results, by asking servers with OpenAI's API (PENSTOCK_ENDPOINT_URLS)."""
    from penstock.endpoint_worker.main import run_endpoint_worker

    run_endpoint_worker(next_name=next_name)


@app.command("embed")
def run_embed(next_name: NextName = False) -> None:
    """Turn requests that have texts into vectors, or into scores by a reranker."""
    from penstock.embed_worker.main import run_embed_worker

    run_embed_worker(next_name=next_name)
