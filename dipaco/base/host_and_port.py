"""Where a server of ours listens, as a user types it: `8090`, `0.0.0.0:8090` or `[::]:8090`."""

from __future__ import annotations

import re

from .errors import ConfigurationError

_THIS_MACHINE = "127.0.0.1"


def host_and_port(flag: str, text: str) -> tuple[str, int]:
    """Return the host and the port that a flag gives; a port alone is for this machine only.

    Port 0 is any free one. Raises ConfigurationError.
    """
    found = re.fullmatch(r"(?:(\[[0-9a-fA-F:.]+\]|[\w.-]+):)?(\d{1,5})", text.strip())
    if found is None or int(found[2]) > 65535:
        raise ConfigurationError(
            f"{flag} '{text}' is no port; for example {flag} 8090, or {flag} 0.0.0.0:8090 to let "
            "others in"
        )
    return (found[1] or _THIS_MACHINE).strip("[]"), int(found[2])
