"""An extender with the rules of the stock NodeResourceTopologyMatch plugin, fed every 60 seconds.

The plugin cannot be built here, so this judges as its filter does for ``single-numa-node`` and
scope ``container`` (scheduler-plugins ``pkg/noderesourcetopology``): a node is taken when one
zone has what each container asks for, by the numbers that were published last. What was sent
there since is not known to it, as in the plugin's own default, without a cache. Run as a process
of its own in the bed's network::

    python -m bench.cluster.stock_rules --zones FILE --port 9999

The file is JSON: by node a list of zones, each with ``cpu`` and ``memory`` that are left.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from nri_numa.text import parse_exact_quantity

ZONES = web.AppKey("zones", Path)


def fits(pod: dict[str, Any], zones: list[dict[str, int]]) -> bool:
    """Whether every container finds a zone with all that it asks for."""
    asked = [one.get("resources", {}).get("requests", {}) for one in pod["spec"]["containers"]]
    return all(
        any(
            all(zone[key] >= parse_exact_quantity(text) for key, text in one.items())
            for zone in zones
        )
        for one in asked
    )


async def judge(request: web.Request) -> web.Response:
    """The filter verb."""
    arguments = await request.json()
    zones = json.loads(request.app[ZONES].read_text())
    names = arguments["NodeNames"]
    taken = [name for name in names if name in zones and fits(arguments["Pod"], zones[name])]
    failed = {name: "cannot align pod" for name in names if name not in taken}
    return web.json_response({"NodeNames": taken, "FailedNodes": failed, "Error": ""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zones", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    app = web.Application(client_max_size=16 << 20)
    app[ZONES] = options.zones
    app.router.add_post("/filter", judge)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
