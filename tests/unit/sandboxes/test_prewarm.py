"""Images before the first rollout."""

from __future__ import annotations

import pytest

from rollwright.errors import ConfigError, ProvisionFailed
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.prewarm import prewarm
from support.scripted_provider import Script

pytestmark = pytest.mark.anyio

IMAGES = [f"image{n}" for n in range(12)]


async def test_every_image_is_checked_once_and_progress_is_told() -> None:
    script, heard = Script(), list[tuple[int, int]]()
    await prewarm(script, IMAGES, done=lambda ready, of: heard.append((ready, of)))
    assert sorted(script.checked) == sorted(IMAGES)
    assert heard == [(n, 12) for n in range(1, 13)]
    assert script.boots == []


async def test_a_box_of_each_image_is_booted_and_removed() -> None:
    script = Script()
    await prewarm(script, IMAGES, boot=SandboxSpec(image=""))
    assert sorted(box.spec.image for box in script.boxes) == sorted(IMAGES)
    assert script.open == []


async def test_all_that_cannot_be_used_are_named() -> None:
    script = Script(broken={f"image{n}": ConfigError(f"no image{n}") for n in (3, 4, 5, 6, 7, 9)})
    with pytest.raises(ConfigError, match=r"6 of 12 images .*image3, image4, .* and 1 more; the first: no image3"):
        await prewarm(script, IMAGES)
    assert len(script.checked) == 12


async def test_one_that_cannot_be_used_is_told_in_the_backends_words() -> None:
    script = Script(broken={"image3": ConfigError("no image3 in /images", image="image3")})
    with pytest.raises(ConfigError, match=r"^no image3 in /images$"):
        await prewarm(script, IMAGES)


async def test_an_image_that_only_a_boot_can_tell_of_is_found_out() -> None:
    script = Script(failures=[ProvisionFailed("no such manifest")])
    with pytest.raises(ConfigError, match="no such manifest"):
        await prewarm(script, ["image0"], boot=SandboxSpec(image=""))


async def test_no_images_are_ready_at_once() -> None:
    await prewarm(Script(), [])
