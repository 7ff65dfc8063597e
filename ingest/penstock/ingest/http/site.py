"""The page: the files in `page/`, under a policy that lets a browser load code and data from this gateway alone."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response

from penstock.ingest.errors import ApiError

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
CONTENT_TYPES: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "md": "text/plain; charset=utf-8",
}
"""The files that are served, by how their names end."""


@dataclass(frozen=True)
class PageFile:
    """A file as it is served."""

    body: bytes
    type: str
    etag: str

    @classmethod
    def from_body(cls, body: bytes, name: str) -> "PageFile":
        """Return a file by its content and name."""
        return cls(body, CONTENT_TYPES[name.rpartition(".")[2]], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def read_page_files(folder: Traversable) -> dict[str, PageFile]:
    """Return the files of a folder that are served."""
    # operations.md is a link into docs/: sources without that folder serve the page without it.
    found = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
    return {
        name: PageFile.from_body(body, name) for name, body in found.items() if name.rpartition(".")[2] in CONTENT_TYPES
    }


PAGE_FILES = read_page_files(files("penstock.ingest.http").joinpath("page"))
"""All files, by name."""


def make_router(*, is_open: bool, max_images: int, max_image_bytes: int) -> APIRouter:
    """Return the routes of the page. `is_open`: the gateway asks for no key, and so does its page."""
    router = APIRouter(include_in_schema=False)
    told = {"keys": "open" if is_open else "needed", "images": max_images, "image-bytes": max_image_bytes}
    attributes = " ".join(f'data-{name}="{value}"' for name, value in told.items())
    index = PAGE_FILES["index.html"].body.replace(b"data-settings", attributes.encode())
    index_page = PageFile.from_body(index, "index.html")

    @router.get("/")
    async def page(request: Request) -> Response:
        return _make_response(request, index_page)

    @router.get("/page/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in PAGE_FILES:
            raise ApiError(404, f"Unknown request URL: GET {request.url.path}.", code="unknown_url")
        return _make_response(request, PAGE_FILES[name])

    return router


def _make_response(request: Request, file: PageFile) -> Response:
    headers = {**PAGE_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.type)
