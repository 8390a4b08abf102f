"""Real vLLM and SGLang servers on this machine's CPU, from the environment that `make test-engines` installs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rollwright.engines import Generation
from rollwright.engines.runtime import load_runtime
from rollwright.engines.sampler import candidates
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.testing.tiny_llama import write_random_llama
from rollwright.tokens.render import load_renderer
from rollwright.types import Sampling

START_SECONDS = 300.0
CONTEXT = 2048

_STUBS = Path(__file__).parent.parent / "engines" / "stubs"
_QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}


def write_policy(folder: Path, *, seed: int = 0) -> Path:
    """A model both servers take: heads of 32, weights of float32, a context longer than what is served."""
    tiny_tokenizer(folder)
    vocab_size = load_renderer(folder, kind="template").vocab_size
    shape = {"hidden": 128, "heads": 4, "kv_heads": 2, "layers": 2, "intermediate": 256}
    # Not tied: a head tied to the embedding keeps the old weights through vLLM's reload on a CPU.
    return write_random_llama(folder, vocab_size=vocab_size, max_context=2 * CONTEXT, seed=seed, tied=False, **shape)


def without_eos(policy: Path, folder: Path) -> Path:
    """A copy whose tokenizer has no end of text: SGLang ends a reply there, also where nobody asked it to."""
    shutil.copytree(policy, folder)
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text())
    del described["eos_token"]
    path.write_text(json.dumps(described))
    return folder


@contextmanager
def vllm_server(python: Path, model: Path, log: Path, *options: str, development: bool = True) -> Generator[str]:
    """Yields its URL, once it is ready."""
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": str(int(development)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [str(python.with_name("vllm")), "serve", str(model), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "16", *options]
    with _server(command, environment, log) as url:
        yield url


@contextmanager
def sglang_server(python: Path, model: Path, log: Path) -> Generator[str]:
    """Yields its URL, once it is ready."""
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(_STUBS)}
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", "float32"]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    command += ["--disable-overlap-schedule", "--mem-fraction-static", "0.1", "--max-total-tokens", "20000"]
    command += ["--context-length", str(CONTEXT)]
    with _server(command, environment, log) as url:
        yield url


@contextmanager
def _server(command: Sequence[str], environment: dict[str, str], log: Path) -> Generator[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        # A group of its own: these servers leave workers behind when only their first process is told to end.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_QUIET, **environment},
            cwd=log.parent,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)  # noqa: TID251 - no event tells that a foreign server is ready
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def own_logprobs(model: Path, prompt: Sequence[int], generation: Generation, sampling: Sampling) -> np.ndarray:
    """What our own numpy runtime gives for each token of a reply, under `sampling`."""
    runtime = load_runtime("numpy", model)
    cache = runtime.new_cache(len(prompt) + len(generation.ids))
    logits = runtime.prefill(list(prompt), cache)
    found: list[float] = []
    for token in generation.ids:
        ids, logprobs = candidates(logits, sampling)
        found.append(float(logprobs[np.flatnonzero(ids == token)[0]]))
        logits = runtime.step([token], [cache])[0]
    return np.array(found)
