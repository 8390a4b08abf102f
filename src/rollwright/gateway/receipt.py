"""Whether a client has a reply: that the kernel took all of it is the beginning of an answer."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Receipt"]


class Receipt:
    """For one reply to one client. It holds until the connection breaks with nothing from the client after the reply.

    It is settled, for good, by the next request on the connection, by its orderly end, or by its loss.
    """

    __slots__ = ("_ask", "_on_loss", "lost")

    def __init__(self, ask: Callable[[], None] | None = None) -> None:
        """`ask`: settles it where the kernel knows what the event loop has not heard of yet. None: it is settled."""
        self.lost = False
        """The client left without reading all of the reply."""
        self._ask = ask
        self._on_loss: Callable[[], None] | None = None

    @property
    def settled(self) -> bool:
        return self._ask is None

    def look(self) -> None:
        """Settle it, if that can be known by now."""
        if self._ask is not None:
            self._ask()

    def on_loss(self, tell: Callable[[], None]) -> None:
        """`tell` is called when it is lost, at once if it has been."""
        if self.lost:
            tell()
        elif not self.settled:
            self._on_loss = tell

    def settle(self, *, lost: bool) -> None:
        """The first time counts."""
        if self.settled:
            return
        self.lost = lost
        self._ask = None
        tell, self._on_loss = self._on_loss, None
        if lost and tell is not None:
            tell()
