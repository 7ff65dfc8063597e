"""A pipeline of embed workers in this process, with a tiny model."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from penstock.config.settings import EngineSettings
from penstock.embed_worker.engine import EmbedEngine
from penstock.embed_worker.model import EmbedModel
from penstock.embed_worker.role import EmbedRole
from penstock.engine.loading.vector_files import open_checkpoint
from penstock.worker.worker import Worker
from tests.embed.checkpoints import write_checkpoint, write_reranker
from tests.endpoint.conftest import EndpointPipeline, open_pipeline

__all__ = ["open_pipeline"]
"""A fixture of the endpoint workers' tests, which pytest finds here."""

MODEL = "tiny"


@cache
def open_model(directory: Path) -> EmbedModel:
    return EmbedModel(open_checkpoint(str(directory)), EngineSettings(model=str(directory), threads=1))


class EmbedPipeline(EndpointPipeline):
    """A pipeline whose embed workers a test turns."""

    def add_embed_worker(self, model: EmbedModel, number: int = 0) -> Worker:
        member = self.bus.join_group("embed", f"embed-{number}")
        role = EmbedRole(self.pipeline, MODEL, model, EmbedEngine(model))
        worker = Worker(role, self.pipeline, f"embed-{number}", self.make_record(), member)
        self.workers.append(worker)
        return worker


MakeEmbedPipeline = Callable[[str], EmbedPipeline]


@pytest.fixture
def make_pipeline(open_pipeline: Callable[[type[EmbedPipeline], str], EmbedPipeline]) -> MakeEmbedPipeline:
    """Makes the pipeline on `embedded`, `kafka`, or `memory`."""
    return partial(open_pipeline, EmbedPipeline)


@pytest.fixture
def line(make_pipeline: MakeEmbedPipeline) -> EmbedPipeline:
    """The pipeline on doubles of the servers."""
    return make_pipeline("memory")


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> EmbedModel:
    """A model for vectors, with prompts, of which vectors may be cut to 16 or 32."""
    prompts = {"query": "bar fern ", "document": "dune "}
    return open_model(write_checkpoint(tmp_path_factory.mktemp("bert"), prompts=prompts, matryoshka_dims=[16, 32]))


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> EmbedModel:
    """A model for scores."""
    return open_model(write_reranker(tmp_path_factory.mktemp("reranker")))
