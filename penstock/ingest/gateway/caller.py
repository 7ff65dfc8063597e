"""Who calls: the dependency that every route but the health check has."""

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from penstock.ingest.gateway.errors import ApiError
from penstock.ingest.gateway.state import gateway_of
from penstock.ingest.tenants import Caller

_BEARER = HTTPBearer(auto_error=False, description="An API key, `psk_…`. An open gateway asks for none.")


async def caller_of(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]) -> Caller:
    """The caller, from the key alone. Raises `ApiError` 401."""
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise ApiError(401, "more than one Authorization header", code="invalid_api_key")
    return await gateway_of(request).keyring.caller_of(given[0] if given else None)


CallerDep = Annotated[Caller, Depends(caller_of)]
"""Of a route: `caller: CallerDep`."""
