"""Who we are to a bucket and where it is, from everywhere each ecosystem keeps it; and errors that say what to set."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place, _alone, gcs_server, make_place, s3_server  # noqa: F401
from servers.gcs import GCSHandler, GCSServer
from servers.loopback import LoopbackHandler, LoopbackServer, Request
from servers.proxy import Fault, Proxy
from servers.service_account import write_service_account
from shardkeep.errors import AccessError, StorageError
from shardkeep.stores.bucket import credentials
from shardkeep.stores.bucket.credentials import Bucket, explain, is_final
from support import assert_same

TREE = {"w": np.arange(4)}
S3_HELP = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
GCS_HELP = "GOOGLE_APPLICATION_CREDENTIALS"


@pytest.fixture
def s3() -> Place:
    return make_place("s3")


def roundtrip(url: str) -> None:
    """Save and load, the environment of the process being left as it is."""
    before = dict(os.environ)
    shardkeep.save(f"{url}/run", TREE)
    assert_same(shardkeep.load(f"{url}/run"), TREE)
    shardkeep.delete(f"{url}/run")
    assert dict(os.environ) == before


# --- S3: where keys, region and endpoint come from


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("region", ["AWS_REGION", "AWS_DEFAULT_REGION", None])
def test_s3_from_the_environment(name: str, region: str | None, s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.server.secret_key)
    monkeypatch.setenv(name, s3.server.url)
    if region:
        monkeypatch.setenv(region, s3.server.region)
    roundtrip(s3.url)


def test_the_endpoint_of_s3_alone_wins(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.server.url)
    roundtrip(s3.url)


class S3Listener(LoopbackServer):
    """Notes what it is asked, and says that nothing is there."""

    def __init__(self) -> None:
        super().__init__(S3ListenerHandler)
        self.headers: list[dict[str, str]] = []


class S3ListenerHandler(LoopbackHandler):
    server: S3Listener

    def do_GET(self) -> None:
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.requests.append(Request(self.command, self.path, 200, 0, 0))
        body = b"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        missing = "list-type" not in self.path
        self.send_response(404 if missing else 200)
        self.send_header("Content-Length", "0" if missing else str(len(body)))
        self.end_headers()
        if not missing:
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Listener]:
    with S3Listener() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def asked(listener: S3Listener) -> dict[str, str]:
    """The headers with which something is asked of the listener."""
    listener.headers.clear()
    assert not shardkeep.exists("s3://bucket/run")
    return listener.headers[-1]


def test_a_session_token_is_sent(listener: S3Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "temporary")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert "x-amz-security-token" not in asked(listener)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the token")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    headers = asked(listener)
    assert headers["x-amz-security-token"] == "the token"
    assert "Credential=temporary/" in headers["authorization"]
    assert "/eu-north-1/s3/" in headers["authorization"]


@pytest.mark.parametrize("name", ["AWS_SKIP_SIGNATURE", "AWS_NO_SIGN_REQUEST"])
def test_without_a_signature(name: str, listener: S3Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "not to be used")
    with pytest.raises(AccessError, match="AWS_SECRET_ACCESS_KEY is not"):
        asked(listener)
    monkeypatch.setenv(name, "true")
    assert "authorization" not in asked(listener)
    monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert "authorization" in asked(listener)


def profile_files(home: Path, monkeypatch: pytest.MonkeyPatch, credentials: str, config: str, own: bool) -> None:
    directory = home if own else home / ".aws"
    directory.mkdir(parents=True)
    (directory / "credentials").write_text(credentials)
    (directory / "config").write_text(config)
    if own:
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(directory / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(directory / "config"))
    else:
        monkeypatch.setenv("HOME", str(home))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ["default", "train"])
def test_s3_from_a_profile(name: str, own: bool, s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = f"aws_access_key_id = {s3.server.access_key}\naws_secret_access_key = {s3.server.secret_key}\n"
    section = "default" if name == "default" else f"profile {name}"
    config = f"[{section}]\nregion = us-east-1\nendpoint_url = {s3.server.url}\n"
    wrong = "[other]\naws_access_key_id = wrong\naws_secret_access_key = wrong\n"
    profile_files(tmp_path / "aws", monkeypatch, f"{wrong}[{name}]\n{keys}", config, own)
    if name != "default":
        monkeypatch.setenv("AWS_PROFILE", name)
    roundtrip(s3.url)


def test_the_environment_wins_over_the_profile(
    listener: S3Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "[default]\naws_access_key_id = profiled\naws_secret_access_key = s\naws_session_token = t\n"
    profile_files(tmp_path / "aws", monkeypatch, keys, "[default]\nregion = eu-west-3\n", own=True)
    headers = asked(listener)
    assert "Credential=profiled/" in headers["authorization"]
    assert "/eu-west-3/s3/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "t"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "named")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    headers = asked(listener)
    assert "Credential=named/" in headers["authorization"]
    assert "/eu-north-1/s3/" in headers["authorization"]
    assert "x-amz-security-token" not in headers  # the profile's is not mixed in


def test_a_profile_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AccessError, match=r"AWS profile 'nobody' \(AWS_PROFILE\) not found"):
        shardkeep.save("s3://bucket/run", TREE)
    profile_files(tmp_path / "aws", monkeypatch, "this is no [profile", "", own=True)
    with pytest.raises(AccessError, match="cannot read the AWS profile 'nobody'"):
        shardkeep.load("s3://bucket/run")


def test_a_profile_with_a_role_needs_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile_files(tmp_path / "aws", monkeypatch, "", "[profile sso]\nsso_start_url = https://x\n", own=True)
    monkeypatch.setenv("AWS_PROFILE", "sso")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(AccessError, match="'sso' uses roles or single sign-on, which needs boto3"):
        shardkeep.load("s3://bucket/run")


def test_a_public_bucket_is_read_without_keys(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as own:
        for name, value in s3.environment().items():
            own.setenv(name, value)
        shardkeep.save(f"{s3.url}/run", TREE)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.server.url)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert_same(shardkeep.load(f"{s3.url}/run"), TREE)
    with pytest.raises(AccessError, match="AccessDenied: access denied by http"):
        shardkeep.save(f"{s3.url}/run", TREE, overwrite=True)


# --- GCS


class PublicGCS(GCSServer):
    """Anyone may read; what is sent as authorization is noted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tokens={"writer": "write"}, **options)
        self.RequestHandlerClass = PublicHandler
        self.authorizations: set[str | None] = set()

    def rights(self, authorization: str) -> str:
        return super().rights(authorization) if authorization else "read"


class PublicHandler(GCSHandler):
    server: PublicGCS

    def authorize(self) -> None:
        self.server.authorizations.add(self.headers.get("Authorization"))
        super().authorize()


def test_a_public_google_bucket_is_read_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with PublicGCS() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        with monkeypatch.context() as own:
            own.setenv("GOOGLE_BEARER_TOKEN", "writer")
            with pytest.raises(AccessError, match="access denied"):  # an emulator takes anybody
                shardkeep.save("gs://bucket/run", TREE)
        server.tokens["anonymous"] = "write"
        shardkeep.save("gs://bucket/run", TREE)
        del server.tokens["anonymous"]
        server.authorizations.clear()
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        assert_same(shardkeep.load("gs://bucket/run"), TREE)
        assert server.authorizations == {None}
        with pytest.raises(AccessError, match=f"access denied by .*{GCS_HELP}"):
            shardkeep.save("gs://bucket/run", TREE, overwrite=True)


@pytest.mark.parametrize("host", ["{url}", "{netloc}", "{url}/"])
def test_an_emulator(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = gcs_server().url
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host.format(url=url, netloc=url.removeprefix("http://")))
    roundtrip(make_place("gs").url)


def test_a_service_account_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key.json"
    accounts = write_service_account(key, "http://127.0.0.1:9/token")
    with GCSServer(accounts=accounts) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        with pytest.raises(AccessError, match=f"access denied by .*{GCS_HELP}"):
            shardkeep.save("gs://bucket/run", TREE)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
        roundtrip("gs://bucket")


def test_a_key_file_may_name_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the key files of some emulators do; without STORAGE_EMULATOR_HOST."""
    key = tmp_path / "key.json"
    accounts = write_service_account(key, "http://127.0.0.1:9/token")
    with GCSServer(accounts=accounts) as server:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
        monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
        roundtrip("gs://bucket")


def test_the_metadata_server_of_a_machine_of_googles(monkeypatch: pytest.MonkeyPatch) -> None:
    with GCSServer(tokens={"good": "write"}) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
        roundtrip("gs://bucket")
        assert server.count("GET", "/computeMetadata/") >= 1


def test_a_key_file_that_is_missing_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "gone.json"))
    with pytest.raises(AccessError, match=r"credentials file .*gone\.json not found"):
        shardkeep.load("gs://bucket/run")
    for text in ("no json", "{}", json.dumps({"type": "service_account"})):
        (tmp_path / "gone.json").write_text(text)
        with pytest.raises(AccessError, match=r"cannot use the credentials file .*gone\.json"):
            shardkeep.load("gs://bucket/run")


# --- Errors: which, what to set, and soon


def dead() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def dropping(stack: ExitStack) -> str:
    """A port whose queue is full: further connections get no answer at all."""
    listening = stack.enter_context(socket.socket())
    listening.bind(("127.0.0.1", 0))
    listening.listen(0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listening.getsockname())
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def silent(stack: ExitStack) -> str:
    """A port that takes connections and says nothing."""
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


SECONDS: dict[str, float] = {}  # told when the module is done


def fails(what: str, call: Callable[[], object], kind: type[Exception], match: str, seconds: float = 10) -> None:
    before = dict(os.environ)
    started = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        call()
    SECONDS[what] = time.monotonic() - started
    assert SECONDS[what] < seconds, f"{what}: {SECONDS[what]:.1f} s until {caught.value}"
    assert dict(os.environ) == before


def calls(url: str) -> dict[str, Callable[[], object]]:
    return {
        "save": lambda: shardkeep.save(f"{url}/run", TREE),
        "save_async": lambda: shardkeep.save_async(f"{url}/run", TREE).wait(),
        "exchange": lambda: shardkeep.save(f"{url}/model.safetensors", TREE),
        "load": lambda: shardkeep.load(f"{url}/run"),
        "exists": lambda: shardkeep.exists(f"{url}/run"),
    }


@pytest.mark.parametrize("endpoint", ["dead", "no such name", "drops", "silent"])
def test_endpoints_out_of_reach(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        url = {
            "dead": dead,
            "no such name": lambda: "http://no-such-host.invalid",
            "drops": lambda: dropping(stack),
            "silent": lambda: silent(stack),
        }[endpoint]()
        variables = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
        for name in (*variables.values(), "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, url)
        problem = "{}.* does not respond" if endpoint in ("silent", "drops") else "cannot connect to {}"
        with ThreadPoolExecutor(10) as pool:  # they mostly wait
            waiting = [
                pool.submit(
                    fails, f"{scheme} {endpoint}: {name}", call, StorageError, problem.format(rf"{url} \({variable}")
                )
                for scheme, variable in variables.items()
                for name, call in calls(f"{scheme}://bucket").items()
            ]
        for each in waiting:
            each.result()


@pytest.mark.parametrize("wrong", ["access key", "secret"])
def test_wrong_keys_for_s3(wrong: str, s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID" if wrong == "access key" else "AWS_SECRET_ACCESS_KEY", "wrong")
    code = {"access key": "InvalidAccessKeyId", "secret": "SignatureDoesNotMatch"}[wrong]
    for name, call in calls(s3.url).items():
        monkeypatch.setattr(credentials, "_failures", {})
        fails(f"s3 wrong {wrong}: {name}", call, AccessError, f"{code}: access denied by .*{S3_HELP}")


def test_keys_that_may_only_read(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as own:
        for name, value in s3.environment().items():
            own.setenv(name, value)
        shardkeep.save(f"{s3.url}/run", TREE)
    for name, value in {**s3.environment(), "AWS_ACCESS_KEY_ID": s3.server.reader_key}.items():
        monkeypatch.setenv(name, value)
    assert_same(shardkeep.load(f"{s3.url}/run"), TREE)
    saving = lambda: shardkeep.save(f"{s3.url}/run", TREE, overwrite=True)  # noqa: E731
    fails("s3 read-only key: save", saving, AccessError, f"AccessDenied: access denied by .*{S3_HELP}")
    deleting = lambda: shardkeep.delete(f"{s3.url}/run")  # noqa: E731
    fails("s3 read-only key: delete", deleting, AccessError, "AccessDenied")
    with GCSServer(tokens={"anonymous": "read"}) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        saving = lambda: shardkeep.save("gs://bucket/run", TREE)  # noqa: E731
        fails("gs read-only key: save", saving, AccessError, f"AccessDenied: access denied by .*{GCS_HELP}")


def test_a_wrong_token_for_google(monkeypatch: pytest.MonkeyPatch) -> None:
    with GCSServer(tokens={"good": "write"}) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        for name, call in calls("gs://bucket").items():
            monkeypatch.setattr(credentials, "_failures", {})
            fails(
                f"gs wrong token: {name}", call, AccessError, f"AuthenticationRequired: access denied by .*{GCS_HELP}"
            )


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_no_credentials(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say = {"gs": f"no valid credentials found; set {GCS_HELP}", "s3": f"no credentials for S3: set {S3_HELP}"}[scheme]
    for name, call in calls(f"{scheme}://bucket").items():
        if scheme == "s3" or name in ("save", "load"):
            monkeypatch.setattr(credentials, "_failures", {})
            fails(f"{scheme} no credentials: {name}", call, AccessError, say)


def test_no_credentials_on_a_machine_without_a_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    fails(
        "gs no credentials, no metadata server: save",
        calls("gs://bucket")["save"],
        AccessError,
        "GOOGLE_SKIP_SIGNATURE",
    )
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    fails("s3 no credentials, dead metadata server: save", calls("s3://bucket")["save"], AccessError, S3_HELP)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket_that_is_not_there(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_place(scheme)
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    for name, call in calls(f"{scheme}://absent").items():
        monkeypatch.setattr(credentials, "_failures", {})
        fails(
            f"{scheme} no bucket: {name}", call, StorageError, f"bucket 'absent' does not exist at {place.server.url}"
        )


def test_a_bucket_in_another_region(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(s3.server.url) as proxy:
        for name, value in {**s3.environment(), "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        proxy.inject(Fault("status", status=301, times=100))
        fails("s3 other region: load", calls(s3.url)["load"], StorageError, "not in the region of .*AWS_REGION")


def test_not_being_allowed_to_list_is_no_reason_to_give_up(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request shows whether the bucket is there at all; what it may not do, another may."""
    with Proxy(s3.server.url) as proxy:
        for name, value in {**s3.environment(), "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        fault = proxy.inject(Fault("status", pattern="shardkeep-is-this-bucket-there", status=403))
        roundtrip(s3.url)
        assert fault.hits == 1


def test_a_failure_is_asked_for_anew_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    with GCSServer() as server, Proxy(server.url) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.inject(Fault("status", status=404))
        for _ in range(2):
            with pytest.raises(StorageError, match="404"):
                Bucket("gs", "bucket").clients()
        assert proxy.count() == 1  # the second was told from memory
        time.sleep(2.1)
        Bucket("gs", "bucket").clients()


def test_a_name_that_speaks_of_credentials_is_only_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with GCSServer() as server, Proxy(server.url) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        for path in ("gs://bucket/credentials/run", "gs://bucket/latest/api/token"):
            proxy.inject(Fault("status", "PUT", "manifest", status=503))
            shardkeep.save(path, TREE)
            assert_same(shardkeep.load(path), TREE)


class Told(Exception):
    pass


@pytest.mark.parametrize(
    ("status", "code", "final"),
    [(400, "", True), (403, "", True), (404, "", True), (501, "NotImplemented", True)]
    + [(400, "RequestTimeout", False), (408, "", False), (409, "", False), (429, "", False), (500, "", False)]
    + [(503, "SlowDown", False), (0, "", False)],
)
def test_what_is_worth_trying_again(status: int, code: str, final: bool) -> None:
    text = f"Server returned non-2xx status code: {status} Some: <Code>{code}</Code>" if status else "error sending"
    assert is_final(Told(text)) is final


def test_what_callers_expect_is_not_explained() -> None:
    assert explain(FileNotFoundError("Object at location x not found"), Bucket("gs", "b"), "gs://b/x") is None


def test_times_until_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Not a test: shows what the tests above measured, with `pytest -s`."""
    with capsys.disabled():
        if os.environ.get("SHARDKEEP_SHOW_TIMES"):
            print()
            for what, seconds in sorted(SECONDS.items()):
                print(f"| {what} | {seconds:.2f} s |")
