"""The pictures of a worker's requests: their files come from the store, and a prompt has rows for them.

Prefill reads all pictures of a request before its prompt is computed. A worker that sees and goes on with a job reads
one only where KV of its rows is to be computed again.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.config.settings import PictureSettings
from penstock.errors import BusUnavailable, InvalidRequest, PictureGone, StorageUnavailable, StoreUnreachable
from penstock.messages import Detail, Job, JobPicture, Picture, Request
from penstock.pictures.decoding import decode_picture
from penstock.pictures.tokens import PictureTokens

if TYPE_CHECKING:  # workers without a model of their own do without its libraries
    from PIL.Image import Image

    from penstock.engine.contract import InferenceEngine
    from penstock.engine.pictures.reader import PictureReader
    from penstock.engine.pictures.rows import Pictures, PromptPicture
    from penstock.engine.pictures.vision import Pixels
    from penstock.pictures.store import PictureStore


class TaskPictures:
    """Reads the pictures of requests and jobs for one engine. Any thread may call it."""

    def __init__(
        self,
        engine: "InferenceEngine",
        reader: "PictureReader",
        store: "PictureStore",
        settings: PictureSettings,
        rule: PictureTokens | None = None,
    ) -> None:
        """`rule` is by which gateways count a picture's tokens, if that is known."""
        self.rule = rule
        self._engine, self._reader, self._store, self._settings = engine, reader, store, settings

    def read_request(self, request: Request, token_ids: Sequence[int]) -> "tuple[list[int], Pictures]":
        """Return a request's prompt with the rows of its pictures, and these. `token_ids` have a token for each.

        Raises `InvalidRequest`, `PictureGone`, and what the store raises.
        """
        given, files = request.pictures, dict[str, bytes]()
        if len(given) > self._settings.max_count:
            raise InvalidRequest(f"{len(given)} pictures; a request may have {self._settings.max_count}")
        for picture in sorted(given, key=lambda one: one.data is None):  # one with its file may be named again
            if picture.digest not in files:
                left = self._settings.max_bytes - sum(map(len, files.values()))
                files[picture.digest] = self._read_file(picture, left, request.tenant)
        seen = ((bytes.fromhex(one.digest), self._decode(files[one.digest], one.detail)) for one in given)
        prompt = self._reader.read_chat(token_ids, seen, self._engine.limits.max_length)
        by_name = {told.name: picture for told, picture in zip(prompt.pictures, given, strict=True)}

        def read(told: "PromptPicture") -> "Pixels":
            if (pixels := prompt.pixels.pop(told.name, None)) is not None:  # they are large, and seen once
                return pixels
            return self.read_again(by_name[told.name], told.name, request.tenant)

        return prompt.token_ids, self._engine.make_pictures(request.tenant, prompt.token_ids, prompt.pictures, read)

    def _read_file(self, picture: Picture, max_bytes: int, tenant: str) -> bytes:
        """Return a picture's file. One that is in the message is stored: whoever reads it again finds it there."""
        try:
            data = None if picture.data is None else base64.b64decode(picture.data, validate=True)
        except ValueError as error:
            raise InvalidRequest(f"the data of a picture is no base64: {error}") from None
        if data is not None and hashlib.sha256(data).hexdigest() != picture.digest:
            raise InvalidRequest(f"the data of the picture {picture.digest[:12]}… has another digest")
        with _wait_for_store():
            found = self._store.get(picture.digest, tenant) if data is None else data
            if len(found) > max_bytes:
                raise InvalidRequest(f"the pictures of a request may have {self._settings.max_bytes:,} bytes together")
            if data is not None:
                self._store.put(data, tenant)
        return found

    def _decode(self, data: bytes, detail: Detail | None) -> "Image":
        return decode_picture(data, self._settings.max_pixels, detail)

    def read_again(self, picture: Picture | JobPicture, name: bytes, tenant: str) -> "Pixels":
        """Return the pixels of a picture that was read before, here or by another worker."""
        with _wait_for_store():
            data = self._store.get(picture.digest, tenant)
        try:
            image = self._decode(data, picture.detail)
        except InvalidRequest as error:  # the worker that read it may have allowed more
            raise PictureGone(f"the picture {picture.digest[:12]}… cannot be read again: {error}") from None
        return self._reader.read_again(bytes.fromhex(picture.digest), image, name)


@contextmanager
def _wait_for_store() -> Iterator[None]:
    """A block in which an outage of the store lets the request wait, and nobody else."""
    try:
        yield
    except (BusUnavailable, StorageUnavailable) as error:
        away = StoreUnreachable(f"its pictures cannot be read or stored now: {error}")
        away.is_outage = True
        raise away from error


def find_pictures(engine: "InferenceEngine", job: Job, files: TaskPictures | None) -> "Pictures | None":
    """Return the pictures of a job's prompt; `files` reads them where this worker sees. Raises `InvalidRequest`."""
    from penstock.engine.pictures.rows import PromptPicture

    if not job.pictures:
        return None
    by_name = {bytes.fromhex(one.name): one for one in job.pictures}
    told = [PromptPicture(bytes.fromhex(one.name), one.first, one.num_rows, one.grid) for one in job.pictures]

    def read(picture: PromptPicture) -> "Pixels":
        assert files is not None, "only an engine that sees asks for pixels"
        return files.read_again(by_name[picture.name], picture.name, job.tenant)

    return engine.make_pictures(job.tenant, job.token_ids, told, read)


def tell_pictures(request: Request, pictures: "Pictures | None") -> list[JobPicture] | None:
    """Return the pictures of a request as its job has them."""
    if pictures is None:
        return None
    pairs = zip(request.pictures, pictures.pictures, strict=True)
    return [
        JobPicture(
            digest=given.digest,
            detail=given.detail,
            name=one.name.hex(),
            first=one.first,
            num_rows=one.num_rows,
            grid=one.grid,
        )
        for given, one in pairs
    ]
