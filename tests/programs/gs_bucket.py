"""A bucket of Google's on the loopback, with its XML interface: objects, ranges, parts, lists, conditions.

`python -m tests.programs.gs_bucket [ms]` prints its port, and serves until it is ended; each answer takes `ms` longer.
"""

import email.utils
import itertools
import json
import re
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

OBJECTS: dict[str, tuple[bytes, int]] = {}  # content and generation
UPLOADS: dict[str, dict[int, bytes]] = {}
GENERATIONS, LOCK = itertools.count(1), threading.Lock()
DATE = "2026-01-01T00:00:00.000Z"


def address(port) -> dict[str, str]:
    """The environment of clients: no credentials."""
    account = {"gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True, "client_email": "", "private_key": ""}
    return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**account, "private_key_id": ""})}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seconds = 0.0

    def log_message(self, *_):
        pass

    def answer(self) -> None:
        url = urllib.parse.urlparse(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        key = urllib.parse.unquote(url.path).partition("/")[2].partition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(self.seconds)
        with LOCK:
            status, headers, content = self.result(key, query, body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def result(self, key: str, query: dict, body: bytes) -> tuple[int, dict, bytes]:
        if self.command == "GET" and not key:
            return 200, {}, listing(query)
        if self.command == "POST" and "uploads" in query:
            upload = str(next(GENERATIONS))
            UPLOADS[upload] = {}
            return 200, {}, xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        if self.command == "PUT" and "partNumber" in query:
            UPLOADS[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": f'"{len(body)}"'}, b""
        if self.command == "DELETE" and "uploadId" in query:
            UPLOADS.pop(query["uploadId"], None)
            return 204, {}, b""
        present = OBJECTS.get(key)
        if self.command in ("PUT", "POST"):
            return self.put(key, query, body, present)
        if present is None:
            return 404, {}, b""
        if self.command == "DELETE":
            del OBJECTS[key]
            return 204, {}, b""
        return self.get(*present)

    def put(self, key: str, query: dict, body: bytes, present) -> tuple[int, dict, bytes]:
        condition = self.headers.get("x-goog-if-generation-match")
        if condition is not None and int(condition) != (present[1] if present else 0):
            return 412, {}, b""
        if "uploadId" in query:
            parts = UPLOADS.pop(query["uploadId"])
            body = b"".join(parts[int(n)] for n in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body))
        OBJECTS[key] = body, next(GENERATIONS)
        about = tags(*OBJECTS[key])
        return 200, about, xml("CompleteMultipartUploadResult", f"<ETag>{escape(about['ETag'])}</ETag>")

    def get(self, content: bytes, generation: int) -> tuple[int, dict, bytes]:
        about = tags(content, generation)
        about["Last-Modified"] = email.utils.formatdate(0, usegmt=True)
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)?", self.headers.get("Range", "")):
            start, stop = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
            if start >= len(content):
                return 416, {}, b""
            about["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return 206, about, content[start:stop]
        return 200, {**about, "Content-Length": str(len(content))}, content


def tags(content: bytes, generation: int) -> dict[str, str]:
    return {"ETag": f'"{generation}-{len(content)}"', "x-goog-generation": str(generation)}


def xml(name: str, text: str) -> bytes:
    return f"<?xml version='1.0' encoding='UTF-8'?><{name}>{text}</{name}>".encode()


def listing(query: dict) -> bytes:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    entries, folders = [], set()
    for key, (content, generation) in sorted(OBJECTS.items()):
        if not key.startswith(prefix):
            continue
        name, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if cut:
            folders.add(prefix + name + cut)
            continue
        facts = f"<Key>{escape(key)}</Key><LastModified>{DATE}</LastModified><Size>{len(content)}</Size>"
        entries.append(f"<Contents>{facts}<ETag>{escape(tags(content, generation)['ETag'])}</ETag></Contents>")
    entries += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
    return xml("ListBucketResult", "<IsTruncated>false</IsTruncated>" + "".join(entries))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_):  # a client that has read enough
        pass


def main() -> None:
    Handler.seconds = float(sys.argv[1]) / 1000 if sys.argv[1:] else 0.0
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
