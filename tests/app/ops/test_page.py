"""The status page's files, over HTTP: who gets them, and what a browser may do with them."""

import hashlib
import re

import httpx
import pytest

from app.ops.page import FILES
from tests.app.running import ADMIN_KEY, Running

UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of uPlot 1.6.32 as npm has them."""


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_there_and_of_its_kind(hello: Running, name: str) -> None:
    answer = httpx.get(f"{hello.ops_url}/page/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == FILES[name]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert len(answer.content) > 100


def test_the_page_is_at_the_root(hello: Running) -> None:
    answer = httpx.get(hello.ops_url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text.startswith("<!doctype html>")
    assert ADMIN_KEY not in answer.text


def test_the_page_names_only_files_that_are_there(hello: Running) -> None:
    named = re.findall(r'(?:src|href)="(/page/[^"]+)"', httpx.get(hello.ops_url).text)
    assert len(named) >= 5
    assert all(httpx.get(hello.ops_url + path).status_code == 200 for path in named)


@pytest.mark.parametrize(
    "path", ["/page/nothing", "/page/page.py", "/page/..%2fpage.py", "/page/uplot/LICENSE", "/page/"]
)
def test_nothing_else_is(hello: Running, path: str) -> None:
    assert httpx.get(hello.ops_url + path).status_code == 404


def test_it_is_not_on_the_public_listener(hello: Running) -> None:
    assert httpx.get(hello.url).status_code == 404
    assert httpx.get(f"{hello.url}/page/page.js").status_code == 404


def test_a_foreign_host_name_gets_nothing(hello: Running) -> None:
    assert httpx.get(hello.ops_url, headers={"host": "evil.example"}).status_code == 403


def test_the_policy_lets_in_nothing_but_our_own_files(hello: Running) -> None:
    policy = httpx.get(hello.ops_url).headers["content-security-policy"]
    rules = {name: rest for name, _, rest in (rule.partition(" ") for rule in policy.split("; "))}
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert all(rules[name] == "'self'" for name in ("script-src", "style-src", "connect-src", "form-action"))
    assert "unsafe" not in policy
    assert "http" not in policy


def test_nothing_is_inline(hello: Running) -> None:
    """The policy would refuse it; here it is said before a browser has to."""
    text = httpx.get(hello.ops_url).text
    assert re.findall(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|javascript:", text) == []


@pytest.mark.parametrize("name", UPLOT)
def test_the_library_is_the_published_one(hello: Running, name: str) -> None:
    assert hashlib.sha256(httpx.get(f"{hello.ops_url}/page/{name}").content).hexdigest() == UPLOT[name]
