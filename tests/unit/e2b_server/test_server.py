"""The server as the unchanged SDK sees it, and as somebody without the key does."""

from __future__ import annotations

import contextlib
import gzip
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import e2b
import httpx2
import pytest

from rollwright.e2b_server import E2BServer
from rollwright.e2b_server.processes import Command, Processes
from rollwright.errors import ConfigError
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.sandboxes.namespaces.registry import Registry
from support.e2b_rig import API_KEY, IMAGE_KEY, SPEC, Rig, e2b_rig

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2b-server")


@pytest.fixture
async def rig(state: Path) -> AsyncIterator[Rig]:
    async with e2b_rig(state) as rig:
        yield rig


@pytest.fixture
def client(rig: Rig) -> e2b.E2B:
    return e2b.E2B(api_key=API_KEY, api_url=rig.url, sandbox_url=rig.url)


@pytest.fixture
async def box(client: e2b.E2B) -> AsyncIterator[e2b.AsyncSandbox]:
    box = await client.AsyncSandbox.create("host", metadata={"who": "me & you", "n": "1"})
    yield box
    await box.kill()


# --------------------------------------------------------------------------- commands


async def test_a_command_streams_what_it_writes_and_tells_its_code(box: e2b.AsyncSandbox) -> None:
    heard: list[str] = []
    result = await box.commands.run("echo a; sleep 0.2; echo b; echo c >&2", on_stdout=heard.append)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "a\nb\n", "c\n")
    assert len(heard) == 2
    with pytest.raises(e2b.CommandExitException) as raised:
        await box.commands.run("echo bad; exit 7")
    assert (raised.value.exit_code, raised.value.stdout) == (7, "bad\n")


async def test_a_command_may_die_of_any_signal(box: e2b.AsyncSandbox) -> None:
    for number, name in ((15, "SIGTERM"), (40, "40")):
        with pytest.raises(e2b.CommandExitException) as raised:
            await box.commands.run(f"kill -{number} $$")
        assert raised.value.error == f"signal: {name}"
    assert (await box.commands.run("echo alive")).stdout == "alive\n"


async def test_user_folder_and_environment_are_as_asked(box: e2b.AsyncSandbox) -> None:
    show = 'echo "$(id -un) $PWD $A"'
    assert (await box.commands.run(show)).stdout == "agent /home/agent \n"
    asked = await box.commands.run(show, user="root", cwd="/tmp", envs={"A": "x y"})
    assert asked.stdout == "root /tmp x y\n"
    with pytest.raises(e2b.AuthenticationException):
        await box.commands.run("true", user="nobody-here")
    with pytest.raises(e2b.InvalidArgumentException):
        await box.commands.run("true", cwd="/no/such")


async def test_more_output_than_any_buffer_arrives_whole(box: e2b.AsyncSandbox) -> None:
    result = await box.commands.run("seq 1 200000")
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 200001))


async def test_a_command_in_the_background_is_listed_typed_at_joined_and_killed(box: e2b.AsyncSandbox) -> None:
    handle = await box.commands.run("cat; echo end; sleep 60", background=True, stdin=True)
    assert [process.pid for process in await box.commands.list()] == [handle.pid]
    joined = await box.commands.connect(handle.pid)
    await handle.send_stdin("typed\n")
    await handle.close_stdin()
    with anyio.fail_after(10):
        while joined.stdout != "typed\nend\n":  # noqa: ASYNC110 - the SDK has no event for it
            await anyio.sleep(0.01)
    assert await box.commands.kill(handle.pid)
    for listener in (handle, joined):
        with pytest.raises(e2b.CommandExitException) as raised:
            await listener.wait()
        assert "SIGKILL" in (raised.value.error or "")
    assert not await box.commands.kill(handle.pid)
    assert await box.commands.list() == []


async def test_a_process_outlives_its_listener_and_its_end_can_be_asked_for(box: e2b.AsyncSandbox) -> None:
    handle = await box.commands.run("sleep 0.3; exit 9", background=True)
    await handle.disconnect()
    await box.commands.run("sleep 0.5")
    again = await box.commands.connect(handle.pid)
    with pytest.raises(e2b.CommandExitException) as raised:
        await again.wait()
    assert raised.value.exit_code == 9


async def test_a_listener_may_leave_in_the_middle_of_both_streams(rig: Rig) -> None:
    sandbox = await rig.namespaces.create(SPEC, key="both")
    script = "head -c 9000000 /dev/zero & head -c 9000000 /dev/zero >&2; wait; exit 4"
    command = Command(argv=("sh", "-c", script), env={}, cwd="/", user="agent", stdin=False, tag=None, seconds=None)
    async with anyio.create_task_group() as group:
        processes = Processes(sandbox, group)
        events = await processes.start(command)
        with anyio.fail_after(60):
            while events.statistics().tasks_waiting_send < 2:  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.01)
            events.close()
            (process,) = processes.running()
            with process.listen() as again:
                *_, last = [event async for event in again]
    assert last["end"]["exitCode"] == 4
    await sandbox.close()


async def test_a_timeout_kills_the_leader_alone_as_envd_does(box: e2b.AsyncSandbox) -> None:
    with pytest.raises(e2b.TimeoutException):
        await box.commands.run("setsid sh -c 'sleep 1; echo alive >/tmp/child' & sleep 60", timeout=0.3)
    await box.commands.run("sleep 1.2")
    assert await box.files.read("/tmp/child") == "alive\n"
    assert await box.commands.list() == []


async def test_a_box_that_cannot_be_removed_in_time_does_not_take_the_others_along(
    rig: Rig, client: e2b.E2B, box: e2b.AsyncSandbox, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(rig.state.parent / "server" / "boxes")
    stuck = await client.AsyncSandbox.create("host", timeout=2)
    (record,) = [r for r in registry.records() if r.id == stuck.sandbox_id]
    if not record.cgroups:
        pytest.skip("boxes have no cgroups here")
    for group in record.cgroups:
        Path(group, "held").mkdir()  # noqa: ASYNC240 - takes no time
    try:
        with anyio.fail_after(60):
            while f"box {record.id} could not be removed" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await anyio.sleep(0.1)
        assert (await box.commands.run("echo alive")).stdout == "alive\n"
    finally:
        for group in record.cgroups:
            Path(group, "held").rmdir()  # noqa: ASYNC240 - takes no time
    assert await rig.namespaces.reap() == [record.id]


# --------------------------------------------------------------------------- files


async def test_files_go_both_ways_in_every_form_of_upload(box: e2b.AsyncSandbox) -> None:
    data = secrets.token_bytes(300_000) + b"\r\n--boundary\r\n"
    forms: list[dict[str, Any]] = [{}, {"use_octet_stream": True}, {"gzip": True}]
    for number, form in enumerate(forms):
        written = await box.files.write(f"/tmp/new/{number}", data, **form)
        assert (written.name, written.path) == (str(number), f"/tmp/new/{number}")
        assert bytes(await box.files.read(f"/tmp/new/{number}", format="bytes")) == data
    many = await box.files.write_files([{"path": 'a "b"', "data": "1"}, {"path": "~/c", "data": b"2"}])
    assert [entry.path for entry in many] == ['/home/agent/a "b"', "/home/agent/c"]
    assert await box.files.read("c") == "2"


async def test_a_file_that_cannot_be_had_is_named(box: e2b.AsyncSandbox, rig: Rig) -> None:
    with pytest.raises(e2b.FileNotFoundException):
        await box.files.read("/tmp/none")
    with pytest.raises(e2b.InvalidArgumentException):
        await box.files.read("/tmp")
    with pytest.raises(e2b.InvalidArgumentException):
        await box.files.write("/tmp", "x")
    small = await e2b.E2B(api_key=API_KEY, api_url=rig.url, sandbox_url=rig.url).AsyncSandbox.create("small")
    with pytest.raises(e2b.NotEnoughSpaceException):
        await small.files.write("/tmp/big", bytes(30 << 20))
    await small.kill()


async def test_folders_are_made_listed_moved_and_removed(box: e2b.AsyncSandbox) -> None:
    assert await box.files.make_dir("/tmp/d/e")
    assert not await box.files.make_dir("/tmp/d/e")
    await box.files.write("/tmp/d/e/file", "12345")
    await box.commands.run("ln -s e/file /tmp/d/link; chmod 640 /tmp/d/e/file")
    listed = {entry.path: entry for entry in await box.files.list("/tmp/d", depth=2)}
    assert set(listed) == {"/tmp/d/e", "/tmp/d/e/file", "/tmp/d/link"}
    file = await box.files.get_info("/tmp/d/e/file")
    assert (file.size, file.mode, file.permissions, file.owner) == (5, 0o640, "-rw-r-----", "agent")
    assert (await box.files.get_info("/tmp/d/link")).symlink_target == "e/file"
    moved = await box.files.rename("/tmp/d/e/file", "/tmp/x/moved")
    assert moved.path == "/tmp/x/moved"
    assert not await box.files.exists("/tmp/d/e/file")
    await box.files.remove("/tmp/d")
    assert not await box.files.exists("/tmp/d")
    with pytest.raises(e2b.FileNotFoundException):
        await box.files.get_info("/tmp/d")


async def test_a_body_that_is_not_what_it_says_is_refused(box: e2b.AsyncSandbox, rig: Rig) -> None:
    (theirs,) = rig.server.boxes.all()
    headers = {"e2b-sandbox-id": theirs.id, "x-access-token": theirs.token}
    async with httpx2.AsyncClient(base_url=rig.url, headers=headers) as http:
        cut = gzip.compress(b"x" * 1000)[:-10]
        for body, kind, encoding in [
            (cut, "application/octet-stream", "gzip"),
            (b"no gzip", "application/octet-stream", "gzip"),
            (b"--b\r\n\r\nno name\r\n--b--\r\n", "multipart/form-data; boundary=b", "identity"),
            (b"", "multipart/form-data", "identity"),
        ]:
            more = {"content-type": kind, "content-encoding": encoding}
            answer = await http.post("/files", params={"path": "/tmp/bad"}, content=body, headers=more)
            assert answer.status_code == 400
        assert (await http.post("/files", content=b"x")).status_code == 400
        for path in ("/process.Process/Update", "/filesystem.Filesystem/WatchDir"):
            assert (await http.post(path, content=b"{}")).json()["code"] == "unimplemented"
    assert not await box.files.exists("/tmp/bad")


# --------------------------------------------------------------------------- boxes


async def test_one_idempotency_key_makes_one_box_even_at_once_and_after_its_death(rig: Rig, client: e2b.E2B) -> None:
    ids: list[str] = []

    async def create() -> None:
        ids.append((await client.AsyncSandbox.create("host", idempotency_key="the-key")).sandbox_id)

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(create)
    assert len(set(ids)) == 1
    assert await client.AsyncSandbox.kill(ids[0])
    assert not await client.AsyncSandbox.kill(ids[0])
    await create()
    assert len(set(ids)) == 1
    assert rig.server.boxes.all() == []


async def test_boxes_are_listed_by_metadata_in_pages(client: e2b.E2B, box: e2b.AsyncSandbox) -> None:
    others = [await client.AsyncSandbox.create("host", metadata={"who": "other"}) for _ in range(3)]
    pages = client.AsyncSandbox.list(query=e2b.SandboxQuery(metadata={"who": "me & you"}))
    assert [info.sandbox_id for info in await pages.next_items()] == [box.sandbox_id]
    assert not pages.has_next
    found: list[str] = []
    pages = client.AsyncSandbox.list(limit=3)
    while pages.has_next:
        found += [info.sandbox_id for info in await pages.next_items()]
    assert found == [box.sandbox_id, *(other.sandbox_id for other in others)]
    for other in others:
        await other.kill()


async def test_a_box_is_found_again_and_lives_as_long_as_was_last_said(client: e2b.E2B, box: e2b.AsyncSandbox) -> None:
    again = await client.AsyncSandbox.connect(box.sandbox_id, timeout=900)
    await again.files.write("/tmp/x", "1")
    info = await box.get_info()
    assert 800 < (info.end_at - info.started_at).total_seconds() <= 901
    await again.set_timeout(1)
    with anyio.fail_after(10):
        while await box.is_running():  # noqa: ASYNC110 - the box ends by itself
            await anyio.sleep(0.05)
    with pytest.raises(e2b.SandboxNotRunningException):
        await box.commands.run("true")
    with pytest.raises(e2b.SandboxNotFoundException):
        await box.get_info()


async def test_what_the_server_cannot_do_is_said(client: e2b.E2B, box: e2b.AsyncSandbox) -> None:
    assert await client.AsyncTemplate.exists("host")
    assert not await client.AsyncTemplate.exists("no/such")
    with pytest.raises(e2b.SandboxException, match="501"):
        await box.pause()
    for wrong in ({"template": "no-such"}, {"network": {"allow_out": ["example.org"]}}, {"timeout": 90_000}):
        with pytest.raises(e2b.SandboxException, match=r"40[04]"):
            await client.AsyncSandbox.create(**{"template": "host", **wrong})


_REACH = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as s:
        print(s.recv(9).decode())
except OSError as error:
    print(type(error).__name__)
"""


@contextlib.contextmanager
def greeting(sock: socket.socket) -> Iterator[None]:
    """Says "welcome" to whoever connects."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = sock.accept()
                with client:
                    client.sendall(b"welcome")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        sock.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_closed_box_may_reach_one_host_at_one_port(rig: Rig, client: e2b.E2B, host: str) -> None:
    network = {"allow_out": [host], "deny_out": [e2b.ALL_TRAFFIC]}
    box = await client.AsyncSandbox.create("host", network=network)
    port = rig.gateway.getsockname()[1]
    await box.files.write("/tmp/reach.py", _REACH)

    async def reached(host: str, port: int) -> str:
        return (await box.commands.run(f"/usr/bin/python3 /tmp/reach.py {host} {port}")).stdout.strip()

    with greeting(rig.gateway):
        assert await reached(host, port) == "welcome"
        assert await reached(host, rig.port) == "ConnectionRefusedError"
        assert await reached("1.1.1.1", 53) == "OSError"
    await box.kill()


@pytest.mark.parametrize("host", ["192.0.2.7", "gateway.invalid"])
async def test_the_host_a_box_may_reach_has_its_own_address_there(rig: Rig, client: e2b.E2B, host: str) -> None:
    network = {"allow_out": [host], "deny_out": [e2b.ALL_TRAFFIC]}
    box = await client.AsyncSandbox.create("host", network=network)
    port = rig.gateway.getsockname()[1]
    # Nobody is there, but the way is: we take the box's connection.
    reach = f"import socket; socket.create_connection(('{host}', {port})); print('taken')"
    assert (await box.commands.run(f'/usr/bin/python3 -c "{reach}"')).stdout == "taken\n"
    await box.kill()


@pytest.mark.parametrize(
    "network",
    [
        {"allow_out": ["1.1.1.1"]},
        {"allow_out": ["1.1.1.1", "8.8.8.8"], "deny_out": [e2b.ALL_TRAFFIC]},
        {"allow_out": ["10.0.0.0/8"], "deny_out": [e2b.ALL_TRAFFIC]},
        {"allow_out": ["0.0.0.0"], "deny_out": [e2b.ALL_TRAFFIC]},
        {"allow_out": ["127.1"], "deny_out": [e2b.ALL_TRAFFIC]},
        {"allow_out": ["a b\n127.0.0.1 evil"], "deny_out": [e2b.ALL_TRAFFIC]},
        {"allow_out": ["*.example.org"], "deny_out": [e2b.ALL_TRAFFIC]},
    ],
)
async def test_no_other_network_is_pretended(client: e2b.E2B, rig: Rig, network: dict[str, Any]) -> None:
    with pytest.raises(e2b.SandboxException, match="400"):
        await client.AsyncSandbox.create("host", network=network)
    assert rig.server.boxes.all() == []


async def test_a_folder_of_the_machine_is_no_image_for_a_client(rig: Rig, client: e2b.E2B) -> None:
    for wrong in ({"template": "/"}, {"template": "host", "metadata": {IMAGE_KEY: "/"}}):
        with pytest.raises(e2b.SandboxException, match="404"):
            await client.AsyncSandbox.create(**wrong)
    assert not await client.AsyncTemplate.exists("/")
    assert rig.server.boxes.all() == []


async def test_nobody_comes_in_without_a_key(rig: Rig, box: e2b.AsyncSandbox) -> None:
    with pytest.raises(e2b.AuthenticationException):
        await e2b.E2B(api_key="wrong", api_url=rig.url, sandbox_url=rig.url).AsyncSandbox.create("host")
    async with httpx2.AsyncClient(base_url=rig.url) as http:
        for method, path in [
            ("POST", "/v2/sandboxes"),
            ("GET", "/v2/sandboxes"),
            ("GET", f"/sandboxes/{box.sandbox_id}"),
            ("DELETE", f"/sandboxes/{box.sandbox_id}"),
            ("POST", f"/sandboxes/{box.sandbox_id}/timeout"),
            ("POST", f"/v2/sandboxes/{box.sandbox_id}/connect"),
            ("GET", "/templates/aliases/host"),
            ("POST", f"/sandboxes/{box.sandbox_id}/pause"),
        ]:
            assert (await http.request(method, path, content=b"{}")).status_code == 401, path
        for token in ({}, {"x-access-token": "wrong"}):
            headers = {"e2b-sandbox-id": box.sandbox_id} | token
            for method, path in [
                ("GET", "/health"),
                ("GET", "/files?path=/etc/passwd"),
                ("POST", "/files?path=/tmp/x"),
                ("POST", "/process.Process/List"),
                ("POST", "/process.Process/Start"),
                ("POST", "/filesystem.Filesystem/Stat"),
            ]:
                answer = await http.request(method, path, content=b"{}", headers=headers)
                assert answer.status_code == 401, path
        assert (await http.get("/health", headers={"e2b-sandbox-id": "none"})).status_code == 502
    assert (await box.commands.run("echo well")).stdout == "well\n"


async def test_a_server_without_a_key_does_not_start(rig: Rig) -> None:
    with pytest.raises(ConfigError):
        E2BServer(provider=rig.namespaces, api_key="")


_SERVE = """
import sys
from pathlib import Path
import anyio
from rollwright.e2b_server import serve
ready = lambda url: print(url, flush=True)
anyio.run(lambda: serve(host="127.0.0.1", port=0, api_key="k", state_dir=Path(sys.argv[1]), images=None,
                        image_metadata_key=None, ready=ready))
"""


async def test_it_serves_as_a_process_and_ends_in_order_with_its_boxes(tmp_path: Path) -> None:
    async with await anyio.open_process([sys.executable, "-c", _SERVE, str(tmp_path)], stderr=None) as process:
        assert process.stdout is not None
        url = (await process.stdout.receive()).decode().strip()
        box = await e2b.E2B(api_key="k", api_url=url, sandbox_url=url).AsyncSandbox.create("host")
        assert (await box.commands.run("echo well")).stdout == "well\n"
        process.terminate()
        with anyio.fail_after(20):
            assert await process.wait() == 0
    assert await NamespacesProvider(state_dir=tmp_path).list() == []
