"""The four blocks of the SINGA documentation, as they stand there."""

from __future__ import annotations

SANDBLASTER = """\
cluster {
    nworker_groups: 1
    nserver_groups: 1
    nworkers_per_group: 3
    nservers_per_group: 2
    server_worker_separate: true
}
"""

ALLREDUCE = """\
cluster {
    nworker_groups: 1
    nserver_groups: 1
    nworkers_per_group: 3
    nservers_per_group: 3
    server_worker_separate: false
}
"""

DOWNPOUR = """\
cluster {
    nworker_groups: 2
    nserver_groups: 1
    nworkers_per_group: 2
    nservers_per_group: 2
    server_worker_separate: true
}
"""

HOGWILD = """\
cluster {
    nworker_groups: 3
    nserver_groups: 3
    nworkers_per_group: 1
    nservers_per_group: 1
    server_worker_separate: false
}
"""

PRESETS = {
    "sandblaster": SANDBLASTER,
    "allreduce": ALLREDUCE,
    "downpour": DOWNPOUR,
    "hogwild": HOGWILD,
}
