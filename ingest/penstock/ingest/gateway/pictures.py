"""From the pictures that clients give to those of the pipeline's requests.

    1  read     data URLs, files of the caller, and addresses; of each its size, from its header
    2  count    the tokens that it becomes, for admission
    3  store    each once, right before its request is produced

A crash between 3 and the request's message leaves a file that nobody asks for (`penstock.pictures.store`).
"""

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

from penstock.config.settings import PictureSettings
from penstock.errors import DependencyMissing, InvalidRequest, PictureGone
from penstock.ingest.batch.store import FileStore
from penstock.ingest.errors import ApiError
from penstock.ingest.fetching import PictureFetcher
from penstock.ingest.openai.body import invalid_value
from penstock.ingest.openai.endpoint import SubmitArgs
from penstock.ingest.openai.picture_parts import (
    DATA_URL_FORM,
    GivenPicture,
    KeptPicture,
    change_addresses,
    list_pictures,
    shorten_url,
)
from penstock.messages import Picture
from penstock.objects import T
from penstock.pictures.decoding import measure_picture
from penstock.pictures.store import PictureStore, limit_time
from penstock.pictures.tokens import PictureTokens, count_picture_tokens

MAX_FETCHES = 32
"""Pictures that are fetched at once. The others wait."""
MAX_STORE_CALLS = 16
"""Pictures that are stored and read at once: on threads of their own, as all else would wait for a store that hangs."""
MAX_STORE_S = 15.0
"""How long a request waits for one of them."""


class ReadPictures:
    """The pictures of one HTTP request, which are not stored yet."""

    def __init__(self, put: Callable[[bytes], Awaitable[str]]) -> None:
        self._put = put
        self.files: dict[str, bytes] = {}
        """By digest."""
        self.pictures: list[Picture] = []
        self.short_urls: dict[str, str] = {}
        """What stands for data URLs in what is kept."""

    def count_tokens(self, rule: PictureTokens | None) -> int:
        """Return how many tokens they are for a model; 0 where it does not say how they are counted."""
        return 0 if rule is None else sum(count_picture_tokens(rule, one.width, one.height) for one in self.pictures)

    def shorten_items(self, items: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Return what a response was asked as it is kept: data URLs are named by the digests of their files."""
        return items and change_addresses(items, lambda url: self.short_urls.get(url, url))

    async def store(self) -> None:
        """Store all that are not stored yet. Raises `BusUnavailable` or `StorageUnavailable`."""
        while self.files:
            digest, data = next(iter(self.files.items()))
            await self._put(data)
            self.files.pop(digest, None)


class PictureDesk:
    """Reads the pictures of requests, for one gateway process."""

    def __init__(
        self, settings: PictureSettings, fetcher: PictureFetcher, files: FileStore, store: PictureStore
    ) -> None:
        self._settings, self._fetcher, self._files, self._store = settings, fetcher, files, store
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._threads = ThreadPoolExecutor(MAX_STORE_CALLS, "picture-store")

    def close(self) -> None:
        """Wait for no call of the store any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read_pictures(self, tenant: str, requests: Sequence[SubmitArgs]) -> ReadPictures:
        """Put pictures in the place of those that clients gave, in the turns that all these requests share.

        Raises `ApiError` that names the picture.
        """
        read = ReadPictures(lambda data: self._call_store(lambda: self._store.put(data, tenant)))
        shared: Any = requests[0].get("messages") or ()
        turns = [turn for turn in shared if not isinstance(turn["content"], str)]
        given = list_pictures(requests)
        if len(given) > self._settings.max_count:
            what = f"a request may have {self._settings.max_count} images, here are {len(given)}"
            raise invalid_value(given[self._settings.max_count].param, what)
        for turn in turns:
            turn["content"] = [
                part if isinstance(part, str) else await self._read_picture(tenant, part, read)
                for part in turn["content"]
            ]
        return read

    async def store_pictures(self, tenant: str, requests: Sequence[SubmitArgs]) -> list[SubmitArgs]:
        """Return the requests with pictures that are stored; these stay as they are, and may be tried again.

        Raises as `read_pictures` and `ReadPictures.store`.
        """
        turns = [dict(turn) for turn in cast("Sequence[dict[str, Any]]", requests[0].get("messages") or ())]
        await (await self.read_pictures(tenant, [SubmitArgs(messages=turns)])).store()
        return [SubmitArgs({**args, "messages": turns}) for args in requests]

    async def show_kept(self, tenant: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the items of a kept response with the data URLs of those pictures that are still stored."""

        def show(address: str) -> str:
            kept = KeptPicture.of_kept(address)
            if isinstance(kept, KeptPicture):
                with suppress(PictureGone):
                    return kept.write_url(self._store.get(kept.digest, tenant))
            return address

        return await self._call_store(lambda: change_addresses(items, show))

    async def _call_store(self, call: Callable[[], T]) -> T:
        """Raises `StorageUnavailable` also where other calls have all threads."""
        return await limit_time(asyncio.get_running_loop().run_in_executor(self._threads, call), MAX_STORE_S)

    async def _read_picture(self, tenant: str, given: GivenPicture, read: ReadPictures) -> Picture:
        left = self._settings.max_bytes - sum(map(len, read.files.values()))
        try:
            data = await self._read_file(tenant, given, left)
            if len(data) > left:
                raise ValueError(f"the images of a request may have {self._settings.max_bytes:,} bytes together")
            width, height = await asyncio.to_thread(measure_picture, data, self._settings.max_pixels, given.detail)
        except (ValueError, InvalidRequest) as error:
            message = f"Invalid value for '{given.param}': {error}"
            raise ApiError(400, message, param=given.param, code="invalid_image") from None
        except PictureGone as error:
            message = f"A picture of an earlier turn is gone: {error}"
            raise ApiError(400, message, param=given.param, code=error.code) from None
        except DependencyMissing as error:
            headers = {"x-should-retry": "false"}
            raise ApiError(501, f"This gateway reads no images: {error}", code="no_images", headers=headers) from None
        digest = hashlib.sha256(data).hexdigest()
        read.files[digest] = data
        if given.url[:5].lower() == "data:":
            read.short_urls[given.url] = shorten_url(given.url, digest)
        read.pictures.append(
            Picture(digest=digest, num_bytes=len(data), width=width, height=height, detail=given.detail)
        )
        return read.pictures[-1]

    async def _read_file(self, tenant: str, given: GivenPicture, max_bytes: int) -> bytes:
        """Return a picture's file. Raises `ValueError` or `ApiError`."""
        if given.file_id:
            return await limit_time(self._read_upload(tenant, given.file_id, max_bytes), MAX_STORE_S)
        if isinstance(given.url, KeptPicture):
            digest = given.url.digest
            return await self._call_store(lambda: self._store.get(digest, tenant))
        head, comma, body = given.url.partition(",")
        if given.url[:5].lower() != "data:":
            async with self._fetches:
                return await self._fetcher.fetch_picture(given.url, max_bytes)
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError(DATA_URL_FORM)
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error:
            raise ValueError("the data URL is not base64") from None

    async def _read_upload(self, tenant: str, file_id: str, max_bytes: int) -> bytes:
        file = await self._files.find_file(tenant, file_id)
        if file.purpose != "vision":
            raise ValueError(f"the file was uploaded with the purpose {file.purpose!r}; images have 'vision'")
        if file.bytes > max_bytes:
            raise ValueError(f"the file has {file.bytes:,} bytes; the images may have {max_bytes:,} more")
        return b"".join([chunk async for chunk in self._files.read_content(tenant, file)])
