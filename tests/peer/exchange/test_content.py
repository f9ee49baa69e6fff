"""Content that is served from memory, in parts."""

import asyncio

from dipaco.peer.exchange.files.content import OpenContent


async def _read_all(content, offset, count):
    found = b""
    while data := await content.read(offset + len(found), count):
        found += data
    return found


def test_content_in_parts_is_read_from_any_offset():
    parts = (b"abc", memoryview(b"defgh"), b"", b"i")
    content = OpenContent(parts)
    assert content.size_bytes == 9
    for offset in range(10):
        for count in (1, 2, 9):
            assert asyncio.run(_read_all(content, offset, count)) == b"abcdefghi"[offset:]
    content.close()
