"""A server that the unchanged E2B SDK can drive: E2B's API over the namespaces backend, on one's own machine.

server.py  the server            boxes.py      create once, list, expire     connect.py  RPC framing
app.py     the routes            processes.py  streams of running commands   faults.py   going wrong on request
forward.py the one way out       files.py      files and folders
"""

from __future__ import annotations

from rollwright.e2b_server.boxes import Template
from rollwright.e2b_server.faults import FAULTS, Fault, Faults
from rollwright.e2b_server.server import E2BServer, serve

__all__ = ["FAULTS", "E2BServer", "Fault", "Faults", "Template", "serve"]
