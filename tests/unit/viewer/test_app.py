"""The viewer over real loopback HTTP: who gets in, what is sent, and that it follows a run."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import anyio
import httpx2
import pytest

from rollwright.store import RunDir, RunWriter
from rollwright.testing.run_folder import Talk, build_run, conversations, write_rollout
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render import load_renderer
from rollwright.viewer.library import Library
from rollwright.viewer.pages import Pages
from rollwright.viewer.serve import serving
from support.hostile import LONG, TASK, hostile_run

pytestmark = pytest.mark.anyio


class Page(HTMLParser):
    """Elements, links and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]

    def handle_data(self, data: str) -> None:
        self.text += data


@asynccontextmanager
async def viewer(*roots: Path, cache: Path | None = None) -> AsyncGenerator[httpx2.AsyncClient]:
    library = Library(list(roots), cache)
    library.check()
    async with serving(Pages.of(library), library) as url, httpx2.AsyncClient(base_url=url, timeout=30) as client:
        yield client
    library.close()


async def page(client: httpx2.AsyncClient, path: str) -> Page:
    answer = await client.get(path)
    assert answer.status_code == 200, f"{path}: {answer.status_code}"
    return Page(answer.text)


def names(html: str) -> list[str]:
    """Of the rollouts in a table, in order."""
    return [unquote(name) for name in re.findall(r'<td><a class="strong" href="[^"]*rollouts/([^/"]+)/"', html)]


async def test_nobody_gets_in_without_the_token(built: RunDir) -> None:
    async with viewer(built.path) as client:
        base = client.base_url
        for path in (
            "/",
            "/runs/run/",
            "/static/viewer.js",
            "/wrong/",
            f"/{str(base.path).strip('/')}x/",
            "//",
            "/%00/",
        ):
            answer = await client.get(f"{base.scheme}://{base.host}:{base.port}{path}")
            assert answer.status_code == 403, path
            assert "run" not in answer.text.replace("rollwright", "").replace("printed", "")
        assert (await client.get("")).status_code == 200
        bare = await client.get(str(base).rstrip("/"), follow_redirects=True)
        assert bare.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost@evil", "", "127.0.0.2"])
async def test_another_name_for_this_machine_gets_nothing(built: RunDir, host: str) -> None:
    async with viewer(built.path) as client:
        assert (await client.get("", headers={"host": host})).status_code in (400, 421)
        assert (await client.get("", headers={"host": "localhost:7"})).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_it_only_shows(built: RunDir, method: str) -> None:
    async with viewer(built.path) as client:
        assert (await client.request(method, "")).status_code == 405
    async with viewer(built.path) as client:
        head = await client.head("")
        assert (head.status_code, head.content) == (200, b"")


async def test_every_answer_is_fenced_in(built: RunDir) -> None:
    async with viewer(built.path) as client:
        for path in ("", "runs/run/", "static/viewer.css", "none/", "runs/run/rollouts/none/", "events?state=x"):
            async with client.stream("GET", path) as answer:
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["referrer-policy"] == "no-referrer"
                assert answer.headers["cache-control"] == "no-store"


async def test_every_link_leads_somewhere_and_no_page_has_code_in_it(built: RunDir) -> None:
    """From the first page on, whatever can be clicked; the lists' own headings and filters once."""
    async with viewer(built.path) as client:
        todo, seen = [str(client.base_url)], set[str]()
        while todo:
            url = todo.pop()
            shape = re.sub(r"\d+", "0", urlsplit(url)._replace(fragment="").geturl().removeprefix(str(client.base_url)))
            if shape in seen:
                continue
            seen.add(shape)
            answer = await client.get(url)
            assert answer.status_code == 200, url
            if "html" not in answer.headers["content-type"]:
                continue
            found = Page(answer.text)
            ids = {attributes["id"] for _, attributes in found.elements if attributes.get("id")}
            for tag, attributes in found.elements:
                assert not any(name.startswith("on") or name == "style" for name in attributes), (url, attributes)
                assert tag not in ("style", "iframe", "object", "embed", "base")
                assert tag != "script" or attributes.get("src")
            for link in found.links:
                if link.startswith("#"):
                    assert link[1:] in ids, (url, link)
                else:
                    assert urljoin(url, link).startswith(str(client.base_url))
                    todo.append(urljoin(url, link))
    assert len(seen) > 60


async def test_lists_are_filtered_sorted_and_paged_by_the_url(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", tasks=30, attempts=8, folders=0)
    records = run.records()
    async with viewer(run.path) as client:
        first = (await client.get("runs/run/rollouts/")).text
        second = (await client.get("runs/run/rollouts/?page=2")).text
        assert len(names(first)) == len(names(second)) == 100
        assert not set(names(first)) & set(names(second))
        resolved = [record for record in records if record.status == "resolved"]
        html = (await client.get("runs/run/rollouts/?status=resolved&sort=-seconds")).text
        slowest = sorted(resolved, key=lambda record: -sum(record.seconds.values()))
        assert names(html) == [record.rollout for record in slowest[:100]]
        assert f"{len(resolved)} of {len(records)} rollouts" in html
        task = records[0].task
        assert names((await client.get(f"runs/run/rollouts/?task={task}")).text) == [f"{task}.{n}" for n in range(1, 9)]
        for strange in (
            "?page=x&sort=nothing",
            "?page=99999999999",
            "?" + "&".join(f"a{n}=1" for n in range(400)),
            "?q=%ff%00",
        ):
            assert (await client.get(f"runs/run/rollouts/{strange}")).status_code == 200
        rates = [
            float(rate)
            for rate in re.findall(r"(\d\.\d{3})</td>", (await client.get("runs/run/tasks/?sort=-reward")).text)
        ]
        assert rates == sorted(rates, reverse=True)
        mixed = (await client.get("runs/run/tasks/?kind=mixed")).text
        assert "differs" in mixed
        assert "zero:" not in mixed


async def test_what_others_wrote_is_shown_as_text(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run <b>")
    async with viewer(run.path) as client:
        (start,) = {link for link in (await page(client, "")).links if link.startswith("runs/")}
        paths = [start, f"{start}rollouts/", f"{start}tasks/", f"compare/{start.split('/')[1]}/{start.split('/')[1]}/"]
        for attempt in (1, 2):
            (rollout,) = {
                link
                for link in (await page(client, f"{start}rollouts/")).links
                if f".{attempt}/" in link and "rollouts/" in link
            }
            whole = urljoin(f"/{start}rollouts/", rollout).lstrip("/")
            paths += [whole, f"{whole}tokens/", f"{whole}tokens/0/", f"{whole}branch/0/"]
        for path in paths:
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert len(answer.content) < 1_500_000, f"{path} shows too much"
            for character in "\x1b\x00\x08\x9b\u202e\u2066\ufeff":
                assert character not in answer.text, path
            found = Page(answer.text)
            for tag, attributes in found.elements:
                assert tag not in ("b", "img") or "onclick" not in attributes
                assert not any(name.startswith("on") for name in attributes), (path, tag, attributes)
                assert tag != "img"
                assert tag != "script" or (attributes.get("src") or "").endswith((".js",))
                assert not (attributes.get("href") or "").lower().startswith("javascript:")
            assert "{{7*7}}" in found.text or TASK in found.text, path
        first = (await client.get(paths[4])).text
        assert "\\xff\\xfe\\xc3(" in first, "bytes that are no text are shown as such"
        assert "more bytes" in first
        assert "2 lines of rollouts.jsonl cannot be read" in (await client.get(start)).text
        assert Page(first).text.count(TASK) >= 1


async def test_files_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    async with viewer(run.path) as client:
        path = (await page(client, "runs/run/rollouts/")).links
        rollout = urljoin("/runs/run/rollouts/", next(link for link in path if ".1/" in link)).lstrip("/")
        answer = await client.get(f"{rollout}files/agent.log")
        assert answer.content == run.rollout(f"{TASK}.1").agent_log.read_bytes()
        assert len(answer.content) > LONG
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        "runs/run/rollouts/../../../../etc/passwd",
        "runs/run/rollouts/..%2f..%2f..%2fetc/",
        "runs/run/rollouts/%2e%2e/files/resolved.json",
        "runs/run/rollouts/NAME/files/..%2f..%2f..%2fresolved.json",
        "runs/run/rollouts/NAME/files/.lock",
        "runs/run/rollouts/NAME/files/verdict.99.json",
        "runs/run/rollouts/NAME/files/%00",
        "runs/run/rollouts/NAME/files/",
        "runs/run/rollouts/NAME/tokens/99/",
        "runs/run/rollouts/NAME/tokens/-1/",
        "runs/run/rollouts/NAME/tokens/0/0/",
        "runs/run/rollouts/NAME/tokens/%d9%a1/",
        "runs/run/rollouts/NAME/branch/x/",
        "runs/..%2frun/",
        "runs/other/",
        "compare/run/other/",
        "static/..%2fapp.py",
        "static/none.js",
        "%ff%fe/",
    ],
)
async def test_there_is_nothing_beside_the_pages(built: RunDir, path: str) -> None:
    async with viewer(built.path) as client:
        answer = await client.get(path.replace("NAME", built.records()[0].rollout))
        assert answer.status_code in (403, 404), answer.text[:200]
        assert "root:" not in answer.text


async def test_only_a_rollouts_own_files_are_given_out(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", tasks=1, attempts=1)
    (record,) = run.records()
    (run.rollout(record.rollout).path / "secret.txt").write_text("secret")
    (run.rollout(record.rollout).path / "verdict.1.json").write_text("{}")
    async with viewer(run.path) as client:
        where = f"runs/run/rollouts/{record.rollout}/files"
        assert (await client.get(f"{where}/secret.txt")).status_code == 404
        assert (await client.get(f"{where}/verdict.json")).status_code == 200
        assert (await client.get(f"{where}/verdict.1.json")).text == "{}", "an earlier verdict, which a regrade kept"


async def test_damaged_files_are_told_of_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", tasks=1, attempts=1, seed=2)
    (record,) = run.records()
    folder = run.rollout(record.rollout)
    folder.verdict.write_bytes(b"{")
    folder.samples.write_bytes(b"[]\n")
    async with viewer(run.path) as client:
        where = f"runs/run/rollouts/{record.rollout}/"
        assert "samples.jsonl cannot be read" in (await page(client, f"{where}tokens/")).text
        folder.turns.write_bytes(folder.turns.read_bytes() + b"{nonsense\n")
        assert "damaged line" in (await page(client, where)).text
        assert "damaged line" in (await page(client, f"{where}tokens/")).text
        folder.turns.unlink()
        assert "has no turns" in (await page(client, f"{where}tokens/")).text
        run.resolved_file.write_bytes(b"\xff")
        assert record.rollout in (await page(client, "runs/run/rollouts/")).text
    async with viewer(run.path) as client:
        assert "cannot be read" in (await page(client, "runs/run/")).text


async def test_a_running_run_is_followed(tmp_path: Path) -> None:
    renderer = load_renderer(tiny_tokenizer(tmp_path / "policy"))
    resolved = {"config": {"run": {"attempts": 3}}, "tasks": {"count": 1}}
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved=resolved)
    plain = conversations()["plain"]
    async with viewer(tmp_path) as client:
        assert "running" in (await page(client, "runs/run/")).text
        folder = writer.begin("a.1")
        talk = Talk(renderer, folder.turns, rollout="a.1")
        plain(talk)
        assert "4 turns" in (await page(client, "runs/run/")).text
        assert "Conversation 4 turns" in " ".join((await page(client, "runs/run/rollouts/a.1/")).text.split())
        assert "ungraded" in (await page(client, "runs/run/rollouts/a.1/tokens/")).text
        talk.seal()
        for name in ("..%2frollouts", "..%2f..%2frun", "a.1%2f..%2fa.1"):
            assert (await client.get(f"runs/run/rollouts/{name}/")).status_code == 404
        with anyio.fail_after(60):
            async with client.stream("GET", "runs/run/events?state=none") as events:
                lines = (line async for line in events.aiter_lines() if line.startswith("data:"))
                before = await anext(lines)
                write_rollout(writer, renderer, "a.1", plain)
                after = await anext(lines)
                while after == before:  # the state of the work folder may be told first
                    after = await anext(lines)
        shown = await client.get("runs/run/rollouts/")
        assert names(shown.text) == ["a.1"]
        writer.close()
        assert not any(
            ("class", "running") in attributes.items() for _, attributes in (await page(client, "runs/run/")).elements
        )
        build_run(tmp_path / "second", tasks=1, attempts=1, folders=0, policy=tmp_path / "policy")
        assert "second" in (await page(client, "")).text


async def test_a_run_that_is_taken_away_is_no_error_of_the_viewer(tmp_path: Path) -> None:
    run = build_run(tmp_path / "runs" / "one", tasks=1, attempts=1)
    build_run(tmp_path / "runs" / "two", tasks=1, attempts=1, policy=tmp_path / "runs" / "policy")
    (record,) = run.records()
    async with viewer(tmp_path / "runs") as client:
        assert "one" in (await page(client, "")).text
        shutil.rmtree(run.path)
        first = await page(client, "")
        assert ("one" in first.text, "two" in first.text) == (False, True)
        for path in ("runs/one/", "runs/one/rollouts/", "compare/one/two/"):
            assert (await client.get(path)).status_code == 200
        for path in (f"runs/one/rollouts/{record.rollout}/", f"runs/one/rollouts/{record.rollout}/tokens/"):
            assert (await client.get(path)).status_code == 404


async def test_followers_that_leave_are_let_go(built: RunDir) -> None:
    """Else closing the viewer would wait for them."""
    with anyio.fail_after(60):
        async with viewer(built.path) as client:
            for _ in range(20):
                async with client.stream("GET", "events?state=none") as events:
                    async for line in events.aiter_lines():
                        if line.startswith("data:"):
                            break
            assert (await client.get("")).status_code == 200
