"""HTML and SVG out of elements: text is escaped unless it is markup already."""

from html import escape


class Html(str):
    """Markup. All other text is escaped where it is put into some."""

    __slots__ = ()


_VOID = {"meta"}


def element(tag: str, /, *content: str, **attributes: object) -> Html:
    """stroke_width and class_ are the attributes stroke-width and class; None: not there."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(f"{value}")}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Html(f"<{tag}{told}>")
    return Html(f"<{tag}{told}>{join(*content)}</{tag}>")


def join(*content: str) -> Html:
    return Html("".join(c if isinstance(c, Html) else escape(c) for c in content))
