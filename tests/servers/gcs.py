"""A Google Cloud Storage server on the loopback: the XML API obstore speaks and the JSON API of other programs.

Both see the same objects. `python -m servers.gcs --bucket NAME` serves from a process of its own.
"""

import argparse
import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from servers.buckets import Blob, Buckets, Refused, check
from servers.loopback import LoopbackHandler, LoopbackServer, Request
from servers.service_account import PublicKey, claims

PAGE = 1000  # the most names one answer of a listing holds
REASONS = {401: "required", 403: "forbidden", 404: "notFound", 412: "conditionNotMet"}


class GCSServer(LoopbackServer):
    """Buckets in memory, open to everyone unless `tokens` says which bearer token may "read" or "write".

    The service `accounts` may write too: with tokens they sign themselves or get from `/token`. A client sent here by
    `GCE_METADATA_HOST` gets the first of the tokens, as on a machine of Google's.
    """

    def __init__(
        self,
        buckets: Sequence[str] = ("bucket",),
        tokens: Mapping[str, str] | None = None,
        accounts: Mapping[str, PublicKey] | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(GCSHandler, port)
        self.buckets = Buckets(buckets)
        self.objects = self.buckets.objects
        self.tokens = dict(tokens or {})
        self.accounts = dict(accounts or {})

    def rights(self, authorization: str) -> str:
        """What a request may do: "write", "read", "nothing" without a token, "" with a wrong one."""
        if not self.tokens and not self.accounts:
            return "write"
        token = authorization.removeprefix("Bearer").strip()
        if not token:
            return "nothing"
        return self.tokens.get(token) or ("write" if claims(token, self.accounts) else "")

    def issue(self, assertion: str) -> dict[str, Any]:
        """A token in exchange for what an account signed."""
        if not claims(assertion, self.accounts):
            raise Refused(400, "invalid_grant", "Invalid JWT Signature.")
        token = f"issued-{len(self.tokens)}"
        self.tokens[token] = "write"
        return {"access_token": token, "expires_in": 3599, "token_type": "Bearer"}


class GCSHandler(LoopbackHandler):
    """Answers the requests of one connection, each by a method named after verb and API."""

    server: GCSServer

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.is_json = parts.path.startswith(("/storage/v1/", "/upload/", "/download/"))
        try:
            if parts.path == "/token":
                self.answer_json(self.server.issue(parse_qs(self.body.decode()).get("assertion", [""])[0]))
            elif parts.path.startswith("/computeMetadata/"):
                token = next(iter(self.server.tokens), "anyone")
                self.answer_json({"access_token": token, "expires_in": 3599, "token_type": "Bearer"})
            else:
                self.authorize()
                self.serve(parts.path)
        except Refused as error:
            self.refuse(error)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def authorize(self) -> None:
        rights = self.server.rights(self.headers.get("Authorization", ""))
        if not rights:
            raise Refused(401, "AuthenticationRequired", "Invalid Credentials")
        if rights == "nothing":
            status = 401 if self.is_json else 403
            raise Refused(status, "AccessDenied", "Anonymous caller does not have storage.objects access.")
        if rights == "read" and self.command not in ("GET", "HEAD"):
            raise Refused(403, "AccessDenied", "The caller does not have storage.objects.create access.")

    def serve(self, path: str) -> None:
        if self.is_json:
            bucket, listed, key = path.partition("/b/")[2].partition("/o")
            self.names_objects = bool(listed)
            key = key.removeprefix("/")
        else:
            bucket, _, key = path.lstrip("/").partition("/")
        answer = getattr(self, f"{self.command.lower()}_{'json' if self.is_json else 'xml'}")
        answer(unquote(bucket), unquote(key))

    def get_xml(self, bucket: str, key: str) -> None:
        if key:
            self.answer_blob(self.server.buckets.find(bucket, key, self.query.get("generation", "")))
        else:
            self.list_xml(bucket)

    head_xml = get_xml

    def put_xml(self, bucket: str, key: str) -> None:
        if "uploadId" in self.query:
            number = int(self.query["partNumber"])
            self.server.buckets.parts(self.query["uploadId"])[number] = self.body
            return self.answer(200, headers={"ETag": f'"part-{number}"'})
        blob = self.server.buckets.put(bucket, key, self.body, self.headers.get("x-goog-if-generation-match", ""))
        return self.answer(200, headers=blob.headers)

    def post_xml(self, bucket: str, key: str) -> None:
        if "uploads" in self.query:
            upload = self.server.buckets.begin(bucket)
            return self.answer_xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        numbers = [int(element.text or 0) for element in ElementTree.fromstring(self.body).iter("PartNumber")]
        blob = self.server.buckets.complete(bucket, key, self.query["uploadId"], numbers)
        return self.answer_xml("CompleteMultipartUploadResult", f"<ETag>{escape(blob.etag)}</ETag>", blob.headers)

    def delete_xml(self, bucket: str, key: str) -> None:
        if "uploadId" in self.query:
            self.server.buckets.parts(self.query["uploadId"])
            del self.server.buckets.uploads[self.query["uploadId"]]
        else:
            self.server.buckets.remove(bucket, key, self.headers.get("x-goog-if-generation-match", ""))
        self.answer(204)

    def list_xml(self, bucket: str) -> None:
        names, token = self.page(bucket, "continuation-token", "max-keys")
        text = f"<Name>{escape(bucket)}</Name><IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
        if token:
            text += f"<NextContinuationToken>{token}</NextContinuationToken>"
        for name in names:
            blob = self.server.objects[bucket].get(name)
            if blob is None:
                text += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            else:
                text += f"<Contents><Key>{escape(name)}</Key><Generation>{blob.generation}</Generation>"
                text += f"<LastModified>{iso(blob.modified)}</LastModified><ETag>{escape(blob.etag)}</ETag>"
                text += f"<Size>{len(blob.data)}</Size></Contents>"
        self.answer_xml("ListBucketResult", text)

    def get_json(self, bucket: str, key: str) -> None:
        if not key and self.names_objects:
            return self.list_json(bucket)
        if not key:
            self.server.buckets.bucket(bucket)
            return self.answer_json({"kind": "storage#bucket", "name": bucket, "location": "US"})
        blob = self.server.buckets.find(bucket, key, self.query.get("generation", ""))
        check(blob, self.query.get("ifGenerationMatch", ""))
        if self.query.get("ifGenerationNotMatch") == str(blob.generation):
            return self.answer(304)
        if self.query.get("alt") == "media" or self.path.startswith("/download/"):
            return self.answer_blob(blob)
        return self.answer_json(resource(bucket, key, blob))

    def post_json(self, bucket: str, _: str) -> None:
        data, name = self.body, self.query.get("name", "")
        if self.query.get("uploadType") == "multipart":
            boundary = b"--" + self.headers["Content-Type"].partition("boundary=")[2].strip("\"'").encode()
            about, data = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in data.split(boundary)[1:3])
            name, data = name or json.loads(about)["name"], data.removesuffix(b"\r\n")
        blob = self.server.buckets.put(bucket, name, data, self.query.get("ifGenerationMatch", ""))
        self.answer_json(resource(bucket, name, blob))

    def delete_json(self, bucket: str, key: str) -> None:
        self.server.buckets.remove(bucket, key, self.query.get("ifGenerationMatch", ""))
        self.answer(204)

    def list_json(self, bucket: str) -> None:
        names, token = self.page(bucket, "pageToken", "maxResults")
        start, end, blobs = self.query.get("startOffset", ""), self.query.get("endOffset"), self.server.objects[bucket]
        names = [name for name in names if name >= start and (not end or name < end)]
        items = [resource(bucket, name, blobs[name]) for name in names if name in blobs]
        prefixes = [name for name in names if name not in blobs]
        more = {"nextPageToken": token} if token else {}
        self.answer_json({"kind": "storage#objects", "items": items, "prefixes": prefixes, **more})

    def page(self, bucket: str, token: str, most: str) -> tuple[list[str], str]:
        """The names a listing asks for and the token of its next page, given its words for token and limit."""
        after = base64.urlsafe_b64decode(self.query.get(token, "")).decode() or self.query.get("start-after", "")
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        limit = min(PAGE, int(self.query.get(most, PAGE)))
        names, more = self.server.buckets.names(bucket, prefix, delimiter, after, limit)
        return names, base64.urlsafe_b64encode(names[-1].encode()).decode() if more else ""

    def answer_blob(self, blob: Blob) -> None:
        if self.headers.get("If-Match", blob.etag) not in (blob.etag, "*"):
            raise Refused(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
        if self.headers.get("If-None-Match") in (blob.etag, "*"):
            return self.answer(304)
        size, headers = len(blob.data), {**blob.headers, "Content-Type": "application/octet-stream"}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None or asked[0] == "bytes=-":
            return self.answer(200, blob.data, headers)
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if start >= end:
            raise Refused(416, "InvalidRange", f"The requested range cannot be satisfied: {asked[0]} of {size}.")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return self.answer(206, memoryview(blob.data)[start:end], headers)

    def answer_xml(self, root: str, text: str, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
        text = f"<?xml version='1.0' encoding='UTF-8'?><{root}>{text}</{root}>"
        self.answer(status, text.encode(), {"Content-Type": "application/xml", **(headers or {})})

    def answer_json(self, value: dict[str, Any], status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, error: Refused) -> None:
        if self.path == "/token":
            self.answer_json({"error": error.code, "error_description": error.details}, error.status)
        elif self.is_json:
            why = {"message": error.details, "domain": "global", "reason": REASONS.get(error.status, "invalid")}
            body = {"code": error.status, "message": error.details, "errors": [why]}
            self.answer_json({"error": body}, error.status)
        else:
            text = f"<Code>{error.code}</Code><Message>{escape(error.details)}</Message>"
            self.answer_xml("Error", text, status=error.status)

    def answer(self, status: int, body: bytes | memoryview = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        has_body = status not in (204, 304)
        if has_body:
            self.send_header("Content-Length", str(len(body)))
        sent = len(body) if has_body and self.command != "HEAD" else 0
        # Noted before anything leaves: who has the answer finds the request in the log.
        self.server.requests.append(Request(self.command, self.path, status, len(self.body), sent))
        self.end_headers()
        if sent:
            self.wfile.write(body)


def resource(bucket: str, key: str, blob: Blob) -> dict[str, Any]:
    """The JSON description of an object."""
    link = f"/storage/v1/b/{quote(bucket, safe='')}/o/{quote(key, safe='')}"
    named = {"kind": "storage#object", "name": key, "bucket": bucket, "etag": blob.etag, "selfLink": link}
    numbers = {"generation": str(blob.generation), "metageneration": "1", "size": str(len(blob.data))}
    times = {"timeCreated": iso(blob.modified), "updated": iso(blob.modified)}
    return {**named, **numbers, **times, "contentType": "application/octet-stream"}


def iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


@contextmanager
def gcs_process(*arguments: str) -> Iterator[str]:
    """The URL of a server in a process of its own, which shares no interpreter lock with the test."""
    command = [sys.executable, "-m", "servers.gcs", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=Path(__file__).parents[1], **pipes) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve Google Cloud Storage until the standard input is closed.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", help="may be given several times")
    parser.add_argument("--token", help="the bearer token that is required")
    given = parser.parse_args()
    tokens = {given.token: "write"} if given.token else None
    with GCSServer(given.bucket or ["bucket"], tokens, port=given.port) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
