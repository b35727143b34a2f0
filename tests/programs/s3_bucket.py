"""A bucket of Amazon's on the loopback: moto. `python -m tests.programs.s3_bucket` prints its port, and serves until it
is ended."""

import urllib.request


def address(port) -> dict[str, str]:
    """The environment of clients."""
    credentials = {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **credentials}


def main() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT"))
    print(port, flush=True)
    server._thread.join()


if __name__ == "__main__":
    main()
