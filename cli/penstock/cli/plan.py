"""`penstock plan`: how many workers a load needs, and how that is computed."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from penstock.config.addresses import Addresses
from penstock.config.settings import EngineSettings, RecordSettings, SloSettings, load_settings
from penstock.errors import DependencyMissing
from penstock.ops.status import read_worker_status
from penstock.plan.trace import compute_quantile, has_answers, read_trace


def plan(
    trace: Annotated[Path, typer.Option(help="JSONL: at_s, prompt_tokens, output_tokens of each request.")],
    model: Annotated[str, typer.Option(help="The model; PENSTOCK_ENGINE_MODEL, or what the workers serve.")] = "",
    ttft_s: Annotated[float | None, typer.Option(min=1e-6, help="Goal: 99 of 100 first tokens within it.")] = None,
    itl_s: Annotated[float | None, typer.Option(min=1e-6, help="Goal: at most so long between two tokens.")] = None,
    batch_ttft_s: Annotated[float, typer.Option(min=1e-6, help="Limit for first tokens of class batch.")] = 600.0,
    batch_itl_s: Annotated[float, typer.Option(min=1e-6, help="Limit for times between tokens of class batch.")] = 1.0,
    utilisation: Annotated[float, typer.Option(min=0.05, max=1.0, help="How busy workers may be at the peak.")] = 0.7,
    window_s: Annotated[float, typer.Option(min=0.1, help="The peak is that of so many seconds.")] = 10.0,
    measure: Annotated[bool, typer.Option(help="Measure the model here, instead of asking running workers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show how many prefill and decode workers the trace needs, from measured rates, and what a simulation says."""
    try:
        from penstock.plan.goodput import Slo, read_slos
        from penstock.plan.plan import Goals, make_plan, render_plan
        from penstock.plan.rates import average_rates
    except ImportError as error:  # the scheduler's own needs
        raise DependencyMissing(f"`penstock plan` needs pip install 'penstock[worker]' ({error})") from None
    arrivals = read_trace(trace)
    slo = load_settings(SloSettings)
    slos, keep_s = read_slos(slo, Slo(batch_ttft_s, batch_itl_s)), load_settings(RecordSettings).keep_s
    goals = Goals(ttft_s, itl_s, utilisation, window_s, keep_s, slos, slo.interactive_gap_s)
    settings = load_settings(EngineSettings, **({"model": model} if model else {}))
    if measure:
        from penstock.cli.plan_measure import measure_engine

        rates = measure_engine(settings, round(compute_quantile([one.prompt_tokens for one in arrivals], 0.5)))
    else:
        beats = read_worker_status(load_settings(Addresses))
        rates = average_rates(beats, settings, model or None, has_answers=has_answers(arrivals))
    made = make_plan(arrivals, rates, goals)
    if as_json:
        sys.stdout.write(json.dumps(made.as_json()) + "\n")
        return
    console = Console(highlight=False, soft_wrap=True)
    for name, line in render_plan(made, arrivals):
        console.print(f"[bold]{name:13}[/]{escape(line)}")
