"""What an image file says of itself may be anything; it is believed or refused, never more."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.sandboxes.namespaces.oci import ImageError, describe, from_json, to_json
from support.oci_images import digest, entry, layer, write_archive, write_layout

LAYERS = [layer(entry("a", "x")), layer(entry("b", "y" * 20_000))]


def test_a_layout_and_an_archive_of_the_same_image_say_the_same(tmp_path: Path) -> None:
    env = ["PATH=/opt/bin", "A=b=c", "HOME=/root", "=x", "novalue"]
    layout = describe(str(write_layout(tmp_path / "layout", LAYERS, env=env)), "any", "x86_64")
    archive_file = write_archive(tmp_path / "a.tar", {"x:1": LAYERS}, env=env)
    archive = describe(str(archive_file), "any", "x86_64")
    assert layout.digest == archive.digest
    assert [part.digest for part in layout.layers] == [part.digest for part in archive.layers] == [*map(digest, LAYERS)]
    assert layout.env == archive.env == {"PATH": "/opt/bin", "A": "b=c"}
    for part, data in zip(archive.layers, LAYERS, strict=True):
        raw = archive_file.read_bytes()
        assert raw[part.blob.offset : part.blob.offset + part.blob.size] == data
    assert from_json(json.loads(json.dumps(to_json(archive)))) == archive


@pytest.mark.parametrize("asked", ["x/y:1", "docker.io/x/y:1"])
def test_of_several_images_the_one_of_that_name_is_taken(tmp_path: Path, asked: str) -> None:
    file = write_archive(tmp_path / "a.tar", {"x/y:latest": LAYERS[:1], "x/y:1": LAYERS})
    assert len(describe(str(file), asked, "x86_64").layers) == 2
    assert len(describe(str(file), "x/y", "x86_64").layers) == 1
    folder = write_layout(tmp_path / "layout", LAYERS, names=("1", "latest"))
    assert len(describe(str(folder), "x/y:1", "x86_64").layers) == 2
    with pytest.raises(ImageError, match="2 images"):
        describe(str(folder), "x/y:7", "x86_64")


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("{", "malformed"),
        ("[" * 100_000, "malformed"),
        ([], "0 images"),
        ([{"Config": "c", "RepoTags": None, "Layers": ["../../../etc/passwd"]}], "outside"),
        ([{"Config": "/etc/passwd", "Layers": []}], "outside"),
        ([{"Config": "nothing", "Layers": []}], "no plain file nothing"),
        ([{"Config": "c", "Layers": ["c"]}], "1 layers, but its configuration speaks of 0"),
        ([{"Config": "c", "Layers": []}], "0 layers"),
        ([{"Config": "bad", "Layers": ["c"]}], "only sha256"),
        ([{"Config": "link", "Layers": []}], "no plain file link"),
    ],
)
def test_a_saved_archive_that_lies_is_refused(tmp_path: Path, manifest: Any, said: str) -> None:
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (tmp_path / "a.tar").write_bytes(
        layer(
            entry("manifest.json", text),
            entry("c", json.dumps({"rootfs": {"diff_ids": []}})),
            entry("bad", json.dumps({"rootfs": {"diff_ids": ["md5:../../x"]}})),
            entry("link", type=tarfile.SYMTYPE, linkname="link"),
        )
    )
    with pytest.raises(ImageError, match=said):
        describe(str(tmp_path / "a.tar"), "a", "x86_64")


def test_what_was_changed_after_its_making_is_noticed(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", LAYERS)
    manifest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    blob = layout / "blobs/sha256" / manifest.removeprefix("sha256:")
    blob.write_bytes(blob.read_bytes() + b" ")
    with pytest.raises(ImageError, match="damaged"):
        describe(str(layout), "any", "x86_64")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("sha256:" + "0" * 64),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["manifests", "digest", "config", "layers", "annotations", "platform", "rootfs", "diff_ids"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_JSON)
def test_an_index_of_any_shape_is_an_image_error(tmp_path_factory: pytest.TempPathFactory, index: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "shapes"
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ImageError):
        describe(str(folder), "any", "x86_64")


@given(st.binary(max_size=2000))
def test_a_file_of_any_bytes_is_an_image_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "bytes.tar"
    file.write_bytes(data)
    with pytest.raises(ImageError):
        describe(str(file), "any", "x86_64")
