"""A person at the viewer: real Chromium, `rollwright view`, a run made by the real pi (`make test-browser`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

import pytest

from rollwright.store import RunDir, RunWriter
from rollwright.testing.run_folder import Talk, build_run, conversations, write_rollout
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render import load_renderer
from support.chromium import chromium, missing
from support.commandline import Rollwright
from support.hostile import hostile_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() != "", reason=missing()),
]

SCRIPTED = "engine.kind=scripted"
Until = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def cli(tmp_path: Path) -> Rollwright:
    """Without the images of the quickstart, where no run is made."""
    return Rollwright(home=tmp_path)


def view(cli: Rollwright, *paths: Path) -> str:
    process = cli.start("view", *paths)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def stop(cli: Rollwright) -> None:
    for process in cli.started:
        process.terminate()
        process.communicate()


def quiet(said: list[str]) -> list[str]:
    """What a console says of a page that is left while it is followed is no error."""
    return [line for line in said if "net::ERR_ABORTED" not in line]


@pytest.mark.pi
def test_every_page_of_a_real_run_opens_without_a_complaint(rollwright: Rollwright) -> None:
    run = rollwright.run(SCRIPTED, "run.limit=2", "run.attempts=2")
    with chromium() as (page, said):
        url = view(rollwright, run.path)
        todo, seen = [url], set[str]()
        while todo:
            address = todo.pop()
            if address in seen or "?" in address or "/files/" in address:
                continue
            seen.add(address)
            answer = page.goto(address)
            assert answer.status == 200, address
            assert page.locator("h1").count() == 1
            found = page.eval_on_selector_all("a[href]", "all => all.map(a => a.getAttribute('href'))")
            todo += [urljoin(address, link).split("#")[0] for link in found]
        assert len(seen) > 15
        page.goto(f"{url}runs/{run.path.name}/rollouts/cart.1/")
        assert page.locator(".diff .add").inner_text().endswith(">= FREE_SHIPPING_FROM:")
        assert page.locator("text=Orders of exactly 50.00 ship free now.").count() >= 1
        page.click("text=Tokens →")
        page.wait_for_selector(".run.trained b")
        trained = page.locator(".run.trained b")
        (record,) = (record for record in run.records() if record.rollout == "cart.1")
        assert trained.count() == record.trained_tokens
        trained.first.hover()
        panel = page.locator(".inspector")
        assert "trained" in panel.inner_text()
        assert trained.first.get_attribute("data-i") in panel.inner_text()
        first = panel.inner_text()
        trained.first.click()
        page.keyboard.press("ArrowRight")
        assert panel.inner_text() != first
        page.check("input[value=heat]")
        assert page.locator(".stream").get_attribute("data-colour") == "heat"
        assert quiet(said) == []


@pytest.mark.pi
def test_a_live_run_is_followed_without_reloading(rollwright: Rollwright, until: Until) -> None:
    run = RunDir(rollwright.home / "live")
    job = ("run", rollwright.job, f"run.output={rollwright.home}", "run.name=live", SCRIPTED, "run.limit=2")
    rollwright.start(*job, "run.attempts=2", "run.concurrency=2", "engine.scripted.seconds_per_turn=0.5")
    until(run.resolved_file.exists, "the run folder")
    with chromium() as (page, said):
        page.goto(f"{view(rollwright, run.path)}runs/live/")
        page.evaluate("window.mine = 1")
        page.wait_for_selector("text=In flight")
        page.wait_for_selector(".figure:first-child dd:text-matches('^4 ')")
        page.wait_for_selector("main .head .running", state="detached")
        assert page.evaluate("window.mine") == 1
        assert quiet(said) == []


def test_lists_are_filtered_sorted_and_walked_by_keyboard(cli: Rollwright, tmp_path: Path) -> None:
    build_run(tmp_path / "one", tasks=10, attempts=4, seed=3)
    build_run(tmp_path / "two", tasks=10, attempts=4, seed=3, skill=0.3, folders=0, policy=tmp_path / "policy")
    with chromium() as (page, said):
        url = view(cli, tmp_path / "one", tmp_path / "two")
        page.goto(f"{url}runs/one/")
        page.keyboard.press("g")
        page.keyboard.press("l")
        page.wait_for_url("**/rollouts/")
        page.select_option("select[name=status]", "resolved")
        page.click("text=Filter")
        page.wait_for_url("**status=resolved**")
        statuses = page.eval_on_selector_all("tbody .status", "all => new Set(all.map(s => s.textContent)).size")
        assert statuses == 1
        page.click("th >> text=Time")
        page.wait_for_url("**sort=-seconds**")
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("Time")
        page.keyboard.press("/")
        page.keyboard.type("cache")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=cache**")
        assert all("cache" in name for name in page.locator("tbody a.strong").all_inner_texts())
        page.keyboard.press("j")
        page.keyboard.press("j")
        name = page.locator("tr.at a").inner_text()
        page.keyboard.press("Enter")
        page.wait_for_selector(f"h1:has-text('{name}')")
        page.keyboard.press("]")
        page.wait_for_selector(f"h1:not(:has-text('{name}'))")
        page.keyboard.press("?")
        assert page.locator("dialog.keys").is_visible()
        page.keyboard.press("Escape")
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        page.keyboard.press("d")
        assert page.evaluate(paper) != light
        page.reload()
        assert page.evaluate(paper) != light, "the theme is kept"
        page.goto(url)
        for box in page.locator("input[name=run]").all():
            box.check()
        page.click("text=Compare two runs")
        page.wait_for_url("**/compare/one/two/")
        assert page.locator("figure svg .dot").count() == 4
        with page.expect_download() as waiting:
            page.hover("figure.card")
            page.click("figure.card .png")
        data = Path(waiting.value.path()).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
        assert quiet(said) == []
    stop(cli)


def test_a_hostile_folder_runs_nothing(cli: Rollwright, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    with chromium() as (page, said):
        page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
        url = view(cli, run.path)
        page.goto(f"{url}runs/run/rollouts/")
        todo = page.eval_on_selector_all("tbody a.strong", "all => all.map(a => a.href)")
        for address in (url, f"{url}runs/run/", *todo, *(f"{link}tokens/" for link in todo)):
            page.goto(address)
            page.mouse.move(400, 400)
            assert page.locator("script:not([src])").count() == 0
        assert quiet(said) == []
    stop(cli)


def test_pages_as_files_filter_and_sort_and_complain_of_nothing(cli: Rollwright, tmp_path: Path) -> None:
    build_run(tmp_path / "one", tasks=5, attempts=4, seed=3)
    cli("view", tmp_path / "one", "--bundle", tmp_path / "site")
    with chromium() as (page, said):
        page.goto(f"file://{tmp_path}/site/index.html")
        page.click("text=one")
        page.click("text=Rollouts")
        rows = page.locator("tbody tr:visible")
        assert rows.count() == 20
        page.select_option("select[name=status]", "resolved")
        page.click("text=Filter")
        page.wait_for_url("**status=resolved**")
        assert 0 < rows.count() < 20
        page.click("th >> text=Sampled")
        page.wait_for_selector("th[aria-sort=descending]")
        column = [
            int(text.replace(",", "")) for text in page.locator("tbody tr:visible td:nth-child(6)").all_inner_texts()
        ]
        assert column == sorted(column, reverse=True)
        page.locator("tbody tr:visible a.strong").first.click()
        page.click("text=Tokens →")
        page.locator(".run.trained b").first.hover()
        assert "trained" in page.locator(".inspector").inner_text()
        assert quiet(said) == []


def test_a_large_run_is_quick_and_small(cli: Rollwright, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10,000 rollouts: what the first page takes, and the server's memory. Numbers to read, with generous bounds."""
    build_run(tmp_path / "large", tasks=1250, attempts=8, folders=200)
    with chromium() as (page, said):
        url = view(cli, tmp_path / "large")
        took: dict[str, float] = {}
        for path in (
            "",
            "runs/large/",
            "runs/large/rollouts/",
            "runs/large/rollouts/?sort=-seconds&status=resolved&page=20",
        ):
            page.goto(url + path)
            timing = page.evaluate("performance.getEntriesByType('navigation')[0].toJSON()")
            took[path] = timing["responseEnd"] - timing["requestStart"]
        status = Path(f"/proc/{cli.started[-1].pid}/status").read_text()
        peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024
        assert peak < 200
        assert max(took.values()) < 10_000
        assert quiet(said) == []
    with capsys.disabled():
        sys.stdout.write(f"\n{ {path: f'{value:.0f} ms' for path, value in took.items()} }, {peak:.0f} MB\n")
    stop(cli)


def test_a_rollout_in_flight_is_followed_turn_by_turn(cli: Rollwright, tmp_path: Path) -> None:
    renderer = load_renderer(tiny_tokenizer(tmp_path / "policy"))
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={"config": {}})
    folder = writer.begin("a.1")
    talk = Talk(renderer, folder.turns, rollout="a.1")
    with chromium() as (page, said):
        url = view(cli, tmp_path / "run")
        page.goto(f"{url}runs/run/rollouts/a.1/")
        page.wait_for_selector("text=No turn yet.")
        page.wait_for_selector(".live:not([hidden])")
        conversations()["plain"](talk)
        page.wait_for_selector("#turn-3")
        talk.log.release()
        page.goto(f"{url}runs/run/rollouts/")
        page.wait_for_selector("text=No rollout is like that.")
        page.wait_for_selector(".live:not([hidden])")
        write_rollout(writer, renderer, "a.1", conversations()["plain"])
        page.wait_for_selector("tbody tr >> text=a.1")
        page.keyboard.press("j")
        write_rollout(writer, renderer, "a.2", conversations()["subagent"])
        page.wait_for_selector("tbody tr >> text=a.2")
        assert page.evaluate("document.activeElement.textContent") == "a.1", "what had the focus has it still"
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('a.1')")
        page.keyboard.press("g")
        page.keyboard.press("k")
        page.wait_for_selector(".tokens")
        page.keyboard.press("j")
        page.keyboard.press("ArrowRight")
        assert "trained" in page.locator(".inspector").inner_text()
        assert quiet(said) == []
    writer.close()
    stop(cli)
