"""All fuzz targets, in the order of their turns."""

from typing import Final

from tests.fuzz import cluster, readers, targets

EVERY: Final[tuple[type[targets.Target], ...]] = tuple(
    kind
    for module in (targets, readers, cluster)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, targets.Target) and "name" in vars(kind)
)
