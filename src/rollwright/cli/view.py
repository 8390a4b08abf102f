"""`rollwright view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import OK, say


def view(
    *runs: Path,
    port: int = 0,
    bundle: Path | None = None,
    tokenizer: Path | None = None,
    browser: Annotated[bool, Parameter(name="--open", negative=())] = False,
) -> int:
    """Look at runs in a browser, down to each token.

    Only shows: nothing in a run folder is changed. Listens on 127.0.0.1, and only the address it prints, which has a
    random token in it, is answered. A run that is still going on is followed.

    Parameters
    ----------
    runs
        Run folders, or folders of run folders; `runs` when left out.
    port
        To listen at; 0 takes a free one.
    bundle
        Write the pages into this new folder instead; they need no server.
    tokenizer
        Folder with the policy's tokenizer.json, where the run's own is not there any more.
    browser
        Open the address in a browser.

    Examples
    --------
    rollwright view runs/latest
    rollwright view runs --port 7700 --open
    rollwright view runs/before runs/after --bundle site
    """
    import anyio

    from rollwright.cli.places import places
    from rollwright.viewer.bundle import write_bundle
    from rollwright.viewer.library import Library
    from rollwright.viewer.pages import Pages
    from rollwright.viewer.serve import serving

    library = Library(list(runs) or [Path("runs")], places().cache / "viewer")
    library.check()
    if bundle is not None:
        told = 0

        def progress(done: int, total: int) -> None:
            nonlocal told
            if total and done * 10 // total > told:
                told = done * 10 // total
                say(f"{done} of {total} rollouts")

        count = write_bundle(library, bundle, tokenizer=tokenizer, progress=progress)
        print(f"{count} pages: {bundle / 'index.html'}")
        return OK

    async def go() -> None:
        async with serving(Pages.of(library, tokenizer=tokenizer), library, port=port) as url:
            print(url, flush=True)
            say("Ctrl-C stops it")
            if browser:
                import webbrowser

                await anyio.to_thread.run_sync(webbrowser.open, url)
            await anyio.sleep_forever()

    until_interrupted(go)
    library.close()
    return OK
