"""The status page in a real browser, on a phone and on a desk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blackbox.harness import House
from blackbox.sidecars import sidecar
from browser import Browser, browser, program
from checkpoints import make_checkpoint, make_key
from releases import serve

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium on PATH; scripts/packages installs one"
)

PHONE, DESK = (390, 844), (1280, 800)
EVIL = "<img src=x onerror=\"document.title='evil'\"><script>document.title='evil'</script>"
BARS = """(() => {
  const bar = document.querySelector("details[open] .bar"), place = bar.getBoundingClientRect();
  return [place.left, place.right, bar.parentElement.getBoundingClientRect().right + 1];
})()"""
WIDE = "document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def looking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_the_page_can_be_read_on_a_phone_and_on_a_desk(
    house: House, looking: Browser, tmp_path: Path
) -> None:
    house.serve()
    long = "of-" + "a-very-long-name-" * 8
    old = make_checkpoint(house.local, name=long)
    serve(house.state, old)
    make_checkpoint(house.shared, name="new", key=make_key(vllm="0.33.0"), created_at="2027-01-01")
    with sidecar(house, "--no-follow", "--scrub-interval", "never") as running:
        running.wait_until('shardboot_checkpoints{state="complete",store="shared"}', 1)
        for name, size in (("phone", PHONE), ("desk", DESK)):
            looking.show(running.url, *size)
            looking.picture(tmp_path / f"{name}.png")
            assert looking.value(WIDE) <= size[0]
            text = looking.value("document.body.innerText")
            assert f"newer than {long}, which runs: vllm 0.33.0 instead of 0.32.0" in text
            assert "runs here" in text
            assert "Where their time went" in text
            assert "decide" in text
            left, right, end = looking.value(BARS)
            assert left < right <= end
        assert looking.value("getComputedStyle(document.querySelector('thead')).display") != "none"
        looking.show(running.url, *PHONE)
        assert looking.value("getComputedStyle(document.querySelector('thead')).display") == "none"
    print(f"pictures: {tmp_path}/phone.png, {tmp_path}/desk.png")


def test_what_others_have_named_is_text_to_a_browser(house: House, looking: Browser) -> None:
    serve(house.state, make_checkpoint(house.local), family_name=EVIL, reason=EVIL)
    with sidecar(house) as running:
        running.wait_until('shardboot_checkpoints{state="complete",store="local"}', 1)
        looking.show(running.url, *DESK)
        assert EVIL in looking.value("document.body.innerText")
        assert looking.value("document.images.length + document.scripts.length") == 0
        assert looking.value("document.title").startswith("shardboot on ")
