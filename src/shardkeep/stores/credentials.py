"""Buckets: who we are to them, where they are, and what their refusals mean.

Everything is taken from where each ecosystem keeps it (docs/buckets.md has the table) and handed to the one client;
the environment of the process is never changed.
"""

import configparser
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

from shardkeep.errors import AccessError, StorageError

_S3_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile (AWS_PROFILE)"
_GCS_KEYS = "GOOGLE_APPLICATION_CREDENTIALS (a service-account file), or run `gcloud auth application-default login`"
PATIENCE = 60.0  # seconds in which what may pass is tried again
_SMALL_BODY = 1 << 20  # is sent within the time that any request has
_SLOWEST = 1 << 20  # bytes per second: a request with a large body may take as long as this needs for it
_YES = ("1", "true", "yes")
# Variables of the client's own that it prefers to a credentials file.
_OVERRIDING = (
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT",
)


@dataclass(frozen=True)
class Bucket:
    """A bucket and how it is reached. `key_file`: a service-account file for this bucket alone."""

    scheme: str
    name: str
    key_file: str | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def clients(self) -> "Clients":
        """The clients, once a first request has shown that the bucket can be reached at all."""
        if os.getpid() != _pid:
            raise StorageError(
                f"{self.url}: buckets cannot be used in a forked process; start it anew (multiprocessing 'spawn')"
            )
        asked = (self, _settings(self), _surroundings())
        failed = _failures.get(asked)
        if failed is not None and time.monotonic() - failed.when < 2:
            raise failed.kind(failed.message)  # who tidies up after a failure need not wait for the next
        try:
            return _reached(*asked)
        except StorageError as error:
            # Not the error itself: it would keep what its traceback leads to.
            _failures[asked] = Failure(type(error), str(error), time.monotonic())
            raise


@dataclass(frozen=True, eq=False)
class Clients:
    """Three degrees of patience: `reading` and `writing` try again for a minute, `once` does not at all."""

    reading: Any
    writing: Any
    once: Any
    make: Callable[[float], Any]  # one like `once` for requests that may take so many seconds
    _sending: dict[int, Any] = field(default_factory=dict[int, Any])

    def sending(self, nbytes: int) -> Any:
        """For one attempt to put so many bytes, which gets as long as a slow connection needs for them."""
        if nbytes <= _SMALL_BODY:
            return self.once
        minutes = 5 * (1 + nbytes // (300 * _SLOWEST))
        if minutes not in self._sending:
            self._sending[minutes] = self.make(60 * minutes)
        return self._sending[minutes]


Settings = tuple[tuple[str, Any], ...]
_pid = os.getpid()


class Failure(NamedTuple):
    """What came of trying to reach a bucket."""

    kind: type[StorageError]
    message: str
    when: float


_failures: dict[tuple[Bucket, Settings, Settings], Failure] = {}


@lru_cache(maxsize=64)
def _reached(bucket: Bucket, settings: Settings, _: Settings) -> Clients:
    """What is wrong with bucket, keys, region or endpoint shows at once, not after a minute of trying."""
    probe = _make(bucket, settings, {"timeout": timedelta(seconds=5)}, retries=3, seconds=5)
    try:
        obstore.list_with_delimiter(probe, "shardkeep-is-this-bucket-there")
    except (FileNotFoundError, BaseError) as error:
        # Not to be allowed to list is no reason: what is asked for may still be allowed.
        if status_of(error) != 403 or _code(error) in _UNKNOWN_KEYS or _lacks_keys(error):
            raise (explain(error, bucket, bucket.url) or error) from error
    patient: dict[str, Any] = {"retries": 1000, "seconds": PATIENCE}
    return Clients(
        reading=_make(bucket, settings, {"timeout": "300s", "read_timeout": "20s"}, **patient),
        writing=_make(bucket, settings, {"timeout": "300s"}, **patient),
        once=_make(bucket, settings, {"timeout": "20s"}, retries=0, seconds=20),
        make=lambda seconds: _make(
            bucket, settings, {"timeout": timedelta(seconds=seconds)}, retries=0, seconds=seconds
        ),
    )


def _make(bucket: Bucket, settings: Settings, options: dict[str, Any], retries: int, seconds: float) -> Any:
    chosen = dict(settings)
    endpoint = str(chosen.get("endpoint") or chosen.get("base_url") or "https")
    patience: Any = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 3},
    }
    client: Any = {"allow_http": endpoint.startswith("http:"), "connect_timeout": "5s", **options}
    kind: Any = S3Store if bucket.scheme == "s3" else GCSStore
    try:
        return kind(bucket.name, client_options=client, retry_config=patience, **chosen)
    except (BaseError, ValueError) as error:
        if "application_credentials" in chosen:
            text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
            raise AccessError(f"{bucket.url}: {chosen['application_credentials']} cannot be used: {text}") from error
        raise (explain(error, bucket, bucket.url) or error) from error


def _settings(bucket: Bucket) -> Settings:
    return tuple((_s3_settings() if bucket.scheme == "s3" else _gcs_settings(bucket)).items())


def _surroundings() -> Settings:
    """What the client looks at itself: when it changes, others are needed."""
    return tuple(
        (name, os.environ[name]) for name in sorted(os.environ) if name.startswith(("AWS_", "GOOGLE_", "GCE_"))
    )


def _s3_settings() -> dict[str, Any]:
    """Keys, region and endpoint, from the environment or else from the profile."""
    variables = os.environ
    profile = _profile()
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or profile.get("region")
    anonymous = _is_set("AWS_SKIP_SIGNATURE") or _is_set("AWS_NO_SIGN_REQUEST")
    found: dict[str, Any] = {"region": region or "us-east-1", "skip_signature": anonymous, "unsigned_payload": True}
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL") or profile.get("endpoint_url")
    if endpoint:  # the second name would win over the first if it came from the environment
        found |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    # Without a provider the client would look for keys itself, and complain of half of a pair.
    found |= {"credential_provider": _fixed_keys("", "", None)} if anonymous else _s3_keys(profile)
    return found


def _s3_keys(profile: dict[str, str]) -> dict[str, Any]:
    variables = os.environ
    if variables.get("AWS_ACCESS_KEY_ID"):
        if not variables.get("AWS_SECRET_ACCESS_KEY"):
            raise AccessError("AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not")
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
        raise AccessError(f"no credentials for S3: set {_S3_KEYS}; for a public bucket AWS_SKIP_SIGNATURE=true")
    return {}


@lru_cache(maxsize=16)
def _fixed_keys(key: str, secret: str | None, token: str | None) -> Callable[[], dict[str, Any]]:
    """Keys as they are: a provider, so that no other variable is mixed in."""
    found = {"access_key_id": key, "secret_access_key": secret or "", "token": token, "expires_at": None}
    return lambda: found


@lru_cache(maxsize=4)
def _boto3_keys(profile: str | None) -> Any:
    """Keys that must be asked for (single sign-on, roles, other programs), by who knows how."""
    try:
        from boto3 import Session  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise AccessError(
            f"the AWS profile {profile or 'default'!r} uses roles or single sign-on: install boto3 for that, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    return Boto3CredentialProvider(Session(profile_name=profile))  # pyright: ignore[reportUnknownArgumentType]


def _profile() -> dict[str, str]:
    """The profile's section of the shared files; that of `credentials` wins over that of `config`."""
    name = os.environ.get("AWS_PROFILE", "default")
    home = Path.home() / ".aws"
    config, credentials = configparser.RawConfigParser(), configparser.RawConfigParser()
    try:
        config.read(os.environ.get("AWS_CONFIG_FILE", home / "config"))
        credentials.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"))
    except configparser.Error as error:
        raise AccessError(f"the AWS profile {name!r} cannot be read: {error}") from error
    found: dict[str, str] = {}
    section = name if name == "default" else f"profile {name}"
    if config.has_section(section):
        found.update(config.items(section))
    if credentials.has_section(name):
        found.update(credentials.items(name))
    if not found and "AWS_PROFILE" in os.environ:
        raise AccessError(f"there is no AWS profile {name!r} (AWS_PROFILE) in the shared credentials or config file")
    return found


def _gcs_settings(bucket: Bucket) -> dict[str, Any]:
    """A service-account file, or what obstore finds itself: application-default credentials, the metadata server."""
    variables = os.environ
    found: dict[str, Any] = {}
    emulator = variables.get("STORAGE_EMULATOR_HOST")
    if emulator:
        found["base_url"] = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/")
    elif variables.get("GOOGLE_BASE_URL"):
        found["base_url"] = variables["GOOGLE_BASE_URL"]
    key_file = bucket.key_file or variables.get("GOOGLE_APPLICATION_CREDENTIALS")
    stronger = [name for name in _OVERRIDING if variables.get(name)]
    if bucket.key_file and stronger:  # the client would take these instead
        raise AccessError(f"{bucket.url}: {stronger[0]} is set and would win over {key_file}: unset it")
    if key_file:
        if not os.path.isfile(key_file):
            raise AccessError(f"{bucket.url}: the credentials file {key_file} is not there")
        return {**found, "application_credentials": key_file}
    if _is_set("GOOGLE_SKIP_SIGNATURE"):
        return {**found, "skip_signature": True, "bearer_token": ""}
    if emulator:
        return {**found, "bearer_token": "anonymous"}
    default = Path.home() / ".config" / "gcloud" / "application_default_credentials.json"
    if _is_set("NO_GCE_CHECK") and not default.is_file():
        public = "for a public one GOOGLE_SKIP_SIGNATURE=true"
        raise AccessError(f"no credentials for {bucket.url}: set {_GCS_KEYS}; {public}")
    return found


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in _YES


_UNKNOWN_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "InvalidSecurity")


def status_of(error: Exception) -> int:
    """What the server answered; 0 if it did not."""
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else 0


def is_final(error: Exception) -> bool:
    """Whether trying again is of no use."""
    status = status_of(error)
    passing = status in (408, 409, 425, 429) or _code(error) == "RequestTimeout"
    return (400 <= status < 500 and not passing) or status == 501 or _lacks_keys(error)


def _lacks_keys(error: Exception) -> bool:
    """Whether no request could be made for want of keys: who gives them out refused, or none were found."""
    text = str(error).partition("\n\nDebug source:")[0]
    if "token request" in text or re.search(r"https?://[^/\s]+/latest/(api/token|meta-data/iam/\S*)\s", text):
        return True
    # A name in a URL may be anything, and so may what a server says.
    return status_of(error) == 0 and bool(re.search("[Cc]redential", re.sub(r"https?://\S+", "", text)))


def was_cut(error: Exception) -> bool:
    """Whether a connection broke where the client does not try again itself: in a list, at the reset of a delete."""
    text = str(error)
    tried = re.search(r"after [1-9]\d* retries", text)
    broke = "response body" in text or ("kind: Interrupted" in text and not tried)
    return isinstance(error, BaseError) and broke and not is_final(error)


def _code(error: Exception) -> str:
    found = re.search(r"<Code>(\w+)|\(code: (\w+)", str(error))
    return (found[1] or found[2]) if found else ""


def explain(error: Exception, bucket: Bucket, where: str) -> StorageError | None:
    """What is wrong and what to set; None for what callers expect (nothing there, a condition not met)."""
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())[:400]
    status, code = status_of(error), _code(error)
    if code == "NoSuchBucket":
        return StorageError(f"{where}: there is no bucket {bucket.name!r} at {_endpoint(bucket)}")
    if isinstance(error, FileNotFoundError | AlreadyExistsError | PreconditionError):
        return None
    keys = _S3_KEYS if bucket.scheme == "s3" else _GCS_KEYS
    if _lacks_keys(error):
        return AccessError(f"{where}: no usable credentials: set {keys} ({text})")
    if status in (401, 403) or code in ("AccessDenied", *_UNKNOWN_KEYS):
        denied = f"{code or status}: access denied by {_endpoint(bucket)}"
        return AccessError(f"{where}: {denied}. Credentials come from {keys} ({text})")
    if "BareRedirect" in str(error) or code in ("AuthorizationHeaderMalformed", "PermanentRedirect"):
        return StorageError(
            f"{where}: the bucket is in another region than {_endpoint(bucket)}: set AWS_REGION ({text})"
        )
    if any(sign in str(error) for sign in ("ConnectionRefused", "dns error", "ConnectError", "kind: Connect")):
        return StorageError(f"{where}: {_endpoint(bucket)} cannot be reached; check the endpoint and network ({text})")
    if status == 0 and any(sign in str(error) for sign in ("Timeout", "TimedOut", "timed out")):
        return StorageError(f"{where}: {_endpoint(bucket)} gives no answer; check the endpoint and network ({text})")
    return StorageError(f"{where}: {text}")


def _endpoint(bucket: Bucket) -> str:
    """Where requests go, and what decides it."""
    try:
        settings = dict(_settings(bucket))
    except AccessError:
        settings = {}
    if bucket.scheme == "s3":
        region = settings.get("region", "")
        return f"{settings.get('endpoint') or 'Amazon S3'} (AWS_ENDPOINT_URL; region {region}, AWS_REGION)"
    return f"{settings.get('base_url') or 'Google Cloud Storage'} (STORAGE_EMULATOR_HOST)"
