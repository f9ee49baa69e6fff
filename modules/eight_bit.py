"""bitsandbytes: imported only when a run or a flag asks for it, since it takes seconds to load."""

from __future__ import annotations

import logging


def load_bitsandbytes() -> None:
    """Import bitsandbytes without its advice to install more, which would end up among our lines.

    Called before its optimizers and codecs are used, and before averagers are forked.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional
    import bitsandbytes.optim  # noqa: F401
