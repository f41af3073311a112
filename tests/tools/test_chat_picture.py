"""tools/chat_picture.py: the output of a terminal becomes a picture without external resources."""

from xml.etree import ElementTree

from tools.chat_picture import PICTURE, draw

MOST = 60_000  # bytes
SVG = "{http://www.w3.org/2000/svg}"


def test_a_session_becomes_svg() -> None:
    picture = draw(">>> a < b\n\x1b[4;32mguessed\x1b[0m & drawn\n2 tok")
    words = "".join(text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text"))
    assert words.replace("\xa0", " ").split() == [">>>", "a", "<", "b", "guessed", "&", "drawn", "2", "tok"]
    assert "underline" in picture


def test_the_committed_picture_is_small_and_complete() -> None:
    picture = PICTURE.read_text(encoding="utf-8")
    ElementTree.fromstring(picture)
    assert len(picture.encode()) < MOST
    assert picture.count("http") == 1  # the namespace: no font and no image from elsewhere
