"""Images and thumbnails of novelties, on a real server."""

from __future__ import annotations

import io
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from tests.support.novelties import add_novelty, block_image, problem_of
from tests.support.servers import RunningServer, learned_folder, running_server

HTML = b"<!DOCTYPE html><html><body><script>alert(document.cookie)</script></body></html>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("novelty-images") / "robot")
    with running_server(data, threads=1, inbox_rate=1000) as running:
        yield running


@pytest.mark.parametrize(  # different images: the same one would fold
    ("number", "format", "kind"),
    [(300, "PNG", "image/png"), (301, "JPEG", "image/jpeg"), (302, "WEBP", "image/webp")],
)
def test_an_image_is_served_with_its_type_and_safe_headers(
    server: RunningServer, number: int, format: str, kind: str
) -> None:
    data = block_image(number, format=format)
    id = add_novelty(server, data)
    response = server.get(f"/novelties/{id}/image")
    headers = response.headers
    assert response.content == data
    assert (headers["content-type"], headers["x-content-type-options"]) == (kind, "nosniff")
    assert headers["content-disposition"].startswith("inline")
    assert "sandbox" in headers["content-security-policy"]
    assert headers["cache-control"] == "private, max-age=60"  # an erased image must leave browsers soon
    again = server.get(f"/novelties/{id}/image", headers={"If-None-Match": headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_an_image_with_an_html_payload_is_never_served_as_html(server: RunningServer) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", HTML.decode())
    payloads = [
        block_image(310, pnginfo=text),
        block_image(311) + HTML,
        block_image(312, format="JPEG", comment=HTML),
        block_image(313, format="WEBP") + HTML,
    ]
    for data in payloads:
        assert HTML in data
        id = add_novelty(server, data)
        for name in ("image", "thumbnail"):
            response = server.get(f"/novelties/{id}/{name}", headers={"Accept": "text/html"})
            assert response.headers["content-type"] in ("image/png", "image/jpeg", "image/webp")
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["content-security-policy"] == "default-src 'none'; sandbox"
            assert (HTML in response.content) == (name == "image")  # thumbnails are encoded again


@pytest.mark.parametrize("size", [64, 100, 512])
def test_a_thumbnail_is_an_upright_jpeg_of_at_most_that_size(server: RunningServer, size: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    id = add_novelty(server, block_image(320, size=(900, 300), format="JPEG", exif=exif))
    response = server.get(f"/novelties/{id}/thumbnail", params={"size": size})
    assert response.headers["content-type"] == "image/jpeg"
    with Image.open(io.BytesIO(response.content)) as image:
        image.load()
        assert image.format == "JPEG"
        assert max(image.size) == image.size[1] == size
        assert abs(image.size[0] - size / 3) <= 1


def test_a_small_image_is_not_enlarged(server: RunningServer) -> None:
    id = add_novelty(server, block_image(321, size=(48, 36)))
    with Image.open(io.BytesIO(server.get(f"/novelties/{id}/thumbnail?size=512").content)) as image:
        assert image.size == (48, 36)


def test_a_cached_thumbnail_is_answered_with_304(server: RunningServer) -> None:
    id = add_novelty(server, block_image(322))
    first = server.get(f"/novelties/{id}/thumbnail")
    path, etag = f"/novelties/{id}/thumbnail", first.headers["etag"]
    assert server.get(path).content == first.content
    for given in (etag, f'"other", W/{etag}', "*"):
        response = server.get(path, headers={"If-None-Match": given})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", etag)
    assert server.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    assert server.get(f"{path}?size=100", headers={"If-None-Match": etag}).status_code == 200
    for size in (63, 513):
        assert problem_of(server.get(f"{path}?size={size}")) == (422, "invalid")
    assert server.get(f"/novelties/{id}/thumbnail").status_code == 200
    assert httpx.delete(f"{server.url}/novelties/{id}", timeout=30).status_code == 204
    assert problem_of(server.get(path, headers={"If-None-Match": etag})) == (404, "not_found")
