"""What tokens are sold for, and what the workers cost that computed them.

Metering counts the tokens of results by tenant, key, model and class (`penstock.ingest.metering`). Each worker writes
what its seconds were spent on (`penstock.worker.account`). A table in a file has the prices of both. The difference is
the margin, after the seconds in which workers were idle.
"""

import json
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import SettingsError, reword_validation
from penstock.names import Pipeline, PriorityClass, WorkerKind

TOKEN_COUNTERS = ("prefill_tokens", "cached_tokens", "decode_tokens")
"""The counters of metering that have a price: `input`, `cached` and `output` in the table."""
READ_INTERVAL_S = 10.0
"""For how long the account of a day is used that a gateway has read."""


Hour = Annotated[int, Field(ge=0, le=24)]


class TokenPrice(BaseModel):
    """The prices of a million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = None
    """The model's name; None: any."""
    priority_class: PriorityClass | None = Field(default=None, alias="class")
    """The class of requests; None: both."""
    input: float = Field(ge=0)
    cached: float = Field(ge=0)
    output: float = Field(ge=0)


class Prices(BaseModel):
    """A table of prices."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    currency: str = ""
    worker_hour: dict[WorkerKind, float] = {}
    """What an hour of a worker costs, by its kind."""
    tokens: list[TokenPrice] = []
    """The first row that fits counts."""
    batch_hours: list[tuple[Hour, Hour]] = []
    """When lines of other regions' batches are welcome, from an hour to an hour of UTC; empty: always."""

    def find_row(self, model: str, priority_class: str) -> TokenPrice | None:
        """Return the prices of a model's tokens; None where no row fits."""
        fitting = (
            row for row in self.tokens if row.model in (None, model) and row.priority_class in (None, priority_class)
        )
        return next(fitting, None)


def read_prices(file: str) -> Prices:
    """Return the prices in a TOML file. Raise `SettingsError` that says what to change."""
    try:
        return Prices.model_validate(tomllib.loads(Path(file).read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"PENSTOCK_GATEWAY_PRICES={file}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        words = f"PENSTOCK_GATEWAY_PRICES={file}: {where}: {reword_validation(first['msg'])}"
        raise SettingsError(f"{words}; docs/gateway.md has an example") from None


class Whose(NamedTuple):
    """What the rows of an account are told apart by."""

    tenant: str
    key: str
    """The id of the API key; empty where there was none."""
    model: str
    priority_class: str


@dataclass
class AccountRow:
    """The tokens, seconds and amounts of one of them."""

    requests: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sold: float = 0.0
    """What the tokens are sold for."""
    cost: float = 0.0
    """What the workers cost in these seconds."""


@dataclass
class Account:
    """The account of some days."""

    rows: dict[Whose, AccountRow] = field(default_factory=dict)
    idle_s: float = 0.0
    idle_cost: float = 0.0
    num_unpriced_tokens: int = 0
    """Tokens that no row of the table fits: they are sold for nothing here."""

    @property
    def totals(self) -> dict[str, float]:
        """What all tokens are sold for, what workers cost while they computed and while they were idle, and the
        margin: what is left.
        """
        sold, cost = (sum(getattr(row, name) for row in self.rows.values()) for name in ("sold", "cost"))
        return {"sold": sold, "cost": cost, "idle_cost": self.idle_cost, "margin": sold - cost - self.idle_cost}

    def add_day(self, usage: Mapping[bytes, bytes], seconds: Mapping[bytes, bytes], prices: Prices) -> None:
        """Add the hashes of a day: of metering's counts, and of the workers' seconds."""
        for name, count in usage.items():
            counter, _, whose = name.decode().partition(":")
            self._add_count(Whose(*json.loads(whose)), counter, int(count), prices)
        for name, microseconds in seconds.items():
            kind, model, stage, priority_class, tenant, key = json.loads(name)
            spent_s = int(microseconds) / 1e6
            cost = prices.worker_hour.get(kind, 0.0) * spent_s / 3600
            if stage is None:
                self.idle_s, self.idle_cost = self.idle_s + spent_s, self.idle_cost + cost
                continue
            row = self._find_row(Whose(tenant, key, model, priority_class))
            setattr(row, f"{stage}_s", getattr(row, f"{stage}_s") + spent_s)
            row.cost += cost

    def _add_count(self, whose: Whose, counter: str, count: int, prices: Prices) -> None:
        row, price = self._find_row(whose), prices.find_row(whose.model, whose.priority_class)
        setattr(row, counter, getattr(row, counter) + count)
        if counter in TOKEN_COUNTERS:
            if price is None:
                self.num_unpriced_tokens += count
            else:
                amounts = dict(zip(TOKEN_COUNTERS, (price.input, price.cached, price.output), strict=True))
                row.sold += count * amounts[counter] / 1e6

    def _find_row(self, whose: Whose) -> AccountRow:
        return self.rows.setdefault(whose, AccountRow())


def read_account(client: "redis.Redis", pipeline: Pipeline, days: Iterable[str], prices: Prices) -> Account:
    """Return the account of some days such as `2026-11-21`. Raise `redis.RedisError`."""
    account = Account()
    for day in days:
        usage: Any = client.hgetall(pipeline.meter_key(f"detail:{day}"))
        seconds: Any = client.hgetall(pipeline.seconds_key(day))
        account.add_day(usage, seconds, prices)
    return account


class TodaysAccount:
    """The account of today, as a gateway shows it."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self._read_at, self._totals = -READ_INTERVAL_S, dict[str, float]()

    def read_totals(self, client: "redis.Redis", pipeline: Pipeline) -> dict[str, float]:
        """Return today's totals, as of a moment ago. Raise `redis.RedisError`."""
        if time.monotonic() >= self._read_at + READ_INTERVAL_S:
            today = time.strftime("%Y-%m-%d", time.gmtime())
            self._totals = read_account(client, pipeline, [today], self.prices).totals
            self._read_at = time.monotonic()
        return self._totals
