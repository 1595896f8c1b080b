"""A script is run in this process to be looked at, not to train: by `shoal validate` and `shoal doctor`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from shoal import session
from shoal.config import Config
from shoal.launcher.member import run_script, user_traceback
from shoal.training import Prepared


class Seen(SystemExit):
    """Enough is known of a script: it ends here."""

    def __init__(self) -> None:
        super().__init__(0)


def look(
    script: str, args: Sequence[str], probe: Callable[[Prepared], None], config: Config | None = None
) -> bool:
    """Run a script whose `prepare()` calls `probe`, until that or what it has set up raises `Seen`.

    Args:
        config: as worker 0.0 of this cluster; None: as a run of one worker and one server.

    Returns:
        whether the script came to `prepare()` and then to its end; if not, the reason has been shown.
    """
    calls = 0

    def called(prepared: Prepared) -> None:
        nonlocal calls
        calls += 1
        probe(prepared)

    session.attach_probe(called, config)
    session.seed_everything(config.seed if config is not None else 0)
    try:
        run_script(script, args)
    except SystemExit as end:
        print(f"{script} ended with exit status {end.code}", file=sys.stderr)
        return False
    except BaseException as error:
        trace = error.__traceback__
        print(user_traceback(error.with_traceback(trace and trace.tb_next)), end="", file=sys.stderr)
        return False
    if not calls:
        print(f"{script} ended without run.prepare(model, optimizer): nothing to look at", file=sys.stderr)
    return calls > 0
