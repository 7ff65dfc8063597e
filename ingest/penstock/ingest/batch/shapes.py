"""OpenAI's objects for files and batches."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Purpose = Literal["batch", "batch_output", "vision"]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]
DAY_S = 86400
FILE_LIFE_S = 30 * DAY_S
"""How long a file is kept, unless its upload says otherwise."""


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class FileDeleted(BaseModel):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ExpiresAfter(BaseModel):
    """How long a file is kept: seconds after it was made."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * DAY_S)


class LineError(BaseModel):
    """An error in a batch file, and in which line (from 1)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(BaseModel):
    """The errors in a batch file."""

    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(BaseModel):
    """How far a batch is: `completed` lines are in its output, `failed` ones in its error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class NewBatch(BaseModel):
    """The fields from which a batch is made."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str = Field(max_length=128)
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchState(BaseModel):
    """The fields that change in the course of a batch."""

    status: Status = "validating"
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()


class BatchObject(BatchState):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    created_at: int
    expires_at: int
    metadata: dict[str, Any] | None = None


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool
