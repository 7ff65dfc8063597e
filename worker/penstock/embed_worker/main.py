"""Composes and starts an embed worker: `penstock worker embed`."""

import logging

from penstock.engine.loading.vector_files import open_checkpoint
from penstock.errors import ModelLoadError, choose_load_error
from penstock.worker.process import WorkerProcess, require_libraries

log = logging.getLogger(__name__)


def run_embed_worker(*, next_name: bool = False) -> None:
    """Turn requests that have texts into vectors or scores, until told to stop."""
    with WorkerProcess("embed", next_name=next_name) as process:
        settings, beat = process.settings.engine, process.beat
        try:
            checkpoint = open_checkpoint(settings.model, beat.report_progress)
            beat.update_status(now=True, doing="importing torch")
            with require_libraries("worker,embeddings"):
                from penstock.embed_worker.engine import EmbedEngine
                from penstock.embed_worker.model import EmbedModel
                from penstock.embed_worker.role import EmbedRole
            beat.update_status(now=True, doing="loading the model")
            model = EmbedModel(checkpoint, settings, process.settings.embed.prompt or None)
        except ModelLoadError as error:
            raise choose_load_error(error)(f"cannot load model {settings.model!r}: {error}") from error
        name = settings.find_served_name()
        metrics = process.make_metrics(name)
        engine = EmbedEngine(model)
        role = EmbedRole(process.pipeline, name, model, engine, settings.model)
        process.serve(role, metrics, model_source=settings.model, **model.describe_model())
