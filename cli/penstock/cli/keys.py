"""`penstock keys create | list | revoke | tenant`: the API keys and tenants of the gateway."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import redis
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from penstock.config.addresses import Addresses
from penstock.config.settings import AdmissionSettings, WebhookSettings, load_settings
from penstock.errors import SettingsError, reword_validation
from penstock.messages import Tenant
from penstock.names import KEYS_KEY, TENANTS_KEY
from penstock.redis.client import redis_client

if TYPE_CHECKING:
    from penstock.ingest.keys import KeyBook

app = typer.Typer(help="Manage the gateway's keys and tenants, where PENSTOCK_GATEWAY_KEYS says.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
TenantName = Annotated[str, typer.Argument(metavar="TENANT")]


@app.command("create")
def create_key(tenant: TenantName, as_json: AsJson = False) -> None:
    """Make a key for a tenant and print it, this once: only its hash is kept."""
    from penstock.ingest.tenants import make_key

    _check_tenant(tenant)
    key, key_id, entry = make_key(tenant)

    def add_key(book: "KeyBook") -> None:
        book.keys[key_id] = entry

    _change_keys(add_key, lambda client: client.hset(KEYS_KEY, key_id, entry.model_dump_json()))
    print(json.dumps({"id": key_id, "tenant": tenant, "key": key}) if as_json else key)  # noqa: T201


@app.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """All keys by id and tenant, and what the tenants may."""
    book = _read_book()
    if as_json:
        print(book.model_dump_json(indent=1, exclude={"keys": {"__all__": {"hash"}}}))  # noqa: T201
        return
    keys = Table("key", "tenant", "created", box=None, pad_edge=False)
    for key_id, entry in sorted(book.keys.items(), key=lambda item: (item[1].tenant, item[1].created)):
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created)) if entry.created else ""
        keys.add_row(f"psk_{key_id}_…", entry.tenant, created)
    tenants = Table("tenant", "weight", box=None, pad_edge=False)
    tenants.add_column("classes", no_wrap=True)
    for name in ("requests\n/min", "tokens\n/min", "tokens\n/request", "batch\ntokens"):
        tenants.add_column(name, justify="right", no_wrap=True)
    stays = any(what.regions or what.topics == "own" for what in book.tenants.values())
    if stays:
        tenants.add_column("data stays in")
    for name, what in sorted(book.tenants.items()):
        limits = (what.requests_per_min, what.tokens_per_min, what.max_request_tokens, what.max_batch_tokens)
        counts = ("any" if limit is None else f"{limit:,}" for limit in limits)
        where = ", ".join(what.regions) or ("its region" if what.topics == "own" else "")
        tenants.add_row(name, f"{what.weight:g}", ", ".join(what.classes), *counts, *([where] if stays else []))
    console = Console(highlight=False)
    console.print(keys if book.keys else "no keys")
    if book.tenants:
        console.print()
        console.print(tenants)


@app.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(metavar="ID", help="As `penstock keys list` shows it.")]) -> None:
    """Make a key worthless, on every gateway within a second."""
    name = key_id.removeprefix("psk_").split("_")[0]

    def remove_key(book: "KeyBook") -> None:
        if book.keys.pop(name, None) is None:
            raise SettingsError(f"no key has the id {name!r}: see penstock keys list")

    def remove_key_in_redis(client: "redis.Redis") -> None:
        if not client.hdel(KEYS_KEY, name):
            raise SettingsError(f"no key has the id {name!r}: see penstock keys list")

    _change_keys(remove_key, remove_key_in_redis)


@app.command("tenant")
def set_tenant(
    tenant: TenantName,
    weight: Annotated[float | None, typer.Option(help="Its share where tenants compete.")] = None,
    class_: Annotated[list[str] | None, typer.Option("--class", help="A class it may use; may be repeated.")] = None,
    requests_per_min: Annotated[int | None, typer.Option(help="0: no limit.")] = None,
    tokens_per_min: Annotated[int | None, typer.Option(help="Prompt and output together. 0: no limit.")] = None,
    max_request_tokens: Annotated[int | None, typer.Option(help="Output that one may ask for. 0: no limit.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Of all its open batches. 0: no limit.")] = None,
    region: Annotated[
        list[str] | None, typer.Option(help="A region that may have its data; may be repeated. '': no list.")
    ] = None,
    topics: Annotated[str | None, typer.Option(help="own: its data stays, in topics of its own. shared.")] = None,
    fallback: Annotated[
        bool | None,
        typer.Option("--fallback/--no-fallback", help="Endpoints may answer where own workers cannot in time."),
    ] = None,
    webhook_url: Annotated[
        str | None,
        typer.Option(help="Where its events go; its secret is printed. '': where PENSTOCK_WEBHOOK_URL says."),
    ] = None,
) -> None:
    """Set what a tenant may do; what is not given stays as it is."""
    from penstock.ingest.tenants import TenantEntry

    _check_tenant(tenant)
    limits = {
        "requests_per_min": requests_per_min,
        "tokens_per_min": tokens_per_min,
        "max_request_tokens": max_request_tokens,
        "max_batch_tokens": max_batch_tokens,
    }
    given: dict[str, Any] = {name: limit or None for name, limit in limits.items() if limit is not None}
    given |= {"weight": weight} if weight is not None else {}
    given |= {"classes": class_} if class_ else {}
    given |= {"regions": [name for name in region if name]} if region else {}
    given |= {"topics": topics} if topics is not None else {}
    given |= {"fallback": fallback} if fallback is not None else {}
    given |= {"webhook_url": webhook_url} if webhook_url is not None else {}
    secret = _check_webhook(tenant, webhook_url) if webhook_url else ""
    try:
        entry = TenantEntry.model_validate(_read_book().tenants.get(tenant, TenantEntry()).model_dump() | given)
    except ValidationError as error:
        raise typer.BadParameter("; ".join(reword_validation(line["msg"]) for line in error.errors())) from None

    def set_entry(book: "KeyBook") -> None:
        book.tenants[tenant] = entry

    _change_keys(
        set_entry, lambda client: client.hset(TENANTS_KEY, tenant, entry.model_dump_json(exclude_defaults=True))
    )
    if secret:
        print(secret)  # noqa: T201


def _check_webhook(tenant: str, url: str) -> str:
    """Return the secret that the tenant's receiver must have."""
    from penstock.ingest.webhooks import check_url, derive_tenant_secret

    settings = load_settings(WebhookSettings)
    if not settings.secret:
        raise SettingsError("there are no webhooks: set PENSTOCK_WEBHOOK_SECRET, here and for the gateways")
    try:
        check_url(url, settings.allowed_hosts)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return derive_tenant_secret(settings.secret, tenant)


def _check_tenant(name: str) -> None:
    try:
        TypeAdapter(Tenant).validate_python(name)
    except ValidationError:
        raise typer.BadParameter(f"{name!r} cannot name a tenant: 1 to 64 of A-Z a-z 0-9 . _ -") from None


def _find_book() -> str:
    """Return where the keys are: "redis" or a file. Raises `SettingsError` where no keys are used."""
    from penstock.ingest.keys import KEYS_OPEN

    location = load_settings(AdmissionSettings).keys
    if location in {"", KEYS_OPEN}:
        raise SettingsError("no keys are asked for: set PENSTOCK_GATEWAY_KEYS to a JSON file, or to 'redis'")
    return location


def _read_book() -> "KeyBook":
    """Return all keys and tenants."""
    from penstock.ingest.keys import KEYS_IN_REDIS, KeyBook, read_book_file, read_redis_book

    location = _find_book()
    if location == KEYS_IN_REDIS:
        with redis_client(load_settings(Addresses).first_url) as client:
            return read_redis_book(client)
    path = Path(location).expanduser()
    return read_book_file(path) if path.exists() else KeyBook()


def _change_keys(in_file: Callable[["KeyBook"], None], in_redis: Callable[["redis.Redis"], object]) -> None:
    """Change the keys where they are. A file is read, changed and replaced by one process at a time."""
    from penstock.ingest.keys import KEYS_IN_REDIS, write_book_file

    location = _find_book()
    if location == KEYS_IN_REDIS:
        with redis_client(load_settings(Addresses).first_url) as client:
            in_redis(client)
        return
    path = Path(location).expanduser()
    with _lock_directory(path.parent):
        book = _read_book()
        in_file(book)
        write_book_file(path, book)


@contextlib.contextmanager
def _lock_directory(folder: Path) -> Iterator[None]:
    """Hold a directory's lock, which excludes other processes, while the context lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
