"""Posts a body to a URL so many times side by side with Python's own client, which keeps a connection for as long as
the server does, again after each pause, and prints what comes back.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit


def _ask(connection: HTTPConnection) -> str:
    connection.request("POST", urlsplit(sys.argv[1]).path, sys.argv[2], {"Content-Type": "application/json"})
    return connection.getresponse().read().decode()


def main() -> None:
    """Ask again and again over the same connections."""
    connections = [HTTPConnection(urlsplit(sys.argv[1]).netloc) for _ in range(int(sys.argv[3]))]
    with ThreadPoolExecutor(len(connections)) as threads:
        for pause in [*sys.argv[4:], "0"]:
            for answer in threads.map(_ask, connections):
                sys.stdout.write(f"{answer}---\n")
            time.sleep(int(pause))


if __name__ == "__main__":
    main()
