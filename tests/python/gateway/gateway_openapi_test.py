"""The page of the routes."""

import re

from epikv.gateway import openapi


def test_the_page_has_all_routes_and_fields() -> None:
    page = openapi.page()
    for path in openapi.document()["paths"]:
        assert f" {path}</h2>" in page
    for field in ("prompt", "kv", "messages", "request_id", "enable_thinking"):
        assert f"<code>{field}</code>" in page
    assert set(re.findall('href="#(.*?)"', page)) <= set(re.findall('id="(.*?)"', page))


def test_the_page_asks_no_other_server() -> None:
    assert "<script" not in openapi.page() and "//" not in openapi.page()
