"""A watcher of the live page that leaves frees its place at once."""

from __future__ import annotations

from types import SimpleNamespace

from jurybox.protocol.errors import ServerGone
from jurybox.server.gateway.live import LiveRoutes


async def test_a_page_that_is_closed_is_no_watcher_any_more():
    """The place is the next page's, which is refused while the most are open."""

    async def gone():
        raise ServerGone("nobody there")

    routes = LiveRoutes(SimpleNamespace(status=gone))
    pages = [routes._until_left() for _ in range(2)]
    for page in pages:
        assert "nobody there" in await anext(page)
    for left, page in enumerate(pages):
        assert routes._broadcast.watchers == 2 - left
        await page.aclose()
        assert routes._broadcast.watchers == 1 - left
    routes.close()
