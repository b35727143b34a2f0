"""A bucket of Google's on the loopback: gcp-storage-emulator, with what TensorStore needs of the real one.

The emulator leaves out the header with an object's generation and ignores conditions on it: TensorStore's database
updates its manifest with those. `python -m tests.programs.bucket` prints its port, and serves until it is ended.
"""

import re
import threading
import urllib.parse
from http.server import ThreadingHTTPServer

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler, Router
from gcp_storage_emulator.storage import Storage

STORAGE, LOCK = Storage(use_memory_fs=True), threading.Lock()
ENVIRONMENT = {  # for clients: no credentials, no questions to Google's own servers
    "FSSPEC_GCS_TOKEN": "anon",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "NO_GCE_CHECK": "true",
}


def address(port) -> dict[str, str]:
    url = f"http://127.0.0.1:{port}"
    return {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, **ENVIRONMENT}


class Handler(RequestHandler):
    def __init__(self, *args, **kwargs):
        super().__init__(STORAGE, *args, **kwargs)

    def end_headers(self):
        if self.command in ("GET", "HEAD") and self.generation:
            self.send_header("x-goog-generation", self.generation)
        super().end_headers()

    def answer(self) -> None:
        url = urllib.parse.urlparse(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        found = re.search(r"/b/([^/]+)/o(?:/(.+))?$", url.path)
        name = urllib.parse.unquote((found and found[2]) or query.get("name", ""))
        with LOCK:
            try:
                self.generation = STORAGE.get_file_obj(found[1] if found else "", name)["generation"]
            except (NotFound, KeyError):
                self.generation = ""
            wanted, other = query.get("ifGenerationMatch"), query.get("ifGenerationNotMatch")
            if wanted is not None and wanted != (self.generation or "0"):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.refuse(412)
            elif other is not None and other == (self.generation or "0"):
                self.refuse(304)
            else:
                Router(self).handle(self.command)

    def refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = answer


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):  # a client that has read enough
        pass


def main() -> None:
    buckets.create_bucket("bucket", STORAGE)
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
