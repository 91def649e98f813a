"""Puts the agent's configuration schema into the Helm chart's: run it after ``make schema``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
AGENT: Final = REPOSITORY / "config/agent.schema.json"
VALUES: Final = REPOSITORY / "config/helm/nri-numa/values.schema.json"


def merged() -> str:
    """The chart's schema with the agent's definitions as they are now."""
    values: dict[str, Any] = json.loads(VALUES.read_text(encoding="utf-8"))
    values["$defs"] = json.loads(AGENT.read_text(encoding="utf-8"))["$defs"]
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    VALUES.write_text(merged(), encoding="utf-8")
    sys.exit(0)
