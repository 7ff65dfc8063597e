"""Servers, faults and models of the protocol, for tests and benchmarks."""

import os
from urllib.request import getproxies

if getproxies():  # a machine's proxy does not know the servers that tests start
    for _name in ("no_proxy", "NO_PROXY"):
        os.environ[_name] = ",".join(filter(None, [os.environ.get(_name, ""), "127.0.0.1,localhost,::1"]))
