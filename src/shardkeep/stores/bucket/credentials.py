"""Credentials, regions and endpoints of buckets, and what the errors of their servers mean.

Settings come from the usual places of each ecosystem (see the table in docs/buckets.md) and are passed to the client.
The environment of the process is never changed.
"""

import configparser
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

from shardkeep.errors import AccessError, StorageError

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig

_S3_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile (AWS_PROFILE)"
_GCS_KEYS = "GOOGLE_APPLICATION_CREDENTIALS (a service-account file), or run `gcloud auth application-default login`"
PATIENCE = 60.0  # seconds for which transient errors are retried
_SMALL_BODY = 1 << 20  # bodies up to this size fit into the default timeout
_SLOWEST = 1 << 20  # bytes per second; sets the timeout of requests with large bodies
_YES = ("1", "true", "yes")
# Variables that the client prefers to a credentials file.
_OVERRIDING = (
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT",
)


@dataclass(frozen=True)
class Bucket:
    """A bucket. `key_file` is a service-account file for this bucket only."""

    scheme: str
    name: str
    key_file: str | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def clients(self) -> "Clients":
        """The clients, after a first request has shown that the bucket is reachable."""
        if os.getpid() != _pid:
            raise StorageError(
                f"{self.url}: buckets cannot be used in a forked process. Start the process with the multiprocessing "
                "start method 'spawn'"
            )
        asked = (self, _settings(self), _surroundings())
        failed = _failures.get(asked)
        if failed is not None and time.monotonic() - failed.when < 2:
            raise failed.kind(failed.message)  # a cleanup after a failure need not wait for another timeout
        try:
            return _reached(*asked)
        except StorageError as error:
            # Not the error itself: its traceback would keep objects alive.
            _failures[asked] = Failure(type(error), str(error), time.monotonic())
            raise


Client: TypeAlias = S3Store | GCSStore


def list_below(client: Client, prefix: str | None) -> "ListResult[Sequence[ObjectMeta]]":
    """The objects and the directories right below a prefix."""
    return obstore.list_with_delimiter(client, prefix)  # pyright: ignore[reportUnknownMemberType]  (tables of arrow)


@dataclass(frozen=True, eq=False)
class Clients:
    """Clients with different retries: `reading` and `writing` retry for a minute, `once` never retries."""

    reading: Client
    writing: Client
    once: Client
    make: Callable[[float], Client]  # makes a client like `once` with this timeout in seconds
    _sending: dict[int, Client] = field(default_factory=dict[int, Client])

    def sending(self, nbytes: int) -> Client:
        """A client for one attempt to put `nbytes`, with a timeout that is long enough for a slow connection."""
        if nbytes <= _SMALL_BODY:
            return self.once
        minutes = 5 * (1 + nbytes // (300 * _SLOWEST))
        if minutes not in self._sending:
            self._sending[minutes] = self.make(60 * minutes)
        return self._sending[minutes]


Settings: TypeAlias = tuple[tuple[str, object], ...]
_pid = os.getpid()


class Failure(NamedTuple):
    """A failed attempt to reach a bucket."""

    kind: type[StorageError]
    message: str
    when: float


_failures: dict[tuple[Bucket, Settings, Settings], Failure] = {}


@lru_cache(maxsize=64)
def _reached(bucket: Bucket, settings: Settings, _: Settings) -> Clients:
    """Fail within seconds, not after a minute, if the bucket, the keys, the region or the endpoint are wrong."""
    probe = _make(bucket, settings, {"timeout": timedelta(seconds=5)}, retries=3, seconds=5)
    try:
        list_below(probe, "shardkeep-is-this-bucket-there")
    except (FileNotFoundError, BaseError) as error:
        # A permission error for listing is ignored: other requests may still be allowed.
        if status_of(error) != 403 or _code(error) in _UNKNOWN_KEYS or _lacks_keys(error):
            raise (explain(error, bucket, bucket.url) or error) from error
    return Clients(
        reading=_make(bucket, settings, {"timeout": "300s", "read_timeout": "20s"}, retries=1000, seconds=PATIENCE),
        writing=_make(bucket, settings, {"timeout": "300s"}, retries=1000, seconds=PATIENCE),
        once=_make(bucket, settings, {"timeout": "20s"}, retries=0, seconds=20),
        make=lambda seconds: _make(
            bucket, settings, {"timeout": timedelta(seconds=seconds)}, retries=0, seconds=seconds
        ),
    )


def _make(bucket: Bucket, settings: Settings, options: "ClientConfig", retries: int, seconds: float) -> Client:
    chosen: dict[str, Any] = dict(settings)
    endpoint = str(chosen.get("endpoint") or chosen.get("base_url") or "https")
    patience: RetryConfig = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 3},
    }
    client: ClientConfig = {"allow_http": endpoint.startswith("http:"), "connect_timeout": "5s", **options}
    kind: Callable[..., Client] = S3Store if bucket.scheme == "s3" else GCSStore
    try:
        return kind(bucket.name, client_options=client, retry_config=patience, **chosen)
    except (BaseError, ValueError) as error:
        if "application_credentials" in chosen:
            text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
            raise AccessError(
                f"{bucket.url}: cannot use the credentials file {chosen['application_credentials']}: {text}"
            ) from error
        raise (explain(error, bucket, bucket.url) or error) from error


def _settings(bucket: Bucket) -> Settings:
    return tuple((_s3_settings() if bucket.scheme == "s3" else _gcs_settings(bucket)).items())


def _surroundings() -> Settings:
    """The environment variables that the client reads itself; new clients are needed when they change."""
    return tuple(
        (name, os.environ[name]) for name in sorted(os.environ) if name.startswith(("AWS_", "GOOGLE_", "GCE_"))
    )


def _s3_settings() -> dict[str, object]:
    """Keys, region and endpoint from the environment, with the profile as fallback."""
    variables = os.environ
    profile = _profile()
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or profile.get("region")
    anonymous = _is_set("AWS_SKIP_SIGNATURE") or _is_set("AWS_NO_SIGN_REQUEST")
    found: dict[str, object] = {"region": region or "us-east-1", "skip_signature": anonymous, "unsigned_payload": True}
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL") or profile.get("endpoint_url")
    if endpoint:  # under both names: the environment could otherwise override the first
        found |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    # Without a provider the client would look for keys itself, and reject an incomplete pair.
    found |= {"credential_provider": _fixed_keys("", "", None)} if anonymous else _s3_keys(profile)
    return found


def _s3_keys(profile: dict[str, str]) -> dict[str, object]:
    variables = os.environ
    if variables.get("AWS_ACCESS_KEY_ID"):
        if not variables.get("AWS_SECRET_ACCESS_KEY"):
            raise AccessError("AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not; set both")
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        return {"credential_provider": _fixed_keys(*(variables.get(name) for name in names))}
    if "aws_access_key_id" in profile:
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        return {"credential_provider": _fixed_keys(*(profile.get(name) for name in names))}
    others = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(variables.get(name) for name in (*others, "AWS_CONTAINER_CREDENTIALS_FULL_URI")):
        return {}
    if {"role_arn", "sso_session", "sso_start_url", "credential_process"} & profile.keys():
        return {"credential_provider": _boto3_keys(variables.get("AWS_PROFILE"))}
    if _is_set("AWS_EC2_METADATA_DISABLED"):
        raise AccessError(f"no credentials for S3: set {_S3_KEYS}; for a public bucket set AWS_SKIP_SIGNATURE=true")
    return {}


@lru_cache(maxsize=16)
def _fixed_keys(key: str, secret: str | None, token: str | None) -> Callable[[], dict[str, str | None]]:
    """A provider of fixed keys, so that the client does not mix them with other variables."""
    found = {"access_key_id": key, "secret_access_key": secret or "", "token": token, "expires_at": None}
    return lambda: found


@lru_cache(maxsize=4)
def _boto3_keys(profile: str | None) -> object:
    """A provider for single sign-on, roles and external programs, through boto3."""
    try:
        from boto3 import Session  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise AccessError(
            f"the AWS profile {profile or 'default'!r} uses roles or single sign-on, which needs boto3: install boto3, "
            "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    return Boto3CredentialProvider(Session(profile_name=profile))  # pyright: ignore[reportUnknownArgumentType]


def _profile() -> dict[str, str]:
    """The section of the profile in the shared files; `credentials` takes precedence over `config`."""
    name = os.environ.get("AWS_PROFILE", "default")
    home = Path.home() / ".aws"
    config, credentials = configparser.RawConfigParser(), configparser.RawConfigParser()
    try:
        config.read(os.environ.get("AWS_CONFIG_FILE", home / "config"))
        credentials.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"))
    except configparser.Error as error:
        raise AccessError(f"cannot read the AWS profile {name!r}: {error}") from error
    found: dict[str, str] = {}
    section = name if name == "default" else f"profile {name}"
    if config.has_section(section):
        found.update(config.items(section))
    if credentials.has_section(name):
        found.update(credentials.items(name))
    if not found and "AWS_PROFILE" in os.environ:
        raise AccessError(f"AWS profile {name!r} (AWS_PROFILE) not found in the shared credentials and config files")
    return found


def _gcs_settings(bucket: Bucket) -> dict[str, object]:
    """A service-account file; without one, obstore looks for application-default credentials itself."""
    variables = os.environ
    found: dict[str, object] = {}
    emulator = variables.get("STORAGE_EMULATOR_HOST")
    if emulator:
        found["base_url"] = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/")
    elif variables.get("GOOGLE_BASE_URL"):
        found["base_url"] = variables["GOOGLE_BASE_URL"]
    key_file = bucket.key_file or variables.get("GOOGLE_APPLICATION_CREDENTIALS")
    stronger = [name for name in _OVERRIDING if variables.get(name)]
    if bucket.key_file and stronger:  # the client would use these instead
        raise AccessError(f"{bucket.url}: {stronger[0]} is set and would override {key_file}; unset it")
    if key_file:
        if not os.path.isfile(key_file):
            raise AccessError(f"{bucket.url}: credentials file {key_file} not found")
        return {**found, "application_credentials": key_file}
    if _is_set("GOOGLE_SKIP_SIGNATURE"):
        return {**found, "skip_signature": True, "bearer_token": ""}
    if emulator:
        return {**found, "bearer_token": "anonymous"}
    default = Path.home() / ".config" / "gcloud" / "application_default_credentials.json"
    if _is_set("NO_GCE_CHECK") and not default.is_file():
        public = "for a public bucket set GOOGLE_SKIP_SIGNATURE=true"
        raise AccessError(f"no credentials for {bucket.url}: set {_GCS_KEYS}; {public}")
    return found


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in _YES


_UNKNOWN_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "InvalidSecurity")


def status_of(error: Exception) -> int:
    """The HTTP status of the response; 0 if there was none."""
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else 0


def is_final(error: Exception) -> bool:
    """Whether a retry cannot succeed."""
    status = status_of(error)
    transient = status in (408, 409, 425, 429) or _code(error) == "RequestTimeout"
    return (400 <= status < 500 and not transient) or status == 501 or _lacks_keys(error)


def _lacks_keys(error: Exception) -> bool:
    """Whether no request was made because no credentials were found or the token server refused them."""
    text = str(error).partition("\n\nDebug source:")[0]
    if "token request" in text or re.search(r"https?://[^/\s]+/latest/(api/token|meta-data/iam/\S*)\s", text):
        return True
    # URLs are removed and responses ignored: both may contain the word by chance.
    return status_of(error) == 0 and bool(re.search("[Cc]redential", re.sub(r"https?://\S+", "", text)))


def was_cut(error: Exception) -> bool:
    """Whether the connection broke in a request that the client does not retry itself, such as a list or a delete."""
    text = str(error)
    tried = re.search(r"after [1-9]\d* retries", text)
    broke = "response body" in text or ("kind: Interrupted" in text and not tried)
    return isinstance(error, BaseError) and broke and not is_final(error)


def _code(error: Exception) -> str:
    found = re.search(r"<Code>(\w+)|\(code: (\w+)", str(error))
    return (found[1] or found[2]) if found else ""


def explain(error: Exception, bucket: Bucket, where: str) -> StorageError | None:
    """An error that says what is wrong and what to set; None if callers handle it (not found, condition not met)."""
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())[:400]
    status, code = status_of(error), _code(error)
    if code == "NoSuchBucket":
        return StorageError(f"{where}: bucket {bucket.name!r} does not exist at {_endpoint(bucket)}")
    if isinstance(error, FileNotFoundError | AlreadyExistsError | PreconditionError):
        return None
    keys = _S3_KEYS if bucket.scheme == "s3" else _GCS_KEYS
    if _lacks_keys(error):
        return AccessError(f"{where}: no valid credentials found; set {keys} ({text})")
    if status in (401, 403) or code in ("AccessDenied", *_UNKNOWN_KEYS):
        denied = f"{code or status}: access denied by {_endpoint(bucket)}"
        return AccessError(f"{where}: {denied}. Check the credentials and their permissions: set {keys} ({text})")
    if "BareRedirect" in str(error) or code in ("AuthorizationHeaderMalformed", "PermanentRedirect"):
        return StorageError(f"{where}: the bucket is not in the region of {_endpoint(bucket)}; set AWS_REGION ({text})")
    if any(sign in str(error) for sign in ("ConnectionRefused", "dns error", "ConnectError", "kind: Connect")):
        return StorageError(
            f"{where}: cannot connect to {_endpoint(bucket)}; check the endpoint and the network ({text})"
        )
    if status == 0 and any(sign in str(error) for sign in ("Timeout", "TimedOut", "timed out")):
        return StorageError(
            f"{where}: {_endpoint(bucket)} does not respond; check the endpoint and the network ({text})"
        )
    return StorageError(f"{where}: {text}")


def _endpoint(bucket: Bucket) -> str:
    """The endpoint and region of a bucket, with the variables that set them."""
    try:
        settings = dict(_settings(bucket))
    except AccessError:
        settings = {}
    if bucket.scheme == "s3":
        region = settings.get("region", "")
        return f"{settings.get('endpoint') or 'Amazon S3'} (AWS_ENDPOINT_URL; region {region}, AWS_REGION)"
    return f"{settings.get('base_url') or 'Google Cloud Storage'} (STORAGE_EMULATOR_HOST)"
