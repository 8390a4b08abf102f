"""A Docker daemon of a test's own, with an image made of this machine's programs. Nothing of it stays."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

IMAGE = "rollwright-test:plain"
"""bash, coreutils, util-linux's setsid and setpriv, grep, getent."""
BUSYBOX_IMAGE = "rollwright-test:busybox"
"""Nothing but busybox."""

_PROGRAMS = """
bash sh cat echo chmod chown cp cut date dd env false getent grep head id kill ls mkdir mkfifo mv printf rm rmdir sed
seq setpriv setsid sleep sort stat tail tee timeout touch tr true uname uniq wc yes
"""
_PASSWD = "root:x:0:0:root:/root:/bin/bash\n"
_GROUP = "root:x:0:\n"


def missing() -> str | None:
    """Why no daemon can be started here. None: it can."""
    if os.geteuid() != 0:
        return "starting dockerd needs root"
    for program in ("dockerd", "containerd", "runc", "docker-init"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install docker.io)"
    try:
        import docker  # noqa: F401
    except ImportError:
        return "the docker SDK is not installed (pip install 'rollwright[docker]')"
    return None


class DockerDaemon:
    """`dockerd` with its data, its containerd and its cgroups for itself, and no network of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._cgroup = f"rollwright-test-{folder.name}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = folder / "docker.sock"
        self.url = f"unix://{self.socket}"

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def start(self, command: list[str] | None = None) -> None:
        """Start it (or another daemon's command line), also after a stop, and wait until it answers."""
        argv = ["dockerd", "--data-root", str(self._folder / "data"), "--exec-root", str(self._folder / "exec")]
        argv += ["--pidfile", str(self._folder / "pid"), "--host", self.url, "--cgroup-parent", f"/{self._cgroup}"]
        argv += ["--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=overlay2"]
        argv += ["--exec-opt=native.cgroupdriver=cgroupfs", "--shutdown-timeout=1", *self._options]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command or argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        pause = threading.Event()
        for _ in range(600):
            if self._answers():
                return
            if self._process.poll() is not None:
                break
            pause.wait(0.05)
        raise RuntimeError(f"the daemon does not come up: {self.log[-3000:]}")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
            client.connect(str(self.socket))
            client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in client.recv(100)
        return False

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signal the daemon and wait for its end. SIGTERM ends its containers too, SIGKILL does not."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)
        if number == signal.SIGKILL:
            # Its containerd dies with it, and may stay as a zombie, which the next one would take for alive.
            for path in ("pid", "exec/containerd/containerd.pid"):
                (self._folder / path).unlink(missing_ok=True)

    def load(self, name: str, archive: bytes) -> None:
        """Make an image of a root file system."""
        import docker

        client = docker.APIClient(base_url=self.url, version="auto")
        repository, tag = name.split(":")
        path = self._folder / "image.tar"
        path.write_bytes(archive)
        client.import_image(src=str(path), repository=repository, tag=tag)
        path.unlink()
        client.close()

    def clean(self) -> None:
        """End what is left of it: processes, mounts, cgroups."""
        if self._process is not None and self._process.poll() is None:
            self.stop()
        pause = threading.Event()
        for _ in range(100):
            left = self._left_over()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            pause.wait(0.05)
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(f"{self._folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False)
        _remove_cgroups(self._cgroups())

    def _cgroups(self) -> list[Path]:
        return [top / self._cgroup for top in _cgroup_mounts() if (top / self._cgroup).is_dir()]

    def _left_over(self) -> set[int]:
        """What a killed daemon leaves: containerd and its shims, which name our folder, and what is in our cgroups."""
        found: set[int] = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if f"{self._folder}/".encode() in path.read_bytes():
                    found.add(int(path.parent.name))
        for group in self._cgroups():
            for path in group.rglob("cgroup.procs"):
                found |= {int(pid) for pid in path.read_text().split()}
        return found - {os.getpid()}


def _cgroup_mounts() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4]) for line in lines if " - cgroup" in line]


def _remove_cgroups(tops: list[Path]) -> None:
    """Those that are empty, from the leaves up."""
    for top in tops:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


@contextlib.contextmanager
def docker_daemon(*options: str) -> Iterator[DockerDaemon]:
    """A running daemon with both images."""
    # Not pytest's folder: the paths of its sockets would be too long.
    folder = Path(tempfile.mkdtemp(prefix="rw-docker-", dir="/tmp"))
    key = Path("/etc/docker/key.json")
    had_key = key.exists()
    daemon = DockerDaemon(folder, *options)
    try:
        daemon.start()
        daemon.load(IMAGE, _plain_root())
        if shutil.which("busybox"):
            daemon.load(BUSYBOX_IMAGE, _busybox_root())
        yield daemon
    finally:
        daemon.clean()
        shutil.rmtree(folder)
        if not had_key:
            key.unlink(missing_ok=True)


PODMAN_IMAGE = "localhost/rollwright-test:plain"


def podman_missing() -> str | None:
    """Why no Podman service can be started here. None: it can."""
    for program in ("podman", "conmon", "runc"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install podman runc)"
    return missing()


@contextlib.contextmanager
def podman_service() -> Iterator[str]:
    """The URL of a Podman service of a test's own, with the plain image."""
    folder = Path(tempfile.mkdtemp(prefix="rw-podman-", dir="/tmp"))
    traces = [Path("/dev/shm/libpod_lock"), Path("/run/containers"), Path("/run/libpod")]
    traces = [path for path in traces if not path.exists()]
    argv = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--tmpdir", f"{folder}/tmp"]
    argv += ["--runtime=runc", "--cgroup-manager=cgroupfs", "--storage-driver=overlay"]
    (folder / "image.tar").write_bytes(_plain_root())
    daemon = DockerDaemon(folder)
    groups = [top / "libpod_parent" for top in _cgroup_mounts() if not (top / "libpod_parent").exists()]
    try:
        subprocess.run([*argv, "import", f"{folder}/image.tar", PODMAN_IMAGE], check=True, capture_output=True)
        daemon.start([*argv, "system", "service", "--time=0", daemon.url])
        yield daemon.url
    finally:
        subprocess.run([*argv, "rm", "--all", "--force", "--time=0"], check=True, capture_output=True)
        daemon.clean()
        _remove_cgroups(groups)
        shutil.rmtree(folder)
        for path in traces:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _plain_root() -> bytes:
    files: dict[str, Path] = {}
    for name in _PROGRAMS.split():
        program = Path(shutil.which(name) or "")
        files[f"usr/bin/{name}"] = program.resolve()
    linked = subprocess.run(["ldd", *map(str, files.values())], capture_output=True, text=True, check=False).stdout
    for library in set(re.findall(r"(/\S+\.so\S*) \(0x", linked)):
        files[library.lstrip("/")] = Path(library).resolve()
    for library in Path("/lib/x86_64-linux-gnu").glob("libnss_*.so.2"):
        files[str(library).lstrip("/")] = library.resolve()
    return _root({name: path.read_bytes() for name, path in files.items()})


def _busybox_root() -> bytes:
    busybox = Path(shutil.which("busybox") or "")
    applets = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"usr/bin/{applet}": "busybox" for applet in applets if applet != "busybox"}
    return _root({"usr/bin/busybox": busybox.read_bytes()}, links)


def _root(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    """A root file system with a merged /usr, as a tar archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:

        def add(name: str, kind: bytes, mode: int, *, data: bytes = b"", target: str = "") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.size, member.linkname = kind, mode, len(data), target
            archive.addfile(member, io.BytesIO(data))

        for name in ("usr", "usr/bin", "usr/lib", "usr/lib64", "etc", "srv", "opt", "var", "root"):
            add(name, tarfile.DIRTYPE, 0o755)
        add("tmp", tarfile.DIRTYPE, 0o1777)
        for name in ("bin", "lib", "lib64"):
            add(name, tarfile.SYMTYPE, 0o777, target=f"usr/{name}")
        for name, text in (("etc/passwd", _PASSWD), ("etc/group", _GROUP)):
            add(name, tarfile.REGTYPE, 0o644, data=text.encode())
        for name, data in files.items():
            top, _, rest = name.partition("/")
            add(f"usr/{top}/{rest}" if top in ("lib", "lib64") else name, tarfile.REGTYPE, 0o755, data=data)
        for name, target in (links or {}).items():
            add(name, tarfile.SYMTYPE, 0o777, target=target)
    return out.getvalue()
