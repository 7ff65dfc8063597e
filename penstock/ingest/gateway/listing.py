"""`/v1/models`."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from penstock.ingest.gateway.caller import CallerDep
from penstock.ingest.gateway.handlers import errors
from penstock.ingest.gateway.models import Served
from penstock.ingest.gateway.state import gateway_of

router = APIRouter()


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Since when it is served, as far as its workers know."""
    owned_by: str = "penstock"
    max_model_len: int | None = None
    """The most tokens of prompt and answer together, as vLLM tells it."""


class ModelList(BaseModel):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


def _model(served: Served) -> Model:
    return Model(id=served.name, created=int(served.since_s), max_model_len=served.max_model_len)


@router.get("/v1/models", summary="All models", responses=errors(401, 503))
async def all_models(request: Request, caller: CallerDep) -> ModelList:
    """What workers say they serve."""
    return ModelList(data=[_model(served) for served in await gateway_of(request).models.all()])


@router.get("/v1/models/{model:path}", summary="One model", responses=errors(401, 404, 503))
async def one_model(request: Request, caller: CallerDep, model: str) -> Model:
    """By its name."""
    return _model(await gateway_of(request).models.find(model))
