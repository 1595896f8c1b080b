"""A worker's way to its servers: the model as they see it, and what it exchanges with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.beside import OwnShard
from shoal.codecs import Coding
from shoal.exchange import Exchange
from shoal.models import Described
from shoal.own import Own, steps_itself
from shoal.parameters import Replica
from shoal.partition import Plan
from shoal.site import Membership, Site
from shoal.staging import Stage
from shoal.transport import Post


def connected(
    membership: Membership,
    site: Site,
    plan: Plan,
    described: Described,
    optimizers: Sequence[torch.optim.Optimizer],
    ema: float | None,
    note: Callable[[str], None],
) -> tuple[Replica, Exchange]:
    """The model as the servers see it, and the exchange with them.

    Args:
        ema: how moving averages follow, where servers keep any.
        note: tells the user something.
    """
    m = membership
    post = Post(site.endpoint(), m.run_id, m.incarnation)
    if m.beside is not None and not m.schedules.kept and steps_itself(m.config.cluster, plan, ema):
        replica = Replica(plan, described.tensors, described.places)
        m.beside.shard = OwnShard(replica, optimizers, m.topology.synchronised, m.beside.lock)
        return replica, Own(m, post, plan, m.beside.shard, site.check)
    memory, stage = post.endpoint.memory, Stage.of(described.all, note)
    memory.mapped = None if stage is None else stage.pin
    replica = Replica(plan, described.tensors, described.places, memory.allocate, stage)
    coding = Coding.of(m.config.cluster)
    return replica, Exchange(m.member, m.topology, post, plan, m.config.timeouts, site.check, coding)
