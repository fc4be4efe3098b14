"""The program of the S3 server: `python s3process.py` prints its port, and ends when its stdin does.

Guarantee: whoever started it may die in any way: stdin ends with it, and so does the server.
"""

from __future__ import annotations

import logging
import os
import sys


def main() -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
