"""When the messages of each member leave and arrive, written down for ``python -m bench timeline``."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from shoal.transport import Post, Token
from shoal.wire import Kind, Message

FOLDER = "BENCH_TIMELINE"  # the variable that says where to; without it nothing is written down


def watch(folder: Path) -> None:
    """From now on have every post of this process leave, when it closes, a file with its member's name.

    Its rows are time (seconds of the machine's monotonic clock), whether it was sent, kind, peer and step.
    """
    send, receive, close = Post.send, Post.receive, Post.close
    rows: defaultdict[Post, list[tuple[float, bool, str, str, int]]] = defaultdict(list)

    def sent(post: Post, peer: str, kind: Kind, *args: Any, **fields: Any) -> Token:
        rows[post].append((time.monotonic(), True, kind.name, peer, fields.get("step", 0)))
        return send(post, peer, kind, *args, **fields)

    def received(post: Post, timeout: float) -> Message | None:
        message = receive(post, timeout)
        if message is not None:
            head = message.header
            rows[post].append((time.monotonic(), False, head.kind.name, head.sender, head.step))
        return message

    def closed(post: Post) -> None:
        if post in rows:  # else it is closed once more
            folder.joinpath(f"{post.endpoint.name}.json").write_text(json.dumps(rows.pop(post)))
        close(post)

    Post.send, Post.receive, Post.close = sent, received, closed  # type: ignore[method-assign, assignment]
