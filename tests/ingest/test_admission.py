"""Admission: one budget for all gateways, and when to come again."""

import asyncio
import uuid
from collections import Counter, deque

import pytest
import redis.asyncio

from penstock.config.settings import AdmissionSettings
from penstock.errors import BusUnavailable
from penstock.ingest.admission import Admission, HeldTokens, TenantShares, Ticket
from penstock.ingest.errors import ApiError
from penstock.ingest.tenants import Caller
from penstock.local.processes import find_free_port
from penstock.messages import Usage
from penstock.names import CLASSES, Pipeline
from penstock.ops.lag import PipelineLag
from penstock.redis.client import async_redis_client
from tests.draws import mark_some

DEMO = Pipeline(f"t-{uuid.uuid4().hex[:12]}")


class FixedLag:
    """A pipeline in which a request waits for so long, and an answer takes so many tokens."""

    def __init__(self, wait_s: float | None = 0.0, mean_output: float | None = None) -> None:
        self.wait_s, self.mean_output = wait_s, mean_output
        self.num_reads = 0

    async def read(self, _: Pipeline) -> PipelineLag:
        self.num_reads += 1
        return PipelineLag({}, dict.fromkeys(CLASSES, self.wait_s), None, dict.fromkeys(CLASSES, self.mean_output))


@pytest.fixture
def tenant() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"


def make_admission(client: "redis.asyncio.Redis", wait_s: float | None = 0.0) -> Admission:
    return Admission(client, FixedLag(wait_s).read, AdmissionSettings(max_wait_s=10))


async def refusal(asked: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await asked  # type: ignore[misc]
    return raised.value


@pytest.mark.proof
async def test_gateways_share_a_tenants_requests(client: "redis.asyncio.Redis", tenant: str) -> None:
    caller = Caller(tenant, requests_per_min=20)
    gateways = [make_admission(client) for _ in range(3)]

    async def ask(number: int) -> Ticket | ApiError:
        try:
            return await gateways[number % 3].admit(caller, DEMO, "interactive", 5)
        except ApiError as error:
            return error

    found = await asyncio.gather(*(ask(number) for number in range(40)))
    admitted = [one for one in found if isinstance(one, Ticket)]
    refused = [one for one in found if isinstance(one, ApiError)]
    assert 20 <= len(admitted) <= 30  # three seconds bring another one each
    assert {(error.status, error.code) for error in refused} == {(429, "rate_limit_exceeded")}
    assert all(1 <= int(error.headers["Retry-After"]) <= 3 for error in refused)
    assert all(int(error.headers["retry-after-ms"]) <= 3000 for error in refused)
    assert admitted[0].headers["x-ratelimit-limit-requests"] == "20"
    assert "x-ratelimit-limit-tokens" not in admitted[0].headers


@pytest.mark.proof
async def test_an_estimate_is_taken_and_corrected_at_the_end(client: "redis.asyncio.Redis", tenant: str) -> None:
    caller, admission = Caller(tenant, tokens_per_min=1000, requests_per_min=600), make_admission(client)
    ticket = await admission.admit(caller, DEMO, "interactive", 900)
    assert 100 <= int(ticket.headers["x-ratelimit-remaining-tokens"]) < 900
    error = await refusal(admission.admit(caller, DEMO, "interactive", 800))
    assert 1 < int(error.headers["Retry-After"]) <= 42  # 700 tokens are missing, 16.7 come a second
    assert int(error.headers["x-ratelimit-remaining-requests"]) >= 598  # a refused request takes nothing
    await admission.settle(ticket, Usage(prompt_tokens=40, completion_tokens=10))
    await admission.settle(ticket, Usage(prompt_tokens=40, completion_tokens=10))  # once is enough
    second = await admission.admit(caller, DEMO, "interactive", 800)
    assert 150 <= int(second.headers["x-ratelimit-remaining-tokens"]) < 900
    await admission.settle(second, Usage(prompt_tokens=800, completion_tokens=2000))  # it took more: the bucket owes
    error = await refusal(admission.admit(caller, DEMO, "interactive", 1))
    assert int(error.headers["Retry-After"]) > 60


@pytest.mark.proof
async def test_an_answer_without_a_limit_takes_what_answers_take(client: "redis.asyncio.Redis", tenant: str) -> None:
    """The mean is reserved, at the end what was used is taken; a bucket that is smaller than the mean lets it in."""
    caller = Caller(tenant, tokens_per_min=1000)
    admission = Admission(client, FixedLag(mean_output=300.4).read, AdmissionSettings())
    ticket = await admission.admit(caller, DEMO, "interactive", 100, max_output=2**31 - 1, num_open=1)
    assert ticket.num_tokens == 400
    assert 600 <= int(ticket.headers["x-ratelimit-remaining-tokens"]) < 900
    await admission.settle(ticket, Usage(prompt_tokens=90, completion_tokens=10))
    second = await admission.admit(caller, DEMO, "interactive", 100, max_output=2**31 - 1, num_open=2)
    assert second.num_tokens == 700
    assert 200 <= int(second.headers["x-ratelimit-remaining-tokens"]) < 500
    error = await refusal(admission.admit(caller, DEMO, "interactive", 100, max_output=2**31 - 1, num_open=1))
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    await admission.settle(second, Usage(prompt_tokens=100, completion_tokens=5000))
    error = await refusal(admission.admit(caller, DEMO, "interactive", 1))
    assert int(error.headers["Retry-After"]) > 200, "the bucket owes what the answers took"
    small = Caller(f"{tenant}-small", tokens_per_min=250)
    assert (await admission.admit(small, DEMO, "interactive", 100, max_output=2**31 - 1, num_open=1)).num_tokens == 250
    capped = Caller(f"{tenant}-capped", max_request_tokens=50)
    assert (await admission.admit(capped, DEMO, "interactive", 100, max_output=50, num_open=1)).num_tokens == 150


@pytest.mark.proof
async def test_what_a_caller_may_never_ask_for(client: "redis.asyncio.Redis", tenant: str) -> None:
    admission = make_admission(client)
    caller = Caller(tenant, classes=("batch",), tokens_per_min=100, max_request_tokens=50)
    error = await refusal(admission.admit(caller, DEMO, "interactive", 5))
    assert (error.status, error.code) == (403, "class_not_allowed")
    error = await refusal(admission.admit(caller, DEMO, "batch", 60, max_output=51))
    assert (error.status, error.body.error.param) == (400, "max_tokens")
    error = await refusal(admission.admit(caller, DEMO, "batch", 101, max_output=50))
    assert (error.status, "Retry-After" in error.headers) == (413, False)
    assert await admission.admit(caller, DEMO, "batch", 100, max_output=50)


@pytest.mark.parametrize(
    ("wait_s", "wanted_s", "code", "after"),
    mark_some([
        (0.0, 0.0, "", 0), (0.9, 1.0, "", 0), (9.0, None, "", 0), (None, None, "", 0),
        (0.1, 0.0, "busy", 1), (3.5, 1.0, "busy", 3), (None, 5.0, "busy", 1), (37.2, None, "overloaded", 28),
    ], pytest.mark.proof, 2),
)  # fmt: skip
async def test_the_lag_says_when_to_come_again(
    client: "redis.asyncio.Redis", wait_s: float | None, wanted_s: float | None, code: str, after: int
) -> None:
    admission = make_admission(client, wait_s)
    if not code:
        assert await admission.admit(Caller(), DEMO, "interactive", 10, max_wait_s=wanted_s)
        return
    error = await refusal(admission.admit(Caller(), DEMO, "interactive", 10, max_wait_s=wanted_s))
    assert (error.status, error.code, error.headers["Retry-After"]) == (429, code, str(after))
    if code == "overloaded":
        assert await admission.admit(Caller(), DEMO, "batch", 10)  # which may wait for longer


@pytest.mark.proof
async def test_weights_share_a_full_pipeline(client: "redis.asyncio.Redis", pipeline: Pipeline) -> None:
    """Both ask as often as they can; what is admitted is worked off in order of arrival."""
    shares = TenantShares(client)
    weights, queue, served = {"heavy": 3.0, "light": 1.0}, deque[HeldTokens](), Counter[str]()
    for turn in range(400):
        for tenant in sorted(weights, reverse=turn % 2 == 0):
            held = None
            if len(queue) < 24:  # beyond that, nobody is admitted
                held = await shares.hold_tokens(pipeline, tenant, weights[tenant], 10, is_full=len(queue) > 4)
            if held is not None:
                queue.append(held)
        done = queue.popleft()
        await shares.release_tokens(done)
        served[done.tenant] += done.num_tokens
    assert served["heavy"] == pytest.approx(3 * served["light"], rel=0.2)
    while queue:  # the heavy one goes: the light one may have it all
        await shares.release_tokens(queue.popleft())
    for _ in range(30):
        assert await shares.hold_tokens(pipeline, "light", 1.0, 10, is_full=True) is not None
    assert await shares.hold_tokens(pipeline, "heavy", 3.0, 500, is_full=True) is not None  # it had none
    assert await shares.hold_tokens(pipeline, "heavy", 3.0, 500, is_full=True) is not None  # it had less than 3/4
    assert await shares.hold_tokens(pipeline, "heavy", 3.0, 10, is_full=True) is None
    assert (
        await shares.hold_tokens(pipeline, "light", 1.0, 10, is_full=True) is not None
    )  # 300 of 1,300 are less than 1/4
    assert await shares.hold_tokens(pipeline, "heavy", 3.0, 10, is_full=False) is not None


@pytest.mark.proof
async def test_what_nobody_settles_counts_for_a_while_only(
    client: "redis.asyncio.Redis", pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = make_admission(client, 5.0)
    monkeypatch.setattr("penstock.ingest.admission.HELD_TTL_S", 0)
    lost = [await admission.admit(Caller("lost"), pipeline, "interactive", 100) for _ in range(3)]
    monkeypatch.setattr("penstock.ingest.admission.HELD_TTL_S", 60)
    kept = await admission.admit(Caller("kept"), pipeline, "interactive", 100)
    other = await admission.admit(Caller("other"), pipeline, "interactive", 100)
    holders = await client.hkeys(pipeline.shares_key("tokens"))
    assert holders == [b"kept", b"other"]
    more = await admission.admit(Caller("kept"), pipeline, "interactive", 100)
    error = await refusal(admission.admit(Caller("kept"), pipeline, "interactive", 100))
    assert (error.status, error.code, error.headers["Retry-After"]) == (429, "over_share", "5")
    for ticket in (*lost, kept, other, more):
        await admission.settle(ticket, Usage())
    assert await client.hgetall(pipeline.shares_key("tokens")) == {}


async def test_requests_that_come_together_read_the_lag_once(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ingest.admission.LAG_REFRESH_S", 3600.0)
    monkeypatch.setattr("penstock.ingest.admission.LAG_MAX_AGE_S", 3600.0)
    fixed = FixedLag()
    admission = Admission(client, fixed.read, AdmissionSettings())
    await asyncio.gather(*(admission.admit(Caller(), DEMO, "interactive", 1) for _ in range(100)))
    assert fixed.num_reads == 1


async def test_closing_ends_what_reads_the_lag(client: "redis.asyncio.Redis") -> None:
    is_reading, is_ended = asyncio.Event(), asyncio.Event()

    async def read_forever(pipeline: Pipeline) -> PipelineLag:
        is_reading.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_ended.set()
        raise AssertionError(pipeline)

    admission = Admission(client, read_forever, AdmissionSettings())
    asking = asyncio.create_task(admission.admit(Caller(), DEMO, "interactive", 1))
    await is_reading.wait()
    await admission.close()
    assert is_ended.is_set()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.proof
async def test_without_redis_nobody_with_a_limit_is_admitted() -> None:
    client = async_redis_client(f"redis://127.0.0.1:{find_free_port()}/0")
    admission = make_admission(client)
    with pytest.raises(BusUnavailable):
        await admission.admit(Caller(requests_per_min=10), DEMO, "interactive", 1)
    await client.aclose()
