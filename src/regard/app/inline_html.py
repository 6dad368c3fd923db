"""Safe HTML files with inline scripts, styles and data."""

import json
from base64 import b64encode
from hashlib import sha256
from typing import Any

from regard.errors import ArgumentError


def content_security_policy(css: str, script: str, *, images: str = "") -> str:
    """Return a policy that allows only this style and this script, by their hashes, and images from `images`.

    >>> from regard.app.inline_html import content_security_policy
    >>> content_security_policy("", "", images="data:").split("; ")[3:]
    ['img-src data:', "base-uri 'none'", "form-action 'none'"]
    """
    if "</script" in script.lower() or "</style" in css.lower():
        raise ArgumentError("A script or style contains its own end tag, so it cannot be embedded in a page.")
    style_hash, script_hash = (b64encode(sha256(text.encode()).digest()).decode() for text in (css, script))
    rules = ["default-src 'none'", f"style-src 'sha256-{style_hash}'", f"script-src 'sha256-{script_hash}'"]
    if images:
        rules.append(f"img-src {images}")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def to_json(data: Any) -> str:
    """Return JSON without characters that are special in HTML or end a line in JavaScript.

    >>> from regard.app.inline_html import to_json
    >>> to_json("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.encode("utf-8", "replace").decode()  # replaces lone surrogates
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
