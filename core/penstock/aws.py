"""Passwords that AWS's servers take: urls signed with the credentials that botocore finds, for `penstock[aws]`."""

from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

from penstock.errors import AccessRefused, DependencyMissing

LIFETIME_S = 900
"""How long a signed url is taken for a login: AWS allows no longer."""


class AwsSigner:
    """Signs urls for one service, each with the credentials of that moment. Thread-safe."""

    def __init__(self, service: str) -> None:
        """Raise `DependencyMissing` without botocore. Nothing is asked for yet."""
        if find_spec("botocore") is None:
            raise DependencyMissing("logins with AWS's IAM need botocore: pip install 'penstock[aws]'")
        from botocore.session import get_session

        self._service, self._session = service, get_session()

    def sign_url(self, url: str, region: str = "") -> tuple[str, float]:
        """Return a url that is signed, and until when it is valid, in seconds since 1970.

        `{region}` in it becomes the region, by default that of AWS's configuration. Raise `AccessRefused` without
        credentials or a region.
        """
        from botocore.auth import SigV4QueryAuth
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            credentials = self._session.get_credentials()
            region = region or self._session.get_config_variable("region") or ""
            frozen = credentials.get_frozen_credentials() if credentials else None
        # The second one is a refusal of AWS's token service, where a role is taken on. Their words have no secrets.
        except (BotoCoreError, ClientError) as error:
            raise AccessRefused(f"AWS gives no credentials now ({error})") from None
        if frozen is None or not frozen.access_key:
            raise AccessRefused("no credentials of AWS: give this process a role, or AWS_ACCESS_KEY_ID and the like")
        if not region:
            raise AccessRefused("no region of AWS: set AWS_REGION")
        request: Any = AWSRequest("GET", url.replace("{region}", region))
        SigV4QueryAuth(frozen, self._service, region, expires=LIFETIME_S).add_auth(request)
        signed_at = datetime.strptime(request.context["timestamp"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return request.url, (signed_at + timedelta(seconds=LIFETIME_S)).timestamp()
