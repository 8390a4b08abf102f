"""A harness that prints all that an agent could see: files, environment, processes, mounts, the endpoint."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path

from rollwright.harnesses import AgentReport, Artifact, DialectName, Endpoint, Launch, Wheels
from rollwright.sandboxes import JobResult

LOOK = r"""
env; id; hostname; pwd
cat /etc/hostname /etc/hosts /proc/sys/kernel/hostname /proc/self/mountinfo /proc/self/cgroup
for p in /proc/[0-9]*; do
    tr '\0' '\n' <$p/cmdline; tr '\0' '\n' <$p/environ; cat $p/comm $p/mountinfo; ls -l $p $p/fd $p/root/
done 2>/dev/null
git log --all --reflog -p; git config --list; git for-each-ref; git stash list
recent() { find / -xdev \( -path /proc -o -path /sys \) -prune -o -newermt '-1 day' "$@" 2>/dev/null; }
recent -print
recent -type f -size -100k -exec cat {} +
find /opt /var /run /tmp /home -print 2>/dev/null
python3 - "$URL" "$KEY" <<'END'
import sys, urllib.error, urllib.request
url, key = sys.argv[1:]
for path in "/ /v1/models /v1/chat/completions /v1/messages /admin /healthz /metrics /nowhere".split():
    for shown in (key, "wrong"):
        for data in (None, b"{", b'{"model": "x", "messages": "x"}'):
            head = {"Authorization": f"Bearer {shown}", "x-api-key": shown, "Content-Type": "application/json"}
            try:
                reply = urllib.request.urlopen(urllib.request.Request(url + path, data, head), timeout=20)
            except urllib.error.HTTPError as error:
                reply = error
            print(reply.status, reply.headers, reply.read())
END
echo all seen
"""


class Spy:
    """`tarball`: what it brings along."""

    name = "spy"
    dialect: DialectName = "openai_chat"

    def __init__(self, *, tarball: Path) -> None:
        digest = base64.b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()
        self._artifact = Artifact(package="spy", version="1", sha512=digest, file=tarball)

    @property
    def artifacts(self) -> tuple[Artifact | Wheels, ...]:
        return (self._artifact,)

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return ("cat", f"{bundle}/spy/look.sh")

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        return Launch(
            argv=("sh", f"{bundle}/spy/look.sh"),
            env={"URL": endpoint.base_url, "KEY": endpoint.api_key, "MODEL": endpoint.model},
            files={f"{home}/prompt": prompt.encode()},
        )

    def report(self, result: JobResult) -> AgentReport:
        return AgentReport(ok=True, reason="completed")


def spy_tarball(folder: Path) -> Path:
    """The npm package that holds the script."""
    path = folder / "spy.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (("package.json", '{"name": "spy", "version": "1"}'), ("look.sh", LOOK)):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return path
