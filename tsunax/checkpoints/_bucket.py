"""Objects in a bucket, through `obstore`: addresses, requests, and the parts of arrays in objects.

A request is repeated within a limit of time. An answer that does not come is a ConnectionError,
which is no damage: a run must not go back to an earlier checkpoint because a network fails.
"""

import concurrent.futures.thread  # now: at the end of the interpreter it could not be loaded
import contextlib
import dataclasses
import datetime
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tsunax._core.libraries import library
from tsunax.checkpoints import _blocks, _safetensors

PARALLEL_REQUESTS = 16  # a bucket answers late; each request may take 16 MB of memory
_PART = 8 << 20  # bytes in a request of an upload: a smaller object is sent at once
_HEADS = 16 << 20  # bytes from the beginnings of all files: small checkpoints need no other request
_KINDS = {"AlreadyExistsError": FileExistsError, "PreconditionError": FileExistsError}


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """A context that raises the errors of obstore as OSError, with the sentence of the server."""
    try:
        yield
    except Exception as error:
        is_missing = isinstance(error, FileNotFoundError)
        if not is_missing and not type(error).__module__.startswith("obstore"):
            raise
        kind = FileNotFoundError if is_missing else _KINDS.get(type(error).__name__)
        text = str(error).partition("\n\nDebug source")[0]
        if re.search(" 416 |Invalid range", text):
            raise ValueError("an object that ends too early") from None
        sentence = re.search(r"<Message>(.+?)</Message>", text, re.DOTALL)
        raise (kind or ConnectionError)(sentence[1] if sentence else text) from None


@dataclasses.dataclass(frozen=True)
class BucketPath:
    """The address of an object, or of a run's directory: `str` is the URL, `/` appends a name."""

    directory: str  # the URL of the run
    store: Any = dataclasses.field(repr=False, compare=False)  # obstore's, of the run
    key: str = ""  # the path of the object, within the directory

    @staticmethod
    def of(address: str, timeout: float) -> "BucketPath":
        """obstore finds credentials and regions in the environment."""
        extra = "gcs" if address.startswith("gs:") else "s3"
        from_url = library("obstore.store", "Checkpoints()", extra=extra).from_url
        limit = datetime.timedelta(seconds=min(timeout, 180.0))
        client = {"allow_http": True, "timeout": limit, "connect_timeout": limit / 6}
        with _os_errors():
            store = from_url(address, client_options=client, retry_config={"retry_timeout": limit})
        return BucketPath(address.rstrip("/"), store)

    def __str__(self) -> str:
        return f"{self.directory}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> "BucketPath":
        return dataclasses.replace(self, key=f"{self.key}/{name}".strip("/"))

    def keys(self, prefix: str = "") -> list[str]:
        """The keys in the directory that begin so: a request for each 1,000 keys."""
        with _os_errors():
            return sorted(x["path"] for page in self.store.list(prefix or None) for x in page)

    def read(self, limit: int) -> tuple[bytes, dict[str, Any]]:
        """An object and its version, which is a `mode` of `write`. ValueError for a larger one."""
        with _os_errors():
            answer = self.store.get(self.key)
            if (size := answer.meta["size"]) > limit:
                raise ValueError(f"{size} bytes, more than {limit}")
            facts = {name: answer.meta[name] for name in ("e_tag", "version")}
            return bytes(answer.bytes()), {x: y for x, y in facts.items() if y is not None}

    def read_range(self, start: int, stop: int) -> bytes:
        with _os_errors():
            return self.store.get_range(self.key, start=start, end=stop).to_bytes()

    def write(self, content: bytes, mode: Any = "overwrite") -> None:
        """FileExistsError if `mode` is "create", or a version, and another object is there."""
        with _os_errors():
            self.store.put(self.key, content, mode=mode, use_multipart=False)

    def write_arrays(self, blocks: _blocks.Blocks) -> None:
        """The blocks as a safetensors file: a few parts of it are in memory, and on their way."""
        size, pieces = _safetensors.size_and_pieces(_blocks.plain_arrays(blocks), {})
        if size <= _PART:
            return self.write(b"".join(pieces))
        part = max(_PART, size // 9_000)  # S3 and GCS allow 10,000 parts
        with _os_errors():
            self.store.put(self.key, pieces, chunk_size=part, max_concurrency=PARALLEL_REQUESTS)

    def unlink(self, *names: str) -> None:
        """Delete the object, or the objects of these names below; names may be missing."""
        keys = [f"{self.key}/{name}" for name in names] or [self.key]
        try:
            with _os_errors():
                self.store.delete(keys)
        except FileNotFoundError:  # in stores of Google it ends the deletion of all keys
            for key in keys:
                with contextlib.suppress(FileNotFoundError), _os_errors():
                    self.store.delete(key)


def stored_in(paths: Sequence[BucketPath]) -> dict[str, list]:
    """The blocks of each leaf, as `_blocks.stored_in` finds them in files.

    That function checks headers in files: here in local ones with the header and the size of the
    object, and zeros in place of its arrays.
    """
    heads: dict[Path, tuple[BucketPath, bytes]] = {}
    with tempfile.TemporaryDirectory() as scratch:

        def fetch(path: BucketPath) -> None:
            # A process without blocks has written no file.
            with contextlib.suppress(FileNotFoundError), _os_errors():
                end = max(1 << 16, _HEADS // len(paths))
                answer = path.store.get(path.key, options={"range": (0, end)})
                head, size = bytes(answer.bytes()), answer.meta["size"]
                header_end = 8 + int.from_bytes(head[:8], "little")
                if len(head) < header_end <= min(size, 8 + _safetensors.MAX_HEADER):
                    head += path.read_range(len(head), header_end)
                file = Path(scratch, path.key.rpartition("/")[2])
                with open(file, "xb") as output:
                    output.write(head)
                    output.truncate(size)
                heads[file] = path, head

        with concurrent.futures.ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            list(pool.map(fetch, paths))
        stored = _blocks.stored_in(heads)

    def fill(file: Path, start: int, target: memoryview) -> int:
        path, head = heads[file]
        content = head[start : start + len(target)]
        if len(content) < len(target):
            content = path.read_range(start, start + len(target))
        target[: len(content)] = content
        return len(content)

    with_fill = lambda entry: dataclasses.replace(entry, fill=fill)
    return {x: [(cut, with_fill(entry)) for cut, entry in y] for x, y in stored.items()}
