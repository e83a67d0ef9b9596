"""How the status page bears up, in a browser: on a phone, in the dark, by keyboard, and against markup in its data."""

from pathlib import Path

import pytest

from tests.app.ops.chromium import Chromium, Page
from tests.app.ops.scripted_admin import GIB, MIB, Scripted, device, event, losing, request_row, serving, vram
from tests.app.ops.signed_in import Shared, answer, asked_by, opened, outcome, rows_of, sign_in

WIDTHS = (320, 360, 412, 600, 768, 820, 1024, 1280, 1920)
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
SCROLLING = """
[...document.querySelectorAll('main *')].filter((it) => it.scrollWidth > it.clientWidth + 1
  && getComputedStyle(it).overflowX === 'auto').length
"""


def low_contrast(page: Page) -> list[str]:
    """Texts with too little of it."""
    found: list[str] = page.run((Path(__file__).parent / "contrast.js").read_text(encoding="utf-8"))
    return found


def test_no_width_scrolls_sideways(shared: Shared, admin: Scripted) -> None:
    admin.vram = vram(*(losing(number, own=None, error="NVML: a long word " + "x" * 80) for number in range(4)))
    admin.events = [event(1, kind="trim", rung="cublas_workspace", reason="r" * 90, returned_bytes=123 * GIB)]
    admin.requests = [request_row(number, [130 * GIB] * 4, [-58 * MIB] * 4) for number in range(3)]
    page = opened(shared, width=360, height=740)
    rows_of(page, "requests", 3)
    for width in WIDTHS:
        page.size(width, 800)
        wide, window = page.run("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window == width
        if width <= 412:
            assert page.run(SCROLLING) == 0, f"{width}: a part of it scrolls sideways"


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(shared: Shared, admin: Scripted, dark: bool) -> None:
    states = ("ok", "watch", "trim", "drain", "reload", "blind", "degraded", "stuck", "disabled")
    admin.vram = vram(*(device(number, state=state, tight=state == "ok") for number, state in enumerate(states)))
    admin.vram["devices"][1] |= {"idle_free": None}
    admin.events = [event(1), event(2, state="stuck", kind="trim", rung="pools")]
    admin.requests = [request_row(1, [MIB] * 9, [None] * 9)]
    admin.refusal = "no"
    page = opened(shared, dark=dark)
    rows_of(page, "requests", 1)
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) is dark
    page.run("(document.querySelector('details').open = true, 0)")
    asked_by(page, "#trim button")
    assert low_contrast(page) == []
    answer(page, yes=True)
    assert outcome(page) == "no"
    assert low_contrast(page) == []


def test_the_form_for_the_key_can_be_read_in_the_dark(chrome: Chromium) -> None:
    with serving() as admin, chrome.page(admin.url, dark=True) as page:
        sign_in(page, "wrong")
        page.until("document.querySelector('#login-error').innerText !== ''")
        assert low_contrast(page) == []


def test_everything_has_a_name_and_the_keyboard_gets_there(shared: Shared, admin: Scripted) -> None:
    admin.requests = [request_row(1, [MIB] * 2, [None] * 2)]
    page = opened(shared)
    rows_of(page, "requests", 1)
    roles = {"button", "textbox", "combobox", "link", "image", "img", "region", "heading", "dialog"}
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in page.send("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert {"button", "combobox", "link", "region", "heading"} <= {role for role, _ in found}
    assert [role for role, name in found if not name] == []
    assert any("idle free" in name for role, name in found if role in ("image", "img"))
    at = "[...[document.activeElement].flatMap((it) => [it.id || it.innerText, getComputedStyle(it).outline])]"
    reached = []
    for _ in range(12):
        page.press("Tab", 9)
        reached.append(page.run(at))
    order = [
        "logout",
        "span",
        "rung",
        "trim-device",
        "Trim…",
        "Reload the engine…",
        "mode-name",
        "mode-for",
        "Set mode…",
    ]
    assert [name for name, _ in reached[:9]] == order
    assert [name for name, outline in reached if "none" in outline] == []


def test_markup_in_data_is_text(shared: Shared, admin: Scripted) -> None:
    words = {"name": EVIL, "reason": EVIL, "error": EVIL, "state": "watch", "ledger": {EVIL: MIB}}
    admin.vram = vram(device(0, **words, trend={"class": EVIL}), model=EVIL, version=EVIL)
    admin.events = [event(1, reason=EVIL, kind=EVIL, rung=EVIL, state=EVIL)]
    admin.requests = [request_row(1, [MIB], [MIB]) | {"id": EVIL}]
    page = opened(shared)
    rows_of(page, "requests", 1)
    assert page.text().count(EVIL) >= 9
    assert page.run("document.querySelectorAll('main img, main script').length") == 0
    assert "taken" not in page.run("document.title")
    assert page.complaints == []


def test_the_policy_holds(shared: Shared, admin: Scripted) -> None:
    """A script that got in all the same could not run another, nor write markup, nor send anything elsewhere."""
    page = opened(shared)
    for script in ("document.body.innerHTML = '<b>'", "document.body.setAttribute('onclick', '1')", "eval('1')"):
        tried = page.run(f"(() => {{ try {{ {script}; }} catch (error) {{ return error.name; }} }})()")
        assert tried in ("TypeError", "EvalError"), script
    assert page.run("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert any("Content Security Policy" in complaint for complaint in page.complaints)
